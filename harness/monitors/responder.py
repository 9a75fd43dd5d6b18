"""Turns the verdicts of one step into one action. The only place that counts budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.core.facts import Action, Continue, Halt, Rollback, StepFacts, Switch, Verdict

if TYPE_CHECKING:
    from harness.core.config import GuardConfig
    from harness.core.state import Incidents


class Responder:
    """One action a step: Halt before Rollback before Switch before Continue, within the guard's budgets.

    What was spent is kept in `incidents`, which a rollback does not restore. The loop carries the action out:
    it adds `Rollback.bad` to `incidents.skipped_windows`, and halts when there is no good checkpoint to go back to.

    notes: the responder's own verdicts of the last `decide` (a refused switch, told once); log them beside the
    monitors'.
    """

    def __init__(self, guard: GuardConfig, incidents: Incidents) -> None:
        self.guard = guard
        self.incidents = incidents
        self.notes: list[Verdict] = []
        self._refusal_told = False

    def decide(self, verdicts: Sequence[Verdict]) -> Action:
        """The action for one step's verdicts; spends budgets, so call it exactly once a step, on every rank."""
        self.notes = []
        if not self.guard.enabled:
            return Continue()
        skips = [verdict for verdict in verdicts if verdict.skip]
        self.incidents.skips += len(skips)
        halts = [v.proposal.reason for v in verdicts if isinstance(v.proposal, Halt)]
        if halts:
            return Halt("; ".join(halts))
        if skips and self.incidents.skips > self.guard.max_skips:
            return Halt(
                f"{self.incidents.skips} updates were skipped, more than guard.max_skips "
                f"({self.guard.max_skips}); last: {skips[-1].text}. "
                "Look for bad data in the windows that the journal names, lower train.lr, or, if nothing is wrong with "
                "them, raise guard.max_skips, guard.skip_growth or guard.spike_sigma, in a new run: "
                "--name NEW --resume runs/<run>/checkpoints/step-<good>"
            )
        rollbacks = [v.proposal for v in verdicts if isinstance(v.proposal, Rollback)]
        if rollbacks:
            return self._rollback(rollbacks)
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

    def _rollback(self, proposals: Sequence[Rollback]) -> Action:
        reason = "; ".join(proposal.reason for proposal in proposals)
        if self.incidents.rollbacks >= self.guard.max_rollbacks:
            return Halt(
                f"{reason}; and all of guard.max_rollbacks ({self.guard.max_rollbacks}) are spent. "
                "Lower train.lr, lengthen train.warmup_steps, try the bf16 recipe, or look at the windows that the "
                "journal names, in a new run from a good checkpoint: "
                "--name NEW --resume runs/<run>/checkpoints/step-<N>"
            )
        self.incidents.rollbacks += 1
        bad = {window for proposal in proposals for window in proposal.bad} - set(self.incidents.skipped_windows)
        return Rollback(reason, tuple(sorted(bad)), any(proposal.from_disk for proposal in proposals))

    def _switch(self, proposals: Sequence[tuple[int, Switch]]) -> Action:
        lower = next((switch.lower for _, switch in proposals if switch.lower), "")
        if lower and not self.incidents.lowered:
            # One way and once, so it needs no budget; single layers have nothing left to decide.
            self.incidents.lowered = lower
            return Switch(reason="; ".join(switch.reason for _, switch in proposals if switch.lower), lower=lower)
        demote = list(dict.fromkeys(layer for _, switch in proposals for layer in switch.demote))
        promote = [layer for layer in dict.fromkeys(n for _, s in proposals for n in s.promote) if layer not in demote]
        # Demotions come first: they protect the run, promotions only make it faster.
        left = max(0, self.guard.max_switches - self.incidents.switches)
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
                    evidence={"refused": refused, "switches": self.incidents.switches},
                )
            )
        if not granted_down and not granted_up:
            return Continue()
        self.incidents.switches += len(granted_down) + len(granted_up)
        reason = "; ".join(switch.reason for _, switch in proposals)
        return Switch(tuple(granted_down), tuple(granted_up), reason)
