"""Transformer Engine as this project needs it. Four things are here:

- `load` imports TE and checks that it has everything that the te* files use.
- `make_recipe` builds TE's recipe object from ours.
- `DelayedScales` and `TensorScales` keep the amax and scale of every slot, which TE's casts read and fill.
- `Recomputations` gives a recomputed forward the scales of its first run.

Slots are ordered layer by layer, each with input, weight and grad_output, in the layout of `scaling.roll`.

Why `Recomputations` is needed: te.checkpoint runs a forward twice, the second time within backward. It keeps amax
history and scale of every module's first run in a queue, oldest first. The second run takes the front of the queue.
That is the wrong entry if an earlier forward had no backward, or if backwards come in another order.

How it finds the right entry: all forwards between two rolls have the same scales. So it is enough to know between which
rolls a forward ran. Autograd numbers the nodes of a thread in the order in which they are made. During backward it
knows which node is running, and so its number. Compared with the numbers at each roll, that gives the interval.
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
# Environment variables that TE itself reads. They change how values are rounded or when histories roll, and neither
# recipe nor plan would show it.
_OVERRIDES = (
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_UNFUSED_FP8_UPDATE",
)


class Library(NamedTuple):
    """The parts of Transformer Engine that the te* files use.

    pytorch: the module transformer_engine.pytorch.
    recipes: the module transformer_engine.common.recipe.
    recomputing: whether te.checkpoint is running a forward for the second time.
    checkpointing: whether te.checkpoint is running a forward at all.
    manager: the class that holds TE's global FP8 state.
    """

    pytorch: Any
    recipes: Any
    recomputing: Callable[[], bool]
    checkpointing: Callable[[], bool]
    manager: Any
    version: str


def load() -> Library:
    """Import TE.

    Raises MachineError if it does not import, lacks something that is used here, or is overridden by the environment.
    """
    values = {name: os.environ.get(name, "0") for name in _OVERRIDES}
    overridden = [name for name, value in values.items() if value not in ("", "0")]
    if overridden:
        why = "it changes what Transformer Engine computes, against the recipe and the plan"
        problems: list[Problem] = []
        for name in overridden:
            what = f"{name} is set in the environment"
            problems.append(Problem(what, WHERE, why, f"unset {name}"))
        raise MachineError(problems)
    try:
        package = import_module("transformer_engine")
        recipes = import_module("transformer_engine.common.recipe")
        pytorch = import_module("transformer_engine.pytorch")
        distributed = import_module("transformer_engine.pytorch.distributed")
        quantization = import_module("transformer_engine.pytorch.quantization")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        what = f"Transformer Engine does not import: {error}"
        fix = "make setup builds it; or take a recipe without it, such as bf16"
        raise MachineError(Problem(what, WHERE, fix=fix)) from error

    # Another version may have renamed or moved any of these. Better an error now than one in the middle of a step.
    version = str(getattr(package, "__version__", "of unknown version"))
    linear = getattr(pytorch, "Linear", None)
    manager = getattr(quantization, "FP8GlobalStateManager", None)
    needed = (
        (pytorch, ("autocast", "Linear", "LayerNormLinear", "LayerNormMLP")),
        (
            distributed,
            ("in_fp8_activation_recompute_phase", "is_fp8_activation_recompute_enabled"),
        ),
        (recipes, ("Format", *_RECIPES.values())),
        (linear, ("init_fp8_metadata",)),
        (quantization, ("FP8GlobalStateManager",)),
        (
            manager,
            ("quantization_state", "get_buffer_info", "add_fp8_tensors_to_global_buffer"),
        ),
    )
    missing: list[str] = []
    for owner, names in needed:
        missing += [name for name in names if not hasattr(owner, name)]
    if missing:
        raise unexpected(version, f"has no {', '.join(missing)}")

    return Library(
        pytorch=pytorch,
        recipes=recipes,
        recomputing=distributed.in_fp8_activation_recompute_phase,
        checkpointing=distributed.is_fp8_activation_recompute_enabled,
        manager=manager,
        version=version,
    )


def make_recipe(library: Library, fp8: Fp8Config) -> Any:
    """TE's recipe object for `fp8`. Raises MachineError if the object does not have every argument that it was given.

    TE's recipe classes drop arguments that they do not know, without an error.
    """
    formats = library.recipes.Format
    fp8_format = formats.HYBRID if fp8.format == "hybrid" else formats.E4M3
    wanted: dict[str, Any] = {"fp8_format": fp8_format}
    if fp8.scaling == "delayed":
        wanted |= {
            "margin": fp8.margin,
            "amax_history_len": fp8.amax_history_len,
            "amax_compute_algo": fp8.amax_compute_algo,
            "reduce_amax": True,
        }
    kind = _RECIPES[fp8.scaling]
    make = getattr(library.recipes, kind)
    recipe = make(**wanted)
    # Read back what it was given: the object is the only one who knows.
    dropped = [name for name, value in wanted.items() if getattr(recipe, name, None) != value]
    if dropped:
        names = ", ".join(dropped)
        raise unexpected(library.version, f"ignores {names} of {kind}")
    return recipe


def keep_out_of_global_state(library: Library, fp8_meta: dict[str, Any]) -> None:
    """Keep TE from reducing and rolling this module's amaxes. Raises MachineError if it would do so anyway."""
    manager = library.manager
    # TE leaves out a module whose meta already names a position in the global buffer.
    fp8_meta[manager.get_buffer_info()] = []
    held = _held_by_te(manager)
    manager.add_fp8_tensors_to_global_buffer(fp8_meta)
    if _held_by_te(manager) != held:
        what = "rolls amax histories of modules that it was told to leave alone"
        raise unexpected(library.version, what)


