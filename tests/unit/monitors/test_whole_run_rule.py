"""Leaving fp16 for good: after failures in a row that no lower loss scale would have cured, and for nothing else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from harness.core.facts import BAD_LABEL, Limits, StepFacts, Switch
from harness.monitors.fallback import WholeRunFallback


def facts(
    step: int, applied: bool, scale: float, loss: float = 2.0, fell_back_to: str = ""
) -> StepFacts:
    norm = 1.0 if applied else math.inf
    return StepFacts(
        step, step, loss, norm, 1e-3, scale, applied, step, 4096, 0.1, fell_back_to=fell_back_to
    )


def proposals(monitor: WholeRunFallback, trace: list[StepFacts]) -> list[tuple[int, Switch]]:
    verdicts = [monitor.observe(seen) for seen in trace]
    return [(v.step, v.proposal) for v in verdicts if isinstance(v.proposal, Switch)]


def test_a_scaler_that_finds_its_range_is_left_alone() -> None:
    trace = [facts(step, False, 2.0**24 / 2**step) for step in range(15)]
    assert trace[-1].loss_scale == 1024
    assert proposals(WholeRunFallback(3, "fp32"), trace) == []


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_third_failure_in_a_row_at_a_small_scale_lowers_the_run_once(precision: str) -> None:
    trace = [facts(step, False, 1024 / 2**step) for step in range(12)]
    ((step, switch),) = proposals(WholeRunFallback(3, precision), trace)
    assert (step, switch.whole_run_to, switch.demote, switch.promote) == (3, precision, (), ())
    assert f"goes on in {precision}, for good" in switch.reason
    assert "loss scale 128" in switch.reason


def test_one_failure_that_is_enough_is_no_row() -> None:
    ((_, switch),) = proposals(WholeRunFallback(1, "bf16"), [facts(0, False, 1024.0, math.nan)])
    assert switch.reason.startswith("1 update failed in fp16")


def test_a_loss_that_is_not_finite_counts_at_any_scale() -> None:
    trace = [facts(step, False, 65536.0 / 2**step, loss=math.nan) for step in range(3)]
    ((step, _),) = proposals(WholeRunFallback(3, "bf16"), trace)
    assert step == 2


def test_a_step_that_succeeds_starts_the_count_again() -> None:
    trace = [facts(step, step % 3 == 2, 512.0) for step in range(30)]
    assert proposals(WholeRunFallback(3, "bf16"), trace) == []


def test_null_never_lowers_and_a_lowered_run_is_not_lowered_again() -> None:
    trace = [facts(step, False, 8.0) for step in range(30)]
    assert proposals(WholeRunFallback(None, "bf16"), trace) == []
    trace = [facts(step, False, 8.0, fell_back_to="bf16") for step in range(30)]
    assert proposals(WholeRunFallback(3, "bf16"), trace) == []


@pytest.mark.parametrize("cut", range(5))
def test_a_state_saved_in_between_decides_the_same(cut: int) -> None:
    trace = [
        facts(step, False, 1024 / 2**step, loss=math.inf if step else 2.0) for step in range(5)
    ]
    live, resumed = WholeRunFallback(3, "bf16"), WholeRunFallback(3, "bf16")
    expected = [live.observe(seen) for seen in trace]
    again = WholeRunFallback(3, "bf16")
    for seen in trace[:cut]:
        again.observe(seen)
    resumed.load_state_dict(json.loads(json.dumps(again.state_dict(), allow_nan=False)))
    assert [resumed.observe(seen) for seen in trace[cut:]] == expected[cut:]
    assert any(isinstance(verdict.proposal, Switch) for verdict in expected)


@pytest.mark.parametrize(
    "fields", [{"bad_data": BAD_LABEL}, {"grad_norm": 50.0, "limits": Limits(norm=8.0)}]
)
def test_skips_for_data_or_a_spike_do_not_count(fields: dict[str, Any]) -> None:
    trace = [replace(facts(step, False, 512.0), **fields) for step in range(6)]
    assert proposals(WholeRunFallback(3, "bf16"), trace) == []
    overflow = [replace(facts(step, False, 512.0), limits=Limits(norm=8.0)) for step in range(6, 9)]
    ((step, _),) = proposals(WholeRunFallback(3, "bf16"), [*trace, *overflow])
    assert step == 8, "an infinite norm is no spike"
