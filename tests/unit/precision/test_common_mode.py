"""A tensor that is a constant plus a signal: what FP8 leaves of the signal shows in `centred_db` alone."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from api_support import recipe
from fp8_oracle import quantize
from torch import Tensor, nn

from harness import Precision
from harness.core.config import FallbackConfig
from harness.core.facts import ROLES
from harness.precision import scaling
from harness.precision.backends.slot_buffers import SlotBuffers
from harness.precision.recipe import Fp8Config, load_recipe
from harness.precision.scaling import SampledStats

POLICY = FallbackConfig()
CPU = torch.device("cpu")


def gaussian(rows: int = 256, columns: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def fitting(x: Tensor, fmt: str) -> float:
    """The scale that puts the largest finite value on the format's largest."""
    return float(torch.tensor(scaling.FORMATS[fmt].max) / x[x.isfinite()].abs().max())


def measured(x: Tensor, fmt: str = "e4m3", by_row: bool = False) -> dict[str, float]:
    """Figures of the cast under the scale that fits."""
    stats = SampledStats([fmt], CPU, by_row)
    stats.begin(sample=True)
    stats.add(0, x, None if by_row else torch.tensor(fitting(x, fmt)))
    names = ("clipped", "underflow", "sqnr_db", "even_db", "centred_db")
    return dict(zip(names, stats.rows(lambda values: values)[:, 0].tolist(), strict=True))


def oracle(x: Tensor, scale: float, fmt: str) -> float:
    """The figure's definition in float64, by numpy."""
    finite = np.where(np.isfinite(x.float().numpy()), x.float().numpy(), 0.0).astype(np.float32)
    exact: npt.NDArray[np.float64] = finite.astype(np.float64)
    error = quantize(finite, scale, fmt).astype(np.float64) / scale - exact
    varying, lost = (((each - each.mean(axis=0)) ** 2).sum(axis=0) for each in (exact, error))
    told = varying > 2.0**-16 * (exact**2).sum(axis=0)
    return float(10 * np.log10(varying[told].sum() / lost[told].sum()))


@pytest.mark.parametrize("offset", [0.0, 4.0, 64.0])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_the_figure_is_what_numpy_makes_of_its_definition(fmt: str, offset: float) -> None:
    x = gaussian(180, 40) * torch.exp2(gaussian(1, 40)) + offset * gaussian(1, 40, seed=1)
    x[:3, 0] = torch.tensor([math.nan, math.inf, 0.0])
    stats = SampledStats([fmt], CPU)
    stats.begin(sample=True)
    stats.add(0, x, torch.tensor(fitting(x, fmt)))
    assert stats.rows(lambda sums: sums)[4, 0].item() == pytest.approx(
        oracle(x, fitting(x, fmt), fmt), abs=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 48), (40, 3000), (1000, 7), (5000, 300), (8, 1)])
