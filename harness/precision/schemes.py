"""The scales that each way of scaling gives one tensor, and what a cast under them loses. Pure functions.

    delayed      one scale for the tensor, from earlier steps        format of the recipe
    current      one scale for the tensor, from its own amax         format of the recipe
    block        one for 1 x 128 values, of weights for 128 x 128    E4M3
    mxfp8        one for 32 values of a row, as on Blackwell         E4M3
    mxfp8_ocp    the same blocks, with the scale that OCP suggests   E4M3

`scaling.quantize` casts under every one of them. Here are only the scales, as factors: q = round(x * scale).

Sources:
- current, block: Transformer Engine 2.20, Float8CurrentScaling and Float8BlockScaling; the rule is
  compute_scale_from_amax in transformer_engine/common/recipe/recipe_common.cuh. A block's scale is rounded down to
  a power of two, unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1. The blocks are those of DeepSeek-V3 (arXiv 2412.19437),
  whose scales are no powers of two.
- mxfp8: Transformer Engine 2.20, MXFP8BlockScaling. The stored scale is amax / 448, rounded up to a power of two, so
  nothing is clipped (arXiv 2506.08027).
- mxfp8_ocp: OCP Microscaling Formats (MX) Specification 1.0, section 6.3. The stored scale is the largest power of two
  in amax, over the largest in the format (2^8). Values over 1.75 times a power of two are clipped. torchao's MX formats
  do this by default.

Block scaling and MX quantise a tensor twice, because a GEMM needs its blocks along the dimension that it sums over. The
figures are of the blocks along rows: input and weight of the forward GEMM, grad_output of the input gradient's. The
blocks along columns, for the other GEMMs, are not measured. Weights in blocks of 128 x 128 are the same both ways.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.core.facts import ROLES
from harness.precision import scaling
from harness.precision.scaling import E4M3, FORMATS

SCHEMES = ("delayed", "current", "block", "mxfp8", "mxfp8_ocp")
"""Every way of scaling that is compared. The first is the one in use."""

BLOCK = 128
MX_BLOCK = 32
_MX_LARGEST_POWER = 8
"""Exponent of the largest power of two in E4M3, 256."""
_BIAS = 127
_MANTISSA_BITS = 23
_FLT_MAX = torch.finfo(torch.float32).max


def format_of(scheme: str, recipe_format: str) -> str:
    """The format of a slot under `scheme`: block scaling and MX use E4M3 for every role."""
    if scheme in ("delayed", "current"):
        return recipe_format
    return E4M3.name


def scale_of(scheme: str, x: Tensor, role: str, recipe_format: str, in_use: Tensor) -> Tensor:
    """The scale of every value of x under `scheme`: float32, 0-d or [r, c].

    x: [r, c], float32 or bfloat16.
    role: "input", "weight" or "grad_output".
    recipe_format: "e4m3" or "e5m2", of delayed and current scaling.
    in_use: float32 0-d, the scale that delayed scaling casts with.

    A tensor or block whose amax is 0 or infinite has the scale 1, as in Transformer Engine. NaN is no amax. The last
    block of a row or column may be smaller than the others. Transformer Engine refuses such sizes.

    Raises ValueError on an unknown scheme.
    """
    if scheme == "delayed":
        return in_use
    if scheme == "current":
        fmt = FORMATS[recipe_format]
        return _fitting(scaling.amax(x), fmt.max)
    if scheme == "block":
        height = BLOCK if role == "weight" else 1
        amax = _block_amax(x, height, BLOCK)
        # A scale of the next power of two would take the amax over the format's maximum.
        scale = _power_below(_fitting(amax, E4M3.max))
        return _expanded(scale, x, height, BLOCK)
    if scheme not in ("mxfp8", "mxfp8_ocp"):
        known = ", ".join(SCHEMES)
        raise ValueError(f"scheme must be one of {known}, got {scheme!r}")

    # frexp gives the amax as m * 2^e with m in [0.5, 1): its largest power of two is 2^(e - 1).
    largest = _block_amax(x, 1, MX_BLOCK)
    if scheme == "mxfp8":
        # Rounded up to a power of two, 2^exponent. A mantissa of 0.5 is a power of two already: 2^(exponent - 1).
        mantissa, exponent = torch.frexp(largest * (1 / E4M3.max))
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    else:
        exponent = torch.frexp(largest).exponent - 1 - _MX_LARGEST_POWER
    # The stored scale is E8M0, whose smallest value is 2^-127; values are multiplied by its inverse.
    scale = _power_of_two(-exponent.clamp_min(-_BIAS))
    scale = _usable(scale, largest)
    return _expanded(scale, x, 1, MX_BLOCK)


def cast_sums(scheme: str, x: Tensor, slot: int, recipe_format: str, in_use: Tensor) -> Tensor:
    """What a cast of x under `scheme` loses, as sums that `scaling.shares` reads: float64 [scaling.SUMS].

    Arguments as of `scale_of`; slot: number of the slot, which says its role.

    Of a tensor with more than `scaling.LARGEST` values, evenly spread rows stand for all (of weights, bands of 128).
    The two sums over channels are 0. Sums of several tensors may be added.
    """
    role = ROLES[slot % len(ROLES)]
    band = BLOCK if role == "weight" else 1
    rows = _spread_rows(x, band)
    # One scale for the tensor comes from all of it. A block's comes from the block alone.
    scaled_by = x if scheme == "current" else rows
    scale = scale_of(scheme, scaled_by, role, recipe_format, in_use)

    fmt = format_of(scheme, recipe_format)
    quantized = scaling.quantize(rows, scale, fmt)
    of_rows = scaling.quantization_stats(rows, quantized, scale, fmt)
    sums = scaling.summed(of_rows, scaling.by_rows(slot))
    return F.pad(sums, (0, scaling.CHANNEL_SUMS))


def _fitting(amax: Tensor, largest: float) -> Tensor:
    """The scale that puts `amax` on the format's largest value, of the shape of `amax`."""
    scale = torch.full_like(amax, largest) / amax
    return _usable(scale.clamp_max(_FLT_MAX), amax)


