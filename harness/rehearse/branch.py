"""One branch of a rehearsal: the run's own steps in one precision, and the figures that are kept of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from harness.core.facts import Halt, Rollback, StepFacts, Switch, jsonable
from harness.monitors.fallback import FallbackController
from harness.monitors.responder import Judgement
from harness.rehearse.slots import SlotRecord, SlotRow
from harness.replay.flight import Difference

if TYPE_CHECKING:
    from harness.precision.counterfactual import Comparison

FaultKind = Literal["unfit data", "not finite", "left its precision", "rollback", "halt"]

_FIRST_STEPS = 3
"""Steps left out of the median time: in them kernels are chosen and memory is allocated, so they take longer."""


TAIL = 10
"""A branch is judged by the last 1 / TAIL of its steps."""


def tail_of(losses: Sequence[float]) -> Sequence[float]:
    """The last 1 / TAIL of the losses, at least one; empty if there are none."""
    return losses[-max(1, len(losses) // TAIL) :]


@dataclass(frozen=True, slots=True)
class Fault:
    """The first thing that went wrong in a branch.

    step: where it went wrong. why: in words.
    windows: numbers of the windows that the guard holds responsible; empty if it named none.
    ends: whether the branch ends here, as the guard would have rolled back or halted.
    """

    kind: FaultKind
    step: int
    why: str
    windows: tuple[int, ...] = ()
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    """The figures of one branch.

    name: for people. precision: fp32, bf16, fp16 or fp8. resolved: `backend:precision`.
    begin: number of the step before its first one.
    losses: one for each step.
    skipped: number of updates that were not applied.
    fault: the first one; None if nothing went wrong.
    seconds: median time of a step; NaN if there were too few steps.
    peak: most memory in use, GiB; NaN if it is not known.
    difference: the first figure in which the branch differs from the run's journal; None if there is none, or if the
        branch does not repeat the run.
    predicted: FP8 layers (padded names) that the fallback would move to BF16 -> the step in which it decided that.
    slots: those of FP8 layers, the worst first.
    record: the figures behind `slots`, step by step; None without FP8.
    fell_back_to: the precision to which the whole branch was downgraded; empty: none.
    unhealthy: codes of the verdicts for which steps did not count as healthy.
    scalings: what other scalings would lose on the sampled tensors; None if that was not measured.
    """

    name: str
    precision: str
    resolved: str
    begin: int
    losses: tuple[float, ...]
    skipped: int
    fault: Fault | None
    seconds: float = math.nan
    peak: float = math.nan
    difference: Difference | None = None
    predicted: Mapping[str, int] = field(default_factory=dict[str, int])
    slots: tuple[SlotRow, ...] = ()
    record: SlotRecord | None = None
    fell_back_to: str = ""
    unhealthy: tuple[str, ...] = ()
    scalings: Comparison | None = None

    @property
    def last_step(self) -> int:
        """Number of the last step that was run."""
        return self.begin + len(self.losses)

    def as_json(self) -> dict[str, Any]:
        """The branch's entry in `harness rehearse --json`."""
        fault: dict[str, Any] | None = None
        if self.fault is not None:
            fault = {
                "kind": self.fault.kind,
                "step": self.fault.step,
                "why": self.fault.why,
                "windows": list(self.fault.windows),
            }

        # JSON has no NaN: null stands for what was not measured.
        return {
            "name": self.name,
            "precision": self.precision,
            "resolved": self.resolved,
            "steps": len(self.losses),
            "losses": [jsonable(loss) for loss in self.losses],
            "skipped": self.skipped,
            "fault": fault,
            "seconds_per_step": None if math.isnan(self.seconds) else self.seconds,
            "peak_memory_gib": None if math.isnan(self.peak) else self.peak,
            "unhealthy": list(self.unhealthy),
            "fell_back_to": self.fell_back_to,
        }


