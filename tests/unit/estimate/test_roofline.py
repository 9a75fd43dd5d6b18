"""The roofline: cards, predicted seconds, and what measurements of a card change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.capability.cards import CARDS
from harness.core.errors import ConfigError
from harness.estimate.roofline import (
    Op,
    bottleneck,
    device_seconds,
    find_card,
    is_host_bound,
    read_calibration,
    seconds_of,
    step_seconds,
    uncalibrated,
    usual_rates,
)

H100 = CARDS["H100"]
RATES = usual_rates(H100)


def op(**changed: object) -> Op:
    """An operation that moves 1 MB and computes nothing."""
    given: dict[str, object] = {
        "name": "mul", "phase": "forward", "purpose": "", "reads": 600_000, "writes": 400_000, "flops": 0.0,
        "unit": "none", "attention": False, "kernels": 1,
    }  # fmt: skip
    return Op(**(given | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("H100", "H100"),
        ("h100", "H100"),
        ("A100", "A100-80GB"),
        ("rtx 4090", "RTX4090"),
        ("v100", "V100-16GB"),
    ],
)
def test_cards_are_found_in_any_case_and_by_short_names(name: str, card: str) -> None:
    assert find_card(name) is CARDS[card]


def test_an_unknown_card_is_refused_with_a_list() -> None:
    with pytest.raises(ConfigError) as caught:
        find_card("H1000")
    assert 'did you mean "H100"?' in str(caught.value)
    assert all(name in str(caught.value) for name in CARDS)


@pytest.mark.parametrize("name", CARDS)
def test_figures_of_a_card_hang_together(name: str) -> None:
    """FP8 units came with 8.9 and double the 16-bit rate; those of 16 bits are over twice the plain fp32 ones (A10: 4
    times), but for Ada, whose fp32 is quick."""
    card = CARDS[name]
    if card.capability >= (8, 9):
        assert card.fp8 == pytest.approx(2 * card.half, rel=0.02)
    else:
        assert card.fp8 == 0
    assert card.half >= 1.9 * card.fp32
    # So many FLOPs for each byte: between a T4's and an L4's.
    assert 130 < card.half / card.bandwidth < 450
    assert 14 < card.memory / 2**30 < 180
    assert 5 < card.memory / card.bandwidth * 1e3 < 80, (
        "milliseconds to read all of the memory once"
    )


def test_the_slower_of_traffic_and_arithmetic_counts() -> None:
    """By hand: 1 GB at 85% of 3.35 TB/s; 1e12 FLOP at 75% of 989 TFLOP/s, of 1,979 in FP8, at half in attention."""
    big = op(reads=10**9, writes=0)
    assert seconds_of(big, RATES) == pytest.approx(1e9 / 2.8475e12)
    gemm = op(flops=1e12, unit="half")
    assert seconds_of(gemm, RATES) == pytest.approx(1e12 / 741.75e12)
    assert seconds_of(op(flops=1e12, unit="fp8"), RATES) == pytest.approx(1e12 / 1484.25e12)
    assert seconds_of(op(flops=1e12, unit="half", attention=True), RATES) == pytest.approx(
        1e12 / 494.5e12
    )
    assert seconds_of(op(flops=1e6, unit="half", reads=10**9), RATES) == pytest.approx(
        (1e9 + 4e5) / 2.8475e12
    )


def test_small_kernels_cost_their_minimum_and_their_launch() -> None:
    tiny = op(reads=4, writes=4, kernels=3)
    assert seconds_of(tiny, RATES) == pytest.approx(6e-6)
    assert device_seconds([tiny] * 10, RATES) == pytest.approx(60e-6)
    assert step_seconds([tiny] * 10, RATES) == pytest.approx(1.5e-3), "the host is slower than that"
    assert step_seconds([replace(tiny, compiled=True)] * 10, RATES) == pytest.approx(120e-6)
    assert step_seconds([op(reads=10**9)], RATES) == pytest.approx(
        device_seconds([op(reads=10**9)], RATES)
    )


def test_gaps_lengthen_a_step_by_its_kernels_unless_the_host_is_slower_still() -> None:
    """By hand: a kernel of 1 GB and ten of 2 us, at 5 us a gap; then a host that needs 50 us for each."""
    assert RATES.gap_seconds == 0, "an estimate without a calibration knows of none"
    made = [op(reads=10**9, writes=0), *[op(reads=4, writes=4)] * 10]
    ops = [replace(each, compiled=True) for each in made]
    on_device = 1e9 / 2.8475e12 + 20e-6
    gaps = replace(RATES, gap_seconds=5e-6)
    assert device_seconds(ops, gaps) == pytest.approx(on_device)
    assert step_seconds(ops, gaps) == pytest.approx(on_device + 55e-6)
    assert not is_host_bound(ops, gaps)

    slow = replace(gaps, launch_seconds=50e-6)
    assert step_seconds(ops, slow) == pytest.approx(550e-6)
    assert is_host_bound(ops, slow)
    assert step_seconds(made, replace(gaps, eager_seconds=40e-6)) == pytest.approx(440e-6)


def test_most_of_a_step_may_be_gaps() -> None:
    ops = [replace(op(reads=10**6, writes=0), compiled=True)] * 10
    fast = replace(RATES, launch_seconds=1e-7, shortest_seconds=1e-7)
    assert bottleneck(ops, fast) == "memory-bandwidth"
    assert bottleneck(ops, replace(fast, gap_seconds=1e-5)) == "host/launches"


_FP8 = {"reads": 10**6, "flops": 1e12, "unit": "fp8"}
_HALF = {"reads": 10**6, "flops": 1e12, "unit": "half"}


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ([op(**_FP8)], "fp8-gemms"),
        ([op(**_FP8), op(**_HALF)], "gemms"),
        ([op(**_HALF, attention=True)], "attention"),
        ([op(**_HALF, attention=True), op(**_HALF), op(**_HALF)], "gemms"),
        ([op(reads=10**9, purpose="optimizer"), op(reads=10**8)], "optimizer"),
        ([op(reads=10**9), op(reads=10**8, purpose="optimizer")], "memory-bandwidth"),
        # A GEMM of few rows: its weights take longer to read than to multiply.
        ([op(reads=10**9, flops=1e9, unit="half")], "memory-bandwidth"),
        # 4 us of launching each, against 2 us at least on the card.
        ([op(reads=4, writes=4)] * 10, "host/launches"),
        # Launched in time beside a long kernel, and together longer than that.
        ([op(reads=4, writes=4, kernels=1)] * 400 + [op(reads=2 * 10**9, writes=0)] * 3, "memory-bandwidth"),
        ([op(reads=4, writes=4)] * 900 + [op(reads=15 * 10**8), *[op(**_FP8)] * 2], "host/launches"),
    ],
)  # fmt: skip
def test_the_bottleneck_is_what_most_time_goes_to(ops: list[Op], expected: str) -> None:
    compiled = [replace(each, compiled=True) for each in ops]
    assert bottleneck(compiled, RATES) == expected


def test_an_eager_step_of_short_kernels_is_held_up_by_python() -> None:
    """By hand: 100 kernels take 5 ms of Python, beside 3 ms of the card."""
    ops = [op(reads=85 * 10**6, writes=0)] * 100
    assert device_seconds(ops, RATES) == pytest.approx(2.985e-3, rel=1e-3)
    assert bottleneck(ops, RATES) == "host/launches"
    assert step_seconds(ops, RATES) == pytest.approx(5e-3)
    compiled = [replace(each, compiled=True) for each in ops]
    assert bottleneck(compiled, RATES) == "memory-bandwidth"


def proof(tmp_path: Path, **changed: object) -> Path:
    section: dict[str, object] = {
        "card": H100.name, "capability": [9, 0], "gemm_bf16": 700e12, "gemm_fp8": 1300e12, "attention": 400e12,
        "bandwidth": 3e12, "launch_seconds": 5e-6, "gap_seconds": 7e-6, "context_bytes": 500_000_000,
    }  # fmt: skip
    path = tmp_path / "proof.json"
    path.write_text(json.dumps({"roofline": section | changed}))
    return path


def test_measurements_take_the_place_of_constants(tmp_path: Path) -> None:
    found = read_calibration(proof(tmp_path), H100)
    assert found.calibrated
    assert found.notes == ()
    rates = found.rates
    assert (rates.gemm_half, rates.gemm_fp8, rates.attention, rates.bandwidth) == (
        700e12,
        1300e12,
        400e12,
        3e12,
    )
    assert (rates.launch_seconds, rates.gap_seconds) == (5e-6, 7e-6)
    assert rates.context_bytes == 500_000_000
    assert rates.gemm_fp32 == RATES.gemm_fp32


@pytest.mark.parametrize("missing", ["gemm_bf16", "gemm_fp8", "bandwidth"])
def test_without_what_matters_it_is_not_calibrated(tmp_path: Path, missing: str) -> None:
    found = read_calibration(proof(tmp_path, **{missing: None}), H100)
    assert not found.calibrated
    assert missing in found.notes[0]


def test_a_card_without_fp8_units_is_calibrated_without_their_rate(tmp_path: Path) -> None:
    card = CARDS["A100-80GB"]
    measured = {
        "card": card.name,
        "capability": [8, 0],
        "gemm_bf16": 250e12,
        "gemm_fp8": None,
        "attention": 150e12,
    }
    found = read_calibration(proof(tmp_path, bandwidth=1.7e12, **measured), card)
    assert found.calibrated
    assert found.notes == ()


def test_what_is_missing_and_minor_keeps_its_constant(tmp_path: Path) -> None:
    found = read_calibration(proof(tmp_path, attention=None, launch_seconds=None), H100)
    assert found.calibrated
    assert (found.rates.attention, found.rates.launch_seconds) == (
        RATES.attention,
        RATES.launch_seconds,
    )
    assert "attention, launch_seconds" in found.notes[0]


def test_a_record_without_a_gap_says_how_to_fit_one(tmp_path: Path) -> None:
    found = read_calibration(proof(tmp_path, gap_seconds=None), H100)
    assert found.calibrated
    assert found.rates.gap_seconds == 0
    (note,) = found.notes
    assert "benchmarks.estimated --fit" in note


def test_another_cards_measurements_are_not_used(tmp_path: Path) -> None:
    found = read_calibration(proof(tmp_path, card="NVIDIA H100 PCIe"), H100)
    assert found.rates == uncalibrated(H100).rates
    assert not found.calibrated
    assert "NVIDIA H100 PCIe" in found.notes[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"gemm_bf16": 1e308},
        {"bandwidth": 3.0},
        {"launch_seconds": 5.0},
        {"gap_seconds": 7.0},
        {"context_bytes": 1e300},
        {"gemm_fp8": 1300.0},
    ],
)
def test_what_no_such_card_does_is_refused(tmp_path: Path, changed: dict[str, float]) -> None:
    """Most likely in another unit."""
    (name,) = changed
    with pytest.raises(ConfigError, match=f"roofline.{name}: .* is not a figure of a NVIDIA H100"):
        read_calibration(proof(tmp_path, **changed), H100)


def test_every_problem_of_a_file_is_named(tmp_path: Path) -> None:
    path = proof(tmp_path, gemm_bf16="fast", bandwidth=-1, gem_fp8=1, card=None, attention=True)
    with pytest.raises(ConfigError) as caught:
        read_calibration(path, H100)
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert all(name in text for name in ("gemm_bf16", "bandwidth", "gem_fp8", "card", "attention"))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"roofline": 3}', '{"roofline": {"bandwidth": NaN}}']
)
def test_a_file_that_is_no_proof_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "proof.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        read_calibration(path, H100)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration(tmp_path / "nowhere.json", H100)
