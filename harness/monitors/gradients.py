"""Skipped updates and the limits on gradient norms that decide them.

How `GradientMonitor` tells a bad gradient from a usual one:

1. *What is usual.* Gradient norms vary by factors, so their logarithms are compared. `base.level` takes the level and
   the spread (sigma) of the last `window` applied norms. It ignores outliers and follows a fall.
2. *The limit.* An update is skipped if its norm is over max(skip_growth, e^(6 sigma)) times the usual one. The limit is
   decided two steps ahead, since facts arrive one step late. The device compares; no host waits.
3. *Skips in a row.* One large norm may be due to its samples: skipping it is enough. After `max_consecutive_skips` in a
   row the monitor proposes a rollback past their windows.
4. *Norms that are right.* Skipping and rolling back do not help where large norms are the nature of the run. Two such
   cases are accepted (see `GradientMonitor`): weights that give large norms whatever the samples, and samples that give
   them again and again, with usual norms between.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

from harness.core.errors import in_a_row
from harness.core.facts import Continue, Limits, Rollback, StepFacts, Verdict, jsonable
from harness.monitors.base import (
    AHEAD,
    ARMED_AFTER,
    RECURRING_SPAN,
    KeptWindow,
    MonitorContext,
    from_log,
    is_calibration,
    level,
    mark,
    recurring,
    why_skipped,
)

SKIP_SIGMA = 6.0
"""A norm is skipped only if it is over the usual one by this many robust sigmas, so that noisy gradients are not."""
GROWTH = 10.0
"""A norm this many times the earlier ones is reported as growth."""
GROWTH_WINDOW = 100
"""Applied steps within which a norm that grew `GROWTH`-fold is reported."""
GROWTH_ARMED_AFTER = 16
"""Norms needed before growth is reported."""
OLDEST = 10
"""How many of the oldest norms of the last GROWTH_WINDOW a norm is compared with, to see gradual growth."""


class GradientMonitor(KeptWindow):
    """Judges skipped updates, sets the limits for those to come, and reports gradient norms that grow.

    max_consecutive_skips: skipped steps in a row after which it proposes a rollback past their windows.
    skip_growth: an update with more than this many times the usual norm is skipped.
    clip_growth: gradients are clipped to this many times the usual norm.
    window: applied steps that say what is usual (see `base.level`); limits begin after 32 of them, or `window` if less.

    The limit for the update two steps ahead is max(skip_growth, e^(6 sigma)) times the usual norm. The norms of skipped
    updates are not kept.

    A row of `max_consecutive_skips` large norms (two or more) is *accepted* if every loss in it is within its limit and
    no norm is over skip_growth times its limit. Then as many large updates as were skipped are applied, clipped as
    before. The reason: such norms come from the weights, not the samples. The next window would have a large norm too,
    and a rollback would lead to the same weights, but these updates may lead to better ones.

    It was a fault after all if norms stay large after that, if they grow further, or if another row comes within
    `window` applied steps. Then rollbacks follow, and at last a halt whose text names the key to raise.

    Large norms with usual norms between them come from the samples. If they *recur* (see `base.recurring`) and none is
    over skip_growth times its limit, norms up to their size are applied, clipped, for as long as they recur.

    Verdicts, all with limits once armed:
    - `nonfinite.skip`, unhealthy: loss or norm is not finite.
    - `gradient.skip`, unhealthy: the norm is over its limit.
    - `gradient.accepted`, unhealthy: the same, and the limit is raised for what comes.
    - `scaler.calibration`, unhealthy: the loss scaler is searching for its range.
    - `gradient.growth`, healthy, once per streak.
    - `gradient.ok`: nothing to report.

    Other monitors judge updates that were skipped for their samples or their loss. Such updates neither extend nor end
    a row. But a row with a loss over its limit in it is not accepted.
    """

    key = "gradients"
    kept = (
        "norms",
        "bad_windows",
        "bad_norms",
        "accepted",
        "probation",
        "left",
        "lifted",
        "marks",
        "recurs",
        "skip_scale",
        "growing",
    )

    def __init__(
        self,
        max_consecutive_skips: int,
        skip_growth: float = 5.0,
        clip_growth: float = 3.0,
        window: int = 40,
    ) -> None:
        self.max_consecutive_skips = max_consecutive_skips
        self.skip_growth = skip_growth
        self.clip_growth = clip_growth
        self.window = window
        self._norms: deque[float] = deque(maxlen=max(GROWTH_WINDOW, window))

        # The present row of skipped updates; a norm is None where it was not the reason.
        self._bad_windows: list[int] = []
        self._bad_norms: list[float | None] = []

        # Median norm of the accepted row.
        self._accepted = 0.0
        # Applied steps left before another row may be accepted.
        self._probation = 0
        # Large updates that may still be applied in those steps.
        self._left = 0
        # Whether the limit that was decided last was raised for one of them.
        self._lifted = False

        # What `base.recurring` looks at, and whether large norms recur by it.
        self._marks: deque[float] = deque(maxlen=RECURRING_SPAN)
        self._recurs = False

        self._skip_scale: float | None = None
        self._growing = False

    @classmethod
    def build(cls, context: MonitorContext) -> GradientMonitor:
        """For every run."""
        guard = context.guard
        return cls(
            guard.max_consecutive_skips, guard.skip_growth, guard.clip_growth, guard.spike_window
        )

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step, with the limits for the step two on. Deterministic."""
        match why_skipped(facts):
            case "":
                self._forget_row()
                self._probation = max(0, self._probation - 1)
                self._skip_scale = None
                self._count(facts)
                verdict = self._applied(facts)
            case "norm":
                verdict = self._over(facts)
            case "nonfinite":
                verdict = self._not_finite(facts)
            case "loss":
                # The weights give more than large norms: this row is for a rollback.
                self._bad_norms = [None for _ in self._bad_norms]
                verdict = Verdict("gradient.ok", facts.step)
            case _:
                verdict = Verdict("gradient.ok", facts.step)
        return replace(verdict, limits=self._limits())

    def _usual(self, ahead: int) -> tuple[float, float] | None:
        """The usual log norm, and how far over it the limit is; None while too few norms are known."""
        if len(self._norms) < min(ARMED_AFTER, self.window):
            return None
        begin = max(0, len(self._norms) - self.window)
        logs = [math.log(norm) for norm in islice(self._norms, begin, None)]
        usual = level(logs, ahead)
        room = max(math.log(self.skip_growth), SKIP_SIGMA * usual.sigma)
        return usual.centre, room

    def _limits(self) -> Limits:
        """The limits for the step two ahead."""
        usual = self._usual(AHEAD)
        if usual is None:
            return Limits()
        centre, room = usual

        # An accepted row raises the limit while some of its updates are left. Limits are decided two steps ahead, so
        # the step of the last limit is still on its way. If that limit was raised, count one update as used.
        self._lifted = self._left - int(self._lifted) > 0
        accepted = self.skip_growth * self._accepted if self._lifted else 0.0

        # Norms that recur raise it for as long as they do, and by no more than one factor of skip_growth.
        found = recurring(self._marks) if self._recurs else None
        self._recurs = found is not None
        if found is not None:
            room = max(room, min(found, room + math.log(self.skip_growth)))

        norm = max(from_log(centre + room), accepted)
        clip = from_log(centre + math.log(self.clip_growth))
        return Limits(norm=norm, clip=clip)

    def _over(self, facts: StepFacts) -> Verdict:
        """The verdict on an update that was skipped because its norm was over the limit."""
        limit = facts.limits.norm
        # What the limit is a multiple of. Where norms fall, it is under their median.
        known = self._usual(1)
        usual = math.nan if known is None else from_log(known[0])
        what = (
            f"gradient norm {facts.grad_norm:.4g} is over its limit of {limit:.4g} (usual norm {usual:.4g}), "
            f"loss {facts.loss:.4g}, window {facts.window}"
        )
        evidence = {
            "grad_norm": facts.grad_norm,
            "limit": limit,
            "usual": jsonable(usual),
            "loss": facts.loss,
        }

        # Norms that recur come from the samples. One far beyond its limit ends that.
        if facts.grad_norm > self.skip_growth * limit:
            self._marks.clear()
        else:
            deviation = self._begins_to_recur(facts)
            if deviation is not None:
                return self._accept_recurring(facts, deviation, what, evidence)

        # A row of norms comes from the weights. A single norm is as likely due to its samples.
        row = [*self._bad_norms, facts.grad_norm]
        most = self.skip_growth * limit
        near = [norm for norm in row if norm is not None and norm <= most]
        from_weights = len(near) == len(row) > 1
        if from_weights and len(row) >= self.max_consecutive_skips and not self._probation:
            return self._accept(facts, near, what, evidence)

        advice = f"; if norms like this are right, raise guard.skip_growth ({self.skip_growth:g})"
        return self._skip(
            facts, "gradient.skip", what, "skipped", evidence, advice, norm=facts.grad_norm
        )

    def _accept(
        self, facts: StepFacts, row: list[float], what: str, evidence: dict[str, Any]
    ) -> Verdict:
        """Let as many large updates through as this row has, instead of a rollback."""
        # Once: if a row comes back within `window` applied steps, these updates led nowhere.
        self._accepted = median(row)
        self._probation = self.window
        self._left = len(row)
        self._forget_row()
        evidence = {
            "window": facts.window,
            **evidence,
            "consecutive": len(row),
            "accepted": self._accepted,
        }
        text = (
            f"update skipped, weights unchanged: {what}. The last {len(row)} in a row had norms of {min(row):.4g} to "
            f"{max(row):.4g} at a loss within its limit: the weights give such gradients, not these samples. From step "
            f"{facts.step + AHEAD} on {len(row)} updates with norms up to {self.skip_growth * self._accepted:.4g} are "
            "applied, clipped, to lead away from there. If it comes again, lower the learning rate or lengthen the "
            "warm-up"
        )
        return Verdict(
            "gradient.accepted", facts.step, text, healthy=False, evidence=evidence, skip=True
        )

    def _count(self, facts: StepFacts) -> None:
        """Count an applied norm: mark it for `recurring`; a large one uses up one of the accepted updates."""
        usual = self._usual(1)
        if usual is None or not 0 < facts.grad_norm < math.inf:
            return
        centre, room = usual
        deviation = math.log(facts.grad_norm) - centre
        self._marks.extend(mark(deviation, room))
        if self._left and not self._probation:
            self._left = 0
        elif self._left and deviation > room:
            self._left -= 1

    def _begins_to_recur(self, facts: StepFacts) -> float | None:
        """Note a large norm. If large norms recur from this one on: how far over the usual log norm to let through."""
        usual = self._usual(1)
        if usual is None or not 0 < facts.grad_norm < math.inf:
            return None
        # A mark of 0 would stand for a usual norm, so a large one counts at least clip_growth.
        centre, _ = usual
        deviation = math.log(facts.grad_norm) - centre
        self._marks.append(max(deviation, math.log(self.clip_growth)))
        return None if self._recurs else recurring(self._marks)

    def _accept_recurring(
        self, facts: StepFacts, deviation: float, what: str, evidence: dict[str, Any]
    ) -> Verdict:
        """Let norms of this size through for as long as they recur."""
        self._forget_row()
        self._recurs = True
        over = sum(value > 0 for value in self._marks)
        text = (
            f"update skipped, weights unchanged: {what}. Of the last {len(self._marks)} norms {over} were over their "
            "limit, with usual ones between them: some of the samples give such gradients, not the weights. From "
            f"step {facts.step + AHEAD} on norms up to {from_log(deviation):.3g} times the usual one are applied, "
            "clipped, as long as they recur. If those samples should not be there, look at the windows that these "
            "events name"
        )
        evidence = {
            "window": facts.window,
            **evidence,
            "recurring": over,
            "growth": jsonable(from_log(deviation)),
        }
        return Verdict(
            "gradient.accepted", facts.step, text, healthy=False, evidence=evidence, skip=True
        )

    def _forget_row(self) -> None:
        """End the row of skipped updates."""
        self._bad_windows.clear()
        self._bad_norms.clear()

    def _not_finite(self, facts: StepFacts) -> Verdict:
        """The verdict on an update that was skipped because loss or gradient is not finite."""
        calibrating = is_calibration(facts.loss, facts.loss_scale, self._skip_scale)
        self._skip_scale = facts.loss_scale
        evidence: dict[str, Any] = {
            "loss": jsonable(facts.loss),
            "grad_norm": jsonable(facts.grad_norm),
            "loss_scale": facts.loss_scale,
        }
        if calibrating:
            text = f"update skipped: the loss scale {facts.loss_scale:g} was too large and is being lowered"
            evidence["window"] = facts.window
            # A scaler's search for its range is expected: it costs no budget, and no repro bundle is kept for it.
            return Verdict(
                "scaler.calibration",
                facts.step,
                text,
                healthy=False,
                evidence=evidence,
                suspect=False,
            )
        what = f"loss {facts.loss:g}, gradient norm {facts.grad_norm:g}, window {facts.window}"
        return self._skip(facts, "nonfinite.skip", what, "not finite", evidence)

    def _skip(
        self,
        facts: StepFacts,
        code: str,
        what: str,
        was: str,
        evidence: dict[str, Any],
        advice: str = "",
        norm: float | None = None,
    ) -> Verdict:
        """Extend the row by this update; propose a rollback once the row is long enough.

        what: about this update. was: what all updates of the row were. norm: None where it was not the reason.
        """
        self._bad_windows.append(facts.window)
        self._bad_norms.append(norm)
        run = len(self._bad_windows)
        proposal: Continue | Rollback = Continue()
        if run >= self.max_consecutive_skips:
            # Skip all of the row's windows: the facts do not show which of them broke the state first.
            updates = f"{in_a_row(run, 'update')} {'was' if run == 1 else 'were'} {was}"
            reason = f"{updates} (last: {what}){advice}"
            proposal = Rollback(reason, tuple(self._bad_windows))
        return Verdict(
            code,
            facts.step,
            f"update skipped, weights unchanged: {what}",
            healthy=False,
            proposal=proposal,
            evidence={"window": facts.window, **evidence, "consecutive": run},
            skip=True,
        )

    def _applied(self, facts: StepFacts) -> Verdict:
        """Note an applied norm; report one that grew."""
        quiet = Verdict("gradient.ok", facts.step)
        norm = facts.grad_norm
        if not 0 < norm < math.inf:
            return quiet

        # Compared before it joins the norms that it is compared with. A streak is reported once.
        usual = self._growth_base()
        self._norms.append(norm)
        was_growing = self._growing
        self._growing = usual is not None and norm >= GROWTH * usual
        if usual is None or not self._growing or was_growing:
            return quiet
        times = norm / usual
        text = f"gradient norm {norm:.4g} is {times:.1f} times what it was"
        text += f" in the last {GROWTH_WINDOW} steps ({usual:.4g})"
        evidence = {"grad_norm": norm, "median": usual, "window": facts.window}
        return Verdict("gradient.growth", facts.step, text, evidence=evidence)

    def _growth_base(self) -> float | None:
        """The norm to compare growth with; None while too few norms are known.

        It is the median of the last 100 norms, or of the oldest of them if that is less, to see gradual growth too.
        """
        norms = list(self._norms)[-GROWTH_WINDOW:]
        if len(norms) < GROWTH_ARMED_AFTER:
            return None
        return min(median(norms), median(norms[:OLDEST]))
