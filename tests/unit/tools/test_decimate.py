"""Decimated and packed series against the series that they came from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.report.decimate import (
    INFINITE,
    NOT_A_NUMBER,
    Bounds,
    Groups,
    extremes,
    not_finite,
    pack,
    unpack,
)


@pytest.mark.parametrize("count", [0, 1, 5, 99, 100, 101, 1000, 9973])
def test_few_points_have_the_extremes_of_every_group_and_both_ends(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    places = extremes(values, 100)
    assert len(places) <= 100
    assert (np.diff(places) > 0).all()
    if count <= 100:
        assert places.tolist() == list(range(count))
        return
    each = math.ceil(count / 49)
    for first in range(0, count, each):
        group = values[first : first + each]
        kept = values[places[(places >= first) & (places < first + each)]]
        assert kept.min() == group.min()
        assert kept.max() == group.max()
    assert places[0] == 0
    assert places[-1] == count - 1


@pytest.mark.parametrize("at", [0, 1, 4999, 7777, 9999])
def test_a_spike_of_one_step_survives(at: int) -> None:
    values = np.ones(10_000)
    values[at] = 50.0
    values[5000] = -3.0
    places = extremes(values, 200)
    assert at in places
    assert 5000 in places


def test_values_that_are_not_finite_are_kept_apart() -> None:
    values = np.arange(1000.0)
    values[[3, 500, 999]] = [math.nan, math.inf, -math.inf]
    assert not set(extremes(values, 50).tolist()) & {3, 500, 999}
    assert not_finite(values, 50).tolist() == [3, 500, 999]
    everywhere = np.full(1000, math.nan)
    assert extremes(everywhere, 50).tolist() == []
    assert len(not_finite(everywhere, 50)) == 50


def test_bounds_of_groups_are_those_of_their_steps() -> None:
    random = np.random.default_rng(1)
    values = random.lognormal(size=(103, 4)).astype(np.float32)
    values[17, 2], values[18, 2], values[50, 1] = math.inf, math.nan, math.nan
    groups = Groups.of(103, 10)
    bounds = Bounds(4, len(groups))
    for place in range(103):
        # Two blocks of series, in another order.
        group = groups.of_place(place)
        bounds.add(group, np.array([2, 0]), values[place : place + 1, [2, 0]])
        bounds.add(group, np.array([1, 3]), values[place : place + 1, [1, 3]])
    for group in range(len(groups)):
        block = values[group * groups.each : (group + 1) * groups.each]
        finite = np.where(np.isfinite(block), block, np.nan)
        assert bounds.low[:, group].tolist() == np.nanmin(finite, axis=0).tolist()
        assert bounds.high[:, group].tolist() == np.nanmax(finite, axis=0).tolist()
    marked = {
        (int(row), int(column)): int(bounds.marks[row, column])
        for row, column in np.argwhere(bounds.marks)
    }
    assert marked == {(2, 1): INFINITE | NOT_A_NUMBER, (1, 4): NOT_A_NUMBER}


def test_packed_values_come_back_to_a_thousandth() -> None:
    random = np.random.default_rng(2)
    values = np.exp2(random.uniform(-30, 30, (5, 400)))
    values[0, 7] = 0.0
    values[1, 9] = math.nan
    values[2] = 448.0
    values[3] = math.nan
    values[4] = 0.0
    back = unpack(pack(values))
    assert np.isnan(back).tolist() == np.isnan(values).tolist()
    there = ~np.isnan(values)
    np.testing.assert_allclose(back[there], values[there], rtol=1e-3)
    assert back[0].max() == pytest.approx(values[0].max(), rel=1e-5), "an extreme is nearly exact"
