"""What one step of `harness.Precision` did, as device tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.core.facts import Switch


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of one step; the tensors are 0-d, on the model's device, and not yet read by the host.

    applied: bool; False when loss or gradients were not finite on some rank and nothing was changed. grad_norm:
    float32, of the unscaled gradients before clipping. loss_scale: float32, in use at this step (1 unless fp16).
    switch: what the recipe's fallback moved at the end of this step: layers between FP8 and BF16, or, for good, the
    whole run to another precision; else None.
    """

    applied: Tensor
    grad_norm: Tensor
    loss_scale: Tensor
    switch: Switch | None = None

    @property
    def was_applied(self) -> bool:
        """`applied` on the host; waits for the device."""
        return bool(self.applied.item())
