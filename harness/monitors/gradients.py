"""Gradients and what they do: skipped updates and limits, clipping, fp16's ends of the range, the weights' norm."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from itertools import islice
from statistics import median, median_low
from typing import Any

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
"""Robust sigmas that a norm must be over the usual one, however small `skip_growth` is: for noisy gradients."""
GROWTH = 10.0
GROWTH_WINDOW = 100
"""Applied steps within which a norm that grew `GROWTH`-fold is reported."""
GROWTH_ARMED_AFTER = 16
OLDEST = 10
BASELINE = 8
"""Measurements of underflow that make the baseline; they are also compared: the latest half against the half before."""
MOSTLY = 0.5
"""A share of zeros that is reported whatever the baseline was."""


class GradientMonitor(KeptWindow):
    """Judges skipped updates, sets the limits for those to come, and reports gradient norms that grow.

    max_consecutive_skips: skipped steps in a row that make it propose a rollback past their windows. skip_growth,
    clip_growth: how many times the usual norm is not applied, is clipped to. window: applied steps that say what is
    usual, on a log scale (see `base.level`); armed after 32 of them (or `window`, if that is less).

    The limit for an update two steps on is max(skip_growth, e^(6 sigma)) times the usual norm. A norm that was skipped
    does not enter the window.

    A row of `max_consecutive_skips` large norms (two or more) is accepted if every loss in it is within its limit and
    no norm is over skip_growth times its limit. The weights give such norms, not the samples, so the next window would
    have one too, and a rollback would lead to the same weights. As many large updates as were skipped are then
    applied, clipped as before: they may lead to better weights. If norms stay large after that, if they grow further,
    or if another row comes within `window` applied steps, it is a fault: rollbacks follow, then the halt, whose text
    names the key to raise.

    Large norms with usual norms between them come from the samples. If they recur (see `base.recurring`) and none is
    over skip_growth times its limit, norms up to their size are applied, clipped, for as long as they recur.

    Verdicts: `nonfinite.skip`, `gradient.skip`, `gradient.accepted`, `scaler.calibration` (all unhealthy),
    `gradient.growth` (healthy, once per streak), else `gradient.ok`, all with limits once armed. Updates skipped for
    their samples or their loss are other monitors' to judge; they neither extend nor end a row, but with a loss
    over its limit among them it is not accepted.
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
        self._bad_windows: list[int] = []
        self._bad_norms: list[float | None] = []
        self._accepted = 0.0
        # Applied steps until norms may be accepted again, and large updates until then that are still to be applied.
        self._probation = 0
        self._left = 0
        # Whether the newest limit has room for one: that step is on its way when the next limit is decided.
        self._lifted = False
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
        newest = islice(self._norms, max(0, len(self._norms) - self.window), None)
        usual = level([math.log(norm) for norm in newest], ahead)
        return usual.centre, max(math.log(self.skip_growth), SKIP_SIGMA * usual.sigma)

    def _limits(self) -> Limits:
        usual = self._usual(AHEAD)
        if usual is None:
            return Limits()
        centre, room = usual
        # The step before the one that this limit is for may apply one of those that are left.
        self._lifted = self._left - int(self._lifted) > 0
        accepted = self.skip_growth * self._accepted if self._lifted else 0.0
        found = recurring(self._marks) if self._recurs else None
        self._recurs = found is not None
        again = 0.0 if found is None else min(found, room + math.log(self.skip_growth))
        norm = max(from_log(centre + max(room, again)), accepted)
        return Limits(norm=norm, clip=from_log(centre + math.log(self.clip_growth)))

    def _over(self, facts: StepFacts) -> Verdict:
        limit, usual = facts.limits.norm, median(self._norms) if self._norms else math.nan
        what = (
            f"gradient norm {facts.grad_norm:.4g} is over its limit of {limit:.4g} (median {usual:.4g}), "
            f"loss {facts.loss:.4g}, window {facts.window}"
        )
        evidence = {
            "grad_norm": facts.grad_norm,
            "limit": limit,
            "median": jsonable(usual),
            "loss": facts.loss,
        }
        row = [*self._bad_norms, facts.grad_norm]
        near = all(norm is not None and norm <= self.skip_growth * limit for norm in row)
        # A single norm is its samples' as likely.
        near = near and len(row) > 1
        if facts.grad_norm > self.skip_growth * limit:
            self._marks.clear()
        elif (deviation := self._begins_to_recur(facts)) is not None:
            return self._accept_recurring(facts, deviation, what, evidence)
        if len(row) >= self.max_consecutive_skips and near and not self._probation:
            return self._accept(facts, [norm for norm in row if norm is not None], what, evidence)
        advice = f"; if norms like this are right, raise guard.skip_growth ({self.skip_growth:g})"
        return self._skip(
            facts,
            "gradient.skip",
            what,
            f"were skipped (last: {what}){advice}",
            evidence,
            facts.grad_norm,
        )

    def _accept(
        self, facts: StepFacts, row: list[float], what: str, evidence: dict[str, Any]
    ) -> Verdict:
        self._accepted, self._probation, self._left = median(row), self.window, len(row)
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
        """An applied norm: usual, or large and let through. Large ones use up what was accepted."""
        usual = self._usual(1)
        if usual is None or not 0 < facts.grad_norm < math.inf:
            return
        deviation = math.log(facts.grad_norm) - usual[0]
        self._marks.extend(mark(deviation, usual[1]))
        if self._left and (deviation > usual[1] or not self._probation):
            self._left = self._left - 1 if self._probation else 0

    def _begins_to_recur(self, facts: StepFacts) -> float | None:
        """If large norms recur by this one: how far over the usual log norm they are let through from now on."""
        usual = self._usual(1)
        if usual is None or not 0 < facts.grad_norm < math.inf:
            return None
        self._marks.append(max(math.log(facts.grad_norm) - usual[0], math.log(self.clip_growth)))
        return None if self._recurs else recurring(self._marks)

    def _accept_recurring(
        self, facts: StepFacts, deviation: float, what: str, evidence: dict[str, Any]
    ) -> Verdict:
        self._forget_row()
        self._recurs = True
        over = sum(value > 0 for value in self._marks)
        text = (
            f"update skipped, weights unchanged: {what}. Of the last {len(self._marks)} norms {over} were over their "
            "limit, with usual ones between them: some of the samples give such gradients, not the weights. From "
            f"step {facts.step + AHEAD} on norms up to {math.exp(deviation):.3g} times the usual one are applied, "
            "clipped, as long as they recur. If those samples should not be there, look at the windows that these "
            "events name"
        )
        evidence = {
            "window": facts.window,
            **evidence,
            "recurring": over,
            "growth": math.exp(deviation),
        }
        return Verdict(
            "gradient.accepted", facts.step, text, healthy=False, evidence=evidence, skip=True
        )

    def _forget_row(self) -> None:
        self._bad_windows.clear()
        self._bad_norms.clear()

    def _not_finite(self, facts: StepFacts) -> Verdict:
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
            # The scale's search for its range is no news: neither budget nor flight record is for it.
            return Verdict(
                "scaler.calibration",
                facts.step,
                text,
                healthy=False,
                evidence=evidence,
                suspect=False,
            )
        what = f"loss {facts.loss:g}, gradient norm {facts.grad_norm:g}, window {facts.window}"
        return self._skip(
            facts, "nonfinite.skip", what, f"were not finite (last: {what})", evidence
        )

    def _skip(
        self,
        facts: StepFacts,
        code: str,
        what: str,
        why: str,
        evidence: dict[str, Any],
        norm: float | None = None,
    ) -> Verdict:
        self._bad_windows.append(facts.window)
        self._bad_norms.append(norm)
        run = len(self._bad_windows)
        proposal: Continue | Rollback = Continue()
        if run >= self.max_consecutive_skips:
            # The whole run of windows goes: which of them broke the state first cannot be told from here.
            proposal = Rollback(f"{run} updates in a row {why}", tuple(self._bad_windows))
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
        norm = facts.grad_norm
        if not 0 < norm < math.inf:
            return Verdict("gradient.ok", facts.step)
        usual = self._growth_base()
        self._norms.append(norm)
        was_growing = self._growing
        self._growing = usual is not None and norm >= GROWTH * usual
        if usual is None or not self._growing or was_growing:
            return Verdict("gradient.ok", facts.step)
        return Verdict(
            "gradient.growth",
            facts.step,
            f"gradient norm {norm:.4g} is {norm / usual:.1f} times what it was in the last {GROWTH_WINDOW} steps "
            f"({usual:.4g})",
            evidence={"grad_norm": norm, "median": usual, "window": facts.window},
        )

    def _growth_base(self) -> float | None:
        """The median of the last 100 norms, or of the oldest of them where growth is gradual and that is less."""
        norms = list(self._norms)[-GROWTH_WINDOW:]
        if len(norms) < GROWTH_ARMED_AFTER:
            return None
        return min(median(norms), median(norms[:OLDEST]))


