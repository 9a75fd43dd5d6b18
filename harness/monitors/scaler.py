"""The fp16 loss scale: low is worth knowing, collapsed means that nothing is learned any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.core.facts import Halt, StepFacts, Verdict
from harness.core.protocols import Meta


class ScalerMonitor:
    """Watches the loss scale. Without a scaler (scale always 1) it stays silent.

    floor: a calibrated scale below this is reported. Calibrated means that an update was applied under a scale over 1.

    Verdicts: `scaler.low` (healthy, once per streak), `scaler.collapse` (unhealthy, proposes a halt) when a scale
    that was over 1 reaches 1 or less, else `scaler.ok`.
    """

    def __init__(self, floor: float = 1024.0) -> None:
        self.floor = floor
        self._scaling = False
        self._calibrated = False
        self._low = False

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        if facts.lowered:  # the whole run left fp16, and with it the need for a scale
            return Verdict("scaler.ok", facts.step)
        scale = facts.loss_scale
        self._scaling = self._scaling or scale > 1
        if not self._scaling:
            return Verdict("scaler.ok", facts.step)
        evidence = {"loss_scale": scale, "window": facts.window}
        if scale <= 1:
            reason = (
                f"the loss scale collapsed to {scale:g}: fp16 gradients overflow at any useful scale. "
                "Lower train.lr or train.max_grad_norm, check the data, or use a bf16 or fp32 recipe"
            )
            return Verdict(
                "scaler.collapse", facts.step, reason, healthy=False, proposal=Halt(reason), evidence=evidence
            )
        self._calibrated = self._calibrated or facts.applied
        was_low, self._low = self._low, self._calibrated and scale < self.floor
        if not self._low or was_low:
            return Verdict("scaler.ok", facts.step)
        text = f"the loss scale fell to {scale:g}, under {self.floor:g}: small fp16 gradients are flushed to zero"
        return Verdict("scaler.low", facts.step, text, evidence=evidence)

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {"scaling": self._scaling, "calibrated": self._calibrated, "low": self._low}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._scaling = bool(meta["scaling"])
        self._calibrated = bool(meta["calibrated"])
        self._low = bool(meta["low"])
