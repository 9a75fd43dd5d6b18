"""The operands of the native backend's GEMMs, and the three products of them that make a Linear.

The products are named as in BLAS, n for an operand as it is and t for a transposed one:

    nt   a b^T   forward           y  = x W^T
    nn   a b     input gradient    dx = dy W
    tn   a^T b   weight gradient   dW = dy^T x

An operand has one of two forms. `Fp8Pair` holds FP8 bytes, for GPUs with FP8 units. `Carrier` holds the same FP8 values
in bfloat16, for any other device. Both have the same values bit for bit. Each carries the inverse of the scale that it
was cast under, because the GEMM has to divide by the scales.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

_FLT_MIN = torch.finfo(torch.float32).tiny
_FLT_MAX = torch.finfo(torch.float32).max
# What cuBLASLt's FP8 GEMMs ask for: the bytes of a row, and the address of a scale, are multiples of 16.
MULTIPLE = 16
ALIGNMENT = 16


def has_fp8_units(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` runs on FP8 tensor cores of `device`: NVIDIA, compute capability 8.9 or more."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def operands_as_they_are(device_type: str) -> AbstractContextManager[Any]:
    """A context in which autocast does not cast bfloat16 operands to another dtype.

    Under the usual bfloat16 autocast it does nothing: that leaves bfloat16 as it is, and switching autocast off at
    every call would cost 1% of a small layer.
    """
    if (
        torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) != torch.bfloat16
    ):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class Operand(Protocol):
    """A matrix [r, c] ready for a GEMM, with the inverse of the scale that it was cast under.

    Products are bfloat16, and each output is rounded once. A weight gradient may also leave in the float32 that the
    GEMM adds up in. The other operand has to be of the same class.
    """

    def nt(self, other: Any, bias: Tensor | None = None) -> Tensor:
        """self [m, k] times other^T [k, n], plus bias [n] of any float dtype.

        FP8 units use fast accumulation here, as in Transformer Engine's forward.
        """
        ...

    def nn(self, other: Any) -> Tensor:
        """self [m, n] times other [n, k]."""
        ...

    def tn(self, other: Any, wide: bool = False) -> Tensor:
        """self^T [n, m] times other [m, k]. wide: in float32; of operands without FP8, still rounded to bfloat16."""
        ...

    def kept(self) -> tuple[tuple[Tensor | None, ...], Callable[..., Operand]]:
        """The tensors that autograd saves for backward, and a function that rebuilds the operand from them.

        They are what `nn` and `tn` need of it as the right operand.
        """
        ...


@dataclass(frozen=True, slots=True)
class Carrier:
    """FP8 values held in bfloat16, which represents each of them exactly.

    inverse: of the scale; None: the values are plain bfloat16, not FP8, and have no scale.
    """

    values: Tensor
    inverse: float | None = None

    def nt(self, other: Any, bias: Tensor | None = None) -> Tensor:
        return _product(self.values, other.values.t(), self.inverse, other.inverse, bias)

    def nn(self, other: Any) -> Tensor:
        return _product(self.values, other.values, self.inverse, other.inverse)

    def tn(self, other: Any, wide: bool = False) -> Tensor:
        left, right = self.values.t(), other.values
        if not wide:
            return _product(left, right, self.inverse, other.inverse)
        if self.inverse is None:
            return _product(left, right, None, None).float()
        # Autocast would take the operands for bfloat16.
        with torch.autocast(left.device.type, enabled=False):
            return _product(left.float(), right.float(), self.inverse, other.inverse)

    def kept(self) -> tuple[tuple[Tensor, ...], Callable[..., Carrier]]:
        return (self.values,), partial(Carrier, inverse=self.inverse)


@dataclass(frozen=True, slots=True)
class Fp8Pair:
    """FP8 bytes of a matrix [r, c] in both layouts; a layout that no product needs is None.

    rows: the matrix, [r, c].
    columns: its transpose, [c, r], where zeros pad r to a multiple of 16.
    inverse: of the scale, float32 [1], its address a multiple of ALIGNMENT bytes.

    FP8 GEMMs on Hopper and Ada take both operands with the common dimension last. `nt` therefore reads the rows of
    both, `tn` the columns of both, and `nn` the rows of the left and the columns of the right one. Zeros that pad the
    common dimension change no sum.
    """

    rows: Tensor | None
    columns: Tensor | None
    inverse: Tensor

    def nt(self, other: Any, bias: Tensor | None = None) -> Tensor:
        return _scaled_mm(self.rows, other.rows, self.inverse, other.inverse, bias, fast=True)

    def nn(self, other: Any) -> Tensor:
        return _scaled_mm(self.rows, other.columns, self.inverse, other.inverse)

    def tn(self, other: Any, wide: bool = False) -> Tensor:
        dtype = gradient_dtype(wide)
        return _scaled_mm(self.columns, other.columns, self.inverse, other.inverse, dtype=dtype)

    def kept(self) -> tuple[tuple[Tensor | None, Tensor], Callable[..., Fp8Pair]]:
        return (self.columns, self.inverse), partial(Fp8Pair, None)


def plain_operand(x: Tensor) -> Carrier:
    """`x` [r, c] of any float dtype as a bfloat16 operand without FP8."""
    return Carrier(x.detach().to(torch.bfloat16).contiguous())


def gradient_dtype(wide: bool) -> torch.dtype:
    """The dtype of a weight's gradient, as `Operand.tn` returns it."""
    return torch.float32 if wide else torch.bfloat16


def padded(rows: int) -> int:
    """`rows` rounded up to a multiple of 16."""
    return -(-rows // MULTIPLE) * MULTIPLE


def _product(
    left: Tensor,
    right: Tensor,
    left_inverse: float | None,
    right_inverse: float | None,
    bias: Tensor | None = None,
) -> Tensor:
    """left right / (both scales) + bias in their dtype, for carriers.

    The inverse scales go into the GEMM's alpha. Multiplying its bfloat16 output by them would round twice.
    """
    scale = 1.0
    if left_inverse is not None and right_inverse is not None:
        scale = left_inverse * right_inverse
        if not _FLT_MIN <= scale <= _FLT_MAX:
            # Alpha is a float32, which cannot hold this number. The scaled product may still be a normal one.
            wide = left.double() @ right.double() * left_inverse * right_inverse
            if bias is not None:
                wide = wide + bias.detach().to(torch.bfloat16)
            return wide.to(left.dtype)
    if bias is not None:
        return torch.addmm(bias.detach().to(torch.bfloat16), left, right, alpha=scale)
    # addmm is the product with an alpha. beta=0 ignores what it would add.
    return torch.addmm(_ignored_bias(left.device, left.dtype), left, right, beta=0, alpha=scale)


@cache
def _ignored_bias(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.zeros(1, dtype=dtype, device=device)


def _scaled_mm(
    left: Tensor | None,
    right: Tensor | None,
    left_inverse: Tensor,
    right_inverse: Tensor,
    bias: Tensor | None = None,
    fast: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """left [m, k] times right^T [k, n] on FP8 units. Both are row-major, the layouts that cuBLASLt takes.

    dtype: of the result.
    """
    assert left is not None
    assert right is not None
    # On a CPU `_scaled_mm` decomposes into operations that autocast would cast to bfloat16.
    alone = nullcontext()
    if left.device.type == "cpu":
        alone = torch.autocast("cpu", enabled=False)
    if bias is not None:
        bias = bias.detach().to(torch.bfloat16)
    with alone:
        return torch._scaled_mm(
            left,
            right.t(),
            scale_a=left_inverse,
            scale_b=right_inverse,
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
