"""Transformer Engine as this project needs it: checked for what it leans on, its recipe object built, its scales kept.

Amax and scale of every slot are kept here, used and filled by TE's casts. Slots are ordered layer by layer, each input,
weight, grad_output, in the layout of `scaling.update`.

Which forward a recomputation repeats, so that it takes the scales of that one: te.checkpoint keeps amax history and
scale of every module's first forward in a queue, oldest first, and the second forward takes what is in front: of
another forward, where one had no backward or came later in line. Autograd numbers the nodes that a thread makes, in
their order, and knows which node is running: its number tells between which rolls its forward ran. All forwards
between two rolls have the same scales.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from harness.core.errors import MachineError, Problem
from harness.core.protocols import TensorDict
from harness.precision.backends.slot_buffers import ScalingState
from harness.precision.recipe import Fp8Config

WRITTEN_FOR = "2.20"
WHERE = "backend transformer_engine"
_RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
}
# Read by TE itself: they change how values are rounded or when histories roll, and no recipe key or plan would say so.
_OVERRIDES = (
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_UNFUSED_FP8_UPDATE",
)


class Library(NamedTuple):
    """pytorch: the module transformer_engine.pytorch. recipes: transformer_engine.common.recipe. recomputing: whether
    te.checkpoint runs a forward again. checkpointing: whether it runs one at all. manager: TE's global FP8 state."""

    pytorch: Any
    recipes: Any
    recomputing: Callable[[], bool]
    checkpointing: Callable[[], bool]
    manager: Any
    version: str


def load() -> Library:
    """Import it. Raises MachineError if it does not import, lacks what this was written for, or is overridden."""
    if overridden := [name for name in _OVERRIDES if os.environ.get(name, "0") not in ("", "0")]:
        why = "it changes what Transformer Engine computes, against the recipe and the plan"
        raise MachineError(
            [
                Problem(f"{name} is set in the environment", WHERE, why, f"unset {name}")
                for name in overridden
            ]
        )
    try:
        package = import_module("transformer_engine")
        recipes = import_module("transformer_engine.common.recipe")
        pytorch = import_module("transformer_engine.pytorch")
        distributed = import_module("transformer_engine.pytorch.distributed")
        quantization = import_module("transformer_engine.pytorch.quantization")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        fix = "make setup builds it; or take a recipe without it, such as bf16"
        raise MachineError(
            Problem(f"Transformer Engine does not import: {error}", WHERE, fix=fix)
        ) from error
    version = str(getattr(package, "__version__", "of unknown version"))
    needed = [(pytorch, name) for name in ("autocast", "Linear", "LayerNormLinear", "LayerNormMLP")]
    needed += [(distributed, "in_fp8_activation_recompute_phase")]
    needed += [(distributed, "is_fp8_activation_recompute_enabled")]
    needed += [(recipes, name) for name in ("Format", *_RECIPES.values())]
    needed += [
        (getattr(pytorch, "Linear", None), "init_fp8_metadata"),
        (quantization, "FP8GlobalStateManager"),
    ]
    manager = getattr(quantization, "FP8GlobalStateManager", None)
    needed += [
        (manager, name)
        for name in ("quantization_state", "get_buffer_info", "add_fp8_tensors_to_global_buffer")
    ]
    if missing := [name for owner, name in needed if not hasattr(owner, name)]:
        raise unexpected(version, f"has no {', '.join(missing)}")
    phases = (
        distributed.in_fp8_activation_recompute_phase,
        distributed.is_fp8_activation_recompute_enabled,
    )
    return Library(pytorch, recipes, *phases, manager, version)


def make_recipe(library: Library, fp8: Fp8Config) -> Any:
    """TE's recipe object for `fp8`. Raises MachineError if TE does not take over every argument.

    Its recipe classes drop arguments that they do not know, without a word.
    """
    formats = library.recipes.Format
    wanted: dict[str, Any] = {
        "fp8_format": formats.HYBRID if fp8.format == "hybrid" else formats.E4M3
    }
    if fp8.scaling == "delayed":
        wanted |= {
            "margin": fp8.margin,
            "amax_history_len": fp8.amax_history_len,
            "amax_compute_algo": fp8.amax_compute_algo,
            "reduce_amax": True,
        }
    recipe = getattr(library.recipes, _RECIPES[fp8.scaling])(**wanted)
    if dropped := [name for name, value in wanted.items() if getattr(recipe, name, None) != value]:
        raise unexpected(
            library.version, f"ignores {', '.join(dropped)} of {_RECIPES[fp8.scaling]}"
        )
    return recipe


