"""One step's facts become one action: the judge asks every monitor, the responder weighs what they say, within budgets.

Every loop judges by this: ours with all monitors, and `harness.Precision` with the recipe's fallback alone unless a
`harness.Guard` watches it. What was decided comes into force two steps later. Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.core.facts import (
    SWITCH_DELAY,
    Action,
    Continue,
    Halt,
    Limits,
    Rollback,
    StepFacts,
    StepTerms,
    Switch,
    Verdict,
    is_sampled,
)
from harness.core.protocols import NO_LIMITS, Monitor, PrecisionBackend

if TYPE_CHECKING:
    from harness.core.collectives import RankComparison
    from harness.core.config import GuardConfig
    from harness.core.state import RunLedger, TrainState

LR_JUMPED = "lr.jump"
"""The verdict that every later rollback and halt names: what was too long a step is the likelier cause."""


class Responder:
    """One action a step: Halt before Rollback before Switch before Continue, within the guard's budgets.

    What was spent is kept in `ledger`, which a rollback does not restore. The guard carries the action out: it adds
    `Rollback.bad` to `ledger.skipped_windows`, and halts when there is nothing good to go back to.

    notes: the responder's own verdicts of the last `decide` (a refused switch, told once); log them beside the
    monitors'.
    """

    def __init__(self, guard: GuardConfig, ledger: RunLedger) -> None:
        self.guard = guard
        self.ledger = ledger
        self.notes: list[Verdict] = []
        self._refusal_told = False
        self._lr_jump = ""

    def decide(self, verdicts: Sequence[Verdict], window: int = 0) -> Action:
        """The action for one step's verdicts; spends budgets, so call it exactly once a step, on every rank.

        window: of the step; budgets of skips and rollbacks are over the last `guard.budget_windows` of them.
        """
        self.notes = []
        if not self.guard.enabled:
            return Continue()
        for verdict in verdicts:
            if verdict.code == LR_JUMPED:
                self._lr_jump = f"; before that, at step {verdict.step}, {verdict.text}"
        action = self._decided(verdicts, window)
        if isinstance(action, Halt | Rollback):
            return replace(action, reason=action.reason + self._lr_jump)
        return action

    def _decided(self, verdicts: Sequence[Verdict], window: int) -> Action:
        skips = [verdict for verdict in verdicts if verdict.skip]
        within = self.guard.budget_windows
        if skips:
            self.ledger.skipped(window, len(skips), within)
        spent, rolled_back = self.ledger.spent(window, within)
        if halts := [v.proposal.text for v in verdicts if isinstance(v.proposal, Halt)]:
            return Halt("; ".join(halts))
        if skips and spent > self.guard.max_skips:
            return Halt(
                f"{spent} updates were skipped within {within} windows (guard.budget_windows), more than "
                f"guard.max_skips ({self.guard.max_skips}); last: {skips[-1].text}",
                "Look for bad data in the windows that the journal names, lower train.lr, or, if nothing is wrong with "
                "them, raise guard.max_skips, guard.skip_growth or guard.spike_sigma, in a new run: "
                "--name NEW --resume runs/<run>/checkpoints/step-<good>",
            )
        if rollbacks := [v.proposal for v in verdicts if isinstance(v.proposal, Rollback)]:
            return self._rollback(rollbacks, rolled_back, window)
        switches = [(v.step, v.proposal) for v in verdicts if isinstance(v.proposal, Switch)]
        return self._switch(switches) if switches else Continue()

    @staticmethod
    def healthy(verdicts: Sequence[Verdict]) -> bool:
        """Whether the step counts towards making the last checkpoint a rollback target."""
        return all(verdict.healthy for verdict in verdicts)

    @staticmethod
    def suspect(facts: StepFacts, verdicts: Sequence[Verdict], action: Action) -> bool:
        """Whether what is needed to run the step again should be kept: its update was skipped and no verdict takes that
        for granted, or a verdict or the action is reason enough.
        """
        said = {verdict.suspect for verdict in verdicts}
        skipped = not facts.applied and False not in said
        return skipped or True in said or isinstance(action, Rollback | Halt)

    def _rollback(self, proposals: Sequence[Rollback], spent: int, window: int) -> Action:
        reason = "; ".join(proposal.reason for proposal in proposals)
        if spent >= self.guard.max_rollbacks:
            return Halt(
                f"{reason}; and all of guard.max_rollbacks ({self.guard.max_rollbacks}) are spent within "
                f"{self.guard.budget_windows} windows (guard.budget_windows)",
                "Lower train.lr, lengthen train.warmup_steps, try the bf16 recipe, or look at the windows that the "
                "journal names, in a new run from a good checkpoint: "
                "--name NEW --resume runs/<run>/checkpoints/step-<N>",
            )
        self.ledger.rolls_back(window, self.guard.budget_windows)
        bad = {window for proposal in proposals for window in proposal.bad} - set(
            self.ledger.skipped_windows
        )
        return Rollback(
            reason, tuple(sorted(bad)), any(proposal.from_disk for proposal in proposals)
        )

    def _switch(self, proposals: Sequence[tuple[int, Switch]]) -> Action:
        whole_run_to = next(
            (switch.whole_run_to for _, switch in proposals if switch.whole_run_to), ""
        )
        if whole_run_to and not self.ledger.lowered:
            # One way and once, so it needs no budget; single layers have nothing left to decide.
            self.ledger.lowered = whole_run_to
            return Switch(
                reason="; ".join(switch.reason for _, switch in proposals if switch.whole_run_to),
                whole_run_to=whole_run_to,
            )
        demote = list(dict.fromkeys(layer for _, switch in proposals for layer in switch.demote))
        promote = [
            layer
            for layer in dict.fromkeys(n for _, s in proposals for n in s.promote)
            if layer not in demote
        ]
        # Demotions come first: they protect the run, promotions only make it faster.
        left = max(0, self.guard.max_switches - self.ledger.switches)
        granted_down = demote[:left]
        granted_up = promote[: left - len(granted_down)]
        refused = demote[len(granted_down) :] + promote[len(granted_up) :]
        if refused and not self._refusal_told:
            self._refusal_told = True
            self.notes.append(
                Verdict(
                    "switch.refused",
                    proposals[0][0],
                    f"guard.max_switches ({self.guard.max_switches}) is spent: {', '.join(refused)} and any later "
                    "layer keep their precision",
                    evidence={"refused": refused, "switches": self.ledger.switches},
                )
            )
        if not granted_down and not granted_up:
            return Continue()
        self.ledger.switches += len(granted_down) + len(granted_up)
        reason = "; ".join(switch.reason for _, switch in proposals)
        return Switch(tuple(granted_down), tuple(granted_up), reason)


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
    comparison: of the ranks' weights, None where there is nothing to compare. seed: of the steps that are sampled.
    """

    config: GuardConfig
    state: TrainState
    precision: PrecisionBackend
    monitors: Sequence[Monitor]
    held: set[str] = field(default_factory=set[str])
    comparison: RankComparison | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.responder = Responder(self.config, self.state.ledger)

    def observe(self, facts: StepFacts) -> Judgement:
        """Judge one step; once for each, in order, the same on every rank. Raises nothing of its own."""
        verdicts = tuple(monitor.observe(facts) for monitor in self.monitors)
        action = self.responder.decide(verdicts, facts.window)
        due = facts.step + SWITCH_DELAY
        if more := max((verdict.sample_steps for verdict in verdicts), default=0):
            self.state.dense_sampling = self.state.dense_sampling.extended(due, more)
        limits = functools.reduce(
            Limits.stricter, (verdict.limits for verdict in verdicts), NO_LIMITS
        )
        if limits != NO_LIMITS:
            self.state.limits[due] = limits
        if isinstance(action, Switch):
            self.state.switches.append(
                (due, list(action.demote), list(action.promote), action.whole_run_to)
            )
        healthy, suspect = (
            self.responder.healthy(verdicts),
            self.responder.suspect(facts, verdicts, action),
        )
        return Judgement(facts, verdicts, tuple(self.responder.notes), action, healthy, suspect)

    def switch_due(self) -> list[tuple[int, Switch]]:
        """Carry out the switches whose step comes next: (step, what moved). Between two steps; harmless twice."""
        due = [switch for switch in self.state.switches if switch[0] <= self.state.step + 1]
        self.state.switches = [switch for switch in self.state.switches if switch not in due]
        done: list[tuple[int, Switch]] = []
        for step, demote, promote, whole_run_to in due:
            before = self.precision.demoted
            promote = [layer for layer in promote if layer not in self.held]
            if whole_run_to:
                self.precision.fall_back(whole_run_to)
            else:
                self.precision.switch(demote, promote)
            moved = tuple(layer for layer in self.precision.demoted if layer not in before)
            done.append((step, Switch(moved, tuple(promote), whole_run_to=whole_run_to)))
        return done

    def stay_fallen_back(self) -> None:
        """After a state was loaded: one from before the whole run's fall must not bring the old precision back."""
        fallen = self.state.ledger.lowered
        if (
            fallen
            and not self.precision.fell_back_to
            and not any(switch[3] for switch in self.state.switches)
        ):
            self.precision.fall_back(fallen)

    def stay_held(self, held: set[str]) -> None:
        """After a state was loaded: `held`, which the user demoted by then, stay so, and others that it held do not."""
        freed = sorted(self.held - held)
        if held != self.held and not self.precision.fell_back_to:
            self.precision.switch(sorted(held.difference(self.precision.demoted)), freed)
        self.held.clear()
        self.held.update(held)

    @property
    def lr_factor(self) -> float:
        """What the next step's learning rate is multiplied by: every rollback before it lowers it, for good."""
        past = self.state.ledger.rollbacks_before(self.state.step + 1)
        return self.config.rollback_lr_factor**past

    def samples(self, every: int) -> bool:
        """Whether the next step measures the FP8 statistics that cost: one in so many, and all in dense sampling."""
        step = self.state.step + 1
        return is_sampled(self.seed, step, every) or step in self.state.dense_sampling

    def terms(self) -> StepTerms:
        """What is decided about the next step. Figures that cost time are measured in the first step, every
        `guard.measure_every` steps, and while sampling is dense.
        """
        step = self.state.step + 1
        usual = (step - 1) % self.config.measure_every == 0
        measures = self.config.enabled and (usual or step in self.state.dense_sampling)
        return StepTerms(step, self.state.limits.get(step, NO_LIMITS), measures)
