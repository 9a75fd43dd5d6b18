"""What an exercise expected, what it saw, and the verdict. Pure functions of what was read. Torch-free.

An exercise does a fault to a run. First the fault itself must be shown: the signal that ended the process, the bit that
was flipped, the write that failed. An exercise whose fault is not shown says nothing of the run, whatever else holds.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from harness.core.errors import ExitCode, number_of
from harness.report.divergence import Compared
from harness.tracking.existing import LOSS, spans
from harness.tracking.figures import Points
from harness.tracking.history import RunHistory

FIRST_STEP_APART, LATER_STEPS_APART = 1e-3, 1e-2
"""Relative differences of loss that another number of ranks may make: it sums in another order.

The first step after a resume has the same weights and samples. Later ones also have what the weights differ in."""


class Verdict(StrEnum):
    """Of one exercise.

    passed: the fault is shown, and all that was expected was seen.
    failed: something else was seen.
    not shown: the fault did not happen, or what would be judged is missing.
    not applicable: the config or the machine has no place for it.
    """

    PASSED = "passed"
    FAILED = "failed"
    NOT_SHOWN = "not shown"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was expected. holds: whether it was seen."""

    expected: str
    seen: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Account:
    """What one exercise did and found.

    done: what was done to the run.
    fault: the evidence that the fault happened; empty if there is none.
    checks: what was expected.
    reason: why it does not apply, or could not be shown; empty otherwise.
    applies: whether the config and the machine have a place for it.
    notes: more that was seen, and that decides nothing.
    """

    done: str
    fault: str = ""
    checks: Sequence[Check] = ()
    reason: str = ""
    applies: bool = True
    notes: Sequence[str] = ()

    @property
    def verdict(self) -> Verdict:
        """By the fault first, then by the checks."""
        if not self.applies:
            return Verdict.NOT_APPLICABLE
        if not self.fault or not self.checks:
            return Verdict.NOT_SHOWN
        if all(check.holds for check in self.checks):
            return Verdict.PASSED
        return Verdict.FAILED


def not_applicable(reason: str) -> Account:
    """The account of an exercise that has no place here."""
    return Account("nothing", reason=reason, applies=False)


@dataclass(frozen=True, slots=True)
class Ran:
    """A run, after its last process has ended.

    code: exit code of that process; -N: ended by signal N.
    status: of outcome.json; empty if there is none.
    step: of outcome.json; 0 if it has none.
    steps: those with a loss in the journal.
    finite: whether all these losses are.
    resumed: the step from which its last start went on; None: it began anew.
    rollbacks: steps that it was rolled back to.
    ranks: number of them at its last start; 0: not known.
    """

    code: int
    status: str
    step: int
    steps: tuple[int, ...]
    finite: bool
    resumed: int | None = None
    rollbacks: tuple[int, ...] = ()
    ranks: int = 0

    @classmethod
    def of(cls, history: RunHistory, code: int) -> Ran:
        """What the folder says. code: of its last process."""
        losses = history.points(LOSS)
        resumed = [event["step"] for event in history.events if event["code"] == "run.resumed"]
        # A run's files may hold anything: whatever is no number counts as 0.
        step = history.outcome.get("step")
        ranks = history.run["tags"].get("ranks", "")
        return cls(
            code=code,
            status=str(history.outcome.get("status") or ""),
            step=step if type(step) is int else 0,
            steps=tuple(losses.steps.tolist()),
            finite=bool(np.isfinite(losses.figures).all()),
            resumed=resumed[-1] if resumed else None,
            rollbacks=tuple(each.to_step for each in history.rollbacks),
            ranks=int(ranks) if ranks.isdecimal() else 0,
        )