def keep_out_of_global_state(library: Library, fp8_meta: dict[str, Any]) -> None:
    """TE neither reduces nor rolls this module's amaxes. Raises MachineError if it would all the same."""
    manager = library.manager
    fp8_meta[manager.get_buffer_info()] = []
    held = _held_by_te(manager)
    manager.add_fp8_tensors_to_global_buffer(fp8_meta)
    if _held_by_te(manager) != held:
        raise unexpected(
            library.version, "rolls amax histories of modules that it was told to leave alone"
        )


def _held_by_te(manager: Any) -> int:
    return sum(map(len, manager.quantization_state.global_amax_buffer.values()))


def unexpected(version: str, what: str) -> MachineError:
    """The error of a TE that is not as this was written for."""
    fix = f"install {WRITTEN_FOR}, which this was written for"
    return MachineError(Problem(f"Transformer Engine {version} {what}", WHERE, fix=fix))


RECOMPUTED = "global_fp8_buffer_pos_fwd_recompute"
"""Where a module's `fp8_meta` names its queue of what te.checkpoint is to compute again."""


class Recomputations:
    """What te.checkpoint keeps for one model in an optimizer step, by the roll that ended its time.

    manager: TE's global FP8 state, which has the queues. Forwards and rolls belong in one thread; where they do not,
    no node's forward is known. Nothing here waits for the device.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._noted: dict[int, Mapping[str, Any]] = {}
        self.forget()

    def forget(self) -> None:
        """A step begins: what is left is of losses that were dropped and forwards that failed, and none's to repeat."""
        for queue in self._queues().values():
            queue.clear()
        self._noted.clear()
        self._thread, self._one_thread = threading.get_ident(), True
        # Nodes numbered below the first are of earlier steps, for which nothing is kept.
        self._rolls = [torch.autograd._get_sequence_nr()]
        self._kept: list[dict[int, deque[Any]]] = [{}]

    def forward_begins(self) -> None:
        """One with gradients."""
        self._one_thread &= threading.get_ident() == self._thread

    def note(self, meta: Mapping[str, Any]) -> None:
        """te.checkpoint runs a forward of a module with this `fp8_meta`, and TE keeps what its queue names."""
        self._noted[id(meta)] = meta

    def rolled(self) -> None:
        """Scales have moved: what is in the queues now is of the time before."""
        self._one_thread &= threading.get_ident() == self._thread
        self._rolls.append(torch.autograd._get_sequence_nr())
        queues = self._queues()
        self._kept.append({place: deque(queue) for place, queue in queues.items()})
        for queue in queues.values():
            queue.clear()

    def moved(self) -> bool:
        """Whether scales have moved since the forward whose backward runs now, or that forward is unknown."""
        return self._time() != len(self._rolls)

    def put_in_front(self, meta: Mapping[str, Any]) -> bool:
        """Into this module's queue: what was kept when the forward ran whose backward runs now. False: nothing was."""
        time, place = self._time(), meta.get(RECOMPUTED)
        queue = self._queue(place)
        if time is None or place is None or queue is None:
            return False
        if time < len(self._rolls):
            kept = self._kept[time].get(place)
            if not kept:
                return False
            queue.appendleft(kept.popleft())
        return len(queue) > 0

    def _time(self) -> int | None:
        """Of the node that runs: how many rolls, and the step's beginning, came before it; None if that is unknown."""
        node = torch._C._current_autograd_node()
        return (
            None
            if node is None or not self._one_thread
            else bisect_right(self._rolls, node._sequence_nr())
        )

    def _queue(self, place: int | None) -> deque[Any] | None:
        queues = self._manager.quantization_state.fp8_tensors_recompute_buffer
        return None if place is None or place >= len(queues) else queues[place]

    def _queues(self) -> dict[int, deque[Any]]:
        found = {
            meta.get(RECOMPUTED): self._queue(meta.get(RECOMPUTED)) for meta in self._noted.values()
        }
        return {
            place: queue
            for place, queue in found.items()
            if place is not None and queue is not None
        }


# te.Linear's columns: scaling_fwd has input, weight, output; scaling_bwd has grad_output, grad_input. The last one of
# each is never quantised here and stays at history 0, scale 1.
_COLUMNS = {"scaling_fwd": 3, "scaling_bwd": 2}
_SLOTS = (0, 1, 3)


class Scales(Protocol):
    """What the backend asks of a way of scaling. amax and scale: float32 [slots]."""

    scrubbed: Tensor
    """Infinite amaxes dropped in the last window, float32 0-d."""

    def begin_window(self) -> None:
        """A window begins."""
        ...

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """A micro-batch ended. reduce: MAX over ranks."""
        ...

    def staged(self) -> Tensor:
        """What this rank saw since scales last moved, for the window's MAX over ranks; float32 [slots], a copy."""
        ...

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """End of a window; float32 [3, slots]: amax, scale in use, saturation. amax: `staged`, reduced over ranks."""
        ...

    def tensors(self) -> TensorDict:
        """history float32 [L, slots], scale float32 [slots]."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `tensors` in place."""
        ...


