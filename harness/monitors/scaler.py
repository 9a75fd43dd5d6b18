"""The loss scale of fp16, which shifts gradients into the format's range.

A low scale flushes small gradients to zero. A scale that collapsed means that nothing is learned any more.
"""

from __future__ import annotations

import math
from collections import deque

from harness.core.facts import Halt, StepFacts, Verdict
from harness.monitors.base import KeptWindow, MonitorContext


class ScalerMonitor(KeptWindow):
    """Watches the loss scale of fp16. Without a scaler (the scale is always 1) it stays silent.

    floor: a calibrated scale below this is reported. A scale is calibrated once an update was applied under a scale
        over 1; the skips before that are the scaler's search for its range.
    window: steps looked back on.
    share: more skips than this share of `window`, once calibrated, are reported.

    A scaler at rest skips once in its growth interval, which is thousands of steps. Skips for bad data, a spike or a
    loss that is itself not finite are not the scaler's.

    Verdicts:
    - `scaler.low`, healthy, once per streak.
    - `scaler.overflow`, healthy, once until half of the skips are gone. If both are due, it follows one step later.
    - `scaler.collapse`, unhealthy: a scale that was over 1 reached 1 or less. Proposes a halt.
    - `scaler.ok`: nothing to report.
    """

    key = "scaler"
    kept = ("scaling", "calibrated", "low", "skips", "overflowing")

    def __init__(
        self,
        floor: float = 1024.0,
        window: int = 200,
        share: float = 0.05,
    ) -> None:
        self.floor = floor
        self.share = share
        self._scaling = False
        self._calibrated = False
        self._low = False
        self._skips: deque[int] = deque(maxlen=window)
        self._overflowing = False

    @classmethod
    def build(cls, context: MonitorContext) -> ScalerMonitor | None:
        """Only where there is a scale. A resume from fp16 into a run without one would take its 1 for a collapse."""
        return cls() if context.scales_loss else None

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        quiet = Verdict("scaler.ok", facts.step)
        # The whole run left fp16, and with it the need for a scale.
        if facts.fell_back_to:
            return quiet
        scale = facts.loss_scale
        self._scaling = self._scaling or scale > 1
        if not self._scaling:
            return quiet

        # Nothing is left to lower. With loss_scale.floor over 1 `scaler.overflow` reports it instead.
        evidence = {"loss_scale": scale, "window": facts.window}
        if scale <= 1:
            reason = (
                f"the loss scale collapsed to {scale:g}: fp16 gradients overflow at any useful scale. "
                "Lower the learning rate or max_grad_norm, check the data, or use a bf16 or fp32 recipe"
            )
            return Verdict(
                "scaler.collapse",
                facts.step,
                reason,
                healthy=False,
                proposal=Halt(reason),
                evidence=evidence,
            )

        # Only skips that a smaller scale can help are the scaler's.
        self._calibrated = self._calibrated or facts.applied
        if self._calibrated:
            foreign = facts.bad_data or facts.over_limits or not math.isfinite(facts.loss)
            self._skips.append(int(not facts.applied and not foreign))

        was_low = self._low
        self._low = self._calibrated and scale < self.floor
        if self._low and not was_low:
            text = f"the loss scale fell to {scale:g}, under {self.floor:g}: small fp16 gradients are flushed to zero"
            return Verdict("scaler.low", facts.step, text, evidence=evidence)
        return self._overflow(facts) or quiet

    def _overflow(self, facts: StepFacts) -> Verdict | None:
        """The verdict on a scaler that skips too often; None if it does not, or that was reported before."""
        # Two limits, so that a count that moves about one of them is reported once.
        skips = sum(self._skips)
        limit = self.share * (self._skips.maxlen or 0)
        was_overflowing = self._overflowing
        if was_overflowing:
            limit /= 2
        self._overflowing = skips > limit
        if was_overflowing or not self._overflowing:
            return None
        text = (
            f"{skips} of the last {len(self._skips)} updates overflowed in fp16 and were skipped (loss scale now "
            f"{facts.loss_scale:g}): this is no search for the right scale, which ends after a few steps"
        )
        evidence = {"skips": skips, "steps": len(self._skips), "loss_scale": facts.loss_scale}
        return Verdict("scaler.overflow", facts.step, text, evidence=evidence)
