"""The level of a drifting series, and the one cause of a skipped update."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.facts import BAD_LABEL, SWITCH_DELAY, Limits, StepFacts
from harness.monitors.base import AHEAD, from_log, level, why_skipped

MakeFacts = Callable[..., StepFacts]


def test_limits_are_for_the_step_that_the_loop_applies_them_to() -> None:
    assert AHEAD == SWITCH_DELAY


def test_of_stationary_noise_it_is_mean_and_standard_deviation() -> None:
    noise = 3.0 + 0.2 * np.random.default_rng(0).standard_normal(100_000)
    found = level(np.sort(noise).tolist(), 2)  # in rising order: no trend to take out
    assert found.centre == pytest.approx(3.0, abs=0.01)
    assert found.sigma == pytest.approx(0.2, rel=0.02)


@settings(max_examples=50)
@given(st.lists(st.floats(-50, 50), min_size=20, max_size=60), st.data())
def test_a_minority_of_outliers_cannot_carry_it_away(
    values: list[float], data: st.DataObject
) -> None:
    rising = sorted(values)
    places = data.draw(st.sets(st.integers(0, len(values) - 1), max_size=(len(values) - 2) // 4))
    spoiled = [1e6 if place in places else value for place, value in enumerate(rising)]
    assert level(spoiled, 2).centre <= max(rising)
    assert level(spoiled, 2).sigma <= 1.4826 * 100


def test_a_line_that_falls_is_continued_down_to_what_was_lately_seen() -> None:
    logs = [-0.1 * place for place in range(40)]
    found = level(logs, 2)
    assert found.centre == pytest.approx(logs[-2])
    assert found.sigma == pytest.approx(0.0, abs=1e-9)


def test_a_fall_that_ended_is_not_continued() -> None:
    logs = [-0.1 * place for place in range(30)] + [-3.0] * 10
    assert level(logs, 2).centre == pytest.approx(-3.0)


def test_a_rise_is_spread_and_is_not_followed() -> None:
    found = level([0.1 * place for place in range(40)], 2)
    assert found.centre == pytest.approx(1.95)
    assert found.sigma == pytest.approx(1.4826)


@pytest.mark.parametrize("logs", [[1.5], [1.5, 1.5], [1.5] * 3])
def test_few_values_do(logs: list[float]) -> None:
    assert (level(logs, 2).centre, level(logs, 2).sigma) == (1.5, 0.0)


def test_what_float32_cannot_hold_is_infinite() -> None:
    assert from_log(math.log(7.0)) == pytest.approx(7.0)
    assert [from_log(value) for value in (81.0, 1e6)] == [math.inf] * 2


LIMITS = Limits(loss=3.0, norm=5.0)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"grad_norm": 9.0, "applied": True}, ""),
        ({"applied": False}, "nonfinite"),
        ({"applied": False, "loss": math.nan, "grad_norm": 9.0}, "nonfinite"),
        ({"applied": False, "loss": math.inf}, "nonfinite"),
        ({"applied": False, "loss": 9.0, "grad_norm": math.inf}, "nonfinite"),
        ({"applied": False, "loss": 9.0}, "loss"),
        ({"applied": False, "loss": 9.0, "grad_norm": 9.0}, "loss"),
        ({"applied": False, "grad_norm": 9.0}, "norm"),
        ({"applied": False, "grad_norm": math.nan, "loss": 9.0, "bad_data": BAD_LABEL}, "data"),
    ],
)
def test_an_update_is_skipped_for_one_cause(
    make_facts: MakeFacts, fields: dict[str, object], why: str
) -> None:
    assert why_skipped(make_facts(7, limits=LIMITS, **fields)) == why
