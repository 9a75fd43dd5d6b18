"""Dynamic FP8 scaling by torchao. It keeps no amax or scale state, so both are measured by layers of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from harness.core.errors import CheckpointError, Problem
from harness.core.protocols import Meta, TensorDict
from harness.precision import scaling
from harness.precision.backends.torchao_linear import Watch, WatchedLinear
from harness.precision.compiling import Blocks
from harness.precision.plan import Plan, pad_numbers
from harness.precision.recipe import Recipe
from harness.precision.scaling import SampledStats


class TorchaoBackend:
    """Every cast computes its own scale from its own amax: saturation is 1 by construction, unless amax is 0.

    FP8 inside a precision context only; outside of one, and in demoted layers, `F.linear` on the same Parameters. On a
    CPU torchao emulates its GEMMs; on a GPU it gains speed only under torch.compile.
    """

    def __init__(self, plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        self.layers = plan.fp8_layers()
        self.device = device
        self.slot_names = plan.slot_names()
        self.note = f"torchao {recipe.fp8.dynamic}"
        config = replace(Float8LinearConfig.from_recipe_name(recipe.fp8.dynamic), emulate=device.type == "cpu")
        wanted = set(self.layers)
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name in wanted, config=config)
        modules = dict(model.named_modules())
        self.modules = {pad_numbers(name): cast("WatchedLinear", modules[name]) for name in self.layers}
        tensorwise = recipe.fp8.dynamic == "tensorwise"
        formats = ["e4m3", "e4m3", "e5m2" if tensorwise else "e4m3"] * len(self.layers)
        self._fp8_max = torch.tensor([scaling.FORMATS[fmt].max for fmt in formats], device=device)
        self._watch = Watch(SampledStats(formats, device, by_row=not tensorwise), device)
        for module in self.modules.values():
            module.__class__ = WatchedLinear
        self._blocks = Blocks(model, WatchedLinear)
        for index, module in enumerate(self.modules.values()):
            module.attach(self._watch, 3 * index, self._blocks.of(module))
        self.lowered = ""

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now (padded names)."""
        return tuple(name for name, module in self.modules.items() if module.demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """bf16 autocast; converted layers cast to FP8 themselves. With gradients off nothing is measured."""
        with self.backward_context(), torch.autocast(self.device.type, dtype=torch.bfloat16):
            yield

    @contextmanager
    def backward_context(self, last: bool | None = None) -> Iterator[None]:
        """Around backward: activation checkpointing recomputes forward there, and must compute the same."""
        self._watch.active = True
        try:
            yield
        finally:
            self._watch.active = False

    def begin_window(self, sample: bool) -> None:
        """Forget the amaxes of the last step. `sample`: measure what the casts lose, too."""
        self._watch.amax.zero_()
        self._watch.stats.begin(sample)
        self._mark_blocks()

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Nothing to roll."""

    def amax(self) -> Tensor:
        """float32 [slots]; a copy."""
        return self._watch.amax.clone()

    def end_window(self, amax: Tensor, skip: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [6, slots] as the protocol says; scale is what the largest cast used.

        Clipped share, underflow and SQNR are those of the casts along the last dimension.
        """
        scale = torch.where(amax > 0, self._fp8_max / amax, torch.ones_like(amax))
        known = torch.stack([amax, scale, amax * scale / self._fp8_max])
        return torch.cat([known, self._watch.stats.rows(mean)])

    def scrubbed(self) -> Tensor:
        """Always 0: there is no history to scrub."""
        return torch.zeros((), device=self.device)

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """Move layers (padded names) to BF16 and back, between two steps."""
        self._watch.demoted |= {self.modules[name].slot for name in demote}
        self._watch.demoted -= {self.modules[name].slot for name in promote}
        self._mark_blocks()

    def _mark_blocks(self) -> None:
        demoted = [module for module in self.modules.values() if module.demoted]
        self._blocks.mark(self._watch.stats.sampling, demoted)

    def lower(self, precision: str) -> None:
        """Every layer to BF16 for good: what FP8 layers have to fall to, whatever is asked for."""
        self.lowered = precision
        self.switch([pad_numbers(layer) for layer in self.layers], ())

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """The last amaxes (as a history of one row) and the demoted set; dynamic scaling has no other state."""
        return {"history": self._watch.amax[None], "scale": torch.ones_like(self._watch.amax)}, {
            "slots": list(self.slot_names),
            "formats": ["dynamic"] * len(self.slot_names),
            "demoted": list(self.demoted),
            "lowered": self.lowered,
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore the last amaxes and which layers are in BF16. Raises CheckpointError if the slots differ.

        What a run without FP8 saved makes all of it new; what such a run fell to says nothing of FP8.
        """
        if meta["slots"] and (list(meta["slots"]) != list(self.slot_names) or tensors["history"].shape[0] != 1):
            fix = "resume with the recipe and model that wrote the checkpoint"
            raise CheckpointError(Problem("FP8 state is of other slots, or of delayed scaling", "fp8 state", fix=fix))
        self._watch.amax.copy_(tensors["history"][0] if meta["slots"] else torch.zeros_like(self._watch.amax))
        self.lowered = meta["lowered"] if meta["slots"] else ""
        self._watch.demoted.clear()
        self.switch(meta["demoted"] if meta["slots"] else (), ())
