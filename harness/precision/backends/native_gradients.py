"""Gradients of a Linear as an operator for the compiler returns them.

An operator has to return tensors, while autograd takes None for a gradient that nobody asked for. So such a gradient is
an empty tensor, [0], between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.precision.backends.native_gemm import gradient_dtype


def as_tensors(
    grad: Tensor, rows: Tensor | None, weight: Tensor | None, bias: Tensor | None, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias as an operator's results.

    grad: of the output, on their device.
    wide: whether the weight's gradient is float32.
    """
    if rows is None:
        rows = grad.new_empty(0)
    if weight is None:
        weight = grad.new_empty(0, dtype=gradient_dtype(wide))
    if bias is None:
        bias = grad.new_empty(0, dtype=torch.float32)
    return rows, weight, bias


def fake_gradients(
    grad: Tensor, rows: Tensor, weight: Tensor, needs: Sequence[bool], wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes and dtypes of `as_tensors`, for the compiler.

    grad: bfloat16 [m, n].
    rows: the input, [m, k].
    weight: [n, k].
    needs: which of the three gradients autograd asks for.
    """
    nothing = (0,)
    of_rows = grad.new_empty(rows.shape if needs[0] else nothing)
    of_weight = grad.new_empty(weight.shape if needs[1] else nothing, dtype=gradient_dtype(wide))
    of_bias = grad.new_empty(grad.shape[1:] if needs[2] else nothing, dtype=torch.float32)
    return of_rows, of_weight, of_bias


def as_autograd_wants(
    gradients: Sequence[Tensor], needs: Sequence[bool], bias_dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The results of `as_tensors`, with None for each that `needs` does not ask for."""
    rows, weight, bias = gradients
    return (
        rows if needs[0] else None,
        weight if needs[1] else None,
        bias.to(bias_dtype) if needs[2] else None,
    )
