"""What an outlier does to everything else: seen where whole-tensor SQNR and underflow do not see it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fp8_oracle import quantize
from torch import Tensor

from harness.core.config import FallbackConfig
from harness.core.facts import ROLES
from harness.precision import scaling
from harness.precision.backends.slot_buffers import SlotBuffers
from harness.precision.recipe import Fp8Config
from harness.precision.scaling import SampledStats

POLICY = FallbackConfig()


def measured(x: Tensor, fmt: str = "e4m3") -> tuple[float, float, float]:
    """Underflow, SQNR and even SQNR under the scale that fits."""
    stats = SampledStats([fmt], torch.device("cpu"))
    stats.begin(sample=True)
    stats.add(0, x, torch.tensor(scaling.FORMATS[fmt].max) / x.abs().max())
    _, underflow, whole, even, _ = stats.rows(lambda values: values)[:, 0].tolist()
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
    assert stats.rows(lambda values: values)[3, 0].item() == pytest.approx(
        -10 * np.log10(lost.mean()), rel=1e-5
    )


def gradient(x: Tensor) -> tuple[float, float]:
    """Underflow and even SQNR of `x` as the gradient of the first layer."""
    stats = SampledStats(["e4m3", "e4m3", "e5m2"], torch.device("cpu"))
    stats.begin(sample=True)
    stats.add(2, x, torch.tensor(scaling.FORMATS["e5m2"].max) / x.abs().max())
    _, underflow, _, even, _ = stats.rows(lambda values: values)[:, 2].tolist()
    return underflow, even


def test_each_row_of_a_gradient_weighs_alike() -> None:
    x = gaussian(32, 16) * torch.exp2(6 * gaussian(32, 1))
    x[3], x[4, 2:] = 0.0, 0.0
    x[5, :2] = torch.tensor([math.nan, math.inf])
    finite = torch.where(x.isfinite(), x, 0.0)
    scale = scaling.FORMATS["e5m2"].max / 2.0**8
    stats = SampledStats(["e4m3", "e4m3", "e5m2"], torch.device("cpu"))
    stats.begin(sample=True)
    stats.add(2, x, torch.tensor(scale))
    exact = finite.numpy().astype(np.float64)
    error = quantize(finite.numpy(), scale, "e5m2").astype(np.float64) / scale - exact
    live = (exact != 0).sum(axis=1)
    some = live > 0
    lost = np.minimum(1, (error[some] ** 2).sum(axis=1) / (exact[some] ** 2).sum(axis=1))
    expected = -10 * np.log10((live[some] * lost).sum() / live.sum())
    assert stats.rows(lambda values: values)[3, 2].item() == pytest.approx(expected, rel=1e-5)


def test_a_sample_that_drowns_the_others_is_seen_in_a_gradient() -> None:
    x = gaussian() * torch.exp2(gaussian().roll(3))
    x[:32] *= 2.0**30
    underflow, even = gradient(x)
    assert underflow < POLICY.underflow_grad_output, "which is not enough to see it"
    assert even < POLICY.even_db_grad_output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(64, 48), (40, 3000), (9, 9000), (8, 1)]
)  # under and over what is summed at once
def test_the_fused_kernel_of_a_cpu_tells_the_same_of_a_gradient(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    names = [f"layer.{role}" for role in ROLES]
    buffers = SlotBuffers(names, ["e4m3", "e4m3", "e5m2"], Fp8Config(), torch.device("cpu"))
    assert buffers.kernel is not None, buffers.kernel_note
    x = gaussian(*shape).to(dtype)
    x[:8] *= 2.0**30
    x[0, 0], x[-1] = math.nan, 0.0
    buffers.begin_window(sample=True)
    buffers.quantize(x, 2, record=True)
    buffers.quantize(x, 2, record=True)  # a second micro-batch
    stats = SampledStats(["e4m3", "e4m3", "e5m2"], torch.device("cpu"))
    stats.begin(sample=True)
    stats.add(2, x, torch.tensor(1.0))
    torch.testing.assert_close(buffers.sums[2, :6], 2 * stats.sums[2, :6], rtol=1e-12, atol=0.0)
    assert buffers.sums[2, 5] > 0


def test_columns_that_vanish_take_no_row_of_a_gradient() -> None:
    """As of queries and keys where attention is saturated: two thirds of the values, in healthy runs."""
    x = gaussian(256, 192)
    x[:, :128] *= 2.0**-34
    underflow, even = gradient(x)
    assert underflow > 0.6
    assert even > POLICY.even_db_grad_output + 10


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