def _held_by_te(manager: Any) -> int:
    return sum(map(len, manager.quantization_state.global_amax_buffer.values()))


def unexpected(version: str, what: str) -> MachineError:
    """The error for a TE that differs from the version that this code was written for."""
    fix = f"install {WRITTEN_FOR}, which this was written for"
    return MachineError(Problem(f"Transformer Engine {version} {what}", WHERE, fix=fix))


RECOMPUTED = "global_fp8_buffer_pos_fwd_recompute"
"""The key of a module's `fp8_meta` that holds the number of its queue, from which te.checkpoint's second run takes."""


class Recomputations:
    """The queues of te.checkpoint for one model in one optimizer step, sorted by the interval between two rolls.

    manager: TE's global FP8 state, which holds the queues.

    Intervals are numbered from 1 in a step, and each roll ends one. TE's own queues hold the entries of the present
    one. A roll moves them to `_kept`, at the number of the interval that it ends.

    Forwards and rolls belong in one thread. If they are in several, a node's number says nothing, and no interval is
    known. Nothing here waits for the device.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._metas: dict[int, Mapping[str, Any]] = {}
        self.forget()

    def forget(self) -> None:
        """A step begins. Entries that are left belong to dropped losses and failed forwards: drop them."""
        for queue in self._queues().values():
            queue.clear()
        self._metas.clear()
        self._thread = threading.get_ident()
        self._one_thread = True
        # The number of the next node when the step began, then at each roll. Lower numbers are of earlier steps.
        self._rolls = [torch.autograd._get_sequence_nr()]
        # Nothing is kept for interval 0, the steps before.
        self._kept: list[dict[int, deque[Any]]] = [{}]

    def forward_begins(self) -> None:
        """A forward with gradients begins."""
        self._one_thread &= threading.get_ident() == self._thread

    def note(self, meta: Mapping[str, Any]) -> None:
        """te.checkpoint runs the first forward of a module with this `fp8_meta`, and TE appends to its queue."""
        self._metas[id(meta)] = meta

    def rolled(self) -> None:
        """Scales have moved: the entries in the queues belong to the interval that ends here."""
        self._one_thread &= threading.get_ident() == self._thread
        self._rolls.append(torch.autograd._get_sequence_nr())
        queues = self._queues()
        self._kept.append({number: deque(queue) for number, queue in queues.items()})
        for queue in queues.values():
            queue.clear()

    def moved(self) -> bool:
        """Whether scales have moved since the forward whose backward runs now, or may have: that forward is unknown."""
        return self._interval() != self._present

    def put_in_front(self, meta: Mapping[str, Any]) -> bool:
        """Put the entry of the forward whose backward runs now in front of this module's queue.

        Returns whether there is one.
        """
        interval = self._interval()
        number = meta.get(RECOMPUTED)
        queue = self._queue(number)
        if interval is None or number is None or queue is None:
            return False

        # An entry of the present interval is in the queue already: all of them have the same scales.
        if interval < self._present:
            kept = self._kept[interval].get(number)
            if not kept:
                return False
            queue.appendleft(kept.popleft())
        return len(queue) > 0

    @property
    def _present(self) -> int:
        """The number of the present interval."""
        return len(self._rolls)  # the step's begin counts as the first

    def _interval(self) -> int | None:
        """The interval in which the forward of the running node ran; None if that is unknown."""
        node = torch._C._current_autograd_node()
        if node is None or not self._one_thread:
            return None
        return bisect_right(self._rolls, node._sequence_nr())

    def _queue(self, number: int | None) -> deque[Any] | None:
        """TE's queue of this number; None if there is none yet."""
        queues = self._manager.quantization_state.fp8_tensors_recompute_buffer
        if number is None or number >= len(queues):
            return None
        return queues[number]

    def _queues(self) -> dict[int, deque[Any]]:
        """The queues of all modules noted in this step, by number."""
        found: dict[int, deque[Any]] = {}
        for meta in self._metas.values():
            number = meta.get(RECOMPUTED)
            queue = self._queue(number)
            if number is not None and queue is not None:
                found[number] = queue
        return found


