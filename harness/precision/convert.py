"""From a plan to a running backend: convert the model, set matmul precision, provide the dynamic loss scale of fp16.

The loss scale follows GradScaler's rule, on the device, with a floor and a cap. torch.amp.GradScaler lets its scale
reach 0.0 after some 166 bad steps, and the next clean step then writes NaN into the weights. Here the scale stays
within [floor, cap], and no host read is needed to use or to update it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.capability.probe import MachineFacts
from harness.core.config import GuardConfig
from harness.core.errors import MisuseError, Problem
from harness.core.protocols import Meta, PrecisionBackend, TensorDict
from harness.monitors.base import MonitorContext
from harness.precision.backends.registry import BACKENDS
from harness.precision.layers import keep_in_fp32
from harness.precision.plan import Plan, agree_on_fallback, pad_numbers
from harness.precision.recipe import LossScaleConfig, Recipe, Rung


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


def build_backend(
    plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device, loss_scale: LossScale | None = None
) -> PrecisionBackend:
    """Convert `model` in place as the plan says and return the backend that runs it.

    Parameters keep their identity. Call it before the model is wrapped and before the optimizer is built.

    Raises MisuseError where a layer to be converted was compiled by itself before.
    """
    _refuse_compiled(plan, model)
    torch.set_float32_matmul_precision(recipe.float32_matmul)
    scaled = {} if loss_scale is None else {"loss_scale": loss_scale}
    backend: PrecisionBackend = BACKENDS[plan.rung.backend].load()(plan, recipe, model, device, **scaled)
    if plan.rung.precision != "fp32":
        keep_in_fp32(model, plan.keep_fp32, device.type)
    return backend


def _refuse_compiled(plan: Plan, model: nn.Module) -> None:
    """A layer that was compiled alone keeps computing what it was: it would go past its FP8 or float32 in silence.

    A block or model around such layers is traced at its first call, and sees what they have become.
    """
    modules = list(model.modules())
    within = {id(vars(each)["_modules"].get("_orig_mod")) for each in modules}
    compiled = {id(each) for each in modules if each._compiled_call_impl is not None} | within
    changed = {row.module for row in plan.layers if row.precision == "fp8"} | set(plan.keep_fp32)
    named = dict(model.named_modules(remove_duplicate=False))
    if found := sorted(name for name in changed if name in named and id(named[name]) in compiled):
        why = "its compiled call would go on computing what it was, whatever the plan says"
        fix = "compile after prepare(), or the blocks around it"
        raise MisuseError([Problem("was compiled before it was prepared", name, why, fix) for name in found])


def build_loss_scale(plan: Plan, recipe: Recipe, device: torch.device) -> LossScale | None:
    """A dynamic loss scale on fp16 rungs, None elsewhere: bf16 and FP8 rungs have fp32's exponent range."""
    return LossScale(recipe.loss_scale, device) if plan.rung.precision == "fp16" else None


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
        problems.append(Problem("DeepSpeed cannot keep modules in fp32", f"{where}: layers.keep_fp32", why, fix))
    if recipe.loss_scale != LossScaleConfig():
        why = "its fp16 engine has a loss scale of its own"
        problems.append(Problem("DeepSpeed does not follow this loss scale", f"{where}: loss_scale", why, fix))
    return problems


def autocast_dtype(plan: Plan) -> torch.dtype | None:
    """What an engine that owns autocast (DeepSpeed) must be told: None for fp32."""
    return {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[plan.rung.precision]