class ClippingMonitor(KeptWindow):
    """Reports when nearly every update is clipped.

    max_grad_norm: the run's limit. warmup_steps: applied steps of the learning rate's warm-up, which do not count:
    gradients are large while nothing is learned yet. share: of the last `window` applied steps that makes it speak.
    A streak ends once under half of that share are clipped, so that a share that wavers about the limit is told once.

    Verdicts: `gradient.clipping` (healthy, once per streak), else `clipping.ok`.
    """

    key = "clipping"
    kept = ("norms", "told")

    def __init__(
        self, max_grad_norm: float, warmup_steps: int, share: float = 0.95, window: int = 200
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.warmup_steps = warmup_steps
        self.share = share
        self._norms: deque[float] = deque(maxlen=window)
        self._told = False

    @classmethod
    def build(cls, context: MonitorContext) -> ClippingMonitor:
        """For every run."""
        return cls(context.max_grad_norm, context.warmup_steps, context.guard.clipping_share)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; a skipped step does not count."""
        quiet = Verdict("clipping.ok", facts.step)
        if not facts.applied or facts.applied_steps <= self.warmup_steps:
            return quiet
        self._norms.append(facts.grad_norm)
        if len(self._norms) != self._norms.maxlen:
            return quiet
        share = sum(norm > self.max_grad_norm for norm in self._norms) / len(self._norms)
        was_told = self._told
        self._told = share >= (self.share / 2 if was_told else self.share)
        if was_told or not self._told:
            return quiet
        usual = median(self._norms)
        text = (
            f"{share:.0%} of the last {len(self._norms)} updates were clipped: max_grad_norm is "
            f"{self.max_grad_norm:g}, the median gradient norm {usual:.4g}. Clipping bounds what breaks a run and does "
            "not mend it: now the limit, not the gradient, sets the length of every step. Lower the learning rate, "
            "look for a loss that is summed where it should be averaged, or raise max_grad_norm above the usual norm"
        )
        evidence = {"share": share, "median": usual, "max_grad_norm": self.max_grad_norm}
        return Verdict("gradient.clipping", facts.step, text, evidence=evidence)


class UnderflowMonitor(KeptWindow):
    """Watches the shares of the still scaled gradient that are exactly 0, and over half of fp16's largest value.

    rise: the share of zeros is reported when it is this much over that of the run's first measurements and still
    rising. A model with sparse activations has zeros of its own, but from the start; only over one half is reported
    without a rise. near_limit: share near the limit that is reported.

    Only applied steps count: in a skipped one the loss scale is about to change. Without a loss scale, or after the
    run left fp16, nothing is measured and it stays silent.

    Verdicts, all healthy and once per streak: `gradient.underflow`, `gradient.overflow`, else `underflow.ok`.
    """

    key = "underflow"
    kept = ("first", "latest", "vanishing", "overflowing")

    def __init__(self, rise: float = 0.05, near_limit: float = 0.01) -> None:
        self.rise = rise
        self.near_limit = near_limit
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=BASELINE)
        self._vanishing = False
        self._overflowing = False

    @classmethod
    def build(cls, context: MonitorContext) -> UnderflowMonitor:
        """For every run."""
        guard = context.guard
        return cls(guard.underflow_rise, guard.overflow_share)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        quiet = Verdict("underflow.ok", facts.step)
        if not facts.applied or facts.fell_back_to or math.isnan(facts.grad_zeros):
            return quiet
        self._latest.append(facts.grad_zeros)
        if len(self._first) < BASELINE:
            self._first.append(facts.grad_zeros)
        was_overflowing, self._overflowing = (
            self._overflowing,
            facts.grad_near_limit > self.near_limit,
        )
        if self._overflowing and not was_overflowing:
            return self._overflow(facts)
        was_vanishing, self._vanishing = self._vanishing, self._vanishes()
        return self._underflow(facts) if self._vanishing and not was_vanishing else quiet

    def _vanishes(self) -> bool:
        """Whether the share of zeros is high for this run; a streak lasts while it stays so, rising or not."""
        half = BASELINE // 2
        if len(self._latest) < half:
            return False
        latest = list(self._latest)
        now = median_low(latest[-half:])
        if now > MOSTLY:
            return True
        over = len(self._first) == BASELINE and now > median(self._first) + self.rise
        return over and (self._vanishing or now > median_low(latest[:-half]))

    def _underflow(self, facts: StepFacts) -> Verdict:
        start = median(self._first)
        text = (
            f"{facts.grad_zeros:.1%} of the gradient's elements are exactly 0, {start:.1%} in the run's first "
            f"measurements: at a loss scale of {facts.loss_scale:g} fp16 rounds them away, and what they would have "
            "taught is lost. Use a bf16 recipe where the card has bf16, else the recipe fp16_underflow, which keeps "
            "the scale high, or a larger loss_scale.init"
        )
        evidence = {"zeros": facts.grad_zeros, "first_zeros": start, "loss_scale": facts.loss_scale}
        return Verdict(
            "gradient.underflow", facts.step, text, evidence=evidence | {"window": facts.window}
        )

    def _overflow(self, facts: StepFacts) -> Verdict:
        text = (
            f"{facts.grad_near_limit:.1%} of the gradient's elements are over half of fp16's largest value at a loss "
            f"scale of {facts.loss_scale:g}: updates are about to be skipped. The scale gives way by itself; if "
            "nonfinite.skip follows again and again, lower the learning rate or use the recipe fp16_overflow"
        )
        evidence = {
            "near_limit": facts.grad_near_limit,
            "loss_scale": facts.loss_scale,
            "window": facts.window,
        }
        return Verdict("gradient.overflow", facts.step, text, evidence=evidence)


class ParameterMonitor(KeptWindow):
    """Watches the L2 norm of the trainable parameters, at the steps in which it was measured.

    growth: a norm this many times the smallest of the last `within` steps is reported. A norm of 0 is no measure.

    Verdicts: `parameters.growth` (unhealthy until the norm has settled, told once per streak), with a proposal to
    roll back if the weights are not finite; else `parameters.ok`. Such a rollback passes over no windows: the gate
    lets no bad gradient through, so the data is not to blame.
    """

    key = "parameters"
    kept = ("norms", "growing", "infinite")

    def __init__(self, growth: float = 10.0, within: int = 100) -> None:
        self.growth = growth
        self.within = within
        self._norms: list[tuple[int, float]] = []
        self._growing = False
        self._infinite = False

    @classmethod
    def build(cls, context: MonitorContext) -> ParameterMonitor:
        """For every run."""
        return cls(context.guard.parameter_growth)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; between measurements it stays what it was."""
        norm = facts.param_norm
        if not math.isnan(norm):
            self._norms = [
                (step, each) for step, each in self._norms if step >= facts.step - self.within
            ]
            smallest = min((each for _, each in self._norms), default=math.inf)
            self._infinite = math.isinf(norm)
            if self._infinite:  # neither begins nor ends a streak of growth
                return self._grown(facts, norm, smallest)
            told, self._growing = self._growing, norm >= self.growth * smallest
            if norm > 0:
                self._norms.append((facts.step, norm))
            if self._growing and not told:
                return self._grown(facts, norm, smallest)
        bad = self._growing or self._infinite
        return Verdict("parameters.growth" if bad else "parameters.ok", facts.step, healthy=not bad)

    def _grown(self, facts: StepFacts, norm: float, smallest: float) -> Verdict:
        proposal: Continue | Rollback = Continue()
        if math.isinf(norm):
            reason = "the weights are not finite"
            proposal = Rollback(reason)
            text = (
                f"{reason} although every gradient was: the optimizer overflowed, something else writes to the "
                "weights, or the memory is faulty. Compare with a run on another card"
            )
        else:
            text = (
                f"the norm of the weights is {norm:.4g}, {norm / smallest:.1f} times its smallest of the last "
                f"{self.within} steps ({smallest:.4g}): the run diverges even if the loss does not show it yet. "
                "Lower the learning rate, or lengthen the warm-up"
            )
        evidence = {
            "norm": jsonable(norm),
            "smallest": jsonable(smallest),
            "lr": facts.lr,
            "window": facts.window,
        }
        return Verdict(
            "parameters.growth",
            facts.step,
            text,
            healthy=False,
            proposal=proposal,
            evidence=evidence,
        )