@pytest.mark.parametrize("slot", [0, 2])
def test_the_fused_kernel_of_a_cpu_tells_the_same(
    slot: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    formats = ["e4m3", "e4m3", "e5m2"]
    buffers = SlotBuffers([f"layer.{role}" for role in ROLES], formats, Fp8Config(), CPU)
    assert buffers.kernel is not None, buffers.kernel_note
    x = (gaussian(*shape) + 20).to(dtype)
    x[1, 0], x[2, 0] = math.nan, math.inf
    buffers.begin_window(sample=True)
    for _ in range(2):  # two micro-batches
        buffers.quantize(x, slot, record=True)
    quantized = scaling.quantize(x, 1.0, formats[slot])
    torch.testing.assert_close(
        buffers.sums[slot, 6:], 2 * scaling.channel_stats(x, quantized, 1.0), rtol=1e-5, atol=0.0
    )
    assert buffers.sums[slot, 7] > 0
    # Without the kernel: the same sums.
    buffers.kernel = None
    kept = buffers.sums[slot].clone()
    buffers.begin_window(sample=True)
    for _ in range(2):
        buffers.quantize(x, slot, record=True)
    torch.testing.assert_close(buffers.sums[slot], kept, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(("fmt", "offset"), [("e4m3", 64.0), ("e4m3", 32.0), ("e5m2", 16.0)])
@pytest.mark.parametrize("by_row", [False, True])
def test_an_offset_does_not_hide_that_the_signal_is_lost(
    fmt: str, offset: float, by_row: bool
) -> None:
    x = gaussian() + offset
    found = measured(x, fmt, by_row)
    assert found["underflow"] == 0
    assert min(found["sqnr_db"], found["even_db"]) > 24, "which are blind to it"
    assert found["centred_db"] < POLICY.centred_db
    assert measured(gaussian(), fmt, by_row)["centred_db"] > 24, "without it nothing is to be seen"


def test_offsets_that_differ_from_channel_to_channel_are_seen_and_those_of_few_channels_are_not() -> (
    None
):
    every = gaussian() + 100 * gaussian(1, 64, seed=3)
    assert measured(every)["centred_db"] < POLICY.centred_db
    few = gaussian()
    few[:, :6] += 64.0
    assert measured(few)["centred_db"] > POLICY.centred_db


def test_a_direction_whose_size_varies_from_row_to_row_counts_as_signal() -> None:
    """The named limit: centring takes the mean away, and no direction that every row has more or less of."""
    x = gaussian() + 64 * torch.sign(gaussian(256, 1, seed=1)) * torch.sign(gaussian(1, 64, seed=2))
    assert measured(x)["centred_db"] > 25


def test_outliers_and_sizes_that_fp8_holds_are_no_common_part() -> None:
    for healthy in (
        gaussian().relu(),
        nn.functional.gelu(gaussian()),
        gaussian().sigmoid(),
        gaussian() + 3,
    ):
        assert measured(healthy)["centred_db"] > 19
    pixels = (torch.rand(256, 64, generator=torch.Generator().manual_seed(0)) * 255).round()
    assert measured(pixels)["centred_db"] > 22
    hot = gaussian()
    hot[:, 5] = (
        1000.0  # a channel that is the same in every row: its error teaches and takes nothing
    )
    assert measured(hot)["centred_db"] > 20


def test_what_does_not_vary_has_no_figure() -> None:
    """Nothing is lost of no signal: a constant, one row, equal rows, and what BF16 does not tell apart either."""
    assert math.isnan(measured(torch.full((64, 32), 3.3))["centred_db"])
    assert math.isnan(measured(gaussian(1, 64))["centred_db"])
    assert math.isnan(measured(gaussian(1, 64).expand(128, 64).contiguous())["centred_db"])
    assert math.isnan(measured(torch.zeros(8, 8) + 1e30)["centred_db"])
    assert math.isnan(measured(gaussian() + 1000.0)["centred_db"])


def test_a_channel_that_is_constant_does_not_hide_the_others() -> None:
    """Nor one that BF16 cannot tell from a constant: each is judged by itself."""
    x = gaussian() + 64.0
    x[:, :4] = 8192.0
    x[:, 4:8] = 8192.0 + gaussian(256, 4, seed=1)
    assert measured(x)["centred_db"] < POLICY.centred_db
    assert measured(x - 64.0)["centred_db"] > 20


def test_of_many_rows_neighbours_are_looked_at() -> None:
    """The first token of every sample is alike: rows that are a multiple of a sample apart must not stand for all."""
    x = gaussian(16 * scaling.CENTRED_ROWS, 16)
    x[::16] = 100.0 + 1e-2 * gaussian(scaling.CENTRED_ROWS, 16, seed=5)
    quantized = scaling.quantize(x, 4.0, "e4m3")
    varying, lost = scaling.channel_stats(x, quantized, 4.0).tolist()
    every = x.double() - x.double().mean(dim=0)
    error = (x.double() - quantized.double() / 4.0).double()
    assert varying == pytest.approx(every.square().sum().item(), rel=0.05)
    assert lost == pytest.approx((error - error.mean(dim=0)).square().sum().item(), rel=0.1)


class Offset(nn.Module):
    """Three Linears. The second sees its input plus `offset`; what the offset adds to its output is taken away."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset
        self.first, self.second, self.third = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.layer_norm(torch.relu(self.first(x)).float(), (64,)) + self.offset
        out = self.second(hidden).float() - self.offset * self.second.weight.float().sum(dim=1)
        return self.third(torch.relu(nn.functional.layer_norm(out, (64,))))


def trained(name: str, offset: float, **fallback: object) -> tuple[float, dict[str, int]]:
    """Mean loss of the last steps, and when layers left FP8."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    precision = Precision(recipe(fallback=fallback) if name == "fp8" else load_recipe(name))
    model = precision.prepare(Offset(offset))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    left: dict[str, int] = {}
    for step in range(1, 301):
        for layer in precision.demoted:
            left.setdefault(layer, step)
        x = torch.randn(128, 32, generator=generator)
        with torch.no_grad():
            target = 3 * teacher(x)
        with precision.context():
            loss = nn.functional.mse_loss(model(x).float(), target)
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-30:]) / 30, left


@pytest.mark.nightly
@pytest.mark.usefixtures("cpu_on_purpose")
def test_only_the_layer_that_loses_its_signal_leaves_and_training_recovers() -> None:
    bf16, _ = trained("bf16", 64.0)
    plain, stayed = trained("fp8", 64.0, enabled=False)
    saved, left = trained("fp8", 64.0, centred_steps=30)
    assert not stayed
    assert plain > 3 * bf16, "the fault costs something"
    assert set(left) == {"second"}
    assert 30 < left["second"] < 50
    assert saved < 1.5 * bf16
    assert trained("fp8", 0.0, centred_steps=30)[1] == {}, "without it nothing leaves"