# How many tensors te.Linear keeps a scale for: scaling_fwd has input, weight and output, scaling_bwd has grad_output
# and grad_input. The last of each is never quantised here. It stays at history 0 and scale 1.
_COLUMNS = {"scaling_fwd": 3, "scaling_bwd": 2}
# Which of these five columns are our slots.
_SLOTS = (0, 1, 3)


class Scales(Protocol):
    """What the backend needs from a kind of scaling. amax and scale: float32 [slots]."""

    scrubbed: Tensor
    """Infinite amaxes dropped in the last window, float32 0-d."""

    def begin_window(self) -> None:
        """A window begins."""
        ...

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """A micro-batch ended. reduce: MAX over ranks."""
        ...

    def staged(self) -> Tensor:
        """This rank's amaxes since scales last moved, for the window's MAX over ranks; float32 [slots], a copy."""
        ...

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """The window ends; float32 [3, slots]: amax, scale in use, saturation.

        amax: `staged`, reduced over ranks.
        skip: 0-d, positive for a skipped step.
        """
        ...

    def tensors(self) -> TensorDict:
        """history float32 [L, slots], scale float32 [slots]."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `tensors` in place."""
        ...


class DelayedScales(ScalingState):
    """Delayed scaling: one history for the whole model, which TE's casts fill and which rolls here.

    Each layer's `amax_history` [L, 3 or 2] and `scale` [3 or 2] in `fp8_meta` become views of `history` and `scale`.
    Its quantizers are rebuilt from the views. A cast then stages its amax in row 0 of `history` by itself. Nothing is
    copied between TE and here, and a roll, a skip or a checkpoint takes a few kernels for any number of layers.

    TE's own rolling is not used. It follows the order in which layers of all models in the process were first used,
    which may differ between ranks. It also rolls at moments that depend on which layer came first, and on whether that
    layer is in the loss.

    Raises MachineError if TE keeps its state in another layout.
    """

    def __init__(
        self, modules: Sequence[Any], config: Fp8Config, fp8_max: Tensor, version: str
    ) -> None:
        device = fp8_max.device
        width = sum(_COLUMNS.values())
        _check_layout(modules, config.amax_history_len, version)

        # The columns of our slots among the five of each module.
        of_slots: list[int] = []
        for index in range(len(modules)):
            of_slots += [width * index + slot for slot in _SLOTS]
        self._of_slots = of_slots
        self._columns = torch.tensor(of_slots, device=device)

        # The columns without a slot need some limit: 1.
        limits = torch.ones(width * len(modules), device=device)
        super().__init__(config, limits.index_copy_(0, self._columns, fp8_max))

        # TE's state becomes views of ours.
        first = 0
        for module in modules:
            for key, columns in _COLUMNS.items():
                state = module.fp8_meta[key]
                own = slice(first, first + columns)
                state.amax_history = self.history[:, own]
                state.scale = self.scale[own]
                module.quantizers[key] = state.make_quantizers()
                first += columns

    def staged(self) -> Tensor:
        """Amaxes since the last roll; all 0 under `roll: micro_batch`."""
        return self.history[0, self._columns]

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """Roll unless micro-batches did; after a skipped step history and scale are as before the window."""
        # 0 in the columns without a slot: an amax of 0 changes neither history nor scale.
        of_columns = torch.zeros_like(self.scale).index_copy_(0, self._columns, amax)
        self.end_window(of_columns, skip)
        return self.window_stats()[:, self._columns]

    def unmeasured(self, slot: int, training: bool) -> bool:
        """As `ScalingState.unmeasured`."""
        return super().unmeasured(self._of_slots[slot], training)

    def tensors(self) -> TensorDict:
        """Copies; the same layout as the native backend's."""
        return {"history": self.history[:, self._columns], "scale": self.scale[self._columns]}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore in place. The tensors may be on any device, in the shapes that `tensors` gives."""
        device = self.scale.device
        self.history[:, self._columns] = tensors["history"].to(device)
        self.scale[self._columns] = tensors["scale"].to(device)
        self.state_loaded()


def _check_layout(modules: Sequence[Any], length: int, version: str) -> None:
    """Raises MachineError if a module's FP8 state is not laid out as `DelayedScales` needs it."""
    for key, columns in _COLUMNS.items():
        wanted = {"amax_history": (length, columns), "scale": (columns,)}
        for module in modules:
            state = module.fp8_meta.get(key)
            for attribute, shape in wanted.items():
                found = getattr(state, attribute, None)
                what = repr(found)
                if isinstance(found, Tensor):
                    if found.shape == shape and found.dtype == torch.float32:
                        continue
                    what = f"{tuple(found.shape)} of {found.dtype}"
                keeps = f"keeps {key}.{attribute} as {what}, not as {shape} of float32"
                raise unexpected(version, keeps)
            if not hasattr(state, "make_quantizers"):
                raise unexpected(version, f"makes no quantizers from {key}")


