"""Gradients near the two ends of fp16's range.

Under a loss scale, small gradients may round to 0 (underflow) and large ones may pass fp16's largest value (overflow,
after which the update is skipped). Both are measured on the scaled gradient, before the update. This monitor reports
them; the loss scale itself is watched by `scaler`.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median, median_low

from harness.core.facts import StepFacts, Verdict
from harness.monitors.base import KeptWindow, MonitorContext

BASELINE = 8
"""Number of first measurements of underflow, whose median is the baseline.

As many of the latest ones are kept. Their newer half against their older half shows whether the share still rises.
"""
MOSTLY = 0.5
"""A share of zeros that is reported whatever the baseline was."""


class UnderflowMonitor(KeptWindow):
    """Watches which share of the scaled gradient is exactly 0, and which is over half of fp16's largest value.

    rise: a share of zeros that is this much over that of the run's first measurements, and still rising, is reported.
    near_limit: a share near the limit that is over this is reported.

    A model with sparse activations has zeros from the start, so only a share over one half is reported without a rise.

    Only applied steps count: in a skipped one the loss scale is about to change. Without a loss scale, or after the
    run left fp16, nothing is measured and the monitor stays silent.

    Verdicts, all healthy and once per streak: `gradient.underflow`, `gradient.overflow`, else `underflow.ok`.
    """

    key = "underflow"
    # Saved in checkpoints, see `monitors.base`.
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

        # Overflow first: it costs updates, where underflow costs precision.
        was_overflowing = self._overflowing
        self._overflowing = facts.grad_near_limit > self.near_limit
        if self._overflowing and not was_overflowing:
            return self._overflow(facts)

        was_vanishing = self._vanishing
        self._vanishing = self._vanishes()
        if self._vanishing and not was_vanishing:
            return self._underflow(facts)
        return quiet

    def _vanishes(self) -> bool:
        """Whether the share of zeros is high for this run. A streak begins with a rise, and lasts while it is high."""
        half = BASELINE // 2
        if len(self._latest) < half:
            return False
        # The lower of the two middle values: more than half of the measurements are at least that large.
        latest = list(self._latest)
        now = median_low(latest[-half:])
        if now > MOSTLY:
            return True
        over = len(self._first) == BASELINE and now > median(self._first) + self.rise
        if not over:
            return False
        return self._vanishing or now > median_low(latest[:-half])

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
