"""From a plan to a running backend, and what monitors and engines need to know about it.

`build_backend` converts the model and sets torch's matmul precision. `monitor_context` describes the result to
monitors. `check_half_weights` and `autocast_dtype` are for DeepSpeed, which owns part of the precision itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from harness.capability.probe import MachineFacts
from harness.core.config import GuardConfig
from harness.core.errors import MisuseError, Problem
from harness.core.facts import pad_numbers
from harness.core.protocols import PrecisionBackend
from harness.monitors.base import MonitorContext
from harness.precision.backends.registry import BACKENDS
from harness.precision.layers import keep_in_fp32
from harness.precision.loss_scale import LossScale
from harness.precision.plan import Plan, agree_on_fallback
from harness.precision.recipe import LossScaleConfig, Recipe, Rung


def build_backend(
    plan: Plan,
    recipe: Recipe,
    model: nn.Module,
    device: torch.device,
    loss_scale: LossScale | None = None,
) -> PrecisionBackend:
    """Convert `model` in place as the plan says, and return the backend that runs it.

    Parameters keep their identity. Call it before the model is wrapped and before the optimizer is built.

    Raises MisuseError if a layer to be converted was compiled by itself before.
    """
    _refuse_compiled(plan, model)
    torch.set_float32_matmul_precision(recipe.float32_matmul)

    # Only fp16 backends take a loss scale.
    scaled: dict[str, LossScale] = {}
    if loss_scale is not None:
        scaled["loss_scale"] = loss_scale
    kind = BACKENDS[plan.rung.backend].load()
    backend: PrecisionBackend = kind(plan, recipe, model, device, **scaled)

    # On an fp32 rung everything computes in float32 already.
    if plan.rung.precision != "fp32":
        keep_in_fp32(model, plan.keep_fp32, device.type)
    return backend


def _refuse_compiled(plan: Plan, model: nn.Module) -> None:
    """Raises MisuseError for a layer that was compiled alone: it would silently go on computing what it was.

    A compiled block or model around such layers is fine: it is traced at its first call, after they were converted.
    """
    changed = {*plan.fp8_layers(), *plan.keep_fp32}
    problems: list[Problem] = []
    for name, module in sorted(model.named_modules(remove_duplicate=False)):
        if name in changed and module._compiled_call_impl is not None:
            what = "was compiled before it was prepared"
            why = "its compiled call would go on computing what it was, whatever the plan says"
            fix = "compile after prepare(), or the blocks around it"
            problems.append(Problem(what, name, why, fix))
    if problems:
        raise MisuseError(problems)


def monitor_context(
    recipe: Recipe,
    backend: PrecisionBackend,
    facts: MachineFacts,
    device: torch.device,
    scales_loss: bool,
    leaves_fp16: bool,
) -> MonitorContext:
    """What monitors may ask about a model under `backend`. The caller adds guard, data and schedule.

    scales_loss: there is an fp16 loss scale.
    leaves_fp16: the loss scale is owned here, not by an engine, so the whole run may leave fp16.
    """
    amax_history: int | None = None
    if recipe.fp8.scaling == "delayed":
        amax_history = recipe.fp8.amax_history_len
    fallback_precision: Callable[[], str] | None = None
    if leaves_fp16:
        fallback_precision = partial(agree_on_fallback, facts, device)
    return MonitorContext(
        guard=GuardConfig(),
        fallback=recipe.fallback,
        layers=tuple(map(pad_numbers, backend.layers)),
        amax_history=amax_history,
        margin=recipe.fp8.margin,
        scales_loss=scales_loss,
        fallback_precision=fallback_precision,
    )


def check_half_weights(recipe: Recipe, rung: Rung) -> list[Problem]:
    """What of `recipe` an fp16 engine with half-precision weights and its own loss scale (DeepSpeed's) cannot do.

    Empty on every other rung: there weights are fp32, and no engine scales the loss.
    """
    if rung.precision != "fp16":
        return []
    where = f"recipe {recipe.name}"
    fix = "start it with torchrun or python instead of deepspeed"
    problems: list[Problem] = []
    if recipe.layers.keep_fp32:
        what = "DeepSpeed cannot keep modules in fp32"
        why = "its fp16 engine turns all weights to half precision"
        problems.append(Problem(what, f"{where}: layers.keep_fp32", why, fix))
    if recipe.loss_scale != LossScaleConfig():
        what = "DeepSpeed does not follow this loss scale"
        why = "its fp16 engine has a loss scale of its own"
        problems.append(Problem(what, f"{where}: loss_scale", why, fix))
    return problems


def autocast_dtype(plan: Plan) -> torch.dtype | None:
    """The dtype for an engine that owns autocast (DeepSpeed); None for fp32."""
    # Modules outside of the FP8 layers compute in bf16.
    dtypes = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
    return dtypes[plan.rung.precision]
