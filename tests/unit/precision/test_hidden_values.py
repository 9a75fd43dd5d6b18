"""What an outlier does to everything else: seen where whole-tensor SQNR and underflow do not see it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fp8_oracle import quantize
from torch import Tensor

from harness.monitors.evidence import FallbackConfig
from harness.precision import scaling
from harness.precision.scaling import SampledStats

POLICY = FallbackConfig()


def measured(x: Tensor, fmt: str = "e4m3") -> tuple[float, float, float]:
    """Underflow, SQNR and even SQNR under the scale that fits."""
    stats = SampledStats([fmt], torch.device("cpu"))
    stats.begin(sample=True)
    stats.add(0, x, torch.tensor(scaling.FORMATS[fmt].max) / x.abs().max())
    _, underflow, whole, even = stats.rows(lambda values: values)[:, 0].tolist()
    return underflow, whole, even


def gaussian(rows: int = 256, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def one_row() -> Tensor:
    x = gaussian()
    x[7] *= 2.0**15
    return x


def two_modes() -> Tensor:
    """Weights of two sizes, 2^17 apart, none of which is lost altogether."""
    x = 1 + 0.1 * gaussian()
    return torch.where(gaussian(256, 256).roll(1) > 0, x, x * 2.0**17)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_each_value_weighs_alike(fmt: str) -> None:
    x = gaussian(32, 32) * torch.exp2(4 * gaussian(32, 32).roll(5))
    x[0, :3] = torch.tensor([0.0, math.nan, math.inf])
    scale = scaling.FORMATS[fmt].max / 2.0**8  # some are clipped
    stats = SampledStats([fmt], torch.device("cpu"))
    stats.begin(sample=True)
    stats.add(0, x, torch.tensor(scale))
    exact = x.numpy().astype(np.float64)
    told = quantize(x.numpy(), scale, fmt).astype(np.float64) / scale
    live = np.isfinite(exact) & (exact != 0)
    lost = np.minimum(1, ((told[live] - exact[live]) / exact[live]) ** 2)
    assert stats.rows(lambda values: values)[3, 0].item() == pytest.approx(-10 * np.log10(lost.mean()), rel=1e-5)


def test_a_hot_row_does_not_hide_the_others() -> None:
    underflow, whole, even = measured(one_row())
    assert underflow < POLICY.underflow, "which is not enough to see it"
    assert whole > 30, "which is blind to it"
    assert even < POLICY.even_db_input
    assert measured(gaussian())[2] > POLICY.even_db_input + 12, "without it nothing is to be seen"


def test_the_larger_of_two_modes_does_not_hide_the_smaller() -> None:
    underflow, whole, even = measured(two_modes())
    assert underflow < 0.01
    assert whole > 30
    assert even < POLICY.even_db_weight
    assert measured(1 + 0.1 * gaussian())[2] > POLICY.even_db_weight + 8