def code_text(code: int) -> str:
    """`exit code 75`, or `ended by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def ended_well(ran: Ran, steps: int) -> Check:
    """The run ended as planned after `steps` steps, each with a finite loss in the journal."""
    seen = f"{code_text(ran.code)}, {ran.status or 'no outcome'}"
    if ran.step:
        seen += f" at step {ran.step}"
    missing = sorted(set(range(1, steps + 1)) - set(ran.steps))
    if missing:
        seen += f"; no loss of {number_of(len(missing), 'step')}: {spans(missing)}"
    if not ran.finite:
        seen += "; losses that are not finite"
    ended = ran.code == ExitCode.DONE and (ran.status, ran.step) == ("done", steps)
    holds = ended and not missing and ran.finite
    expected = f"exit code 0, done at step {steps}, a finite loss for each step"
    return Check(expected, seen, holds)


def same_bits(compared: Compared, steps: int, other: str = "the undisturbed run's") -> Check:
    """All figures of all `steps` steps are those of another run, to the last bit: losses, norms, amax and scales."""
    expected = f"every figure of {steps} steps is {other}, bit for bit"
    if compared.splits:
        first = compared.splits[0]
        seen = f"step {first.step} differs first, {first.tensor} {first.kind}: {first.a!r} against {first.b!r}"
        return Check(expected, seen, False)
    figures = "without FP8 figures"
    if compared.slots:
        figures = "with FP8 amax and scale of every slot"
    seen = f"{compared.steps} steps agree, {figures}"
    return Check(expected, seen, compared.steps == steps)


def stopped(ran: Ran) -> Check:
    """A run that was asked to stop has saved, and says so by code 75 and its outcome."""
    seen = f"{code_text(ran.code)}, {ran.status or 'no outcome'} at step {ran.step}"
    holds = (ran.code, ran.status) == (ExitCode.STOPPED, "stopped")
    return Check("exit code 75, outcome stopped", seen, holds)


def killed(code: int, has_outcome: bool) -> str:
    """Evidence that SIGKILL ended a process in the middle of its work; empty if it did not."""
    if code != -signal.SIGKILL or has_outcome:
        return ""
    return "ended by SIGKILL, with no outcome.json"


def went_on_from(ran: Ran, step: int, why: str = "the newest checkpoint") -> Check:
    """The last start went on from `step`."""
    expected = f"the next start goes on from step {step}, {why}"
    seen = "it began anew"
    if ran.resumed is not None:
        seen = f"from step {ran.resumed}"
    return Check(expected, seen, ran.resumed == step)


def found_by_verify(code: int, text: str, checkpoint: Path, file: str) -> Check:
    """`harness verify` refuses the checkpoint, and names the damaged file. text: what it printed."""
    named = [line for line in text.splitlines() if checkpoint.name in line and file in line]
    shown = f"{file} is not named"
    if named:
        shown = named[0].strip()
    seen = f"{code_text(code)}; {shown}"
    expected = f"harness verify ends with exit code 1 and names {checkpoint.name}/{file}"
    holds = code == ExitCode.FAILED and bool(named)
    return Check(expected, seen, holds)


def failed_save(text: str) -> str:
    """Evidence that a checkpoint could not be written: the first such error of a run's screen; empty if there is none.

    The journal may have lost the event: it lies on the same disk.
    """
    lines = text.splitlines()
    for place, line in enumerate(lines):
        if "checkpoint.failed: " in line:
            reason = lines[place + 1 : place + 2]
            return "; ".join(each.strip(" !") for each in [line, *reason])
    return ""


def full_disk_met(policy: str, code: int) -> Check:
    """What a run does while its checkpoints cannot be written. policy: checkpoint.on_failure; code: of that process."""
    expected, codes = {
        "pause": ("the run waits, and goes on by itself once there is room", (ExitCode.DONE,)),
        "halt": ("the run ends with exit code 3", (ExitCode.HALTED,)),
        "continue": (
            "the run trains on; exit code 1 if its end could not be saved",
            (ExitCode.DONE, ExitCode.FAILED),
        ),
    }[policy]
    return Check(f"{expected} (checkpoint.on_failure={policy})", code_text(code), code in codes)


def sync_named(text: str) -> Check:
    """A run whose tracker never answered names the command that delivers later. text: its screen."""
    named = [line.strip() for line in text.splitlines() if "harness sync" in line]
    seen = named[-1] if named else "no such line"
    return Check("the last lines name harness sync", seen, bool(named))


def on_ranks(ran: Ran, ranks: int) -> Check:
    """The last start had so many ranks."""
    return Check(f"{ranks} ranks go on", f"{ran.ranks} ranks", ran.ranks == ranks)


def near(ours: Points, reference: Points, first: int) -> Check:
    """From step `first` on, where the run went on with other ranks, the losses are nearly those of the reference."""
    expected = (
        f"losses from step {first} on are the undisturbed run's: that step's within {FIRST_STEP_APART:.1%}, "
        f"later ones within {LATER_STEPS_APART:.0%} (ranks sum in another order)"
    )
    apart: dict[int, float] = {}
    for step in range(first, int(reference.steps[-1]) + 1):
        a = ours.get(step)
        b = reference.get(step)
        if a is None or b is None:
            return Check(expected, f"no loss of step {step}", False)
        # Relative. A loss of 0 has no relative distance, so something tiny stands in for it.
        apart[step] = abs(a - b) / max(abs(b), 1e-12)
    if not apart:
        return Check(expected, "no step after the resume", False)
    worst = max(apart, key=lambda step: apart[step])
    seen = f"step {first} is {apart[first]:.2g} apart, relative; the worst, step {worst}, {apart[worst]:.2g}"
    # The first step differs by rounding alone; afterwards differences of the weights add up.
    near_first = apart[first] <= FIRST_STEP_APART
    near_later = apart[worst] <= LATER_STEPS_APART
    # `max` may pass over a NaN, so all of them are looked at.
    finite = all(map(math.isfinite, apart.values()))
    return Check(expected, seen, near_first and near_later and finite)


def rolled_back(ran: Ran, damaged: int) -> Check:
    """The run went back to a state from before the weights were damaged, at the end of step `damaged`."""
    expected = f"a rollback to a step before {damaged}"
    if not ran.rollbacks:
        return Check(expected, "no rollback", False)
    steps = ", ".join(map(str, ran.rollbacks))
    seen = f"rolled back to step {steps}"
    return Check(expected, seen, ran.rollbacks[-1] < damaged)
