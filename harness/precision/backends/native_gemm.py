"""What a GEMM of the native backend multiplies, in two forms: FP8 bytes where the GPU has FP8 units, bfloat16 carriers
elsewhere.

Three products make a Linear, named as in BLAS by what is transposed: `nt` a b^T (forward), `nn` a b (input gradient),
`tn` a^T b (weight gradient).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

_FLT_MIN, _FLT_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
# cuBLASLt's FP8 GEMMs: rows of this many bytes, and each scale at an address that is a multiple of so many.
MULTIPLE = ALIGNMENT = 16


def has_fp8_units(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` runs on FP8 tensor cores there: NVIDIA, compute capability 8.9 or more."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def operands_as_they_are(device_type: str) -> AbstractContextManager[Any]:
    """In here autocast casts no bfloat16 operand.

    Its bfloat16 mode, the usual one, does not anyway: switching that off at every call would cost 1% of a small layer.
    """
    if (
        torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) != torch.bfloat16
    ):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class Operand(Protocol):
    """A matrix [r, c] ready for a GEMM, with the inverse of the scale that it was cast under.

    Products are bfloat16, each output rounded once. The other operand is of the same class. bias: [n], any float
    dtype.
    """

    def nt(self, other: Any, bias: Tensor | None = None) -> Tensor:
        """self [m, k] other^T [k, n] + bias. FP8 units accumulate fast here, as in Transformer Engine's forward."""
        ...

    def nn(self, other: Any) -> Tensor:
        """self [m, n] other [n, k]."""
        ...

    def tn(self, other: Any) -> Tensor:
        """self^T [n, m] other [m, k]."""
        ...

    def kept(self) -> tuple[tuple[Tensor | None, ...], Callable[..., Operand]]:
        """What `nn` and `tn` need of it as the right operand, for autograd's saved tensors, and what makes it again."""
        ...


@dataclass(frozen=True, slots=True)
class Carrier:
    """Raw FP8 values in bfloat16, which holds each of them exactly; inverse None: plain bfloat16, no FP8 at all.

    The scales go into the GEMM's alpha: scaling its bfloat16 output would round twice.
    """

    values: Tensor
    inverse: float | None = None

    def nt(self, other: Any, bias: Tensor | None = None) -> Tensor:
        return _product(self.values, other.values.t(), self.inverse, other.inverse, bias)

    def nn(self, other: Any) -> Tensor:
        return _product(self.values, other.values, self.inverse, other.inverse)

    def tn(self, other: Any) -> Tensor:
        return _product(self.values.t(), other.values, self.inverse, other.inverse)

    def kept(self) -> tuple[tuple[Tensor, ...], Callable[..., Carrier]]:
        return (self.values,), partial(Carrier, inverse=self.inverse)


@dataclass(frozen=True, slots=True)
class Fp8Pair:
    """FP8 bytes [r, c], and transposed [c, r filled with zeros to a multiple of 16]; either may be left out.

    FP8 GEMMs of Hopper and Ada take both operands with the common dimension last, so that each product wants one of
    the two. A zero more in the common dimension changes no sum. inverse: float32 [1], its address a multiple of
    ALIGNMENT bytes.
    """

    rows: Tensor | None
    columns: Tensor | None
    inverse: Tensor

    def nt(self, other: Any, bias: Tensor | None = None) -> Tensor:
        return _scaled_mm(self.rows, other.rows, self.inverse, other.inverse, bias, fast=True)

    def nn(self, other: Any) -> Tensor:
        return _scaled_mm(self.rows, other.columns, self.inverse, other.inverse)

    def tn(self, other: Any) -> Tensor:
        return _scaled_mm(self.columns, other.columns, self.inverse, other.inverse)

    def kept(self) -> tuple[tuple[Tensor | None, Tensor], Callable[..., Fp8Pair]]:
        return (self.columns, self.inverse), partial(Fp8Pair, None)


def plain_operand(x: Tensor) -> Carrier:
    """`x` [r, c] of any float dtype in bfloat16, no FP8."""
    return Carrier(x.detach().to(torch.bfloat16).contiguous())


def padded(rows: int) -> int:
    """The next multiple of 16."""
    return -(-rows // MULTIPLE) * MULTIPLE


def _product(
    left: Tensor,
    right: Tensor,
    left_inverse: float | None,
    right_inverse: float | None,
    bias: Tensor | None = None,
) -> Tensor:
    scale = 1.0
    if left_inverse is not None and right_inverse is not None:
        scale = left_inverse * right_inverse
        if not _FLT_MIN <= scale <= _FLT_MAX:
            # Not a number that alpha could hold, though the product of all three may well be one.
            wide = left.double() @ right.double() * left_inverse * right_inverse
            return (wide if bias is None else wide + bias.detach().to(torch.bfloat16)).to(
                torch.bfloat16
            )
    if bias is not None:
        return torch.addmm(bias.detach().to(torch.bfloat16), left, right, alpha=scale)
    return torch.addmm(_nothing(left.device), left, right, beta=0, alpha=scale)


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.bfloat16, device=device)


def _scaled_mm(
    left: Tensor | None,
    right: Tensor | None,
    left_inverse: Tensor,
    right_inverse: Tensor,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """left [m, k] times right^T [k, n] on FP8 units, both row-major: the layouts that cuBLASLt takes."""
    assert left is not None
    assert right is not None
    # A CPU's is made of operations that autocast would take to bfloat16.
    alone = torch.autocast("cpu", enabled=False) if left.device.type == "cpu" else nullcontext()
    with alone:
        return torch._scaled_mm(
            left,
            right.t(),
            scale_a=left_inverse,
            scale_b=right_inverse,
            bias=None if bias is None else bias.detach().to(torch.bfloat16),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
