"""The Linear of the native backend: three FP8 GEMMs with delayed scaling, eager or inside `torch.compile`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.precision.backends import native_op
from harness.precision.backends.arena import Arena
from harness.precision.backends.native_gemm import Inverse, matmul, operands_as_they_are
from harness.precision.swap import pickled_as_linear

Inverses = tuple[Inverse, Inverse]
Needs = tuple[bool, bool, bool]
# Attributes that a plain Linear has not, or that must not be copied.
_OF_THE_LAYER = {"arena", "slot", "handle", "follows", "_cached", "_compiled_call_impl"}


class NativeLinear(nn.Linear):
    """A Linear whose GEMMs run in FP8 inside a precision context, plain outside of it.

    Shares its Parameters with the Linear it replaces. slot: number of its first slot (input, weight, grad_output).
    handle: int64 0-d on the CPU, how a compiled graph finds the layer; neither parameter nor buffer.

    A deep copy (an EMA of the weights, a teacher) has Parameters of its own and follows the original: inside a
    precision context it computes in FP8 or BF16 as the original does, with the same scales, but it records no amax and
    no statistics, whether or not gradients flow through it. Only the original's tensors set scales. A copy of a
    compiled block is not compiled.
    """

    arena: Arena
    slot: int
    handle: Tensor
    follows: bool = False
    _cached: dict[tuple[int, ...], tuple[Tensor, Tensor]]

    def attach(self, arena: Arena, slot: int) -> None:
        """Take slots `slot` to `slot + 2` of `arena`."""
        self.arena, self.slot, self.handle, self._cached = arena, slot, native_op.register(self), {}

    @property
    def demoted(self) -> bool:
        """In BF16 now, keeping a shadow amax so that the layer can return to FP8 with a warm scale."""
        return self.slot in self.arena.demoted

    def forward(self, input: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.arena.active or not input.is_floating_point():  # F.linear says what is wrong with integers
            return F.linear(input, self.weight, self.bias)
        record = torch.is_grad_enabled() and not self.follows
        if torch.compiler.is_compiling():
            rows = input.to(torch.bfloat16).reshape(-1, input.shape[-1])
            out = native_op.linear(rows, self.weight, self.bias, self.handle, record)[0]
            out = out.reshape(*input.shape[:-1], self.out_features)
        else:
            out: Any = _Matmul.apply(input, self.weight, self.bias, self, record)
        # Where a model turns autocast off it goes on in its own dtype, as after Transformer Engine's Linear.
        return out if torch.is_autocast_enabled(input.device.type) else out.to(input.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLinear:
        made = memo[id(self)] = type(self).__new__(type(self))
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THE_LAYER}
        made.__dict__.update(copy.deepcopy(state, memo))
        made.follows = True
        made.attach(self.arena, self.slot)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not NativeLinear:  # parametrised: torch refuses, and says why
            return super().__reduce_ex__(protocol)
        return pickled_as_linear(self, _OF_THE_LAYER)

    def quantized_weight(self, weight: Tensor, record: bool) -> Tensor:
        """Raw FP8 values of `weight` in bfloat16 under the current scale, quantised once per optimizer step.

        Fused optimizers do not bump a Parameter's version: arena epoch and window stand for it. Without `record` the
        weights may be anything (an evaluation of averaged ones, say) and are quantised every time.
        """
        key = (self.arena.epoch, self.arena.window, weight._version, weight.data_ptr())
        if record and (cached := self._cached.get(key)) is not None:
            return cached[0]
        plain = weight.detach()
        quantized = self.arena.quantize(plain.contiguous(), self.slot + 1, record)
        if record:
            self._cached.clear()
            # Holding the weight keeps its address: freed, it could be that of the next one that somebody computes.
            self._cached[key] = (quantized, plain)
        return quantized

    def multiply(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, record: bool
    ) -> tuple[Tensor, Tensor, Tensor, Inverses]:
        """rows W^T + b: bfloat16 [m, n], and what backward wants: both operands and the inverses of their scales.

        rows: bfloat16 [m, k], contiguous. A demoted layer's operands are plain bfloat16 (the left one is `rows`
        itself) and have no inverses.
        """
        arena, slot = self.arena, self.slot
        inverses: Inverses = (None, None)
        if self.demoted:
            if record:
                arena.observe(rows, slot)
                arena.observe(weight, slot + 1)
            left, right = rows, weight.detach().to(torch.bfloat16)
        else:
            left, right = arena.quantize(rows, slot, record), self.quantized_weight(weight, record)
            inverses = (arena.inverse_of(slot), arena.inverse_of(slot + 1))
        return matmul(left, right.t(), *inverses, ("e4m3", "e4m3"), bias, fast=True), left, right, inverses

    def gradients(
        self, grad: Tensor, left: Tensor, right: Tensor, inverses: Inverses, record: bool, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of rows (bfloat16 [m, k]), weight (bfloat16 [n, k]) and bias (float32 [n]); None where not in `needs`.

        grad: bfloat16 [m, n], contiguous. The others are `multiply`'s.
        """
        arena, slot = self.arena, self.slot + 2
        grad_bias = grad.sum(0, dtype=torch.float32) if needs[2] else None
        inverse = None
        if inverses[0] is not None:
            grad = arena.quantize(grad, slot, record)
            inverse = arena.inverse_of(slot)
        elif record:
            arena.observe(grad, slot)
        fmt = arena.formats[slot]
        grad_rows = matmul(grad, right, inverse, inverses[1], (fmt, "e4m3")) if needs[0] else None
        grad_weight = matmul(grad.t(), left, inverse, inverses[0], (fmt, "e4m3")) if needs[1] else None
        return grad_rows, grad_weight, grad_bias


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: NativeLinear, record: bool) -> Tensor:
        ctx.layer, ctx.record, ctx.shape = layer, record, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
        with operands_as_they_are(x.device.type):
            out, left, right, ctx.inverses = layer.multiply(rows, weight, bias, record)
        ctx.save_for_backward(left, right)
        return out.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad_output.reshape(-1, grad_output.shape[-1]).to(torch.bfloat16).contiguous()
        with operands_as_they_are(grad.device.type):
            grad_rows, grad_weight, grad_bias = ctx.layer.gradients(
                grad, *ctx.saved_tensors, ctx.inverses, ctx.record, ctx.needs_input_grad[:3]
            )
        grad_x = None if grad_rows is None else grad_rows.reshape(ctx.shape)
        return grad_x, grad_weight, None if grad_bias is None else grad_bias.to(ctx.bias_dtype), None, None