def _usable(scale: Tensor, amax: Tensor) -> Tensor:
    """1 where there is no amax to fit."""
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def _power_below(scale: Tensor) -> Tensor:
    """The largest power of two that is not over `scale`, which is positive and finite."""
    return _power_of_two(torch.frexp(scale).exponent - 1)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent for normal float32 numbers, made of bits: a library's power function may be one bit off."""
    return ((exponent + _BIAS) << _MANTISSA_BITS).view(torch.float32)


def _block_amax(x: Tensor, height: int, width: int) -> Tensor:
    """max|x| of every block, float32 [blocks of rows, blocks of columns]. NaN is ignored, Inf is kept."""
    rows, columns = x.shape
    magnitudes = x.detach().abs().float()
    sizes = torch.nan_to_num(magnitudes, nan=0.0, posinf=torch.inf)
    # Zeros fill the last block of a row and of a column up.
    sizes = F.pad(sizes, (0, -columns % width, 0, -rows % height))
    down = sizes.shape[0] // height
    across = sizes.shape[1] // width
    blocks = sizes.reshape(down, height, across, width)
    return blocks.amax(dim=(1, 3))


def _expanded(blocks: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    """The figure of its block for every value of x."""
    rows, columns = x.shape
    tall = blocks.repeat_interleave(height, dim=0)[:rows]
    return tall.repeat_interleave(width, dim=1)[:, :columns]


def _spread_rows(x: Tensor, band: int) -> Tensor:
    """At most about `scaling.LARGEST` values of x [r, c]: whole bands of `band` rows, evenly spread."""
    band_size = band * x.shape[1]
    count = max(1, scaling.LARGEST // band_size)
    bands = -(-len(x) // band)
    if bands <= count:
        return x
    step = bands // count * band
    first = torch.arange(count, device=x.device) * step
    within = torch.arange(band, device=x.device)
    places = (first[:, None] + within).flatten()
    # The last band may be cut short by the end of x.
    inside = places < len(x)
    return x[places[inside]]
