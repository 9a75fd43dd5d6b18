"""One GEMM on raw FP8 operands: real FP8 units where the GPU has them, bfloat16 carriers elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.precision.scaling import FORMATS

Inverse = Tensor | float | None
_COMMON_MULTIPLE = 16


def operands_as_they_are(device_type: str) -> AbstractContextManager[Any]:
    """In here autocast casts no bfloat16 operand.

    Its bfloat16 mode, the usual one, does not anyway: switching that off at every call would cost 1% of a small layer.
    """
    if torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) != torch.bfloat16:
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def matmul(
    left: Tensor,
    right: Tensor,
    left_inverse: Inverse,
    right_inverse: Inverse,
    formats: tuple[str, str],
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """(left @ right) * left_inverse * right_inverse (+ bias), bfloat16 [m, n], each output rounded once.

    left: bfloat16 [m, k], right: bfloat16 [k, n], holding raw FP8 values of `formats`. The inverses are 1/scale of the
    operands, both None for plain bfloat16 operands. bias: [n], any float dtype. fast: let FP8 units accumulate with
    less precision, as Transformer Engine does in forward only; without FP8 units it changes nothing.
    """
    if left_inverse is None or right_inverse is None:
        product_scale = 1.0
    elif isinstance(left_inverse, Tensor) and isinstance(right_inverse, Tensor):
        return _scaled_mm(left, right, left_inverse, right_inverse, formats, bias, fast)
    else:
        product_scale = float(left_inverse) * float(right_inverse)
    if bias is not None:
        return torch.addmm(bias.detach().to(torch.bfloat16), left, right, alpha=product_scale)
    # Scaling inside the GEMM rounds once; scaling its bfloat16 output would round twice.
    return torch.addmm(_nothing(left.device), left, right, beta=0, alpha=product_scale)


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.bfloat16, device=device)


def _scaled_mm(
    left: Tensor,
    right: Tensor,
    left_inverse: Tensor,
    right_inverse: Tensor,
    formats: tuple[str, str],
    bias: Tensor | None,
    fast: bool,
) -> Tensor:
    """cuBLASLt's FP8 GEMM: left row-major, right column-major, their common dimension a multiple of 16.

    Casts come before transposes, which then move half the bytes. In the weight gradient the common dimension is the
    number of tokens: zeros fill it up, which changes no sum.
    """
    a = left.to(FORMATS[formats[0]].dtype).contiguous()
    b = right.to(FORMATS[formats[1]].dtype).t().contiguous()
    if missing := -a.shape[1] % _COMMON_MULTIPLE:
        a, b = (F.pad(raw.view(torch.uint8), (0, missing)).view(raw.dtype) for raw in (a, b))
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=left_inverse,
        scale_b=right_inverse,
        bias=None if bias is None else bias.detach().to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
