"""Which steps are sampled: one of every so many, at places that nothing in a run can be in step with."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from harness.core.facts import is_sampled


def sampled(every: int, steps: int = 10_000, seed: int = 0) -> list[int]:
    return [step for step in range(1, steps + 1) if is_sampled(seed, step, every)]


@pytest.mark.parametrize("every", [1, 2, 3, 7, 10, 64])
def test_each_block_of_steps_has_one_sample(every: int) -> None:
    found = sampled(every)
    assert Counter((step - 1) // every for step in found)[0] == 1
    assert set(Counter((step - 1) // every for step in found).values()) == {1}
    assert max(np.diff(found)) <= max(1, 2 * every - 1)


@pytest.mark.parametrize("period", range(2, 33))
def test_no_period_is_missed_or_favoured(period: int) -> None:
    """Samples of a fault that comes at one phase of a period: as many as its share of the steps, within 4 sigma."""
    found = np.array(sampled(10))
    phases = np.bincount(found % period, minlength=period)
    expected = len(found) / period
    assert phases.min() > 0
    assert np.abs(phases - expected).max() < 4.5 * np.sqrt(expected)


def test_places_are_spread_evenly_and_another_seed_has_others() -> None:
    places = np.bincount([(step - 1) % 10 for step in sampled(10)], minlength=10)
    assert np.abs(places - 100).max() < 4 * np.sqrt(100)
    assert sampled(10, 200) != sampled(10, 200, seed=1)
    assert sampled(10) == sampled(10), "of nothing but seed and step"


@pytest.mark.parametrize("seed", range(50))
def test_a_short_run_has_a_sample_and_not_of_scales_that_are_not_set(seed: int) -> None:
    assert 3 <= sampled(10, 10, seed)[0] <= 5
    assert 3 <= sampled(100, 100, seed)[0] <= 50
    assert sampled(2**40, 1000, seed) == [], "who asks for none has none"