@dataclass
class Record:
    """Collects the figures of a branch, one judged step after the other; the fields are those of `Branch`.

    slots: figures of FP8 tensors; None for a branch without FP8.
    observer: a fallback that only judges, where the recipe's own one is off; None where the run's own monitor judges.
    """

    slots: SlotRecord | None = None
    observer: FallbackController | None = None
    losses: list[float] = field(default_factory=list[float])
    seconds: list[float] = field(default_factory=list[float])
    predicted: dict[str, int] = field(default_factory=dict[str, int])
    unhealthy: dict[str, None] = field(default_factory=dict[str, None])
    skipped: int = 0
    fault: Fault | None = None
    fell_back_to: str = ""
    # Windows of the skipped updates in a row, up to the present step. If the guard ends the run without naming windows,
    # these are at fault.
    _skipped_in_a_row: list[int] = field(default_factory=list[int])

    def take(self, judged: Judgement) -> None:
        """Add one step."""
        facts = judged.facts
        self.losses.append(facts.loss)
        self.seconds.append(facts.seconds)
        self.fell_back_to = facts.fell_back_to
        if facts.applied:
            self._skipped_in_a_row.clear()
        else:
            self.skipped += 1
            self._skipped_in_a_row.append(facts.window)

        # Layers that should leave FP8. Those that are out of it already count too: the fallback moved them earlier.
        leaving = list(facts.demoted)
        verdicts = list(judged.verdicts)
        if self.observer is not None:
            verdicts.append(self.observer.observe(facts))
        for verdict in verdicts:
            if not verdict.healthy:
                self.unhealthy[verdict.code] = None
            if isinstance(verdict.proposal, Switch):
                leaving += verdict.proposal.demote
            # These verdicts name layers that should leave, but would exceed fallback.max_demoted_share.
            if verdict.code in ("precision.budget", "precision.lowered"):
                leaving += verdict.evidence.get("layers", ())
        for layer in leaving:
            self.predicted.setdefault(layer, facts.step)
        if self.slots is not None and facts.applied:
            self.slots.take(facts.slots)

        # The first fault is kept. One that ends the branch replaces it: it says more than a skipped update before it.
        fault = find_fault(judged, self._skipped_in_a_row)
        if fault is not None and (self.fault is None or fault.ends):
            self.fault = fault

    @property
    def ended(self) -> bool:
        """Whether the guard would have rolled back or halted, so that the branch ends."""
        return self.fault is not None and self.fault.ends

    @property
    def step_seconds(self) -> float:
        """Median time of a step without the first _FIRST_STEPS; NaN if no others were done."""
        usual = self.seconds[_FIRST_STEPS:]
        return median(usual) if usual else math.nan


def find_fault(judged: Judgement, row: Sequence[int]) -> Fault | None:
    """What is wrong with one step; None if nothing is.

    row: windows of the skipped updates in a row, up to this step.
    """
    facts, action = judged.facts, judged.action
    if facts.bad_data:
        return Fault(
            "unfit data", facts.step, _text_of(judged, "data."), (facts.window,), _ends(judged)
        )
    match action:
        case Rollback():
            windows = action.bad or tuple(row)
            return Fault("rollback", facts.step, action.reason, windows, ends=True)
        case Halt():
            return Fault("halt", facts.step, action.reason, tuple(row), ends=True)
        case Switch() if action.whole_run_to:
            return Fault("left its precision", facts.step, action.reason, tuple(row))
        case _:
            pass
    # A loss scaler that searches for its range overflows on purpose. That has a code of its own, and is no fault.
    if any(verdict.code == "nonfinite.skip" for verdict in judged.verdicts):
        what = _not_finite(facts)
        return Fault("not finite", facts.step, what, tuple(row))
    return None


def _ends(judged: Judgement) -> bool:
    """Whether the guard's action on this step ends a branch."""
    return isinstance(judged.action, Rollback | Halt)


def _text_of(judged: Judgement, prefix: str) -> str:
    """The text of the first verdict whose code begins with `prefix`."""
    for verdict in judged.verdicts:
        if verdict.code.startswith(prefix) and verdict.text:
            return verdict.text
    return "samples that are unfit to train on"


def _not_finite(facts: StepFacts) -> str:
    """Loss and norm of a step that was skipped because one of them is not finite."""
    return f"loss {facts.loss:g}, gradient norm {facts.grad_norm:g}: the update was skipped"
