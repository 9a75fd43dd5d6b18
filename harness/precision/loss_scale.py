"""The dynamic loss scale of fp16, on the device.

Why a loss scale. fp16 has no values below 6e-8, and many gradients are smaller. The loss is multiplied by a large scale
before backward, which multiplies every gradient by it. The gradients are divided by it again before the update.

The rule is GradScaler's. If a gradient is not finite, the scale was too large: the update is skipped and the scale goes
down. After `growth_interval` good steps in a row it goes up.

What is added is a floor and a cap. torch.amp.GradScaler lets its scale reach 0.0 after about 166 bad steps, and the
next clean step then writes NaN into the weights. No host read is needed to use or to update the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.core.protocols import Meta, TensorDict
from harness.precision.plan import Plan
from harness.precision.recipe import LossScaleConfig, Recipe


class LossScale:
    """The scale and its rule.

    value: float32 0-d, what the loss is multiplied by.
    tracker: float32 0-d, good steps since the last change.
    retired: the run left fp16; the value stays 1.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self.config = config
        self.value = torch.tensor(config.init, dtype=torch.float32, device=device)
        self.tracker = torch.zeros((), dtype=torch.float32, device=device)
        self.retired = False

    def retire(self) -> None:
        """Scale by 1 from now on, in place: bf16 and fp32 have the range that fp16 lacks."""
        self.retired = True
        self.value.fill_(1.0)

    def update(self, overflow: Tensor, skip: Tensor) -> None:
        """Once per step, by torch's amp_update_scale rule.

        overflow: float32 0-d, 1.0 if gradients were not finite on some rank. The scale goes down.
        skip: float32 0-d, 1.0 if the update was skipped. If that was for another reason (bad data, a spike, a loss that
            alone is NaN), nothing changes: the scale is not at fault.
        """
        if self.retired:
            return
        # A skip without an overflow is not the scale's fault: nothing changes.
        config = self.config
        bad = overflow > 0
        keep = (skip > 0) & ~bad

        # All of it by `where`: the host does not know yet whether gradients overflowed.
        counted = self.tracker + 1
        grows = counted >= config.growth_interval
        good = torch.where(grows, self.value * config.growth_factor, self.value)
        scale = torch.where(bad, self.value * config.backoff_factor, good)
        tracker = torch.where(bad | grows, torch.zeros_like(counted), counted)

        # In place: whoever holds these tensors sees the new values.
        bounded = scale.clamp(config.floor, config.cap)
        self.value.copy_(torch.where(keep, self.value, bounded))
        self.tracker.copy_(torch.where(keep, self.tracker, tracker))

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """tensors: value, tracker."""
        return {"value": self.value, "tracker": self.tracker}, {"retired": self.retired}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore in place."""
        self.value.copy_(tensors["value"])
        self.tracker.copy_(tensors["tracker"])
        self.retired = bool(meta["retired"])


def build_loss_scale(
    plan: Plan,
    recipe: Recipe,
    device: torch.device,
) -> LossScale | None:
    """A dynamic loss scale on fp16 rungs. None elsewhere: bf16 has fp32's exponent range, and FP8 its own scales."""
    if plan.rung.precision != "fp16":
        return None
    return LossScale(recipe.loss_scale, device)
