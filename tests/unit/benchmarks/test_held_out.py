"""The harm of a fault is what FP8 loses of it, and a fault leaves nothing behind for the next run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.held_out import DUTIES, FAMILIES, HARMFUL, HEALTHY, PLACES, Bench, Oracle, linears
from benchmarks.held_out_pictures import verdict


@pytest.fixture(autouse=True, scope="module")
def own_precision() -> Iterator[None]:
    """Recipes set a global one, which other tests must not inherit."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_what_fp8_holds_is_not_lost() -> None:
    x = torch.exp2(
        torch.randint(-4, 4, (8, 8), generator=torch.Generator().manual_seed(0)).double()
    )
    oracle = Oracle()
    oracle.step(x, x, x)
    assert oracle.step(x, x, x) < 1e-12, "powers of two within range"


def test_a_hot_row_costs_all_others_though_the_sum_of_squares_is_right() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    x[3] *= 2.0**30
    oracle, weight = Oracle(), torch.randn(16, 16, generator=torch.Generator().manual_seed(2))
    oracle.step(x, weight, x)
    assert oracle.step(x, weight, torch.randn(64, 16)) > 0.9


def test_the_oracle_rounds_as_the_layer_does() -> None:
    seen: dict[str, Tensor] = {}
    bench = linears(PLACES[1], 1)
    layer = bench.model.get_submodule(PLACES[1])

    def look(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        seen.update(x=given[0].float(), out=out.float())

    layer.register_forward_hook(
        look, prepend=True
    )  # before the benchmark puts the faultless output in its place
    oracle = bench.oracle.copy()
    bench.run(HEALTHY, 0, DUTIES["every step"], 1)
    x, weight = oracle.rounded("input", seen["x"]), oracle.rounded("weight", bench.healthy)
    bias = bench.model.get_parameter(f"{PLACES[1]}.bias").detach()
    torch.testing.assert_close(seen["out"], (x @ weight.T + bias).float(), rtol=2**-7, atol=2**-8)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return linears(PLACES[1], 1)


@pytest.mark.slow
def test_a_fault_is_told_with_its_harm_and_leaves_nothing_behind(bench: Bench) -> None:
    before = bench.run(HEALTHY, 0, DUTIES["every step"], 12)
    found = bench.run(FAMILIES["input, a wandering row"], 24, DUTIES["every step"], 12)
    assert 0 < found.left <= 8
    assert found.others == ()
    assert found.harm > 0.8
    assert bench.run(FAMILIES["weight, a column"], 24, DUTIES["every step"], 12).left
    assert bench.run(HEALTHY, 0, DUTIES["every step"], 12) == before
    assert before.left == 0
    assert before.harm < 0.1


def test_a_verdict_weighs_what_was_done_against_the_harm() -> None:
    told = {
        (left, harm): verdict({"left": left, "harm": harm})
        for left in (0, 6)
        for harm in (0.05, 0.15, HARMFUL)
    }
    assert told == {
        (0, 0.05): "quiet",
        (0, 0.15): "quiet",
        (0, HARMFUL): "miss",
        (6, 0.05): "needless",
        (6, 0.15): "seen",
        (6, HARMFUL): "seen",
    }
