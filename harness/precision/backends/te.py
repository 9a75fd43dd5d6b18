"""FP8 by Transformer Engine (TE): te.Linear on a model's own Parameters, with the FP8 state kept by this project.

TE computes the casts and the three GEMMs of each planned Linear (see `native` for them). `fp8.scaling` chooses TE's
recipe: delayed (DelayedScaling), current (Float8CurrentScaling) or block (Float8BlockScaling). The files:

    te.py          the backend: converts the model, enters TE's autocast, switches layers, saves and restores
    te_linear.py   the layer that replaces a Linear
    te_fused.py    norms and MLPs that leave their work to a Linear
    te_block.py    TE's fused modules, in which that Linear does it
    te_library.py  TE itself: import and checks, recipe objects, scales, recomputation

It ran on an H100 (docs/studies/hopper.md, tests/gpu). On the CPU its tests run TE's own Python (tests/te_cpu).

The te* files rely on the following facts. They were read in the Python sources of TE 2.20.2 (quantization.py,
module/{base,linear,layernorm_mlp}.py, distributed.py), in csrc/quantizer.cpp and in recipe/delayed_scaling.cu:

- Under FSDP2 a module drops its cast of the weight after forward. Outside of FP8 its backward then fails, so a layer in
  BF16 calls no module of TE: it is torch's product of its own Parameters.
- `fp8_meta["scaling_fwd" | "scaling_bwd"]` exists after `init_fp8_metadata` ran inside an enabled autocast, and lives
  as long as the module. Outside of an autocast `init_fp8_metadata` does nothing.
- Under delayed scaling a cast reads its quantizer's scale and raises its amax. Both are views of `fp8_meta`'s state.
- TE rolls the state of modules in its global buffers, where a module enters at its first forward. A module whose
  `fp8_meta` already names a position there is left out. Ours do, and roll in `DelayedScales`.
- Weights are quantised at every forward unless `is_first_microbatch` is passed. So no FP8 copy from before a switch is
  used after it.
- Several calls of one module in a forward record their largest amax. Two modules that share a Parameter quantise it
  separately.
- Current and block scaling keep no state, and no amax that could be read.
- torch.utils.checkpoint runs a forward again in backward, after the outer autocast was left. Layers enter it by
  themselves there. Scales move only after backward.
- te.checkpoint keeps history and scale of the first run in a queue for each module, one entry for each forward. For the
  second run it restores the oldest entry, whichever forward that belongs to (`Recomputations`).
- A backward frees what its forward saved, and gradients cannot be differentiated.
- TE refuses delayed scaling in a graph of torch.compile, and hooks that measure would be lost in one. So the compiler
  breaks its graph at each layer, which runs eager, and compiles what lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.errors import CheckpointError, MachineError, Problem
from harness.core.facts import pad_numbers
from harness.core.protocols import Meta, TensorDict
from harness.precision import scaling
from harness.precision.backends import te_fused, te_library
from harness.precision.backends.native_triton import load_stats
from harness.precision.backends.te_library import (
    DelayedScales,
    Recomputations,
    Scales,
    TensorScales,
)
from harness.precision.backends.te_linear import Watch, check_convertible, convert, linear_class
from harness.precision.layers import swap_linears, swiglu_module
from harness.precision.plan import Plan
from harness.precision.recipe import Recipe
from harness.precision.scaling import SampledStats

_BREAK = (
    "a layer of Transformer Engine runs eager: compile without fullgraph, or take a native rung"
)


class TransformerEngineBackend:
    """One outer te.autocast with one recipe object for the whole run. Demoted layers do not call TE.

    Under delayed scaling histories roll when the recipe says (`fp8.roll`), after one MAX over ranks. A demoted layer
    still records amaxes, which roll like any other, so that it returns to FP8 with a warm scale.

    Raises MachineError if TE cannot be imported, lacks something that is used here, or cannot compute this way on this
    machine. Raises ConfigError naming layers that te.Linear cannot replace.
    """

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        model: nn.Module,
        device: torch.device,
    ) -> None:
        library = self._library = te_library.load()
        fp8 = recipe.fp8
        self._te = library.pytorch
        self._recipe = te_library.make_recipe(library, fp8)
        self.device = device
        self.scaling = fp8.scaling
        self._rolls_between = fp8.scaling == "delayed" and fp8.roll == "micro_batch"
        self.layers = plan.fp8_layers()
        self.slot_names = plan.slot_names()
        gradient = "e5m2" if fp8.format == "hybrid" else "e4m3"
        self.formats = ["e4m3", "e4m3", gradient] * len(self.layers)
        self.note = f"transformer_engine {library.version}, {fp8.scaling} scaling"
        if fp8.scaling == "delayed":
            self.note += ", rolls once per " + fp8.roll.replace("_", "-")
        check_convertible(model, self.layers)

        # What all layers share.
        sampled = None
        if fp8.scaling != "block":
            measure, in_pytorch = load_stats(device)
            self.note += in_pytorch
            sampled = SampledStats(self.formats, device, measure=measure)
        self._recomputations = Recomputations(library.manager)
        self._watch = Watch(
            len(self.slot_names),
            device,
            self._recomputations,
            everything=fp8.scaling != "delayed",
            sampled=sampled,
        )

        # Replace the planned layers, each with its three slots.
        planned_class = linear_class(library, self._recipe, fp8.scaling, self._watch)
        # With fused layers compiling is refused by name instead (te_linear).
        if not plan.fused_norms():
            planned_class.forward = torch.compiler.disable(planned_class.forward, reason=_BREAK)
        swapped = swap_linears(model, self.layers, lambda linear: convert(linear, planned_class))
        self.modules: dict[str, Any] = {}
        for index, (name, module) in enumerate(swapped.items()):
            self.modules[pad_numbers(name)] = module
            module.slot = 3 * index
            module.name_in_model = name

        # Fuse what the plan fuses.
        norms: dict[str, nn.Module] = {}
        for name, norm in plan.fused_norms().items():
            norms[name] = model.get_submodule(norm)
            te_fused.fuse(norms[name], swapped[name])
            swapped[name].around = _between(model, name, norm)
        for name, first in plan.fused_mlps().items():
            module = swiglu_module(model, swapped[first], swapped[name])
            te_fused.fuse_mlp(module, norms[first], swapped[first], swapped[name])
            swapped[name].around = _between(model, name, first)

        # TE allocates its state before ours takes its place.
        self._start()
        largest = [scaling.FORMATS[fmt].max for fmt in self.formats]
        fp8_max = torch.tensor(largest, device=device)
        self._scales: Scales
        if fp8.scaling == "delayed":
            delayed = DelayedScales(list(self.modules.values()), fp8, fp8_max, library.version)
            self._scales = delayed
            self._watch.unmeasured = delayed.unmeasured
        else:
            self._scales = TensorScales(fp8_max, self._watch.amax, blocks=fp8.scaling == "block")
        self.fell_back_to = ""
        # Contexts with gradients whose backward is still to come.
        self._open = 0

    def _start(self) -> None:
        """Let TE allocate its FP8 state. Raises MachineError if it cannot compute this way on this card."""
        try:
            with torch.no_grad(), self._te.autocast(True, recipe=self._recipe):
                for module in self.modules.values():
                    module.init_fp8_metadata()
                    te_library.keep_out_of_global_state(self._library, module.fp8_meta)
        except (RuntimeError, AssertionError) as error:
            cannot = f"Transformer Engine cannot compute FP8 with {self.scaling} scaling here"
            what = f"{cannot}: {error}"
            fix = "take a recipe with another fp8.scaling or without it, such as bf16"
            raise MachineError(Problem(what, te_library.WHERE, fix=fix)) from error

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now (padded names)."""
        return tuple(name for name, module in self.modules.items() if module.demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """te.autocast inside bf16 autocast. A forward without gradients records nothing."""
        opened = self._watch.with_gradients = torch.is_grad_enabled()
        self._open += opened
        if opened:
            self._recomputations.forward_begins()
        self._watch.active = True
        try:
            with (
                torch.autocast(self.device.type, dtype=torch.bfloat16),
                self._te.autocast(True, recipe=self._recipe),
            ):
                yield
        except BaseException:
            self._open -= opened  # no backward will follow
            raise
        finally:
            self._watch.active = False

    @contextmanager
    def backward_context(self, last: bool | None = None) -> Iterator[None]:
        """Around backward. Activation checkpointing runs forwards again there, which must give the same bits.

        If scales have moved since that forward (`roll: micro_batch`), only te.checkpoint can do that. Any other kind
        raises MisuseError. So does te.checkpoint for a loss of an earlier step, whose scales it no longer has.
        """
        self._watch.nested = False
        # With no context open, this loss had a backward already or is of an earlier step: scales have moved since.
        if self._rolls_between and not self._open:
            self._watch.rolled_under = True
        self._watch.active = self._watch.in_backward = True
        try:
            yield
        finally:
            self._watch.active = self._watch.in_backward = False

    def gather_weights(self) -> None:
        """Nothing to change: TE finds out that its weights are gathered, and quantises them again in backward."""

    @torch.no_grad()
    def begin_window(self, sample: bool) -> None:
        """An optimizer step begins. sample: also measure what casts lose, by casts of our own beside TE's."""
        self._watch.window += 1
        self._watch.amax.zero_()
        if self._watch.sampled is not None:
            self._watch.sampled.begin(sample)
        self._scales.begin_window()
        self._recomputations.forget()
        self._open = 0
        self._watch.rolled_under = False

    @torch.no_grad()
    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Backward of one micro-batch is done. reduce: MAX over ranks, used only under `roll: micro_batch`."""
        self._scales.end_micro_batch(reduce)
        self._open = max(self._open - 1, 0)
        if self._rolls_between:
            self._recomputations.rolled()
            # Contexts that are still open had their forward under the scales of before.
            self._watch.rolled_under = self._open > 0

    def amax(self) -> Tensor:
        """Amaxes since scales last moved, float32 [slots], for the window's one MAX over ranks; a copy."""
        return self._scales.staged()

    @torch.no_grad()
    def end_window(
        self,
        amax: Tensor,
        skip: Tensor,
        mean: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """float32 [8, slots] as the protocol says. After a skipped step all FP8 state is what it was before."""
        first_rows = self._scales.finish(amax, skip)
        sampled = self._watch.sampled
        if sampled is None:
            sampled_rows = first_rows.new_full((5, first_rows.shape[1]), torch.nan)
        else:
            sampled_rows = sampled.rows(mean)
        return torch.cat([first_rows, sampled_rows])

    def scrubbed(self) -> Tensor:
        """Infinite amaxes dropped in this window."""
        return self._scales.scrubbed

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """Move layers (padded names) to BF16 and back, between two steps and the same on every rank."""
        self._watch.demoted |= {self.modules[name].slot for name in demote}
        self._watch.demoted -= {self.modules[name].slot for name in promote}

    def fall_back(self, precision: str) -> None:
        """Every layer to BF16 for good: FP8 layers have no other precision below them, whatever `precision` names."""
        self.fell_back_to = precision
        self.switch(list(self.modules), ())

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """history float32 [L, slots], scale float32 [slots]; the same layout as the native backend's.

        Current and block scaling keep no state: history is one row with the last amaxes, and scales are ones. TE's own
        extra state is never used, as it is a pickle, and empty after a BF16 forward.
        """
        meta: Meta = {
            "slots": list(self.slot_names),
            "formats": list(self.formats),
            "demoted": list(self.demoted),
            "scaling": self.scaling,
            "lowered": self.fell_back_to,
        }
        return self._scales.tensors(), meta

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore in place. Raises CheckpointError naming what differs: slots, formats, scaling or history length.

        A checkpoint of a run without FP8 resets the FP8 state. A downgrade in that run says nothing about FP8.
        """
        if not meta["slots"]:
            here = self._scales.tensors()
            history = torch.zeros_like(here["history"])
            scale = torch.ones_like(here["scale"])
            self._scales.load({"history": history, "scale": scale})
            self.fell_back_to = ""
            self.switch((), list(self.modules))
            return

        self._check_same(tensors, meta)
        self._scales.load(tensors)
        self.fell_back_to = meta["lowered"]
        others = [name for name in self.modules if name not in meta["demoted"]]
        self.switch(meta["demoted"], others)

    def _check_same(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the saved FP8 state is not that of this run's slots, formats and scaling."""
        saved, mine = list(meta["slots"]), list(self.slot_names)
        differences: list[str] = []
        if saved != mine:
            only = [*sorted(set(saved) - set(mine)), *sorted(set(mine) - set(saved))]
            which = "in another order"
            if only:
                which = f"{only[0]} is in one of them only"
            differences.append(f"{len(saved)} slots, this run has {len(mine)} ({which})")
        elif list(meta["formats"]) != self.formats:
            # The first slot that differs is enough: a recipe's format is that of all layers.
            for name, theirs, ours in zip(saved, meta["formats"], self.formats, strict=True):
                if theirs != ours:
                    differences.append(f"{name} in {theirs}, this run has {ours}")
                    break

        # The native backend saves no scaling: it has delayed scaling only.
        kind = meta.get("scaling", "delayed")
        saved_length = len(tensors["history"])
        own_length = len(self._scales.tensors()["history"])
        if kind != self.scaling:
            differences.append(f"{kind} scaling, this run has {self.scaling}")
        elif saved_length != own_length:
            differences.append(f"history length {saved_length}, this run has {own_length}")

        if differences:
            fix = "resume with the recipe and model that wrote the checkpoint"
            texts = [f"the saved FP8 state has {what}" for what in differences]
            raise CheckpointError([Problem(text, "fp8 state", fix=fix) for text in texts])


def _between(model: nn.Module, one: str, other: str) -> list[nn.Module]:
    """The modules that contain one of two named modules, and not the other.

    Their boundaries lie between the two: a hook on one of them would see what a fused block passes over.
    """
    found: list[nn.Module] = []
    for name, beside in ((one, other), (other, one)):
        parts = name.split(".")
        for end in range(1, len(parts)):
            outer = ".".join(parts[:end])
            if not beside.startswith(f"{outer}."):
                found.append(model.get_submodule(outer))
    return found
