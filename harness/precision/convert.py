"""From a plan to a running backend: convert the model, set matmul precision, provide the dynamic loss scale of fp16,
and compile the model block by block.

The loss scale follows GradScaler's rule, on the device, with a floor and a cap. torch.amp.GradScaler lets its scale
reach 0.0 after some 166 bad steps, and the next clean step then writes NaN into the weights. Here the scale stays
within [floor, cap], and no host read is needed to use or to update it.

Blocks are compiled, not the whole model: equal blocks share their compiled code, so a model of any depth compiles as
long as one block does, and whatever else in the model cannot be compiled stays out of the way. It is noticed when one
runs eager after all.

FP8 layers are operators that the compiler cannot look into. A graph finds its layer by a number in a tensor, which it
takes as an input. What may change between two steps (demotion, sampling) is read from the layer when an operator runs,
or is one flag for a whole block, so that no number of switches compiles a block more than twice.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

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

_WHERE = "engine.compile=blocks"


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
    compiled = {id(each) for each in model.modules() if each._compiled_call_impl is not None}
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


def check_compile(rung: Rung, model: nn.Module, device: torch.device) -> list[Problem]:
    """Why the blocks of `model` cannot be compiled on this rung and machine; empty if they can."""
    problems: list[Problem] = []
    if why := BACKENDS[rung.backend].not_compiled:
        *others, last = (name for name, backend in BACKENDS.items() if not backend.not_compiled)
        fix = f"take a recipe whose rung here is {', '.join(others)} or {last}, or engine.compile=none"
        problems.append(Problem(f"the {rung.backend} backend does not compile", _WHERE, why, fix))
    if not blocks_of(model):
        fix = "keep the repeated blocks in an nn.ModuleList, or engine.compile=none"
        problems.append(Problem(f"{type(model).__name__} has no nn.ModuleList with blocks in it", _WHERE, fix=fix))
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        why = "torch.compile writes C++ for a CPU"
        problems.append(Problem("no C++ compiler", _WHERE, why, "install g++, or engine.compile=none"))
    if device.type == "cuda" and find_spec("triton") is None:
        why = "torch.compile writes Triton kernels for a GPU"
        problems.append(Problem("triton is not installed", _WHERE, why, "pip install triton, or engine.compile=none"))
    return problems


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Elements of the outermost nn.ModuleLists of `model`, each once."""
    found: dict[nn.Module, None] = {}

    def search(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                found[child] = None
            else:
                search(child)

    search(model)
    return list(found)


class EagerWatch(logging.Handler):
    """Remembers that compiled code was given up for eager.

    torch gives up a function after torch._dynamo.config.recompile_limit variants of it (shapes, dtypes, branches), and
    says so to its logger alone.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found = ""
        self._told = False

    def emit(self, record: logging.LogRecord) -> None:
        """Called by torch's logger."""
        text = record.getMessage()
        if "recompile_limit" in text and not self._found:
            self._found = "; ".join(line.strip() for line in text.splitlines()[:3])

    def take(self) -> str:
        """Which function fell back to eager, the first one, and why; told once, empty before and after."""
        if self._told or not self._found:
            return ""
        self._told = True
        return self._found


def compile_blocks(model: nn.Module) -> EagerWatch:
    """Compile the blocks of `model` in place, each at its first call; state_dict keys stay as they are."""
    watch = EagerWatch()
    logging.getLogger("torch._dynamo").addHandler(watch)
    for block in blocks_of(model):
        block.compile()
    return watch


_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_numbers = count()


def register(layer: nn.Module) -> Tensor:
    """A handle for `layer`, int64 0-d on the CPU, which does not keep it alive."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def layer_of(handle: Tensor) -> Any:
    """The layer that was registered under `handle`."""
    return _layers[int(handle)]


def define(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., Any] | None = None,
    mutates: tuple[str, ...] = (),
) -> None:
    """Register an operator. Compiled code is cached on disk by its name: other results need another name.

    mutates: arguments that the compiler shall take for written in place. `torch.library.custom_op` does the same, and
    checks for aliases at every call: 1% of a small layer's time.
    """
    full = f"hopper_harness::{name}"
    torch.library.define(full, torch.library.infer_schema(run, mutates_args=mutates))
    torch.library.impl(full, "default", run)
    torch.library.register_fake(full, fake)
    if backward is not None:
        torch.library.register_autograd(full, backward, setup_context=setup)


@dataclass(slots=True)
class Block:
    """Layers that are compiled together. switching: in this window one of them is in BF16, or measured."""

    switching: bool = False


class Blocks:
    """The layers of class `kind` in `model`, by the block that they are compiled with; the rest of it counts as one."""

    def __init__(self, model: nn.Module, kind: type[nn.Module]) -> None:
        found = [
            (Block(), {child for child in block.modules() if isinstance(child, kind)})
            for block in (*blocks_of(model), model)
        ]
        taken: dict[nn.Module, Block] = {}
        for block, layers in found:
            for layer in layers:
                taken.setdefault(layer, block)
        self._blocks = [(block, [layer for layer in layers if taken[layer] is block]) for block, layers in found]
        self._of = taken

    def of(self, layer: nn.Module) -> Block:
        """The first block with `layer` in it."""
        return self._of[layer]

    def mark(self, sampling: bool, demoted: Iterable[nn.Module]) -> None:
        """Set every flag. One for both reasons: a guard each would compile a block once for each combination."""
        apart = set(demoted)
        for block, layers in self._blocks:
            block.switching = sampling or not apart.isdisjoint(layers)
