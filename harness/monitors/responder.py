"""From one step's facts to one action: every monitor gives a verdict, the responder weighs them within budgets.

A verdict may propose an action. Several monitors may propose at once, so the responder takes the gravest of what they
propose: a halt before a rollback, a rollback before a switch of precision, a switch before going on. Three budgets of
the guard bound what a faulty run can cost:

- `max_skips` updates skipped within the last `budget_windows` windows. More than that halts the run.
- `max_rollbacks` rollbacks within the last `budget_windows` windows. The next one halts the run instead.
- `max_switches` layers moved in the whole run. Later proposals are refused, and their layers stay where they are.

What was spent is kept in the run's ledger. A rollback does not restore the ledger, or a run could go back for ever.

Facts arrive one step late, so a decision comes into force two steps after its facts (`SWITCH_DELAY`). The `Judge` keeps
it in the train state until then, and a run that is stopped in between goes on alike.

Every loop uses this module: the project's own with all monitors, and `harness.Precision` with the recipe's fallback
alone unless a `harness.Guard` watches it. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.core.facts import (
    HUNT_STEPS,
    SWITCH_DELAY,
    Action,
    Continue,
    Halt,
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
"""Every later rollback and halt names this verdict: a step that was too long is the likelier cause."""


class Responder:
    """Turns the verdicts of one step into one action, within the guard's budgets.

    ledger: what was spent.
    notes: the responder's own verdicts of the last `decide` (a refused switch, once); log them beside the monitors'.

    `Judge.switch_due` carries switches out. The guard does the rest: it adds `Rollback.bad` to
    `ledger.skipped_windows`, and halts when there is no good state to go back to.
    """

    def __init__(self, guard: GuardConfig, ledger: RunLedger) -> None:
        self.guard = guard
        self.ledger = ledger
        self.notes: list[Verdict] = []
        self._refusal_reported = False
        # What to add to the reason of a rollback or halt that follows a jump of the learning rate.
        self._lr_jump = ""

    def decide(self, verdicts: Sequence[Verdict], window: int = 0) -> Action:
        """The action for one step's verdicts. Spends budgets: call it exactly once a step, on every rank.

        window: index of the step's window; budgets count within the last `guard.budget_windows` of them.
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
        # Skips are spent whatever is decided: their updates are lost already.
        skips = [verdict for verdict in verdicts if verdict.skip]
        within = self.guard.budget_windows
        if skips:
            self.ledger.skipped(window, len(skips), within)
        spent, rolled_back = self.ledger.spent(window, within)

        halts: list[str] = []
        rollbacks: list[Rollback] = []
        switches: list[tuple[int, Switch]] = []
        for verdict in verdicts:
            match verdict.proposal:
                case Halt() as halt:
                    halts.append(halt.text)
                case Rollback() as rollback:
                    rollbacks.append(rollback)
                case Switch() as switch:
                    switches.append((verdict.step, switch))
                case Continue():
                    pass

        # The gravest proposal wins.
        if halts:
            return Halt("; ".join(halts))
        if skips and spent > self.guard.max_skips:
            return self._too_many_skips(spent, skips[-1])
        if rollbacks:
            return self._rollback(rollbacks, rolled_back, window)
        if switches:
            return self._switch(switches)
        return Continue()

    @staticmethod
    def healthy(verdicts: Sequence[Verdict]) -> bool:
        """Whether the step counts towards making the last checkpoint a rollback target."""
        return all(verdict.healthy for verdict in verdicts)

    @staticmethod
    def suspect(facts: StepFacts, verdicts: Sequence[Verdict], action: Action) -> bool:
        """Whether to keep what is needed to run the step again.

        A verdict may ask for it, and a rollback or halt always does. So does a skipped update, unless a verdict says
        that this skip is expected.
        """
        # True: keep it. False: the skip is expected. None: the verdict does not say.
        opinions = {verdict.suspect for verdict in verdicts}
        unexpected_skip = not facts.applied and False not in opinions
        return unexpected_skip or True in opinions or isinstance(action, Rollback | Halt)

    def _too_many_skips(self, spent: int, last: Verdict) -> Halt:
        return Halt(
            f"{spent} updates were skipped within {self.guard.budget_windows} windows (guard.budget_windows), more "
            f"than guard.max_skips ({self.guard.max_skips}); last: {last.text}",
            "Look for bad data in the windows that the journal names, lower train.lr, or, if nothing is wrong with "
            "them, raise guard.max_skips, guard.skip_growth or guard.spike_sigma, in a new run: "
            "--name NEW --resume runs/<run>/checkpoints/step-<good>",
        )

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

        # One rollback serves all proposals: it skips every window that any of them names.
        self.ledger.rolls_back(window, self.guard.budget_windows)
        bad: set[int] = set()
        for proposal in proposals:
            bad.update(proposal.bad)
        new = sorted(bad - set(self.ledger.skipped_windows))
        from_disk = any(proposal.from_disk for proposal in proposals)
        return Rollback(reason, tuple(new), from_disk)

    def _switch(self, proposals: Sequence[tuple[int, Switch]]) -> Action:
        # The whole run changes precision at most once and never returns, so that needs no budget. It also leaves
        # nothing to decide about single layers.
        of_whole_run = [switch for _, switch in proposals if switch.whole_run_to]
        if of_whole_run and not self.ledger.lowered:
            self.ledger.lowered = of_whole_run[0].whole_run_to
            reason = "; ".join(switch.reason for switch in of_whole_run)
            return Switch(reason=reason, whole_run_to=self.ledger.lowered)

        # Each layer once, in the order of the proposals. A layer that one monitor demotes is not promoted by another.
        demote: list[str] = []
        promote: list[str] = []
        for _, switch in proposals:
            for layer in switch.demote:
                if layer not in demote:
                    demote.append(layer)
        for _, switch in proposals:
            for layer in switch.promote:
                if layer not in demote and layer not in promote:
                    promote.append(layer)

        # Demotions come first: they protect the run, promotions only make it faster.
        left = max(0, self.guard.max_switches - self.ledger.switches)
        granted_down = demote[:left]
        granted_up = promote[: left - len(granted_down)]
        refused = demote[len(granted_down) :] + promote[len(granted_up) :]
        if refused and not self._refusal_reported:
            self._refusal_reported = True
            self.notes.append(self._refusal(proposals[0][0], refused))

        if not granted_down and not granted_up:
            return Continue()
        self.ledger.switches += len(granted_down) + len(granted_up)
        reason = "; ".join(switch.reason for _, switch in proposals)
        return Switch(tuple(granted_down), tuple(granted_up), reason)

    def _refusal(self, step: int, refused: list[str]) -> Verdict:
        key = f"guard.max_switches ({self.guard.max_switches})"
        names = ", ".join(refused)
        text = f"{key} is spent: {names} and any later layer keep their precision"
        evidence = {"refused": refused, "switches": self.ledger.switches}
        return Verdict("switch.refused", step, text, evidence=evidence)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of judging one step.

    facts: of the step.
    verdicts: of every monitor, in order.
    notes: the responder's own verdicts.
    action: what to do.
    healthy: the step counts towards making the states before it good.
    suspect: what is needed to run it again should be kept.
    """

    facts: StepFacts
    verdicts: tuple[Verdict, ...]
    notes: tuple[Verdict, ...]
    action: Action
    healthy: bool
    suspect: bool

    @property
    def to_log(self) -> list[Verdict]:
        """The verdicts and notes to log: those with a text."""
        return [verdict for verdict in (*self.verdicts, *self.notes) if verdict.text]


@dataclass
class Judge:
    """Monitors and responder of one run. Switches and limits wait in the train state until their step has come.

    config: the guard's thresholds and budgets.
    state: the run's.
    precision: the backend that carries switches out.
    monitors: in the order in which they judge.
    held: layers (padded names) that the user demoted; they stay in BF16.
    comparison: compares the ranks' weights; None where there is nothing to compare.
    seed: decides which steps are sampled.
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
        """Judge one step: once each, in order, the same on every rank. Raises nothing of its own."""
        verdicts = tuple(monitor.observe(facts) for monitor in self.monitors)
        action = self.responder.decide(verdicts, facts.window)

        # Everything decided here comes into force at step `due`.
        due = facts.step + SWITCH_DELAY
        sample_steps = max((verdict.sample_steps for verdict in verdicts), default=0)
        if sample_steps:
            sampling = self.state.dense_sampling
            self.state.dense_sampling = sampling.extended(due, sample_steps)
        # Several monitors may set limits, and the strictest of each kind counts.
        limits = NO_LIMITS
        for verdict in verdicts:
            limits = limits.stricter(verdict.limits)
        if limits != NO_LIMITS:
            self.state.limits[due] = limits
        if isinstance(action, Switch):
            switch = (due, list(action.demote), list(action.promote), action.whole_run_to)
            self.state.switches.append(switch)

        return Judgement(
            facts,
            verdicts,
            tuple(self.responder.notes),
            action,
            healthy=self.responder.healthy(verdicts),
            suspect=self.responder.suspect(facts, verdicts, action),
        )

    def switch_due(self) -> list[tuple[int, Switch]]:
        """Carry out the switches that are due at the next step; returns (step, what moved) for each.

        Call it between two steps. A second call does no harm.
        """
        next_step = self.state.step + 1
        due = [switch for switch in self.state.switches if switch[0] <= next_step]
        waiting = self.state.switches
        self.state.switches = [switch for switch in waiting if switch not in due]

        done: list[tuple[int, Switch]] = []
        for step, demote, promote, whole_run_to in due:
            before = self.precision.demoted
            promote = [layer for layer in promote if layer not in self.held]
            if whole_run_to:
                self.precision.fall_back(whole_run_to)
            else:
                self.precision.switch(demote, promote)

            # Only layers that moved: a proposal may name one that the user had demoted by then.
            demoted = self.precision.demoted
            moved = tuple(layer for layer in demoted if layer not in before)
            carried_out = Switch(moved, tuple(promote), whole_run_to=whole_run_to)
            done.append((step, carried_out))
        return done

    def stay_fallen_back(self) -> None:
        """After loading a state: keep the whole run in its fallback precision, though the state is from before that."""
        fallen = self.state.ledger.lowered
        on_its_way = any(whole_run_to for _, _, _, whole_run_to in self.state.switches)
        if fallen and not self.precision.fell_back_to and not on_its_way:
            self.precision.fall_back(fallen)

    def stay_held(self, held: set[str]) -> None:
        """After loading a state: hold in BF16 the layers `held` that the user had demoted by then, and no others."""
        freed = sorted(self.held - held)
        if held != self.held and not self.precision.fell_back_to:
            self.precision.switch(sorted(held.difference(self.precision.demoted)), freed)
        self.held.clear()
        self.held.update(held)

    @property
    def lr_factor(self) -> float:
        """Factor on the next step's learning rate: every rollback before that step lowers it, for good."""
        past = self.state.ledger.rollbacks_before(self.state.step + 1)
        return self.config.rollback_lr_factor**past

    def samples(self, every: int) -> bool:
        """Whether the next step measures the expensive FP8 statistics: one in `every`, and all in dense sampling."""
        step = self.state.step + 1
        return is_sampled(self.seed, step, every) or step in self.state.dense_sampling

    def terms(self) -> StepTerms:
        """What is decided about the next step.

        Figures that cost time are measured in the first step, every `guard.measure_every` steps, and while sampling is
        dense.
        """
        step = self.state.step + 1
        usual = (step - 1) % self.config.measure_every == 0
        measures = self.config.enabled and (usual or step in self.state.dense_sampling)
        return StepTerms(step, self.state.limits.get(step, NO_LIMITS), measures, self._hunts(step))

    def _hunts(self, step: int) -> bool:
        """Whether `step` measures the gradient norm of every layer.

        What is left of a hunt follows from the ledger, which knows every rollback: a resume and a later rollback change
        nothing about it.
        """
        if isinstance(self.config.hunt, bool):
            return self.config.hunt
        return self.state.ledger.rolled_back_before(step, HUNT_STEPS)
