"""Slow faults: a loss that stays above its best for good, and a learning rate that jumps.

`LossMonitor` looks at single losses and cannot see a loss that creeps up: each one is near those before it.
`LossRiseMonitor` compares medians over many steps with the best and the first one instead.
"""

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
"""Share of the fall since the first median. A loss higher than its best by more has lost what it had learned."""

FLOOR = 6.0
"""Robust sigmas of single losses that a median must rise by, whatever the fall was. The median of 40 losses has a
standard deviation of a fifth of a sigma."""

ACT_AFTER = 200
"""Updates in a row over the first median (or the best one, for a smaller rise) after which a rise counts as lasting."""

RISING = 100
"""Updates over which a loss that never fell must go on rising to be acted upon, in each quarter of them. A step that
lasts moves two quarters at most."""

QUARTER = FLOOR / 8
"""Robust sigmas that each quarter must rise by. All four together must rise by FLOOR."""

LR_JUMP = 10.0
"""A learning rate over this many times the largest so far is reported."""


class LossRiseMonitor(KeptWindow):
    """Compares the median of the last `window` applied losses with its best. No single step can move a median.

    window: losses in the median.
    act: whether a rise that lasts proposes a rollback; otherwise it is only reported.

    Only differences of losses count. Three kinds of rise:
    - *Risen*: the median is over the best one by more than half of what it had fallen since the first median, and by
      six sigmas of the losses at their best. Reported, once per streak.
    - *Acted upon*, if `act`: besides, the median was over the first one by six sigmas for 200 updates in a row. It
      proposes a rollback past their windows; once the budget is spent, that is a halt. A loss that had never fallen
      must still be rising: a step that lasts is only reported.
    - *Smaller, but lasting*: six sigmas over the best for 200 updates in a row. Reported once.

    Verdicts: `loss.rise` in these cases, else `loss.ok`. If `act`, every step is unhealthy as long as the median is
    over the first one, so that no rollback goes back to such a state.
    """

    key = "loss_rise"
    kept = ("losses", "first", "best", "sigma", "medians", "above", "risen", "higher")

    def __init__(self, window: int, act: bool = True) -> None:
        self.act = act
        self._losses: deque[float] = deque(maxlen=max(FIRST, window))
        self._medians: deque[float] = deque(maxlen=RISING + 1)
        self._first: float | None = None
        self._best: float | None = None
        # The spread of the losses about their trend when the median was at its best.
        self._sigma = 0.0
        # The windows of the newest updates in a row at which the median was over the first one.
        self._above: deque[int] = deque(maxlen=ACT_AFTER)
        self._risen = False
        # Updates in a row at which the median was over the best by the floor; ACT_AFTER + 1 once that was reported.
        self._higher = 0

    @classmethod
    def build(cls, context: MonitorContext) -> LossRiseMonitor:
        """For every run."""
        guard = context.guard
        return cls(guard.spike_window, guard.loss_rise == "act")

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; losses that were skipped or are not finite do not count."""
        if not facts.applied or not math.isfinite(facts.loss):
            return self._as_before(facts)
        self._losses.append(facts.loss)
        if len(self._losses) < (self._losses.maxlen or 0):
            return self._as_before(facts)

        # What to compare with: the first median, the best one, and the spread at the best.
        now = median(self._losses)
        if self._first is None:
            self._first = median(islice(self._losses, FIRST))
        if self._best is None or now < self._best:
            spread = level(list(self._losses), 0).sigma
            self._best = now
            self._sigma = max(spread, ROUNDING * max(map(abs, self._losses)))
        self._medians.append(now)
        floor = FLOOR * self._sigma

        # Once reported, the loss has to come halfway back before it is reported again.
        was_risen = self._risen
        line = self._best + max(HALF * (self._first - self._best), floor)
        if was_risen:
            line = self._best + (line - self._best) / 2
        self._risen = now > line
        if now > self._first + floor and self._risen:
            self._above.append(facts.window)
        else:
            self._above.clear()

        # A smaller rise is reported once it has lasted. A larger one has been reported by then.
        if now > self._best + floor:
            self._higher = min(self._higher + 1, ACT_AFTER + 1)
            if self._risen:
                self._higher = ACT_AFTER + 1
        elif now <= self._best + floor / 2:
            self._higher = 0

        fell = self._first - self._best > floor
        if self.act and len(self._above) == ACT_AFTER and (fell or self._rising(floor)):
            return self._acted_upon(facts, now)
        if self._risen and not was_risen:
            return self._reported(facts, now, "more than half of what was learned is lost")
        if self._higher == ACT_AFTER:
            self._higher += 1
            why = f"it has been higher than its best for {ACT_AFTER} updates"
            return self._reported(facts, now, why)
        return self._as_before(facts)

    def _rising(self, floor: float) -> bool:
        """Whether the median rose in every quarter of the last RISING updates, and by `floor` in all."""
        if len(self._medians) <= RISING:
            return False
        marks = [self._medians[place] for place in range(0, RISING + 1, RISING // 4)]
        rises = [later - earlier for earlier, later in pairwise(marks)]
        return sum(rises) > floor and min(rises) > QUARTER * self._sigma

    def _as_before(self, facts: StepFacts) -> Verdict:
        """The verdict of a step that changes nothing."""
        bad = self.act and bool(self._above)
        return Verdict("loss.rise" if bad else "loss.ok", facts.step, healthy=not bad)

    def _figures(self, now: float) -> str:
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

    def _reported(self, facts: StepFacts, now: float, why: str) -> Verdict:
        if self.act:
            setting = "act"
            what = f"If it stays over the first for {ACT_AFTER} updates the run goes back"
        else:
            setting = "report"
            what = "It goes on"
        text = (
            f"{self._figures(now)}: {why}. {what} (guard.loss_rise: "
            f"{setting}). Look at the data from window {facts.window} back (targets whose unit "
            "or scale changes, a cache that grows), at train/lr, and at what changed in the model"
        )
        healthy = not (self.act and self._above)
        evidence = self._evidence(facts, now)
        return Verdict("loss.rise", facts.step, text, healthy=healthy, evidence=evidence)

    def _acted_upon(self, facts: StepFacts, now: float) -> Verdict:
        reason = (
            f"{self._figures(now)}, and was over the first for {len(self._above)} updates; lower the learning rate or "
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
    """Reports a learning rate that jumps to more than ten times the largest of the run so far.

    A schedule that warms up, decays or restarts never does that. A wrong unit, override or scheduler does.

    Verdict, healthy: `lr.jump`, at the step of the jump; else `lr.ok`.
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
