"""Scales of other schemes, and what casts under them lose: against loops over tables of FP8 values, and torchao."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fp8_oracle import quantize
from torch import Tensor

from harness.core.facts import ROLES
from harness.precision import scaling
from harness.precision.schemes import SCHEMES, cast_sums, format_of, scale_of

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
IN_USE = torch.tensor(37.5)


def wide(rows: int, columns: int) -> Tensor:
    """Values over 30 binades, some zeros, and one outlier."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    sizes = torch.exp2(torch.rand(rows, columns, generator=generator) * 30 - 20)
    x = sizes * torch.randn(rows, columns, generator=generator)
    x[0, 0] = 5e4
    x[-1, -1] = 0.0
    return x


def oracle_scale(scheme: str, block: np.ndarray, fmt: str) -> float:
    """The scale of one block, by Python's own floats."""
    finite = np.where(np.isnan(block), 0.0, np.abs(block))
    amax = np.float32(finite.max(initial=0.0))
    if amax == 0 or math.isinf(amax):
        return 1.0
    if scheme == "current":
        return float(np.float32(LARGEST[fmt]) / amax)
    if scheme == "block":
        return 2.0 ** math.floor(math.log2(float(np.float32(448) / amax)))
    if scheme == "mxfp8":
        ratio = float(amax * np.float32(1 / 448))
        return 2.0 ** -math.ceil(math.log2(ratio))
    return 2.0 ** -(math.floor(math.log2(float(amax))) - 8)


def oracle_cast(scheme: str, x: np.ndarray, role: str, fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """Scale and FP8 value of every element, block by block."""
    height, width = {
        "current": x.shape,
        "block": (128, 128) if role == "weight" else (1, 128),
    }.get(scheme, (1, 32))
    scales, values = np.zeros(x.shape), np.zeros(x.shape)
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], width):
            part = np.s_[top : top + height, left : left + width]
            scales[part] = oracle_scale(scheme, x[part], fmt)
            values[part] = quantize(x[part], float(scales[part].flat[0]), fmt)
    return scales, values


def figures(scheme: str, x: Tensor, slot: int, fmt: str = "e4m3") -> list[float]:
    """Clipped, underflow, SQNR, per-element SQNR."""
    sums = cast_sums(scheme, x, slot, fmt, IN_USE)
    return scaling.shares(sums[None])[:4, 0].tolist()


@pytest.mark.parametrize("shape", [(7, 50), (1, 1), (2, 257), (130, 33)])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_scales_and_values(scheme: str, role: str, shape: tuple[int, int]) -> None:
    x = wide(*shape)
    if role != "weight":
        x = x.to(torch.bfloat16)
    recipe_format = "e5m2" if role == "grad_output" else "e4m3"
    fmt = format_of(scheme, recipe_format)
    assert fmt == (recipe_format if scheme == "current" else "e4m3")
    scales, values = oracle_cast(scheme, x.float().numpy(), role, fmt)
    scale = scale_of(scheme, x, role, recipe_format, IN_USE)
    assert np.array_equal(scale.expand(x.shape).numpy(), scales)
    assert np.array_equal(scaling.quantize(x, scale, fmt).float().numpy(), values)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_figures(scheme: str, role: str) -> None:
    x = wide(6, 300)
    recipe_format = "e5m2" if role == "grad_output" else "e4m3"
    fmt = format_of(scheme, recipe_format)
    exact = x.double().numpy()
    if scheme == "delayed":
        scales = np.full(exact.shape, IN_USE.item())
        values = quantize(x.numpy(), IN_USE.item(), fmt)
    else:
        scales, values = oracle_cast(scheme, x.numpy(), role, fmt)
    error = exact - values / scales
    used = exact != 0
    clipped, underflow, sqnr, even = figures(scheme, x, ROLES.index(role), recipe_format)
    products = np.abs(x.numpy() * scales.astype(np.float32))
    assert clipped == pytest.approx((products > LARGEST[fmt]).sum() / used.sum())
    assert underflow == pytest.approx((used & (values == 0)).sum() / used.sum())
    assert sqnr == pytest.approx(10 * math.log10((exact**2).sum() / (error**2).sum()), abs=1e-3)
    lost = np.minimum(1, error[used] ** 2 / exact[used] ** 2).mean()
    if role == "grad_output":
        by_row = np.minimum(1, (error**2).sum(axis=1) / (exact**2).sum(axis=1))
        lost = (by_row * used.sum(axis=1)).sum() / used.sum()
    assert even == pytest.approx(-10 * math.log10(lost), abs=1e-3)


