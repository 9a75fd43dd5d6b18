"""From a plan to a running backend: convert the model and set matmul precision; and what monitors and engines must know
of the backend.
"""

from __future__ import annotations

import torch
from torch import nn

from harness.capability.probe import MachineFacts
from harness.core.config import GuardConfig
from harness.core.errors import MisuseError, Problem
from harness.core.protocols import PrecisionBackend
from harness.monitors.base import MonitorContext
from harness.precision.backends.registry import BACKENDS
from harness.precision.layers import keep_in_fp32
from harness.precision.loss_scale import LossScale
from harness.precision.plan import Plan, agree_on_fallback, pad_numbers
from harness.precision.recipe import LossScaleConfig, Recipe, Rung


def build_backend(
    plan: Plan,
    recipe: Recipe,
    model: nn.Module,
    device: torch.device,
    loss_scale: LossScale | None = None,
) -> PrecisionBackend:
    """Convert `model` in place as the plan says and return the backend that runs it.

    Parameters keep their identity. Call it before the model is wrapped and before the optimizer is built.

    Raises MisuseError where a layer to be converted was compiled by itself before.
    """
    _refuse_compiled(plan, model)
    torch.set_float32_matmul_precision(recipe.float32_matmul)
    scaled = {} if loss_scale is None else {"loss_scale": loss_scale}
    backend: PrecisionBackend = BACKENDS[plan.rung.backend].load()(
        plan, recipe, model, device, **scaled
    )
    if plan.rung.precision != "fp32":
        keep_in_fp32(model, plan.keep_fp32, device.type)
    return backend


def _refuse_compiled(plan: Plan, model: nn.Module) -> None:
    """A layer that was compiled alone keeps computing what it was: it would go past its FP8 or float32 in silence.

    A block or model around such layers is traced at its first call, and sees what they have become.
    """
    compiled = {id(each) for each in model.modules() if each._compiled_call_impl is not None}
    changed = {row.module for row in plan.layers if row.precision == "fp8"} | set(plan.keep_fp32)
    named = dict(model.named_modules(remove_duplicate=False))
    if found := sorted(name for name in changed if name in named and id(named[name]) in compiled):
        why = "its compiled call would go on computing what it was, whatever the plan says"
        fix = "compile after prepare(), or the blocks around it"
        raise MisuseError(
            [Problem("was compiled before it was prepared", name, why, fix) for name in found]
        )


def monitor_context(
    recipe: Recipe,
    backend: PrecisionBackend,
    facts: MachineFacts,
    device: torch.device,
    scales_loss: bool,
    leaves_fp16: bool,
) -> MonitorContext:
    """What monitors may ask of a model under `backend`; guard, data and schedule are the loop's to add.

    scales_loss: there is an fp16 loss scale. leaves_fp16: it is ours, so that the whole run may leave fp16.
    """
    return MonitorContext(
        guard=GuardConfig(),
        fallback=recipe.fallback,
        layers=tuple(pad_numbers(layer) for layer in backend.layers),
        amax_history=recipe.fp8.amax_history_len if recipe.fp8.scaling == "delayed" else None,
        margin=recipe.fp8.margin,
        scales_loss=scales_loss,
        fallback_precision=(lambda: agree_on_fallback(facts, device)) if leaves_fp16 else None,
    )


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
        problems.append(
            Problem("DeepSpeed cannot keep modules in fp32", f"{where}: layers.keep_fp32", why, fix)
        )
    if recipe.loss_scale != LossScaleConfig():
        why = "its fp16 engine has a loss scale of its own"
        problems.append(
            Problem("DeepSpeed does not follow this loss scale", f"{where}: loss_scale", why, fix)
        )
    return problems


def autocast_dtype(plan: Plan) -> torch.dtype | None:
    """What an engine that owns autocast (DeepSpeed) must be told: None for fp32."""
    return {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[
        plan.rung.precision
    ]
