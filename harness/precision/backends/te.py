"""FP8 by Transformer Engine: te.Linear on shared Parameters, one outer autocast, FP8 state of our own.

`fp8.scaling` chooses TE's recipe: delayed (DelayedScaling), current (Float8CurrentScaling), block (Float8BlockScaling).
It has not run on a GPU yet (tests/gpu holds the checks). Every name and behaviour it leans on was read in the Python
sources of TE 2.20.2 (quantization.py, module/base.py, module/linear.py, distributed.py), in csrc/quantizer.cpp and in
recipe/delayed_scaling.cu:

- `te.autocast(enabled, recipe=...)` updates forward slots when the outermost enabled one exits with gradients on;
  backward slots update at the end of the backward of the forward's first FP8 module. After backward both have rolled.
- Entering an autocast with `enabled=False` inside an enabled one runs that module in BF16 and touches no FP8 state,
  whatever the scaling.
- `fp8_meta["scaling_fwd" | "scaling_bwd"]` exists once `init_fp8_metadata` ran inside an enabled autocast (outside of
  one it does nothing) and keeps its tensors for life: quantizers and the global buffers hold views of them, so they
  are written in place. Writing between two steps is safe: everything is on one stream.
- A slot with a staging amax of 0 does not roll; amaxes are all-reduced only if torch.distributed is initialised.
- Weights are quantised at every forward unless `is_first_microbatch` is passed, so no stale FP8 copy outlives a switch.
- With gradients off nothing rolls, but amaxes still land in row 0 of the history.
- Several calls of one module in a forward accumulate their largest amax in row 0; two modules that share a Parameter
  quantise it each for itself.
- Current and block scaling keep no state, and no amax that could be read.
- torch.utils.checkpoint runs a forward again in backward, where the outer autocast has been left and scales have
  rolled. te.checkpoint puts both back. Under current and block scaling entering an autocast around backward is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.errors import CheckpointError, MachineError, Problem
from harness.core.facts import ROLES
from harness.core.protocols import Meta, TensorDict
from harness.precision import scaling
from harness.precision.backends import te_library
from harness.precision.backends.te_linear import Watch, check_convertible, convert, linear_class
from harness.precision.backends.te_scales import DelayedScales, Scales, TensorScales
from harness.precision.plan import Plan, pad_numbers
from harness.precision.recipe import Recipe
from harness.precision.sampling import SampledStats
from harness.precision.swap import swap_linears


class TransformerEngineBackend:
    """One outer te.autocast with one recipe object for the whole run; demoted layers disable it for themselves.

    Under delayed scaling TE rolls its histories itself, once per micro-batch, and reduces amax over ranks. A demoted
    layer keeps a shadow amax and gets its history and scale updated by the same rule, once per step, so that it
    returns with a warm scale. Raises MachineError if TE cannot be imported, lacks what this was written for or cannot
    compute this way here, ConfigError naming layers that it cannot stand in for.
    """

    def __init__(self, plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        library = te_library.load()
        fp8 = recipe.fp8
        self._te, self._recipe = library.pytorch, te_library.make_recipe(library, fp8)
        self.device, self.scaling = device, fp8.scaling
        self.layers = plan.fp8_layers()
        self.slot_names = plan.slot_names()
        self.formats = ["e4m3", "e4m3", "e5m2" if fp8.format == "hybrid" else "e4m3"] * len(self.layers)
        self.note = f"transformer_engine {library.version}, {fp8.scaling} scaling"
        if fp8.scaling == "delayed":
            self.note += ", rolls once per micro-batch"
        check_convertible(model, self.layers)
        sampled = None if fp8.scaling == "block" else SampledStats(self.formats, device)
        self._watch = Watch(len(self.slot_names), device, fp8.scaling != "delayed", sampled)
        converted = linear_class(library, self._recipe, fp8.scaling, self._watch)
        swapped = swap_linears(model, self.layers, lambda linear: convert(linear, converted))
        self.modules: dict[str, Any] = {pad_numbers(name): module for name, module in swapped.items()}
        for index, (name, module) in enumerate(swapped.items()):
            module.slot, module.name_in_model = 3 * index, name
        self._start()
        fp8_max = torch.tensor([scaling.FORMATS[fmt].max for fmt in self.formats], device=device)
        self._scales: Scales
        if fp8.scaling == "delayed":
            self._scales = DelayedScales(list(self.modules.values()), fp8, fp8_max, library.version)
        else:
            self._scales = TensorScales(fp8_max, self._watch.amax, blocks=fp8.scaling == "block")
        self.lowered = ""
        self.switch((), ())

    def _start(self) -> None:
        """Let TE allocate its FP8 state, and say whether it can compute this way on this card."""
        try:
            with torch.no_grad(), self._te.autocast(True, recipe=self._recipe):
                for module in self.modules.values():
                    module.init_fp8_metadata()
        except (RuntimeError, AssertionError) as error:
            what = f"Transformer Engine cannot compute FP8 with {self.scaling} scaling here: {error}"
            fix = "take a recipe with another fp8.scaling or without it, e.g. --recipe bf16"
            raise MachineError(Problem(what, te_library.WHERE, fix=fix)) from error

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now (padded names)."""
        return tuple(name for name, module in self.modules.items() if module.demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """te.autocast inside bf16 autocast. With gradients off, what TE notes in its history is taken back."""
        put_back = None if torch.is_grad_enabled() else self._scales.held()
        self._watch.active = True
        try:
            with torch.autocast(self.device.type, dtype=torch.bfloat16), self._te.autocast(True, recipe=self._recipe):
                yield
        finally:
            self._watch.active = False
            if put_back is not None:
                put_back()

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """Around backward, where activation checkpointing runs forwards again.

        Under current and block scaling they compute the same again. Under delayed scaling those of te.checkpoint do;
        any other raises MisuseError.
        """
        again = nullcontext() if self.scaling == "delayed" else self._te.autocast(True, recipe=self._recipe)
        self._watch.active = self._watch.in_backward = True
        try:
            with again:
                yield
        finally:
            self._watch.active = self._watch.in_backward = False

    @torch.no_grad()
    def begin_window(self, sample: bool) -> None:
        """An optimizer step begins. `sample`: measure what casts lose too, by casts of our own beside TE's."""
        self._watch.amax.zero_()
        if self._watch.sampled is not None:
            self._watch.sampled.begin(sample)
        self._scales.begin()

    @torch.no_grad()
    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """After backward: TE has rolled and reduced what it rolls."""
        self._scales.after_backward(self._is_demoted)

    def amax(self) -> Tensor:
        """What was measured here, float32 [slots]; 0 for slots that TE rolls, which it reduces over ranks itself."""
        return self._watch.amax.clone()

    @torch.no_grad()
    def end_window(self, amax: Tensor, skip: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [6, slots] as the protocol says; after a skipped step all FP8 state is what it was before."""
        known = self._scales.finish(amax, skip)
        sampled = self._watch.sampled
        return torch.cat([known, torch.full_like(known, torch.nan) if sampled is None else sampled.rows(mean)])

    def scrubbed(self) -> Tensor:
        """Infinite amaxes dropped in this window."""
        return self._scales.scrubbed

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """Move layers (padded names) to BF16 and back, between two steps and alike on every rank."""
        self._watch.demoted |= {self.modules[name].slot for name in demote}
        self._watch.demoted -= {self.modules[name].slot for name in promote}
        flags = [module.demoted for module in self.modules.values() for _ in ROLES]
        self._is_demoted = torch.tensor(flags, dtype=torch.bool, device=self.device)

    def lower(self, precision: str) -> None:
        """Every layer to BF16 for good: what FP8 layers have to fall to, whatever is asked for."""
        self.lowered = precision
        self.switch(list(self.modules), ())

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """history float32 [L, slots], scale float32 [slots]; the same layout as the native backend's.

        Under current and block scaling, which keep no state, one row with the last amaxes, and ones. TE's own extra
        state is a pickle, and empty after a BF16 forward: never used.
        """
        meta: Meta = {"slots": list(self.slot_names), "formats": list(self.formats), "demoted": list(self.demoted)}
        return self._scales.tensors(), {**meta, "scaling": self.scaling, "lowered": self.lowered}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore in place. Raises CheckpointError if slots, scaling or history length differ.

        What a run without FP8 saved makes all of it new; what such a run fell to says nothing of FP8.
        """
        if not meta["slots"]:
            here = self._scales.tensors()
            new = {"history": torch.zeros_like(here["history"]), "scale": torch.ones_like(here["scale"])}
            self._scales.load(new)
            self.lowered = ""
            self.switch((), list(self.modules))
            return
        mine = (list(self.slot_names), self.scaling, self._scales.tensors()["history"].shape)
        if mine != (list(meta["slots"]), meta.get("scaling", "delayed"), tensors["history"].shape):
            fix = "resume with the recipe and model that wrote the checkpoint"
            raise CheckpointError(
                Problem("slots, scaling or history length differ from this run's", "fp8 state", fix=fix)
            )
        self._scales.load(tensors)
        self.lowered = meta["lowered"]
        self.switch(meta["demoted"], [name for name in self.modules if name not in meta["demoted"]])
