"""Health of gradients and weights in one fused pass, left on the device: norms, exact zeros, values near fp16's limit.

Nothing here reads a value on the host. The norm is measured at every step and costs about one read of the gradients'
memory; the two shares cost several, and are for the steps that ask for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

# On CPU a sum of many squares in fp32 loses accuracy (-0.27% at 38M elements); rows of this many are good to 1e-7, and
# one reduction over rows takes three quarters of the time of one over pieces.
_ROW = 1024
# Up to here a tensor is not worth a call of its own.
_SMALL = 1 << 14
# The shares are estimated from about this many elements of each tensor, in evenly spread first-dim slices: all of them
# would cost ten times the norm, and masks as large as the largest gradient.
_SAMPLE = 1 << 16
# Half of fp16's largest value: the next doubling of the loss scale overflows.
_NEAR_LIMIT = 65504.0 / 2


class GradHealth(NamedTuple):
    """What `grad_health` measures, all fp32 0-d on the gradients' device.

    norm: L2 norm of the gradients as they are. zeros, near_limit: shares in [0, 1], NaN where not measured.
    """

    norm: Tensor
    zeros: Tensor
    near_limit: Tensor


@torch.no_grad()
def grad_health(params: Iterable[nn.Parameter], scaled: bool) -> GradHealth:
    """The norm and, if `scaled`, what a loss scale is there to prevent. Parameters without a gradient are ignored.

    scaled: the gradients are still multiplied by a loss scale, and the two shares are wanted. Under fp16 autocast the
    gradients of fp32 parameters are fp32, but were rounded to fp16 on their way: what fell under its smallest value
    (6e-8) is an exact 0.

    zeros: share of elements that are exactly 0, of those in rows (first-dim slices) and columns with at least one
    other value. Empty ones had no input: words that the batch does not have, units that are masked or inactive. A
    tensor without any other value is counted in full: no gradient reaches it. near_limit: share of elements over half
    of fp16's largest value. Both are 0 / 0 = NaN without a gradient; large tensors are sampled.
    """
    gradients = [param.grad for param in params if param.grad is not None and param.grad.numel()]
    norm = l2_norm(gradients)
    if not scaled or not gradients:
        unknown = torch.full_like(norm, math.nan)
        return GradHealth(norm, unknown, unknown)
    counts = torch.stack([_counts(gradient).to(norm.device) for gradient in gradients]).sum(0)
    zeros, inside, near, elements = counts.unbind()
    return GradHealth(norm, (zeros / inside).float(), (near / elements).float())


@torch.no_grad()
def grad_norm(params: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm of the gradients, see `l2_norm`. Parameters without a gradient are ignored."""
    return l2_norm([param.grad for param in params if param.grad is not None])


@torch.no_grad()
def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of all elements: fp32, 0-d, on the first tensor's device; relative error below 1e-6.

    Without a tensor it is 0 on the CPU. Non-finite if any element is, and if the squares of 1024 elements (CUDA: of
    one tensor) overflow fp32 (elements beyond 1e17). No host read.
    """
    norms = [torch.linalg.vector_norm(torch.cat(_norms(group)).double()) for group in by_device_and_dtype(tensors)]
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])).float()


def by_device_and_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups that one fused operation can take."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _norms(group: list[Tensor]) -> list[Tensor]:
    """Norms of pieces that make up the tensors of one device and dtype; each 1-d, fp32 or fp64."""
    if group[0].device.type != "cpu":
        return [torch.stack(torch._foreach_norm(group, 2, dtype=torch.float32))]
    norms: list[Tensor] = []
    small: list[Tensor] = []
    for tensor in group:
        if tensor.numel() <= _SMALL:
            small.append(tensor)
            continue
        flat = tensor.reshape(-1)
        whole = flat.numel() - flat.numel() % _ROW
        # bf16 and fp16 are cast to fp32 first: part by part the copy stays in the cache.
        parts = flat[:whole].view(-1, _ROW).split(_ROW)
        norms += [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts]
        if whole < flat.numel():
            small.append(flat[whole:])
    if small:
        # bf16 and fp16 squares lose 2e-6 in fp32 even at this size.
        kind = torch.float32 if group[0].dtype == torch.float32 else torch.float64
        norms.append(torch.stack(torch._foreach_norm(small, 2, dtype=kind)))
    return norms


def _counts(gradient: Tensor) -> Tensor:
    """float64 [4]: zeros, elements they are a share of, elements near the limit, elements; see `grad_health`."""
    gradient = gradient.reshape(1) if gradient.ndim == 0 else gradient
    slices = gradient.shape[0]
    step = max(1, min(slices, gradient.numel() // _SAMPLE))
    sample = gradient[::step].float()
    # A vector is one row: each of its zeros is an empty column.
    sample = sample.reshape(sample.shape[0], -1) if sample.ndim > 1 else sample.reshape(1, -1)
    # As 0.0 and 1.0: on CPU comparisons into bools, and sums of bools, take five times as long.
    other = torch.ne(sample, 0.0, out=torch.empty_like(sample))
    in_rows = other.sum(1, dtype=torch.float64)
    inside = in_rows.count_nonzero() * other.sum(0).count_nonzero().double()
    inside = torch.where(inside == 0, float(sample.numel()), inside)
    near = torch.gt(sample.abs(), _NEAR_LIMIT, out=other).sum(dtype=torch.float64)
    elements = torch.full_like(inside, sample.numel())
    return torch.stack([inside - in_rows.sum(), inside, near, elements]) * step
