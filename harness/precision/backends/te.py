"""FP8 by Transformer Engine: te.Linear on shared Parameters, one outer autocast, FP8 state of our own.

`fp8.scaling` chooses TE's recipe: delayed (DelayedScaling), current (Float8CurrentScaling), block (Float8BlockScaling).
It ran on an H100 (docs/studies/hopper.md, tests/gpu); TE's own Python runs under it on the CPU (tests/te_cpu). What it
leans on was read in the Python sources of TE 2.20.2 (quantization.py, module/{base,linear,layernorm_mlp}.py,
distributed.py), in csrc/quantizer.cpp and in recipe/delayed_scaling.cu:

- Entering an autocast with `enabled=False` inside an enabled one runs that module in BF16 and touches no FP8 state,
  whatever the scaling.
- `fp8_meta["scaling_fwd" | "scaling_bwd"]` exists once `init_fp8_metadata` ran inside an enabled autocast (outside of
  one it does nothing) and lives as long as the module.
- Under delayed scaling a cast reads its quantizer's scale and raises its amax, views of that state. TE rolls what
  modules have put into its global buffers, at their first forward; one whose `fp8_meta` names a place there already is
  left out, and rolls here (`DelayedScales`).
- Weights are quantised at every forward unless `is_first_microbatch` is passed, so no stale FP8 copy outlives a switch.
- Several calls of one module in a forward accumulate their largest amax; two modules that share a Parameter quantise
  it each for itself.
- Current and block scaling keep no state, and no amax that could be read.
- torch.utils.checkpoint runs a forward again in backward, where the outer autocast has been left: layers enter it by
  themselves there, and scales move only after backward. te.checkpoint keeps history and scale of the first time in a
  queue for each module, one entry for a forward, and puts them back for the second: the oldest, whatever forward that
  is of (`Recomputations`).
- A backward frees what its forward saved, and gradients are not differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.errors import CheckpointError, MachineError, Problem
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
from harness.precision.layers import swap_linears
from harness.precision.plan import Plan, pad_numbers
from harness.precision.recipe import Recipe
from harness.precision.scaling import SampledStats


class TransformerEngineBackend:
    """One outer te.autocast with one recipe object for the whole run; demoted layers disable it for themselves.

    Under delayed scaling histories roll when the recipe says (`fp8.roll`), after one MAX over ranks. A demoted layer
    keeps a shadow amax, which rolls like any other, so that it returns with a warm scale. Raises MachineError if
    TE cannot be imported, lacks what this was written for or cannot compute this way here, ConfigError naming layers
    that it cannot stand in for.
    """

    def __init__(self, plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        library = self._library = te_library.load()
        fp8 = recipe.fp8
        self._te, self._recipe = library.pytorch, te_library.make_recipe(library, fp8)
        self.device, self.scaling = device, fp8.scaling
        self._rolls_between = fp8.scaling == "delayed" and fp8.roll == "micro_batch"
        self.layers = plan.fp8_layers()
        self.slot_names = plan.slot_names()
        self.formats = ["e4m3", "e4m3", "e5m2" if fp8.format == "hybrid" else "e4m3"] * len(
            self.layers
        )
        self.note = f"transformer_engine {library.version}, {fp8.scaling} scaling"
        if fp8.scaling == "delayed":
            self.note += ", rolls once per " + fp8.roll.replace("_", "-")
        check_convertible(model, self.layers)
        sampled = (
            None
            if fp8.scaling == "block"
            else SampledStats(self.formats, device, measure=load_stats(device))
        )
        again = self._again = Recomputations(library.manager)
        self._watch = Watch(len(self.slot_names), device, again, fp8.scaling != "delayed", sampled)
        converted = linear_class(library, self._recipe, fp8.scaling, self._watch)
        swapped = swap_linears(model, self.layers, lambda linear: convert(linear, converted))
        self.modules: dict[str, Any] = {
            pad_numbers(name): module for name, module in swapped.items()
        }
        for index, (name, module) in enumerate(swapped.items()):
            module.slot, module.name_in_model = 3 * index, name
        for name, norm in plan.fused_norms().items():
            te_fused.fuse(model.get_submodule(norm), swapped[name])
            swapped[name].__dict__["around"] = _between(model, name, norm)
        for name, first in plan.fused_mlps().items():
            swapped[first].__dict__["second"] = swapped[name]
            swapped[name].__dict__["around"] = _between(model, name, first)
        self._start()
        fp8_max = torch.tensor([scaling.FORMATS[fmt].max for fmt in self.formats], device=device)
        self._scales: Scales
        if fp8.scaling == "delayed":
            self._scales = DelayedScales(list(self.modules.values()), fp8, fp8_max, library.version)
        else:
            self._scales = TensorScales(fp8_max, self._watch.amax, blocks=fp8.scaling == "block")
        self.fell_back_to = ""
        self._open = 0

    def _start(self) -> None:
        """Let TE allocate its FP8 state, and say whether it can compute this way on this card."""
        try:
            with torch.no_grad(), self._te.autocast(True, recipe=self._recipe):
                for module in self.modules.values():
                    module.init_fp8_metadata()
                    te_library.keep_out_of_global_state(self._library, module.fp8_meta)
        except (RuntimeError, AssertionError) as error:
            what = (
                f"Transformer Engine cannot compute FP8 with {self.scaling} scaling here: {error}"
            )
            fix = "take a recipe with another fp8.scaling or without it, such as bf16"
            raise MachineError(Problem(what, te_library.WHERE, fix=fix)) from error

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now (padded names)."""
        return tuple(name for name, module in self.modules.items() if module.demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """te.autocast inside bf16 autocast. What runs in it without gradients records nothing."""
        opened = self._watch.with_gradients = torch.is_grad_enabled()
        self._open += opened
        if opened:
            self._again.forward_begins()
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
        """Around backward, where activation checkpointing runs forwards again, and must compute the same.

        Where scales have moved since that forward (`roll: micro_batch`), only te.checkpoint does; any other raises
        MisuseError, and so does te.checkpoint where it has not kept them: for a loss of an earlier step.
        """
        self._watch.nested = False
        if self._rolls_between and not self._open:
            self._watch.rolled_under = (
                True  # its forward counts as done: it had another backward, or is of before
            )
        self._watch.active = self._watch.in_backward = True
        try:
            yield
        finally:
            self._watch.active = self._watch.in_backward = False

    @torch.no_grad()
    def begin_window(self, sample: bool) -> None:
        """An optimizer step begins. `sample`: measure what casts lose too, by casts of our own beside TE's."""
        self._watch.window += 1
        self._watch.amax.zero_()
        if self._watch.sampled is not None:
            self._watch.sampled.begin(sample)
        self._scales.begin_window()
        self._again.forget()
        self._open, self._watch.rolled_under = 0, False

    @torch.no_grad()
    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """After backward. reduce: MAX over ranks, used only under `roll: micro_batch`."""
        self._scales.end_micro_batch(reduce)
        self._open = max(self._open - 1, 0)
        if self._rolls_between:
            self._again.rolled()
            self._watch.rolled_under = self._open > 0

    def amax(self) -> Tensor:
        """What the window's one MAX over ranks must carry, float32 [slots]: amaxes since scales last moved; a copy."""
        return self._scales.staged()

    @torch.no_grad()
    def end_window(self, amax: Tensor, skip: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [8, slots] as the protocol says; after a skipped step all FP8 state is what it was before."""
        known = self._scales.finish(amax, skip)
        sampled = self._watch.sampled
        return torch.cat(
            [
                known,
                known.new_full((5, known.shape[1]), torch.nan)
                if sampled is None
                else sampled.rows(mean),
            ]
        )

    def scrubbed(self) -> Tensor:
        """Infinite amaxes dropped in this window."""
        return self._scales.scrubbed

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """Move layers (padded names) to BF16 and back, between two steps and alike on every rank."""
        self._watch.demoted |= {self.modules[name].slot for name in demote}
        self._watch.demoted -= {self.modules[name].slot for name in promote}

    def fall_back(self, precision: str) -> None:
        """Every layer to BF16 for good: what FP8 layers have to fall to, whatever is asked for."""
        self.fell_back_to = precision
        self.switch(list(self.modules), ())

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """history float32 [L, slots], scale float32 [slots]; the same layout as the native backend's.

        Under current and block scaling, which keep no state, one row with the last amaxes, and ones. TE's own extra
        state is a pickle, and empty after a BF16 forward: never used.
        """
        meta: Meta = {
            "slots": list(self.slot_names),
            "formats": list(self.formats),
            "demoted": list(self.demoted),
        }
        return self._scales.tensors(), {
            **meta,
            "scaling": self.scaling,
            "lowered": self.fell_back_to,
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore in place. Raises CheckpointError naming what differs: slots, formats, scaling or history length.

        What a run without FP8 saved makes all of it new; what such a run fell to says nothing of FP8.
        """
        if not meta["slots"]:
            here = self._scales.tensors()
            new = {
                "history": torch.zeros_like(here["history"]),
                "scale": torch.ones_like(here["scale"]),
            }
            self._scales.load(new)
            self.fell_back_to = ""
            self.switch((), list(self.modules))
            return
        self._check_same(tensors, meta)
        self._scales.load(tensors)
        self.fell_back_to = meta["lowered"]
        self.switch(meta["demoted"], [name for name in self.modules if name not in meta["demoted"]])

    def _check_same(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        saved, mine = list(meta["slots"]), list(self.slot_names)
        found: list[str] = []
        if saved != mine:
            only = [*sorted(set(saved) - set(mine)), *sorted(set(mine) - set(saved))]
            which = f"{only[0]} is in one of them only" if only else "in another order"
            found.append(f"{len(saved)} slots, this run has {len(mine)} ({which})")
        elif list(meta["formats"]) != self.formats:
            pairs = zip(saved, meta["formats"], self.formats, strict=True)
            name, theirs, ours = next(each for each in pairs if each[1] != each[2])
            found.append(f"{name} in {theirs}, this run has {ours}")
        kind, lengths = (
            meta.get("scaling", "delayed"),
            [len(tensors["history"]), len(self._scales.tensors()["history"])],
        )
        if kind != self.scaling:
            found.append(f"{kind} scaling, this run has {self.scaling}")
        elif lengths[0] != lengths[1]:
            found.append(f"history length {lengths[0]}, this run has {lengths[1]}")
        if found:
            fix = "resume with the recipe and model that wrote the checkpoint"
            raise CheckpointError(
                [Problem(f"FP8 state is of {what}", "fp8 state", fix=fix) for what in found]
            )


def _between(model: nn.Module, one: str, other: str) -> list[nn.Module]:
    """The modules that hold one of the two that are called so, and not the other."""
    found: list[nn.Module] = []
    for name, beside in ((one, other), (other, one)):
        parts = name.split(".")
        outer = (".".join(parts[:end]) for end in range(1, len(parts)))
        found += [model.get_submodule(each) for each in outer if not beside.startswith(f"{each}.")]
    return found
