"""Native FP8 delayed scaling in PyTorch.

The three GEMMs of a Linear y = x W^T: forward multiplies x and W, both E4M3; backward multiplies grad_output (E5M2)
with W for the input gradient and with x for the weight gradient. Each operand is quantised once and reused. On a GPU
with FP8 units the GEMMs are `torch._scaled_mm` on real FP8 tensors. Elsewhere raw FP8 values ride in bfloat16, which
holds each of them exactly, and the scales go into the GEMM's alpha, so that an output is rounded once, as in
Transformer Engine. The bias gradient comes from the unquantised grad_output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.errors import MisuseError, Problem
from harness.core.protocols import Meta, TensorDict
from harness.precision.backends.arena import Arena
from harness.precision.backends.native_gemm import has_fp8_units
from harness.precision.backends.native_kernel import keep_freed_memory
from harness.precision.backends.native_linear import NativeLinear
from harness.precision.compiling import Blocks
from harness.precision.layers import swap_linears, twin
from harness.precision.plan import Plan, pad_numbers
from harness.precision.recipe import Recipe


class NativeBackend:
    """Delayed scaling for the Linear layers that the plan names, on one arena.

    fp8_units: multiply FP8 bytes by `torch._scaled_mm`, which a CPU has too, for tests; None: where the GPU can.
    """

    def __init__(
        self, plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device, fp8_units: bool | None = None
    ) -> None:
        self.layers = plan.fp8_layers()
        if device.type == "cpu":
            keep_freed_memory()
        backward = "e5m2" if recipe.fp8.format == "hybrid" else "e4m3"
        formats = ["e4m3", "e4m3", backward] * len(self.layers)
        on_units = has_fp8_units(device) if fp8_units is None else fp8_units
        self.arena = _arena_of(on_units)(plan.slot_names(), formats, recipe.fp8, device)
        self.modules = swap_linears(model, self.layers, lambda linear: twin(linear, NativeLinear))
        self._blocks = Blocks(model, NativeLinear)
        for index, module in enumerate(self.modules.values()):
            module.attach(self.arena, 3 * index, self._blocks.of(module))
        self.slot_names = self.arena.names
        self.note = self.arena.kernel_note
        self.lowered = ""

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now, as named in slots (block numbers padded)."""
        return tuple(pad_numbers(name) for name, module in self.modules.items() if module.demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """FP8 in the converted layers, bf16 autocast elsewhere. With gradients off it leaves no trace."""
        with self._active(), torch.autocast(self.arena.device.type, dtype=torch.bfloat16):
            yield

    @contextmanager
    def backward_context(self, last: bool | None = None) -> Iterator[None]:
        """Around backward: activation checkpointing recomputes forward there, and must compute the same."""
        self.arena.backward_begins(last)
        with self._active():
            yield

    @contextmanager
    def _active(self) -> Iterator[None]:
        if self.arena.active:
            raise MisuseError(
                Problem("precision contexts do not nest", "context()", fix="leave the first context before the next")
            )
        self.arena.active = True
        try:
            yield
        finally:
            self.arena.active = False

    def begin_window(self, sample: bool) -> None:
        """An optimizer step begins; `sample`: measure underflow, clipped share and SQNR too."""
        if sample is not self.arena.sampling:
            self.arena.sampling = sample
            self._mark_blocks()
        self.arena.begin_window(sample)

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """After backward of one micro-batch. reduce: MAX over ranks, used only under `roll: micro_batch`."""
        self.arena.end_micro_batch(reduce)

    def amax(self) -> Tensor:
        """What the window's one MAX all-reduce must carry: staging amax, float32 [slots]; a copy."""
        self.arena.before_update()
        return self.arena.staged()

    def end_window(self, amax: Tensor, skip: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """Update scales unless skipped; float32 [6, slots] statistics (rows: arena.STAT_ROWS)."""
        self.arena.end_window(amax, skip)
        return self.arena.stats(mean(self.arena.sums) if self.arena.sampling else self.arena.sums)

    def scrubbed(self) -> Tensor:
        """Infinite amaxes dropped in this window, float32 0-d."""
        return self.arena.scrubbed

    def switch(self, demote: Sequence[str], promote: Sequence[str]) -> None:
        """Move layers (padded names) to BF16 and back, between two steps."""
        by_name = {pad_numbers(name): module for name, module in self.modules.items()}
        self.arena.demoted |= {by_name[name].slot for name in demote}
        self.arena.demoted -= {by_name[name].slot for name in promote}
        self._mark_blocks()

    def _mark_blocks(self) -> None:
        self._blocks.mark(self.arena.sampling, [module for module in self.modules.values() if module.demoted])

    def lower(self, precision: str) -> None:
        """Every layer to BF16 for good: what FP8 layers have to fall to, whatever is asked for."""
        self.lowered = precision
        self.switch([pad_numbers(layer) for layer in self.layers], ())

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """The arena's state and the demoted set."""
        tensors, meta = self.arena.state_dict()
        return tensors, {**meta, "demoted": list(self.demoted), "lowered": self.lowered}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore scales, histories and which layers are in BF16. Raises CheckpointError if slots differ.

        What a run without FP8 saved makes all of it new; what such a run fell to says nothing of FP8.
        """
        self.arena.load_state_dict(tensors, meta)
        self.lowered = meta["lowered"] if meta["slots"] else ""
        self.arena.demoted.clear()
        self.switch(meta["demoted"], ())


def _arena_of(on_units: bool) -> type[Arena]:
    if not on_units:
        return Arena
    from harness.precision.backends.native_fp8 import Fp8Arena  # and with it Triton and dynamo: seconds

    return Fp8Arena
