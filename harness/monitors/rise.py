"""What rises and should not: a loss that stays above its best for good, and a learning rate that jumps."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice, pairwise
from statistics import median

from harness.core.facts import Rollback, StepFacts, Verdict
from harness.monitors.base import ROUNDING, KeptWindow, MonitorContext, level

FIRST = 16
"""Losses that make the first median."""
HALF = 0.5
"""Of the fall since the first median: a loss that is higher than its best by more has lost what it had learned."""
FLOOR = 6.0
"""Robust sigmas of single losses that a median must rise by, whatever the fall was. One of 40 losses has a fifth of a
sigma of its own."""
ACT_AFTER = 200
RISING = 100
"""Updates over which a loss that never fell must go on rising to be acted upon, in each quarter of them: a step that
lasts moves two quarters at most."""
QUARTER = FLOOR / 8
"""Robust sigmas that a quarter must rise by. All four together must rise by FLOOR."""
LR_JUMP = 10.0


class LossRiseMonitor(KeptWindow):
    """Watches the median of the last `window` applied losses against the best it has been. No single step can move it.

    Differences of losses alone decide. The loss has risen when the median is over the best one by more than half of
    what it had fallen since the first median, and by six sigmas of the losses about the best one. Over the first median
    by six sigmas for 200 updates in a row it is acted upon, if `act`: a rollback past their windows, and the halt once
    the budget is spent. A loss that had not fallen by then must still be rising: a step that lasts is reported alone.
    So is a smaller rise that lasts: six sigmas over the best for 200 updates in a row.

    Verdicts: `loss.rise`, told when it has risen or a smaller rise has lasted, once per streak, and when it is acted
    upon; unhealthy as long as the median is over the first one, if `act`, so that no such state is gone back to. Else
    `loss.ok`.
    """

    key = "loss_rise"
    kept = ("losses", "first", "best", "sigma", "medians", "above", "risen", "higher")

    def __init__(self, window: int, act: bool = True) -> None:
        self.act = act
        self._losses: deque[float] = deque(maxlen=max(FIRST, window))
        self._first: float | None = None
        self._best: float | None = None
        # Of the losses about their trend when the median was at its best.
        self._sigma = 0.0
        self._medians: deque[float] = deque(maxlen=RISING + 1)
        # The windows of the latest updates in a row at which the median was over the first one.
        self._above: deque[int] = deque(maxlen=ACT_AFTER)
        self._risen = False
        # Updates in a row at which the median was over the best one by the floor; ACT_AFTER + 1 once that is told.
        self._higher = 0

    @classmethod
    def build(cls, context: MonitorContext) -> LossRiseMonitor:
        """For every run."""
        guard = context.guard
        return cls(guard.spike_window, guard.loss_rise == "act")

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; what was skipped or is not finite counts for nothing."""
        if not facts.applied or not math.isfinite(facts.loss):
            return self._as_before(facts)
        self._losses.append(facts.loss)
        if len(self._losses) < (self._losses.maxlen or 0):
            return self._as_before(facts)
        now = median(self._losses)
        if self._first is None:
            self._first = median(islice(self._losses, FIRST))
        if self._best is None or now < self._best:
            spread = level(list(self._losses), 0).sigma
            self._best, self._sigma = now, max(spread, ROUNDING * max(map(abs, self._losses)))
        self._medians.append(now)
        floor = FLOOR * self._sigma
        line = self._best + max(HALF * (self._first - self._best), floor)

        # Once told, the loss has to come halfway back before it is told again.
        was_risen = self._risen
        self._risen = now > (self._best + (line - self._best) / 2 if was_risen else line)
        if now > self._first + floor and self._risen:
            self._above.append(facts.window)
        else:
            self._above.clear()

        # A smaller rise is told once it has lasted. A larger one has been told by then.
        if now > self._best + floor:
            self._higher = ACT_AFTER + 1 if self._risen else min(self._higher + 1, ACT_AFTER + 1)
        elif now <= self._best + floor / 2:
            self._higher = 0

        fell = self._first - self._best > floor
        if self.act and len(self._above) == ACT_AFTER and (fell or self._rising(floor)):
            return self._acted_upon(facts, now)
        if self._risen and not was_risen:
            return self._told(facts, now, "more than half of what was learned is lost")
        if self._higher == ACT_AFTER:
            self._higher += 1
            return self._told(
                facts, now, f"it has been higher than its best for {ACT_AFTER} updates"
            )
        return self._as_before(facts)

    def _rising(self, floor: float) -> bool:
        """Whether the median rose in every quarter of the last RISING updates, and by `floor` in all."""
        if len(self._medians) <= RISING:
            return False
        marks = [self._medians[place] for place in range(0, RISING + 1, RISING // 4)]
        rises = [later - earlier for earlier, later in pairwise(marks)]
        return sum(rises) > floor and min(rises) > QUARTER * self._sigma

    def _as_before(self, facts: StepFacts) -> Verdict:
        bad = self.act and bool(self._above)
        return Verdict("loss.rise" if bad else "loss.ok", facts.step, healthy=not bad)

    def _said(self, now: float) -> str:
        return (
            f"the loss is {now:.4g} (median of {len(self._losses)} updates), {self._best:.4g} at its best and "
            f"{self._first:.4g} at first"
        )

    def _evidence(self, facts: StepFacts, now: float) -> dict[str, float | None]:
        return {
            "loss": now,
            "best": self._best,
            "first": self._first,
            "sigma": self._sigma,
            "window": facts.window,
        }

    def _told(self, facts: StepFacts, now: float, why: str) -> Verdict:
        what = (
            f"If it stays over the first for {ACT_AFTER} updates the run goes back"
            if self.act
            else "It goes on"
        )
        text = (
            f"{self._said(now)}: {why}. {what} (guard.loss_rise: "
            f"{'act' if self.act else 'report'}). Look at the data from window {facts.window} back (targets whose unit "
            "or scale changes, a cache that grows), at train/lr, and at what changed in the model"
        )
        evidence = self._evidence(facts, now)
        return Verdict(
            "loss.rise", facts.step, text, healthy=not (self.act and self._above), evidence=evidence
        )

    def _acted_upon(self, facts: StepFacts, now: float) -> Verdict:
        reason = (
            f"{self._said(now)}, and was over the first for {len(self._above)} updates; lower the learning rate or "
            "mend the data; if a loss that rises is right, set guard.loss_rise: report"
        )
        bad = tuple(self._above)
        self._above.clear()
        evidence = self._evidence(facts, now)
        return Verdict(
            "loss.rise",
            facts.step,
            reason,
            healthy=False,
            proposal=Rollback(reason, bad),
            evidence=evidence,
        )


class LearningRateMonitor(KeptWindow):
    """Watches the learning rate for a jump to more than ten times the largest it has been.

    A schedule that warms up, decays or starts again does no such thing; a unit, an override or a scheduler that is
    wrong does. Verdict, healthy: `lr.jump`, at the step of the jump; else `lr.ok`.
    """

    key = "lr"
    kept = ("largest",)

    def __init__(self) -> None:
        self._largest = 0.0

    @classmethod
    def build(cls, context: MonitorContext) -> LearningRateMonitor:
        """For every run."""
        return cls()

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        largest = self._largest
        if math.isfinite(facts.lr):
            self._largest = max(largest, facts.lr)
        if not 0 < LR_JUMP * largest < facts.lr:
            return Verdict("lr.ok", facts.step)
        text = (
            f"the learning rate is {facts.lr:.4g}, {facts.lr / largest:.4g} times the largest of the run so far "
            f"({largest:.4g}): if that is not meant, look at the learning rate and at its schedule"
        )
        evidence = {"lr": facts.lr, "largest": largest, "window": facts.window}
        return Verdict("lr.jump", facts.step, text, evidence=evidence)
