"""The cast and the update rule against an independent oracle, bit for bit."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from fp8_oracle import GRID, decode, quantize, update
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.precision import scaling
from harness.precision.backends import native_kernel

FORMATS = ("e4m3", "e5m2")
FLT_MAX = torch.finfo(torch.float32).max
ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit patterns; NaN equals NaN whatever its payload."""
    return bool(((a.view(torch.int16) == b.view(torch.int16)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_survives_a_round_trip(fmt: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    x = torch.tensor([decode(code, fmt) for code in range(256)], dtype=torch.float32)
    assert torch.equal(
        x.nan_to_num(1.5), codes.view(scaling.FORMATS[fmt].dtype).float().nan_to_num(1.5)
    ), "as torch's"
    assert (x.isnan().sum().item(), x.isinf().sum().item()) == {"e4m3": (2, 0), "e5m2": (6, 2)}[fmt]
    q = scaling.quantize(x, 1.0, fmt)
    assert same_bits(q, x.clamp(-GRID[fmt][-1], GRID[fmt][-1]).to(torch.bfloat16)), (
        "only Inf is no value of its own"
    )
    assert torch.equal(torch.signbit(q[~x.isnan()]), torch.signbit(x[~x.isnan()])), (
        "the sign of zero is kept"
    )
    raw = q[x.isfinite()].to(scaling.FORMATS[fmt].dtype).view(torch.uint8)
    assert torch.equal(raw, codes[x.isfinite()]), "the bytes that a GPU multiplies"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 113.7, 2.0**-9, 2.0**18, 1e-38, FLT_MAX])
def test_all_bf16_values_match_the_oracle(fmt: str, scale: float) -> None:
    expected = torch.from_numpy(quantize(ALL_BF16.float().numpy(), scale, fmt)).to(torch.bfloat16)
    assert same_bits(scaling.quantize(ALL_BF16, scale, fmt), expected)
    assert same_bits(scaling.quantize(ALL_BF16, torch.tensor(scale), fmt), expected)


FLOAT32 = st.one_of(
    st.floats(width=32), st.floats(-500.0, 500.0, width=32), st.floats(-6e4, 6e4, width=32)
)


@given(
    st.lists(FLOAT32, min_size=1, max_size=40),
    st.floats(2.0**-126, FLT_MAX, width=32),
    st.sampled_from(FORMATS),
)
@settings(max_examples=300, deadline=None)
def test_any_float32_at_any_scale_matches_the_oracle(
    values: list[float], scale: float, fmt: str
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    expected = torch.from_numpy(quantize(x.numpy(), scale, fmt)).to(torch.bfloat16)
    assert same_bits(scaling.quantize(x, scale, fmt), expected)
    kernel, note = native_kernel.load()
    assert kernel is not None, note
    amax = torch.zeros(1)
    assert same_bits(kernel(x, scale, fmt, amax.data_ptr(), None), expected)
    assert amax.item() == max([0.0, *(abs(value) for value in values if value == value)])


@pytest.mark.parametrize("fmt", FORMATS)
def test_all_float16_values_match_the_oracle(fmt: str) -> None:
    x = ALL_BF16.view(torch.float16)
    expected = torch.from_numpy(quantize(x.float().numpy(), 0.37, fmt)).to(torch.bfloat16)
    assert same_bits(scaling.quantize(x, 0.37, fmt), expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_ties_go_to_even_and_neighbours_do_not(fmt: str) -> None:
    grid = GRID[fmt]
    middles = np.array([(a + b) / 2 for a, b in pairwise(grid)], dtype=np.float32)
    near = np.concatenate(
        [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))]
    )
    expected = torch.from_numpy(quantize(near, 1.0, fmt)).to(torch.bfloat16)
    assert same_bits(scaling.quantize(torch.from_numpy(near), 1.0, fmt), expected)


def test_saturates_and_keeps_nan() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, 449.0])
    assert scaling.quantize(x, 1.0, "e4m3").tolist()[:2] == [448.0, -448.0]
    assert torch.isnan(scaling.quantize(x, 1.0, "e4m3")[2])
    assert scaling.quantize(x, 1.0, "e5m2").tolist()[3:] == [57344.0, -57344.0, 448.0]


def test_the_fused_kernel_is_in_use_here_and_agrees() -> None:
    kernel, note = native_kernel.load()
    assert kernel is not None, note
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 5001, generator=generator) * torch.logspace(-6, 6, 5001)
    for fmt in FORMATS:
        for values in (x, x.to(torch.bfloat16), ALL_BF16):
            for scale in (1.0, 0.0123, 4096.0):
                amax = torch.zeros(1)
                ours = kernel(values.contiguous(), scale, fmt, amax.data_ptr(), None)
                assert same_bits(ours, scaling.quantize(values, scale, fmt))
                assert amax.item() == scaling.amax(values).item()


