"""Ranks whose weights no longer agree, that call other blocks, or that are slower than the others."""

from __future__ import annotations

import math
from collections import deque

from harness.core.errors import some
from harness.core.facts import Halt, Rollback, StepFacts, Verdict
from harness.monitors.base import KeptWindow, MonitorContext

NAMED_IN_TEXT = 3
NAMED_IN_EVIDENCE = 32


class RanksMonitor(KeptWindow):
    """Reports ranks whose weights differ or that call other blocks, and stragglers: a rank on which every step waits.

    ratio: a step is slow if the slowest rank's forward passes took over this many times the fastest one's.
    window: steps looked back on.
    share: of slow steps in a full `window` that is reported, again only after half of it was good.

    Verdicts:
    - `ranks.diverged`, unhealthy: proposes a rollback to a state that every rank reads from the same file.
    - `ranks.calls`, unhealthy: ranks called other blocks of a sharded model, so the update was skipped. Proposes to
      halt: the next step would gather halves of other weights again.
    - `ranks.straggler`, healthy, once per streak.
    - `ranks.ok`: nothing to report.

    Nothing is kept in checkpoints: times belong to the machines of this process, and a resume may use others.
    """

    key = "ranks"

    def __init__(self, ratio: float = 1.5, window: int = 50, share: float = 0.8) -> None:
        self.ratio, self.share = ratio, share
        self._ratios: deque[float] = deque(maxlen=window)
        self._slow = False

    @classmethod
    def build(cls, context: MonitorContext) -> RanksMonitor:
        """For every run."""
        return cls()

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        # Times are noted in every step, also where another verdict comes first.
        slow = self._straggler(facts)
        if facts.other_calls:
            return _other_calls(facts)
        if facts.diverged:
            return _diverged(facts)
        return slow or Verdict("ranks.ok", facts.step)

    def _straggler(self, facts: StepFacts) -> Verdict | None:
        fastest, slowest = facts.forward_fastest, facts.forward_slowest
        if not 0 < fastest <= slowest < math.inf:
            return None

        self._ratios.append(slowest / fastest)
        slow = sum(ratio > self.ratio for ratio in self._ratios)
        length = self._ratios.maxlen or 0
        # A streak goes on until at most half of the share is slow.
        if self._slow:
            self._slow = slow > self.share / 2 * length
            return None
        # A streak begins once the window is full and the whole share of it is slow.
        self._slow = len(self._ratios) == length and slow >= self.share * length
        if not self._slow:
            return None

        usual = sorted(self._ratios)[length // 2]
        text = (
            f"in {slow} of the last {length} steps the slowest rank's forward passes took over {self.ratio:g} times "
            f"the fastest one's (median {usual:.2f} times, now {slowest:.3g} s against {fastest:.3g} s): "
            "every step waits for it"
        )
        evidence = {
            "slow_steps": slow,
            "steps": length,
            "median_ratio": usual,
            "fastest": fastest,
            "slowest": slowest,
        }
        return Verdict("ranks.straggler", facts.step, text, evidence=evidence)


def _other_calls(facts: StepFacts) -> Verdict:
    text = f"ranks called other blocks in step {facts.step}, or in another order: each gathered halves of other weights"
    text += ", so the update was skipped"
    fix = "Call every block on every rank as often and in the same order, also without gradients, or train with DDP"
    return Verdict("ranks.calls", facts.step, text, healthy=False, proposal=Halt(text, fix))


def _diverged(facts: StepFacts) -> Verdict:
    names = some(facts.diverged, NAMED_IN_TEXT)
    count = len(facts.diverged)
    what = f"{count} parameters are" if count > 1 else f"{count} parameter is"
    text = f"{what} not the same on all ranks, bit for bit: {names}"
    evidence = {"parameters": list(facts.diverged[:NAMED_IN_EVIDENCE]), "count": count}
    # From disk: each rank's snapshot in memory has the weights of that rank.
    proposal = Rollback(text, from_disk=True)
    return Verdict(
        "ranks.diverged", facts.step, text, healthy=False, proposal=proposal, evidence=evidence
    )
