"""The study of clean runs can find a switch: storms get through recording, resampling and the real controller."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from trace_support import CADENCE, LAYERS, SLOTS, clean_trace, with_values

from benchmarks.clean import first_finding, margins, storms, study, sustained, synthetic
from harness.monitors.evidence import FallbackConfig

POLICY = FallbackConfig()
DOWN_INPUT = "blocks.01.mlp.down.input"


def test_a_healthy_trace_gives_no_finding() -> None:
    found = synthetic([clean_trace()], POLICY, runs=5, steps=400, block=40, cadence=CADENCE, seed=0)
    assert (found.runs, found.found, found.example) == (5, 0, "")
    assert found.upper == pytest.approx(1 - 0.05 ** (1 / 5))


def test_a_storm_of_hits_steps_is_found_and_one_less_is_not() -> None:
    limit = POLICY.saturation_input
    for length, named in ((POLICY.hits, True), (POLICY.hits - 1, False)):
        stormy = clean_trace().with_storm(DOWN_INPUT, range(50, 50 + length), 1.01 * limit)
        finding = first_finding(POLICY, LAYERS, stormy.facts())
        assert (finding is not None) == named
        if finding is not None:
            assert "blocks.01.mlp.down to BF16" in finding.text
            assert finding.step == 50 + length


def test_a_recorded_storm_comes_up_in_synthetic_runs() -> None:
    """A block of 40 out of 80 steps: whoever draws 10 blocks misses the storm's place once in a thousand runs."""
    stormy = clean_trace().with_storm(DOWN_INPUT, range(50, 50 + POLICY.hits), 1.01 * POLICY.saturation_input)
    found = synthetic([stormy], POLICY, runs=10, steps=420, block=40, cadence=CADENCE, seed=0)
    assert found.found == 10
    assert DOWN_INPUT in found.example


def test_a_sampled_statistic_comes_up_too() -> None:
    flushed = with_values(clean_trace(), "underflow", DOWN_INPUT, slice(CADENCE - 1, None, CADENCE), 0.5)
    found = synthetic([flushed], POLICY, runs=2, steps=200, block=20, cadence=CADENCE, seed=0)
    assert found.found == 2
    assert "underflow" in found.example


def test_runs_take_turns_among_the_recorded_ones() -> None:
    stormy = clean_trace().with_storm(DOWN_INPUT, range(100), 1.01 * POLICY.saturation_input)
    found = synthetic([clean_trace(), stormy], POLICY, runs=6, steps=60, block=20, cadence=CADENCE, seed=0)
    assert found.found == 3


def test_every_storm_is_noticed_and_a_deaf_controller_notices_none() -> None:
    assert storms([clean_trace()], POLICY, runs=30, seed=0).found == 30
    assert storms([clean_trace()], FallbackConfig(enabled=False), runs=5, seed=0).found == 0


def test_a_finding_outside_the_storm_is_none_of_it() -> None:
    restless = clean_trace().with_storm(DOWN_INPUT, range(5, 10), 1e3)
    assert storms([restless], POLICY, runs=3, seed=0).found == 0


def test_the_study_tells_what_ran_and_what_the_controller_made_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    switched = replace(clean_trace(), switches=2)  # it ran under another controller than the present one
    stormy = clean_trace().with_storm(DOWN_INPUT, range(30, 90), 1e3)
    record = study([clean_trace(), switched, stormy], runs=3, storm_runs=2, steps=200, seed=0)
    assert (record["real"]["found"], record["replayed"]["found"]) == (1, 1)
    assert [found["found"] for found in record["synthetic"].values()] == [1, 1, 1]
    assert record["storms"] == {"runs": 2, "noticed": 2}
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    printed = capsys.readouterr().out
    assert "blocks of 40" in printed
    assert f"1 of 3 with a switch, 95% upper bound {record['real']['upper']:.2%}" in printed


def test_sustained_is_the_limit_that_a_series_just_keeps_to() -> None:
    series = np.array([1, 9, 1, 1, 5, 1, 1, 7, 1, 1, 1, 1, 1, 3], dtype=np.float32)
    assert sustained(series, FallbackConfig(hits=1, window=4), below=False) == pytest.approx(9, rel=1e-5)
    for hits, window in ((2, 4), (3, 7), (3, 6)):
        policy = FallbackConfig(hits=hits, window=window, warmup_steps=1)
        found = sustained(series, policy, below=False)
        assert 1 <= found <= 7
        turned = sustained((-6.0205999 * np.log2(series)).astype(np.float32), policy, below=True)
        assert turned == pytest.approx(-6.0205999 * np.log2(found), abs=1e-3), "decibels below, factors above"
    assert sustained(series[:3], FallbackConfig(hits=2, window=8), below=False) == 1


def test_a_limit_beyond_what_is_sustained_keeps_the_layer_one_under_not() -> None:
    rng = np.random.default_rng(0)
    trace = clean_trace()
    trace.values[2] = rng.uniform(0.2, 1.2, trace.values[2].shape)
    row = next(row for row in margins([trace], POLICY) if (row.statistic, row.role) == ("saturation", "input"))
    for factor, finds in ((1.0001, False), (0.9999, True)):
        policy = FallbackConfig(saturation_input=row.sustained * factor)
        assert (first_finding(policy, LAYERS, trace.facts()) is not None) == finds


def test_margins_name_the_worst_healthy_value_of_each_statistic_and_role() -> None:
    trace = with_values(clean_trace(), "sqnr_db", SLOTS[0], slice(29, 30), 12.0)  # the worst is the lowest
    trace = with_values(trace, "sqnr_db", SLOTS[3], slice(49, 80, 10), 20.0)
    trace = with_values(trace, "clipped", SLOTS[1], slice(9, 10), 0.004)
    trace = with_values(trace, "saturation", SLOTS[2], slice(0, POLICY.warmup_steps), 1e6)  # no evidence yet
    rows = {(row.statistic, row.role): row for row in margins([trace, clean_trace()], POLICY)}
    sqnr = rows["sqnr_db", "input"]
    assert (sqnr.limit, sqnr.worst, sqnr.sustained, sqnr.slot) == (POLICY.sqnr_db, 12.0, 20.0, SLOTS[3])
    clipped = rows["clipped", "weight"]
    assert (clipped.limit, clipped.sustained) == (POLICY.clipped, 0.0)
    assert clipped.worst == pytest.approx(0.004)
    assert rows["saturation", "grad_output"].worst == 1.0
    growth = rows["amax_growth", "weight"]  # amax numbers the steps: the first to count is 3, a window later it is 11
    assert growth.limit is None
    assert growth.worst == pytest.approx(11 / 3)
