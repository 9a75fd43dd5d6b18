"""One step's facts become one action, and what was decided comes into force two steps later. Torch-free.

Every loop judges by this class: ours, with all monitors, and `harness.Precision`, with the recipe's fallback alone
unless a `harness.Guard` watches it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.core.facts import SWITCH_DELAY, Action, Limits, StepFacts, Switch, Verdict
from harness.core.protocols import NO_LIMITS, Monitor, PrecisionBackend
from harness.monitors.responder import Responder

if TYPE_CHECKING:
    from torch import Tensor

    from harness.core.config import GuardConfig
    from harness.core.fingerprint import RankComparison
    from harness.core.state import TrainState


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was made of one step.

    verdicts: of every monitor, in order. notes: the responder's own. healthy: the step counts towards making the states
    before it good. suspect: what is needed to run it again should be kept.
    """

    facts: StepFacts
    verdicts: tuple[Verdict, ...]
    notes: tuple[Verdict, ...]
    action: Action
    healthy: bool
    suspect: bool

    @property
    def told(self) -> list[Verdict]:
        """The verdicts and notes that have something to say."""
        return [verdict for verdict in (*self.verdicts, *self.notes) if verdict.text]


@dataclass
class Judge:
    """Monitors and responder of one run; switches and limits are kept in its state until their step has come.

    precision: what switches are carried out on. held: layers (padded names) that the user demoted, which stay so.
    comparison: of the ranks' weights, None where there is nothing to compare.
    """

    config: GuardConfig
    state: TrainState
    precision: PrecisionBackend
    monitors: Sequence[Monitor]
    held: set[str] = field(default_factory=set[str])
    comparison: RankComparison | None = None

    def __post_init__(self) -> None:
        self.responder = Responder(self.config, self.state.incidents)

    def observe(self, facts: StepFacts) -> Judgement:
        """Judge one step; once for each, in order, the same on every rank. Raises nothing of its own."""
        verdicts = tuple(monitor.observe(facts) for monitor in self.monitors)
        action = self.responder.decide(verdicts)
        due = facts.step + SWITCH_DELAY
        closer = max((verdict.look_closer for verdict in verdicts), default=0)
        if closer:
            self.state.closer_look = self.state.closer_look.extended(due, closer)
        limits = functools.reduce(Limits.stricter, (verdict.limits for verdict in verdicts), NO_LIMITS)
        if limits != NO_LIMITS:
            self.state.limits[due] = limits
        if isinstance(action, Switch):
            self.state.switches.append((due, list(action.demote), list(action.promote), action.lower))
        healthy, suspect = self.responder.healthy(verdicts), self.responder.suspect(facts, verdicts, action)
        return Judgement(facts, verdicts, tuple(self.responder.notes), action, healthy, suspect)

    def switch_due(self) -> list[tuple[int, Switch]]:
        """Carry out the switches whose step comes next: (step, what moved). Between two steps; harmless twice."""
        due = [switch for switch in self.state.switches if switch[0] <= self.state.step + 1]
        self.state.switches = [switch for switch in self.state.switches if switch not in due]
        done: list[tuple[int, Switch]] = []
        for step, demote, promote, lower in due:
            before = self.precision.demoted
            promote = [layer for layer in promote if layer not in self.held]
            if lower:
                self.precision.lower(lower)
            else:
                self.precision.switch(demote, promote)
            moved = tuple(layer for layer in self.precision.demoted if layer not in before)
            done.append((step, Switch(moved, tuple(promote), lower=lower)))
        return done

    def stay_lowered(self) -> None:
        """After a state was loaded: one from before the whole run's fall must not bring the old precision back."""
        fallen = self.state.incidents.lowered
        if fallen and not self.precision.lowered and not any(lower for *_, lower in self.state.switches):
            self.precision.lower(fallen)

    @property
    def lr_factor(self) -> float:
        """What the next step's learning rate is multiplied by: every rollback before it lowers it, for good."""
        past = self.state.incidents.rollbacks_before(self.state.step + 1)
        return self.config.rollback_lr_factor**past

    def limits(self) -> Limits:
        """What the next step's update must keep to."""
        return self.state.limits.get(self.state.step + 1, NO_LIMITS)

    def samples(self, every: int) -> bool:
        """Whether the next step measures the FP8 statistics that cost: every so many steps, and in a closer look."""
        step = self.state.step + 1
        return step % every == 0 or step in self.state.closer_look

    def compared(self, step: int) -> tuple[tuple[str, ...], Tensor | None]:
        """After the update of `step`: the parameters whose bits were compared between ranks, and which of them differ.

        Collective where there is something to compare.
        """
        return self.comparison.after(step) if self.comparison is not None else ((), None)

    def measures(self) -> bool:
        """Whether the next step measures norms and shares that cost: the first, every so many, all of a closer look."""
        step = self.state.step + 1
        usual = (step - 1) % self.config.measure_every == 0
        return self.config.enabled and (usual or step in self.state.closer_look)
