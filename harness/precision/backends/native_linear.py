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
from harness.precision.backends.native_gemm import Carrier, Operand, operands_as_they_are, plain_operand
from harness.precision.compiling import Block, register
from harness.precision.layers import pickled_as_linear

Needs = tuple[bool, bool, bool]
# Attributes that a plain Linear has not, or that must not be copied.
_OF_THE_LAYER = {"arena", "slot", "block", "handle", "follows", "_compiled_call_impl"}


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
    block: Block
    handle: Tensor
    follows: bool = False

    def attach(self, arena: Arena, slot: int, block: Block) -> None:
        """Take slots `slot` to `slot + 2` of `arena`."""
        self.arena, self.slot, self.block, self.handle = arena, slot, block, register(self)

    @property
    def demoted(self) -> bool:
        """In BF16 now, keeping a shadow amax so that the layer can return to FP8 with a warm scale."""
        return self.slot in self.arena.demoted

    def forward(self, input: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.arena.active or not input.is_floating_point():  # F.linear says what is wrong with integers
            return F.linear(input, self.weight, self.bias)
        record = torch.is_grad_enabled() and not self.follows
        if torch.compiler.is_compiling():
            out = self._compiled(input.reshape(-1, input.shape[-1]), record)
            out = out.reshape(*input.shape[:-1], self.out_features)
        else:
            out: Any = _Matmul.apply(input, self.weight, self.bias, self, record)
        # Where a model turns autocast off it goes on in its own dtype, as after Transformer Engine's Linear.
        return out if torch.is_autocast_enabled(input.device.type) else out.to(input.dtype)

    def _compiled(self, rows: Tensor, record: bool) -> Tensor:
        """Traced: every attribute read here is a guard, which two blocks or two windows may share or not."""
        given = (self.weight, self.bias, self.handle, record)
        if self.arena.traced is None:
            return native_op.linear(rows.to(torch.bfloat16), *given)[0]
        linear, switching = self.arena.traced
        if self.block.switching:
            return switching(rows.to(torch.bfloat16), *given)
        return linear(rows, *given, self.arena.gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLinear:
        made = memo[id(self)] = type(self).__new__(type(self))
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THE_LAYER}
        made.__dict__.update(copy.deepcopy(state, memo))
        made.follows = True
        made.attach(self.arena, self.slot, self.block)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not NativeLinear:  # parametrised: torch refuses, and says why
            return super().__reduce_ex__(protocol)
        return pickled_as_linear(self, _OF_THE_LAYER)

    def quantized_weight(self, weight: Tensor, record: bool, rights: bool = True) -> Operand:
        """`weight` as an operand under the current scale, quantised once per optimizer step.

        Fused optimizers do not bump a Parameter's version: arena epoch and window stand for it. Without `record` the
        weights may be anything (an evaluation of averaged ones, say) and are quantised every time. rights: backward
        wants it, too.
        """
        if not record:
            return self.arena.operand(weight.detach(), self.slot + 1, record, rights)
        key = (self.arena.epoch, self.arena.window, weight._version, weight.data_ptr())
        held = self.arena.weights.get(self.slot)
        if held is not None and held[0] == key:
            return held[1]
        plain = weight.detach()
        quantized = self.arena.operand(plain, self.slot + 1, record)
        # Holding the weight keeps its address: freed, it could be that of the next one that somebody computes.
        self.arena.weights[self.slot] = (key, quantized, plain)
        return quantized

    def multiply(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, record: bool, needs: Needs = (True, True, True)
    ) -> tuple[Tensor, Operand, Operand]:
        """rows W^T + b: bfloat16 [m, n], and both operands, for backward.

        rows: [m, k] of any float dtype. needs: gradients of rows, weight and bias that somebody will want. A demoted
        layer's operands are plain bfloat16.
        """
        arena, slot = self.arena, self.slot
        if self.demoted:
            left, right = plain_operand(rows), plain_operand(weight)
            if record:
                arena.observe(left.values, slot)
                arena.observe(weight, slot + 1)
        else:
            left = arena.activation(rows, slot, record, needs[1])
            right = self.quantized_weight(weight, record, needs[0])
        return left.nt(right, bias), left, right

    def gradients(
        self, grad: Tensor, left: Operand, right: Operand, record: bool, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of rows (bfloat16 [m, k]), weight (bfloat16 [n, k]) and bias (float32 [n]); None where not in `needs`.

        grad: [m, n] of any float dtype. The operands are `multiply`'s.
        """
        arena, slot = self.arena, self.slot + 2
        grad = grad.to(torch.bfloat16).contiguous()
        grad_bias = grad.sum(0, dtype=torch.float32) if needs[2] else None
        if isinstance(left, Carrier) and left.inverse is None:
            scaled: Operand = Carrier(grad)
            if record:
                arena.observe(grad, slot)
        else:
            scaled = arena.activation(grad, slot, record, needs[1])
        grad_rows = scaled.nn(right) if needs[0] else None
        grad_weight = scaled.tn(left) if needs[1] else None
        self.release(record)
        return grad_rows, grad_weight, grad_bias

    def release(self, record: bool) -> None:
        """Backward has used the quantised weight."""
        if record and self.arena.may_release():
            self.arena.weights.pop(self.slot, None)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: NativeLinear, record: bool) -> Tensor:
        ctx.layer, ctx.record, ctx.shape = layer, record, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        with operands_as_they_are(x.device.type):
            rows = x.reshape(-1, x.shape[-1])
            out, left, right = layer.multiply(rows, weight, bias, record, ctx.needs_input_grad[:3])
        (kept_left, ctx.left), (kept_right, ctx.right) = left.kept(), right.kept()
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *(part if wants_weight else None for part in kept_left),
            *(part if wants_rows else None for part in kept_right),
        )
        # Not a view: what follows may work in place on it.
        return torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        left, right = ctx.left(*saved[: len(saved) // 2]), ctx.right(*saved[len(saved) // 2 :])
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        with operands_as_they_are(grad.device.type):
            grad_rows, grad_weight, grad_bias = ctx.layer.gradients(
                grad, left, right, ctx.record, ctx.needs_input_grad[:3]
            )
        grad_x = None if grad_rows is None else grad_rows.reshape(ctx.shape)
        return grad_x, grad_weight, None if grad_bias is None else grad_bias.to(ctx.bias_dtype), None, None