@pytest.mark.slow  # torchao's import
def test_mx_blocks_are_torchaos() -> None:
    formats = pytest.importorskip("torchao.prototype.mx_formats")
    to_mx = formats.mx_tensor.to_mx
    modes = formats.config.ScaleCalculationMode
    for scheme, mode in (("mxfp8", modes.RCEIL), ("mxfp8_ocp", modes.FLOOR)):
        for x in (wide(16, 96), wide(16, 96) * 1e-28, torch.full((2, 32), 448.0)):
            stored, values = to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=mode)
            scale = scale_of(scheme, x, "input", "e4m3", IN_USE)
            assert torch.equal(scaling.quantize(x, scale, "e4m3").float(), values.float())
            assert torch.equal(1 / scale[:, ::32], stored.float().reshape(scale[:, ::32].shape))


def test_the_largest_value_fits_but_under_ocps_rule() -> None:
    # 1.9 * 2^k: the stored scale of OCP's rule maps it to 486, over 448.
    x = torch.full((1, 32), 1.9 * 2.0**11)
    assert [figures(scheme, x, 0)[0] for scheme in SCHEMES[1:]] == [0, 0, 0, 1]
    # Under it nothing that ends at 1.75 * 2^k is clipped.
    assert figures("mxfp8_ocp", torch.full((1, 32), 1.75 * 2.0**11), 0)[0] == 0


def test_one_outlier_costs_only_its_own_block() -> None:
    x = torch.full((4, 512), 1e-3)
    x[:, 5] = 1e4
    lost = {scheme: figures(scheme, x, 0)[1] for scheme in SCHEMES[1:]}
    values = x.numel()
    assert lost["current"] == pytest.approx((values - 4) / values)
    assert lost["block"] == pytest.approx(4 * 127 / values)
    assert lost["mxfp8"] == lost["mxfp8_ocp"] == pytest.approx(4 * 31 / values)


def test_powers_of_two_are_exact_in_blocks() -> None:
    # 2^0 to 2^14 in each block: E4M3 has them all, from 2^8 down to 2^-6.
    x = torch.exp2(torch.arange(256) % 15).repeat(3, 1)
    for scheme in ("block", "mxfp8", "mxfp8_ocp"):
        sums = cast_sums(scheme, x, 0, "e4m3", IN_USE)
        assert sums[[0, 2, 4, 5]].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_infinities_and_nan(scheme: str) -> None:
    assert cast_sums(scheme, torch.zeros(2, 130), 0, "e4m3", IN_USE).tolist() == [0] * scaling.SUMS

    # NaN is in no figure, and no amax.
    x = torch.ones(2, 256)
    clean = cast_sums(scheme, x, 0, "e4m3", IN_USE)
    x[0, 3] = torch.nan
    with_nan = cast_sums(scheme, x, 0, "e4m3", IN_USE)
    assert with_nan[1] == clean[1] - 1
    assert with_nan[2] == clean[2] == 0
    assert torch.isfinite(with_nan).all()

    # An infinity is clipped, and its block (of the delayed scheme: nothing) has the scale 1.
    x[0, 3] = torch.inf
    with_inf = cast_sums(scheme, x, 0, "e4m3", IN_USE)
    assert with_inf[0] == 1
    assert torch.isfinite(with_inf).all()
    scale = scale_of(scheme, x, "input", "e4m3", IN_USE).expand(x.shape)
    assert scale[0, 0] == (IN_USE if scheme == "delayed" else 1.0)


def test_the_smallest_and_largest_floats() -> None:
    tiny, huge = torch.full((1, 128), 2.0**-149), torch.full((1, 128), 3e38)
    for x in (tiny, huge):
        for scheme in SCHEMES[1:]:
            scale = scale_of(scheme, x, "input", "e4m3", IN_USE)
            assert torch.isfinite(scale).all()
            assert (scale > 0).all()


def test_a_large_tensor_is_measured_in_whole_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every block of a weight has another size. A row in a block of larger ones would be lost.
    sizes = torch.exp2(torch.arange(8.0) * 12).repeat_interleave(128)[:, None]
    x = torch.randn(1024, 128, generator=torch.Generator().manual_seed(0)) * sizes
    whole = figures("block", x, 1)
    monkeypatch.setattr(scaling, "LARGEST", 3 * 128 * 128)
    some = figures("block", x, 1)
    sums = cast_sums("block", x, 1, "e4m3", IN_USE)
    assert sums[1] == 3 * 128 * 128
    assert some[3] == pytest.approx(whole[3], abs=0.1)

    # A single scale comes from all of the tensor, also from rows that are not measured.
    x[-1, -1] = 2.0**120
    assert figures("current", x, 0)[1] == pytest.approx(1.0, abs=1e-3)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of delayed, current, .*, got 'mx'"):
        scale_of("mx", torch.ones(1, 32), "input", "e4m3", IN_USE)
