"""fp16 gradients at the ends of their format: flushed to zero, or about to overflow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median, median_low
from typing import Any

from harness.core.facts import StepFacts, Verdict
from harness.core.protocols import Meta

BASELINE = 8
"""Measurements that make the baseline; they are also compared: the latest half of them against the half before."""
MOSTLY = 0.5
"""A share of zeros that is reported whatever the baseline was."""


class UnderflowMonitor:
    """Watches the shares of the still scaled gradient that are exactly 0, and over half of fp16's largest value.

    rise: the share of zeros is reported when it is this much over that of the run's first measurements and still
    rising. A model with sparse activations has zeros of its own, but from the start; only over one half is reported
    without a rise. near_limit: share near the limit that is reported.

    Only applied steps count: in a skipped one the loss scale is about to change. Without a loss scale, or after the
    run left fp16, nothing is measured and it stays silent.

    Verdicts, all healthy and once per streak: `gradient.underflow`, `gradient.overflow`, else `underflow.ok`.
    """

    def __init__(self, rise: float = 0.05, near_limit: float = 0.01) -> None:
        self.rise = rise
        self.near_limit = near_limit
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=BASELINE)
        self._vanishing = False
        self._overflowing = False

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        quiet = Verdict("underflow.ok", facts.step)
        if not facts.applied or facts.lowered or math.isnan(facts.grad_zeros):
            return quiet
        self._latest.append(facts.grad_zeros)
        if len(self._first) < BASELINE:
            self._first.append(facts.grad_zeros)
        was_overflowing, self._overflowing = self._overflowing, facts.grad_near_limit > self.near_limit
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
        return Verdict("gradient.underflow", facts.step, text, evidence=evidence | {"window": facts.window})

    def _overflow(self, facts: StepFacts) -> Verdict:
        text = (
            f"{facts.grad_near_limit:.1%} of the gradient's elements are over half of fp16's largest value at a loss "
            f"scale of {facts.loss_scale:g}: updates are about to be skipped. The scale gives way by itself; if "
            "nonfinite.skip follows again and again, lower train.lr or use the recipe fp16_overflow"
        )
        evidence = {"near_limit": facts.grad_near_limit, "loss_scale": facts.loss_scale, "window": facts.window}
        return Verdict("gradient.overflow", facts.step, text, evidence=evidence)

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {
            "first": list(self._first),
            "latest": list(self._latest),
            "vanishing": self._vanishing,
            "overflowing": self._overflowing,
        }

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._first = list(meta["first"])
        self._latest = deque(meta["latest"], maxlen=BASELINE)
        self._vanishing = bool(meta["vanishing"])
        self._overflowing = bool(meta["overflowing"])
