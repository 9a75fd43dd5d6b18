"""From a plan to a running backend: convert the model, set matmul precision, provide the loss scale."""

from __future__ import annotations

import torch
from torch import nn

from harness.core.protocols import PrecisionBackend
from harness.precision.backends.autocast import AutocastBackend
from harness.precision.loss_scale import LossScale
from harness.precision.plan import Plan
from harness.precision.recipe import Recipe


def build_backend(
    plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device, loss_scale: LossScale | None = None
) -> PrecisionBackend:
    """Convert `model` in place as the plan says and return the backend that runs it.

    Parameters keep their identity. Call it before the model is wrapped and before the optimizer is built.
    """
    torch.set_float32_matmul_precision(recipe.float32_matmul)
    if plan.rung.backend == "native":
        from harness.precision.backends.native import NativeBackend

        return NativeBackend(plan, recipe, model, device)
    if plan.rung.backend == "transformer_engine":
        from harness.precision.backends.te import TransformerEngineBackend

        return TransformerEngineBackend(plan, recipe, model, device)
    if plan.rung.backend == "torchao":
        from harness.precision.backends.torchao import TorchaoBackend

        return TorchaoBackend(plan, recipe, model, device)
    return AutocastBackend(plan.rung.precision, device, loss_scale)


def build_loss_scale(plan: Plan, recipe: Recipe, device: torch.device) -> LossScale | None:
    """A dynamic loss scale on fp16 rungs, None elsewhere: bf16 and FP8 rungs have fp32's exponent range."""
    return LossScale(recipe.loss_scale, device) if plan.rung.precision == "fp16" else None


def autocast_dtype(plan: Plan) -> torch.dtype | None:
    """What an engine that owns autocast (DeepSpeed) must be told: None for fp32."""
    return {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[plan.rung.precision]