def test_kernel_statistics_match_the_reference() -> None:
    kernel, note = native_kernel.load()
    assert kernel is not None, note
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 30
    x[:5] = torch.tensor([0.0, math.nan, math.inf, 1e-9, -0.0])
    for fmt, scale in (("e4m3", 20.0), ("e5m2", 1e-3)):
        sums, amax = torch.zeros(scaling.SUMS, dtype=torch.float64), torch.zeros(1)
        q = kernel(x, scale, fmt, amax.data_ptr(), sums.data_ptr())
        reference = scaling.quantization_stats(x, q, scale, fmt).sum(dim=0)
        assert torch.equal(sums[:3], reference[:3])
        assert torch.allclose(sums[3:6], reference[3:], rtol=1e-6)
        assert sums[0] > 0 or fmt == "e5m2", "the E4M3 case must clip"


def test_sqnr_of_gaussian_e4m3_is_what_theory_says() -> None:
    # Uniform rounding error with 3 mantissa bits: about 31.5 dB, for E5M2 about 25.5 dB.
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    for fmt, low, high in (("e4m3", 31.0, 32.2), ("e5m2", 25.0, 26.2)):
        scale = scaling.FORMATS[fmt].max / x.abs().max().item()
        sums = scaling.quantization_stats(x, scaling.quantize(x, scale, fmt), scale, fmt).sum(dim=0)
        assert low < 10 * math.log10(sums[3] / sums[4]) < high


def test_amax_ignores_nan_and_keeps_inf() -> None:
    assert scaling.amax(torch.tensor([math.nan, -3.0, 2.0])).item() == 3.0
    assert scaling.amax(torch.tensor([math.nan, -math.inf])).item() == math.inf
    assert scaling.amax(torch.zeros(0)).item() == 0.0


AMAXES = st.one_of(
    st.sampled_from([0.0, 1e-45, 1.2e-38, 1.4e-36, 1.0, 447.9, 3.4e38, math.inf, math.nan]),
    st.floats(min_value=0.0, max_value=1e10, width=32),
)


@pytest.mark.slow
@given(
    rows=st.integers(2, 7),
    slots=st.integers(1, 4),
    margin=st.sampled_from([0, 1, 3, 15]),
    algo=st.sampled_from(["max", "most_recent"]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_update_matches_the_oracle_on_any_sequence(
    rows: int, slots: int, margin: int, algo: str, data: st.DataObject
) -> None:
    row = st.lists(AMAXES, min_size=slots, max_size=slots)
    fp8_max = data.draw(st.lists(st.sampled_from([448.0, 57344.0]), min_size=slots, max_size=slots))
    h = torch.tensor([data.draw(row) for _ in range(rows)])
    s = torch.tensor(
        data.draw(st.lists(st.floats(2.0**-30, 2.0**30, width=32), min_size=slots, max_size=slots))
    )
    for newest in data.draw(st.lists(row, min_size=1, max_size=9)):
        h[0] = torch.tensor(newest)
        before = h.clone(), s.clone()
        expected = [
            torch.tensor(part) for part in update(h.tolist(), s.tolist(), fp8_max, margin, algo)
        ]
        result = scaling.update(h, s, torch.tensor(fp8_max), margin, algo)
        for mine, right, given_, kept in zip(result, expected, (h, s), before, strict=True):
            assert torch.equal(mine.view(torch.int32), right.view(torch.int32)), (mine, right)
            assert torch.equal(given_.view(torch.int32), kept.view(torch.int32)), (
                "pure: inputs are left alone"
            )
        h, s = result


def test_the_rule_by_hand() -> None:
    """History of two, as small as it gets; then a margin; then what is too small for a finite scale."""
    history, scale = torch.zeros(2, 1), torch.ones(1)
    scales = []
    for amax in (2.0, 4.0, 1.0, 0.0, math.nan, 1.0):
        history[0] = amax
        history, scale = scaling.update(history, scale, 448.0)
        scales.append(scale.item())
    # One row of history: of the last two amaxes the larger counts, zeros do not roll, and NaN only pushes others out.
    assert scales == [224.0, 112.0, 112.0, 112.0, 448.0, 448.0]
    staged = torch.tensor([[7.0], [0.0]])
    assert scaling.update(staged, torch.ones(1), 448.0, margin=2)[1].item() == 16.0
    assert scaling.update(staged, torch.ones(1), 57344.0, margin=0)[1].item() == 8192.0
    assert scaling.update(torch.tensor([[1e-45], [0.0]]), torch.ones(1), 448.0)[1].item() == FLT_MAX


def test_an_inf_amax_freezes_the_scale_until_it_is_scrubbed() -> None:
    history, scale = torch.zeros(4, 1), torch.ones(1)
    history[0] = math.inf
    frozen, scale = scaling.update(history, scale, 448.0)
    frozen[0] = 2.0
    stuck, still = scaling.update(frozen, scale, 448.0)
    assert still.item() == 1.0, "TE's rule: an Inf in the history freezes the scale"
    clean, count = scaling.scrub(stuck)
    clean[0] = 2.0
    assert count.item() == 1
    assert scaling.update(clean, still, 448.0)[1].item() == 224.0


def test_bad_shapes_and_algorithms_are_named() -> None:
    with pytest.raises(ValueError, match="L >= 2"):
        scaling.update(torch.zeros(1, 3), torch.ones(3), 448.0)
    with pytest.raises(ValueError, match="most_recent"):
        scaling.update(torch.zeros(2, 3), torch.ones(3), 448.0, algo="mean")
