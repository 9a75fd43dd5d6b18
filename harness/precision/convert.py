"""From a plan to a running backend: convert the model, set matmul precision, provide the loss scale."""

from __future__ import annotations

import torch
from torch import nn

from harness.core.errors import Problem
from harness.core.protocols import PrecisionBackend
from harness.precision.backends.autocast import AutocastBackend
from harness.precision.layers import keep_in_fp32
from harness.precision.loss_scale import LossScale
from harness.precision.plan import Plan
from harness.precision.recipe import LossScaleConfig, Recipe, Rung


def build_backend(
    plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device, loss_scale: LossScale | None = None
) -> PrecisionBackend:
    """Convert `model` in place as the plan says and return the backend that runs it.

    Parameters keep their identity. Call it before the model is wrapped and before the optimizer is built.
    """
    torch.set_float32_matmul_precision(recipe.float32_matmul)
    backend = _convert(plan, recipe, model, device, loss_scale)
    if plan.rung.precision != "fp32":
        keep_in_fp32(model, plan.keep_fp32, device.type)
    return backend


def _convert(
    plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device, loss_scale: LossScale | None
) -> PrecisionBackend:
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


def check_half_weights(recipe: Recipe, rung: Rung) -> list[Problem]:
    """What an fp16 engine with half-precision weights and a loss scale of its own (DeepSpeed's) cannot do of `recipe`.

    Empty on every other rung: there weights are fp32 and the scale is ours.
    """
    if rung.precision != "fp16":
        return []
    where, fix = f"recipe {recipe.name}", "start it with torchrun or python instead of deepspeed"
    problems: list[Problem] = []
    if recipe.layers.keep_fp32:
        why = "its fp16 engine turns all weights to half precision"
        problems.append(Problem("DeepSpeed cannot keep modules in fp32", f"{where}: layers.keep_fp32", why, fix))
    if recipe.loss_scale != LossScaleConfig():
        why = "its fp16 engine has a loss scale of its own"
        problems.append(Problem("DeepSpeed does not follow this loss scale", f"{where}: loss_scale", why, fix))
    return problems


def autocast_dtype(plan: Plan) -> torch.dtype | None:
    """What an engine that owns autocast (DeepSpeed) must be told: None for fp32."""
    return {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[plan.rung.precision]
