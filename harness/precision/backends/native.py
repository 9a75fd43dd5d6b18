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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.core.errors import MisuseError, Problem
from harness.core.protocols import Meta, TensorDict
from harness.precision.backends.arena import Arena
from harness.precision.backends.native_gemm import matmul
from harness.precision.plan import Plan, pad_numbers
from harness.precision.recipe import Recipe
from harness.precision.swap import swap_linears, twin

ROLES = ("input", "weight", "grad_output")


class NativeLinear(nn.Linear):
    """A Linear whose GEMMs run in FP8 inside a precision context, plain outside of it.

    Shares its Parameters with the Linear it replaces. slot: number of its first slot (input, weight, grad_output).
    demoted: run in BF16, keeping a shadow amax so that the layer can return with a warm scale.
    """

    arena: Arena
    slot: int
    demoted: bool = False
    _cached: tuple[tuple[int, int, int, bool], Tensor] | None = None

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.arena.active:
            return F.linear(input, self.weight, self.bias)
        record = torch.is_grad_enabled()
        return _Matmul.apply(input, self.weight, self.bias, self, record)  # pyright: ignore[reportReturnType]

    def quantized_weight(self, record: bool) -> Tensor:
        """FP8 weight for the current scale, quantised once per optimizer step.

        Fused optimizers do not bump a Parameter's version: arena epoch and window stand for it.
        """
        key = (self.arena.epoch, self.arena.window, self.weight._version, record)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self.arena.quantize(self.weight.detach().contiguous(), self.slot + 1, record))
        return self._cached[1]


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: NativeLinear, record: bool) -> Tensor:
        arena, slot = layer.arena, layer.slot
        ctx.layer, ctx.record, ctx.quantized, ctx.shape = layer, record, not layer.demoted, x.shape
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
        with torch.autocast(x.device.type, enabled=False):
            if layer.demoted:
                if record:
                    arena.observe(rows, slot)
                    arena.observe(weight, slot + 1)
                left, right, ctx.scales = rows, weight.detach().to(torch.bfloat16), (None, None)
            else:
                left, right = arena.quantize(rows, slot, record), layer.quantized_weight(record)
                ctx.scales = (arena.inverse_of(slot), arena.inverse_of(slot + 1))
            ctx.save_for_backward(left, right)
            ctx.bias_dtype = None if bias is None else bias.dtype
            out = matmul(left, right.t(), *ctx.scales, ("e4m3", "e4m3"), bias, fast=True)
        return out.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right = ctx.saved_tensors
        arena, slot = ctx.layer.arena, ctx.layer.slot + 2
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad = grad_output.reshape(-1, grad_output.shape[-1]).to(torch.bfloat16).contiguous()
        grad_x = grad_weight = grad_bias = None
        with torch.autocast(grad.device.type, enabled=False):
            if need_bias:
                grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
            inverse = None
            if ctx.quantized:
                grad = arena.quantize(grad, slot, ctx.record)
                inverse = arena.inverse_of(slot)
            elif ctx.record:
                arena.observe(grad, slot)
            fmt = arena.formats[slot]
            if need_x:
                grad_x = matmul(grad, right, inverse, ctx.scales[1], (fmt, "e4m3")).reshape(ctx.shape)
            if need_weight:
                grad_weight = matmul(grad.t(), left, inverse, ctx.scales[0], (fmt, "e4m3"))
        return grad_x, grad_weight, grad_bias, None, None


class NativeBackend:
    """Delayed scaling for the Linear layers that the plan names, on one arena."""

    def __init__(self, plan: Plan, recipe: Recipe, model: nn.Module, device: torch.device) -> None:
        self.layers = plan.fp8_layers()
        names = [f"{pad_numbers(layer)}.{role}" for layer in self.layers for role in ROLES]
        backward = "e5m2" if recipe.fp8.format == "hybrid" else "e4m3"
        formats = ["e4m3", "e4m3", backward] * len(self.layers)
        self.arena = Arena(names, formats, recipe.fp8, device)
        self.modules: dict[str, NativeLinear] = {}
        for index, (name, module) in enumerate(
            swap_linears(model, self.layers, lambda linear: twin(linear, NativeLinear)).items()
        ):
            module.arena, module.slot = self.arena, 3 * index
            self.modules[name] = module
        self.slot_names = self.arena.names
        self.note = self.arena.kernel_note

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that run in BF16 now, as named in slots (block numbers padded)."""
        return tuple(pad_numbers(name) for name, module in self.modules.items() if module.demoted)

    @contextmanager
    def context(self) -> Iterator[None]:
        """FP8 in the converted layers, bf16 autocast elsewhere. With gradients off it leaves no trace."""
        with self.backward_context(), torch.autocast(self.arena.device.type, dtype=torch.bfloat16):
            yield

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """Around backward: activation checkpointing recomputes forward there, and must compute the same."""
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
        self.arena.begin_window(sample)

    def end_micro_batch(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """After backward of one micro-batch. reduce: MAX over ranks, used only under `roll: micro_batch`."""
        if self.arena.config.roll == "micro_batch":
            self.arena.collect(reduce)

    def amax(self) -> Tensor:
        """What the window's one MAX all-reduce must carry: staging amax, float32 [slots]; a copy."""
        return self.arena.history[0].clone()

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
        for name in demote:
            by_name[name].demoted = True
        for name in promote:
            by_name[name].demoted = False

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """The arena's state and the demoted set."""
        tensors, meta = self.arena.state_dict()
        return tensors, {**meta, "demoted": list(self.demoted)}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore scales, histories and which layers are in BF16. Raises CheckpointError if slots differ."""
        self.arena.load_state_dict(tensors, meta)
        for name, module in self.modules.items():
            module.demoted = pad_numbers(name) in meta["demoted"]
