"""Intervals against printed tables and direct sums."""

from __future__ import annotations

import math

import pytest

from benchmarks.intervals import binomial_upper, samples_needed, t_interval, t_quantile

# Two-sided 95% points of Student's t as printed in textbooks.
TABLE = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    5: 2.571,
    7: 2.365,
    10: 2.228,
    15: 2.131,
    30: 2.042,
    120: 1.980,
}


@pytest.mark.parametrize("degrees", TABLE)
def test_t_quantiles_are_those_of_the_printed_table(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(TABLE[degrees], abs=5.1e-4)


def test_t_interval_by_hand() -> None:
    # mean 3, squared deviations 4 + 1 + 0 + 1 + 4 over 4: sd 1.58114; half width 2.77645 * 1.58114 / sqrt(5).
    found = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.n, found.mean) == (5, 3.0)
    assert found.sd == pytest.approx(math.sqrt(2.5))
    assert (found.low, found.high) == (
        pytest.approx(3 - 1.963243, abs=1e-5),
        pytest.approx(3 + 1.963243, abs=1e-5),
    )


def test_one_value_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        t_interval([1.0])


def test_samples_needed_by_hand() -> None:
    # 12: 2.201 * 0.4 / sqrt(12) = 0.2542; 13: 2.179 * 0.4 / sqrt(13) = 0.2417.
    assert samples_needed(0.4, 0.25) == 13
    assert samples_needed(0.0, 0.25) == 2


@pytest.mark.parametrize("trials", [1, 8, 1000])
def test_without_a_hit_the_bound_is_the_closed_form(trials: int) -> None:
    assert binomial_upper(0, trials) == pytest.approx(1 - 0.05 ** (1 / trials), rel=1e-9)


@pytest.mark.parametrize(("hits", "trials"), [(1, 10), (5, 10), (3, 40), (9, 10)])
def test_at_the_bound_so_few_hits_have_a_chance_of_five_percent(hits: int, trials: int) -> None:
    p = binomial_upper(hits, trials)
    chance = sum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(hits + 1))
    assert chance == pytest.approx(0.05, rel=1e-9)


def test_nothing_but_hits_bounds_nothing() -> None:
    assert binomial_upper(4, 4) == 1.0
