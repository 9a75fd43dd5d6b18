"""Dynamic FP8 scaling by torchao. It keeps no amax or scale state, so both are measured by hooks of our own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from harness.core.errors import CheckpointError, Problem
from harness.core.protocols import Meta, TensorDict
from harness.precision import scaling
from harness.precision.plan import Plan, pad_numbers
from harness.precision.recipe import Recipe
from harness.precision.sampling import SampledStats
from harness.precision.swap import pickled_as_linear

# What torchao adds to a Linear's attributes.
_OWN = ("config", "linear_mm_config", "scaling_type_input", "scaling_type_weight", "scaling_type_grad_output")


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
        self.modules = {pad_numbers(name): modules[name] for name in self.layers}
        self._amax = torch.zeros(len(self.slot_names), device=device)
        tensorwise = recipe.fp8.dynamic == "tensorwise"
        formats = ["e4m3", "e4m3", "e5m2" if tensorwise else "e4m3"] * len(self.layers)
        self._fp8_max = torch.tensor([scaling.FORMATS[fmt].max for fmt in formats], device=device)
        self._sampled = SampledStats(formats, device, by_row=not tensorwise)
        self._demoted: set[str] = set()
        self._active = False
        self.lowered = ""
        for index, (name, module) in enumerate(self.modules.items()):
            self._watch(name, module, 3 * index)

    def _watch(self, name: str, module: nn.Module, slot: int) -> None:
        fp8_forward = type(module).forward

        def forward(layer: Any, x: Tensor) -> Tensor:
            weight, bias = cast("Tensor", layer.weight), cast("Tensor | None", layer.bias)
            if not self._active:
                return F.linear(x, weight, bias)
            dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
            # torchao asks for CUDA's autocast only; the cast is the same everywhere if it is done here.
            x = x.to(torch.bfloat16)
            record = torch.is_grad_enabled() and layer is module  # a deep copy measures nothing
            if record:
                self._observe(slot, x)
                self._observe(slot + 1, weight)
            out = F.linear(x, weight, bias) if name in self._demoted else fp8_forward(layer, x)
            if record and out.requires_grad:
                out.register_hook(lambda grad: self._observe(slot + 2, grad))
            return out.to(dtype)

        def reduce(layer: Any, _: Any) -> tuple[Any, ...]:
            return pickled_as_linear(layer, _OWN)

        # A class of its own, not an attribute: a deep copy's forward must see the copy's weights.
        methods = {"forward": forward, "__deepcopy__": _deepcopy, "__reduce_ex__": reduce}
        module.__class__ = type(type(module).__name__, (type(module),), methods)

    def _observe(self, slot: int, x: Tensor) -> None:
        self._amax[slot] = torch.maximum(self._amax[slot], scaling.amax(x))
        self._sampled.add(slot, x)

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now (padded names)."""
        return tuple(name for name in self.modules if name in self._demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """bf16 autocast; converted layers cast to FP8 themselves. With gradients off nothing is measured."""
        with self.backward_context(), torch.autocast(self.device.type, dtype=torch.bfloat16):
            yield

    @contextmanager
    def backward_context(self, last: bool | None = None) -> Iterator[None]:
        """Around backward: activation checkpointing recomputes forward there, and must compute the same."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def begin_window(self, sample: bool) -> None:
        """Forget the amaxes of the last step. `sample`: measure what the casts lose, too."""
        self._amax.zero_()
        self._sampled.begin(sample)

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Nothing to roll."""

    def amax(self) -> Tensor:
        """float32 [slots]; a copy."""
        return self._amax.clone()

    def end_window(self, amax: Tensor, skip: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [6, slots] as the protocol says; scale is what the largest cast used.

        Clipped share, underflow and SQNR are those of the casts along the last dimension.
        """
        scale = torch.where(amax > 0, self._fp8_max / amax, torch.ones_like(amax))
        known = torch.stack([amax, scale, amax * scale / self._fp8_max])
        return torch.cat([known, self._sampled.rows(mean)])

    def scrubbed(self) -> Tensor:
        """Always 0: there is no history to scrub."""
        return torch.zeros((), device=self.device)

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """Move layers (padded names) to BF16 and back, between two steps."""
        self._demoted = (self._demoted | set(demote)) - set(promote)

    def lower(self, precision: str) -> None:
        """Every layer to BF16 for good: what FP8 layers have to fall to, whatever is asked for."""
        self.lowered = precision
        self.switch([pad_numbers(layer) for layer in self.layers], ())

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """The last amaxes (as a history of one row) and the demoted set; dynamic scaling has no other state."""
        return {"history": self._amax[None], "scale": torch.ones_like(self._amax)}, {
            "slots": list(self.slot_names),
            "formats": ["dynamic"] * len(self.slot_names),
            "demoted": list(self.demoted),
            "lowered": self.lowered,
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore the last amaxes and which layers are in BF16. Raises CheckpointError if the slots differ.

        What a run without FP8 saved makes all of it new; what such a run fell to says nothing of FP8.
        """
        if not meta["slots"]:
            self._amax.zero_()
            self._demoted, self.lowered = set(), ""
            return
        if list(meta["slots"]) != list(self.slot_names) or tensors["history"].shape[0] != 1:
            fix = "resume with the recipe and model that wrote the checkpoint"
            raise CheckpointError(Problem("FP8 state is of other slots, or of delayed scaling", "fp8 state", fix=fix))
        self._amax.copy_(tensors["history"][0])
        self._demoted = set(meta["demoted"])
        self.lowered = meta["lowered"]


def _deepcopy(layer: Any, memo: dict[int, Any]) -> Any:
    """Still an FP8 layer, where a pickled one is not."""
    made = memo[id(layer)] = object.__new__(type(layer))
    made.__dict__.update(copy.deepcopy(layer.__dict__, memo))
    return made