class TensorScales:
    """Current and block scaling: each cast computes its scale from its own tensor, so there is no state to keep.

    fp8_max: float32 [slots], the largest finite value of each slot's format.
    amax: float32 [slots], which hooks raise (`te_linear.Watch`).
    blocks: whether it is block scaling.

    Current scaling: the scale reported is that of the largest tensor of the window, fp8_max / amax. Saturation is 1 by
    construction.

    Block scaling: every 128 values have a scale of their own, in weights every 128 x 128. A tensor has no single
    scale, so it is NaN. Saturation is 1, as no block can exceed its limit.

    As in TE's kernels (common/recipe/recipe_common.cuh) an amax of 0 or infinity gives a scale of 1, and so a
    saturation of 0 or infinity.
    """

    def __init__(self, fp8_max: Tensor, amax: Tensor, blocks: bool) -> None:
        self._fp8_max = fp8_max
        self._amax = amax
        self._blocks = blocks
        self.scrubbed = torch.zeros((), device=fp8_max.device)

    def begin_window(self) -> None:
        """Nothing is kept from window to window."""

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Nothing rolls."""

    def staged(self) -> Tensor:
        """A copy of the amaxes that hooks measured."""
        return self._amax.clone()

    def finish(self, amax: Tensor, skip: Tensor) -> Tensor:
        """The window's figures. `skip` changes nothing, as there is no state."""
        usable = (amax > 0) & torch.isfinite(amax)
        limit = torch.finfo(torch.float32).max
        scale = torch.where(usable, (self._fp8_max / amax).clamp_max(limit), 1.0)
        saturation = amax * scale / self._fp8_max
        if self._blocks:
            scale = torch.full_like(scale, torch.nan)
        return torch.stack([amax, scale, saturation])

    def tensors(self) -> TensorDict:
        """The last amaxes as a history of one row, and scales of 1."""
        return {"history": self._amax[None].clone(), "scale": torch.ones_like(self._amax)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the last amaxes."""
        self._amax.copy_(tensors["history"][0])
