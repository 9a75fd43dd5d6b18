"""The dynamic loss scale of fp16, on the device.

It follows GradScaler's rule, with a floor and a cap. torch.amp.GradScaler lets its scale reach 0.0 after some 166 bad
steps, and the next clean step then writes NaN into the weights. Here the scale stays within [floor, cap], and no host
read is needed to use or to update it.
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
    """value: float32 0-d, what the loss is multiplied by. tracker: good steps since the last change, float32 0-d.

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

        overflow: float32 0-d, 1.0 if gradients were not finite on some rank: the scale is lowered. skip: float32 0-d,
        1.0 if the update was skipped. For another reason (bad data, a spike, a loss that alone is NaN) nothing changes:
        the scale is not at fault.
        """
        if self.retired:
            return
        config = self.config
        bad = overflow > 0
        keep = (skip > 0) & ~bad
        counted = self.tracker + 1
        grows = counted >= config.growth_interval
        good = torch.where(grows, self.value * config.growth_factor, self.value)
        scale = torch.where(bad, self.value * config.backoff_factor, good)
        tracker = torch.where(bad | grows, torch.zeros_like(counted), counted)
        self.value.copy_(torch.where(keep, self.value, scale.clamp(config.floor, config.cap)))
        self.tracker.copy_(torch.where(keep, self.tracker, tracker))

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """tensors: value, tracker."""
        return {"value": self.value, "tracker": self.tracker}, {"retired": self.retired}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore in place."""
        self.value.copy_(tensors["value"])
        self.tracker.copy_(tensors["tracker"])
        self.retired = bool(meta["retired"])


def build_loss_scale(plan: Plan, recipe: Recipe, device: torch.device) -> LossScale | None:
    """A dynamic loss scale on fp16 rungs, None elsewhere: bf16 and FP8 rungs have fp32's exponent range."""
    return LossScale(recipe.loss_scale, device) if plan.rung.precision == "fp16" else None