class DelayedScales(ScalingState):
    """TE's casts stage their amaxes in row 0 of one history for the whole model; it rolls here, as the recipe says.

    Each layer's `amax_history` [L, 3 or 2] and `scale` [3 or 2] in `fp8_meta` become views of `history` and `scale`,
    and its quantizers are made anew from them: nothing is copied between TE and here, and a roll, a skip or a
    checkpoint is a handful of kernels for any number of layers. Rolling as TE does would go by the order in which the
    layers of all models in the process were first used, which ranks may not share, and at moments that depend on which
    layer came first and whether it is in the loss.

    Raises MachineError if TE does not keep its state as this was written for.
    """

    def __init__(
        self, modules: Sequence[Any], config: Fp8Config, fp8_max: Tensor, version: str
    ) -> None:
        device, width = fp8_max.device, sum(_COLUMNS.values())
        _check_layout(modules, config.amax_history_len, version)
        self._columns = torch.tensor(
            [width * i + slot for i in range(len(modules)) for slot in _SLOTS], device=device
        )
        super().__init__(
            config,
            torch.ones(width * len(modules), device=device).index_copy_(0, self._columns, fp8_max),
        )
        first = 0
        for module in modules:
            for key, columns in _COLUMNS.items():
                state, own = module.fp8_meta[key], slice(first, first + columns)
                state.amax_history, state.scale = self.history[:, own], self.scale[own]
                module.quantizers[key] = state.make_quantizers()
                first += columns

    def staged(self) -> Tensor:
        """Amaxes since the last roll; all 0 under `roll: micro_batch`."""
        return self.history[0, self._columns]

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """Roll unless micro-batches did; after a skipped step history and scale are as before the window."""
        self.end_window(torch.zeros_like(self.scale).index_copy_(0, self._columns, amax), skip)
        return self.window_stats()[:, self._columns]

    def tensors(self) -> TensorDict:
        """Copies; the same layout as the native backend's."""
        return {"history": self.history[:, self._columns], "scale": self.scale[self._columns]}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Any device; shapes as `tensors` gives them."""
        device = self.scale.device
        self.history[:, self._columns] = tensors["history"].to(device)
        self.scale[self._columns] = tensors["scale"].to(device)


def _check_layout(modules: Sequence[Any], length: int, version: str) -> None:
    for key, columns in _COLUMNS.items():
        wanted = {"amax_history": (length, columns), "scale": (columns,)}
        for module in modules:
            state = module.fp8_meta.get(key)
            for attribute, shape in wanted.items():
                found = getattr(state, attribute, None)
                if (
                    not isinstance(found, Tensor)
                    or found.shape != shape
                    or found.dtype != torch.float32
                ):
                    what = (
                        f"{tuple(found.shape)} of {found.dtype}"
                        if isinstance(found, Tensor)
                        else repr(found)
                    )
                    raise unexpected(
                        version, f"keeps {key}.{attribute} as {what}, not as {shape} of float32"
                    )
            if not hasattr(state, "make_quantizers"):
                raise unexpected(version, f"makes no quantizers from {key}")


class TensorScales:
    """Current and block scaling: each cast takes its scale from the tensor at hand, so there is no state to keep.

    amax is measured by hook (`Watch`). Current: scale is what the cast of the largest tensor used, fp8_max / amax, and
    saturation is 1 by construction. Block: every 128 values, of weights every 128 x 128, have a scale of their own, so
    scale is NaN (a tensor has no single one), and 1 for saturation says that no block can exceed its limit. As in TE's
    kernels (common/recipe/recipe_common.cuh) an amax of 0 or infinity gives a scale of 1, so a saturation of 0 or
    infinity.
    """

    def __init__(self, fp8_max: Tensor, amax: Tensor, blocks: bool) -> None:
        self._fp8_max, self._amax, self._blocks = fp8_max, amax, blocks
        self.scrubbed = torch.zeros((), device=fp8_max.device)

    def begin_window(self) -> None:
        """Nothing is kept from window to window."""

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Nothing rolls."""

    def staged(self) -> Tensor:
        """Measured by hook."""
        return self._amax.clone()

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """`skip` changes nothing."""
        usable = (amax > 0) & torch.isfinite(amax)
        limit = torch.finfo(torch.float32).max
        scale = torch.where(usable, (self._fp8_max / amax).clamp_max(limit), 1.0)
        saturation = amax * scale / self._fp8_max
        return torch.stack(
            [amax, torch.full_like(scale, torch.nan) if self._blocks else scale, saturation]
        )

    def tensors(self) -> TensorDict:
        """The last amaxes as a history of one row."""
        return {"history": self._amax[None].clone(), "scale": torch.ones_like(self._amax)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The last amaxes."""
        self._amax.copy_(tensors["history"][0])
