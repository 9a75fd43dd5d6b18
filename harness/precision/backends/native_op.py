"""NativeLinear as operators that `torch.compile` cannot look into, so that a block compiles into one graph.

What may change between two steps (scales, demotion, sampling) is read from the layer when the operator runs, so no
switch recompiles. The operators read and write FP8 state that the compiler does not know of. It may drop a call whose
results nobody uses, or merge two calls with equal inputs, neither of which changes an amax that matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.precision.backends.native_gemm import Carrier, operands_as_they_are, plain_operand
from harness.precision.compiling import define, layer_of

if TYPE_CHECKING:
    from harness.precision.backends.native_linear import NativeLinear


def _linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """rows W^T + b of the layer behind `handle`: bfloat16 [m, n]; then what backward wants, for nobody else.

    rows: bfloat16 [m, k]. The quantised weight stays with the layer: it serves several calls, and the compiler may
    reuse the memory of whatever an operator returns.
    """
    layer: NativeLinear = layer_of(handle)
    with operands_as_they_are(rows.device.type):
        out, left, _ = layer.multiply(rows, weight, bias, record)
    assert isinstance(left, Carrier)
    # An operator's outputs may not alias its inputs.
    values = left.values.clone() if left.inverse is None else left.values
    return out, values, torch.tensor([layer.arena.inverses[layer.slot]], device=rows.device)


def _fake_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    return out, rows.new_empty(rows.shape), rows.new_empty(1, dtype=torch.float32)


def _linear_backward(
    grad: Tensor, left: Tensor, left_inverse: Tensor, weight: Tensor, handle: Tensor, record: bool, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, weight (bfloat16) and bias (float32); one that is not in `needs` has shape [0].

    The quantised weight is the one of forward unless scales were rolled in between, which leaves an equally good one.
    """
    layer: NativeLinear = layer_of(handle)
    with operands_as_they_are(grad.device.type):
        if layer.demoted:
            operands = Carrier(left), plain_operand(weight)
        else:
            operands = Carrier(left, left_inverse.item()), layer.quantized_weight(weight, record)
        rows, weights, bias = layer.gradients(grad, *operands, record, (needs[0], needs[1], needs[2]))
    nothing = [grad.new_empty(0) if found is None else found for found in (rows, weights)]
    return nothing[0], nothing[1], grad.new_empty(0, dtype=torch.float32) if bias is None else bias


def _fake_linear_backward(
    grad: Tensor, left: Tensor, left_inverse: Tensor, weight: Tensor, handle: Tensor, record: bool, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    rows = grad.new_empty(left.shape if needs[0] else (0,))
    weights = grad.new_empty(weight.shape if needs[1] else (0,))
    return rows, weights, grad.new_empty(grad.shape[1:] if needs[2] else (0,), dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, weight, bias, handle, ctx.record = inputs
    _, left, left_inverse = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(left, left_inverse, weight, handle)


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    found = _ops.fp8_linear_backward(grad, *ctx.saved_tensors, ctx.record, needs)
    rows, weights, bias = (value if need else None for value, need in zip(found, needs, strict=True))
    return rows, weights, None if bias is None else bias.to(ctx.bias_dtype), None, None


define("fp8_linear", _linear, _fake_linear, _backward, _setup)
define("fp8_linear_backward", _linear_backward, _fake_linear_backward)
_ops: Any = torch.ops.hopper_harness
linear: Callable[..., tuple[Tensor, Tensor, Tensor]] = _ops.fp8_linear
