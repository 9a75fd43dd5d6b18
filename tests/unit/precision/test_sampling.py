"""Statistics of casts that a library makes: the same as of our own casts, on a bounded part of large tensors."""

from __future__ import annotations

import pytest
import torch
from fp8_oracle import quantize
from torch import Tensor

from harness.precision import scaling
from harness.precision.scaling import LARGEST, SampledStats

CPU = torch.device("cpu")


def same(values: Tensor) -> Tensor:
    return values


def measured(fmt: str, x: Tensor, scale: Tensor | None = None, by_row: bool = False) -> list[float]:
    """Clipped share, underflow and SQNR."""
    stats = SampledStats([fmt], CPU, by_row)
    stats.begin(sample=True)
    stats.add(0, x, scale)
    return stats.rows(same)[:3, 0].tolist()


def hot(rows: int = 64) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(rows, 32)
    x[:, 3] = 2.0**20
    return x


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 100.0])
def test_a_given_scale_is_used(fmt: str, scale: float) -> None:
    x = hot()
    clipped, underflow, decibels = measured(fmt, x, torch.tensor(scale))
    quantized = torch.from_numpy(quantize(x.numpy(), scale, fmt)).double()
    assert clipped == pytest.approx(
        (x * scale).abs().gt(scaling.FORMATS[fmt].max).double().mean().item()
    )
    assert underflow == pytest.approx((quantized == 0).double().mean().item())
    noise = (quantized / scale - x.double()).square().sum()
    assert decibels == pytest.approx(
        10 * torch.log10(x.double().square().sum() / noise).item(), rel=1e-5
    )


def test_a_dynamic_scale_is_the_tensors_own_or_the_rows() -> None:
    x = torch.cat([hot(32)[:, :3], 2.0**30 * torch.ones(32, 1)], dim=1)
    x[16:, 3] = 1.0
    _, whole, _ = measured("e4m3", x)
    _, by_row, _ = measured("e4m3", x, by_row=True)
    assert whole == pytest.approx(112 / 128), "one column of 16 rows is all that is left"
    assert by_row == pytest.approx(48 / 128), "the rows without an outlier keep their values"


def test_only_sampled_windows_are_measured() -> None:
    stats = SampledStats(["e4m3"], CPU)
    stats.begin(sample=False)
    stats.add(0, hot())
    assert stats.rows(same).isnan().all()
    stats.begin(sample=True)
    stats.add(0, hot())
    assert stats.rows(same).isfinite().all()
    stats.begin(sample=True)
    assert stats.rows(same).isnan().all(), "the window before is forgotten"


def test_zeros_and_empty_tensors_are_no_samples_and_harm_none() -> None:
    for by_row in (False, True):
        stats = SampledStats(["e4m3"], CPU, by_row)
        stats.begin(sample=True)
        stats.add(0, torch.zeros(4, 8))
        stats.add(0, torch.zeros(0, 8))
        assert stats.rows(same).isnan().all()
        x = hot()
        x[5] = 0.0
        stats.add(0, x)
        assert stats.rows(same).isfinite().all()


def test_large_tensors_are_looked_at_in_part_but_in_all_channels() -> None:
    rows = 3 * LARGEST // 32
    x = torch.ones(rows, 32)
    x[:, 3] = 2.0**20
    stats = SampledStats(["e4m3"], CPU)
    stats.begin(sample=True)
    stats.add(0, x)
    assert 0 < stats.sums[0, 1] <= LARGEST
    assert stats.rows(same)[1, 0] == pytest.approx(31 / 32)
