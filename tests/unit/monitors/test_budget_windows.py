"""Skips and rollbacks count within the last `guard.budget_windows` windows, whatever the run has come through."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from benchmarks.families.course import drive
from benchmarks.families.shapes import Formula
from harness.core.config import GuardConfig
from harness.core.facts import Action, Continue, Halt, Rollback, Verdict
from harness.core.state import RunLedger, TrainState
from harness.monitors.responder import Responder

SKIP = [Verdict("test.skip", 7, "what was skipped", healthy=False, skip=True)]
BACK = [Verdict("test.back", 7, "what broke", healthy=False, proposal=Rollback("it broke"))]


def responder(ledger: RunLedger | None = None, **changed: Any) -> Responder:
    return Responder(GuardConfig.model_validate(changed), ledger or RunLedger())


def spend(judge: Responder, windows: range, verdicts: list[Verdict]) -> Action:
    """The first action that is not to go on, or the last."""
    action: Action = Continue()
    for window in windows:
        action = judge.decide(verdicts, window)
        if not isinstance(action, Continue):
            return action
    return action


def test_a_long_run_with_a_skip_in_a_thousand_windows_goes_on() -> None:
    judge = responder()
    for window in range(100_000):
        assert judge.decide(SKIP if window % 1000 == 999 else [], window) == Continue()
    assert judge.ledger.skips == 100, "the total is kept"
    for window in range(100_000, 1_000_000, 1000):
        assert judge.decide(SKIP, window) == Continue()
    assert len(judge.ledger.recent_skips) == 10, (
        "what is older is forgotten: a ledger does not grow with the run"
    )


@pytest.mark.parametrize(("apart", "halted"), [(99, True), (100, False)])
def test_one_more_than_the_budget_within_the_windows_halts(apart: int, halted: bool) -> None:
    """101 skips, the first and the last of them 9,900 or 10,000 windows apart."""
    action = spend(responder(), range(50_000, 50_000 + 101 * apart, apart), SKIP)
    assert isinstance(action, Halt) is halted
    if isinstance(action, Halt):
        assert (
            "101 updates were skipped within 10000 windows (guard.budget_windows)" in action.reason
        )


def test_rollbacks_within_the_windows_halt_and_older_ones_do_not() -> None:
    far = responder()
    assert all(isinstance(far.decide(BACK, window), Rollback) for window in range(0, 100_000, 3334))
    near = responder()
    assert [type(near.decide(BACK, window)) for window in (0, 3000, 6000, 9999)] == [
        Rollback
    ] * 3 + [Halt]


def test_the_span_is_the_keys() -> None:
    judge = responder(budget_windows=50, max_skips=2)
    assert spend(judge, range(0, 1000, 25), SKIP) == Continue()
    assert isinstance(spend(judge, range(1000, 1003), SKIP), Halt)


def test_a_rollback_does_not_give_back_what_was_spent() -> None:
    judge = responder(max_skips=3)
    spend(judge, range(9_990, 9_993), SKIP)
    judge.ledger.go_back(100, [9_990, 9_991])
    assert isinstance(judge.decide(SKIP, 100), Halt), "the run is at earlier windows again"


def test_the_ledger_on_disk_brings_both_back() -> None:
    judge = responder(max_skips=3, max_rollbacks=1)
    spend(judge, range(20_000, 20_003), SKIP)
    judge.decide(BACK, 20_003)
    again = RunLedger.from_json(json.loads(json.dumps(asdict(judge.ledger))))
    assert isinstance(responder(again, max_skips=3, max_rollbacks=1).decide(SKIP, 20_010), Halt)
    assert isinstance(responder(again, max_skips=9, max_rollbacks=1).decide(BACK, 20_010), Halt)


def nan_at(single: set[int], rows: set[int] | None = None) -> Formula:
    """A loss of 2 and a norm of 1, NaN in the windows `single` and in five from each of `rows` on."""
    bad = single | {first + more for first in rows or () for more in range(5)}
    return lambda _, window: (math.nan if window in bad else 2.0, 1.0)


@pytest.mark.nightly
def test_a_run_of_100_000_steps_with_a_thousandth_skipped_ends_done() -> None:
    """100 single windows by chance, 23 rows that roll back, and another process every 5,000 steps."""
    single = {
        int(window) for window in np.random.default_rng(3).choice(100_000, 100, replace=False)
    }
    course = drive(nan_at(single, set(range(2_000, 94_000, 4_000))), 100_000, resume_every=5_000)
    assert course.status == "done", course.reason
    assert len(course.rollbacks) == 23
    assert course.resumed >= 20
    assert len(course.skipped) > 200


@pytest.mark.slow
@pytest.mark.parametrize(("skips", "status"), [(100, "done"), (101, "halted")])
def test_one_more_than_the_budget_within_10_000_windows_halts_through_rollbacks_and_resumes(
    skips: int, status: str
) -> None:
    """Two rows of five that roll back are among the skips; another process goes on every 1,000 steps."""
    single = set(range(300, 300 + 95 * (skips - 10), 95))
    course = drive(nan_at(single, {4_030, 8_020}), 10_000, resume_every=1_000)
    assert course.status == status, course.reason
    assert len(course.rollbacks) == 2
    assert course.resumed >= 8
    assert len(course.skipped) == skips
    if status == "halted":
        assert course.skipped[-1] == max(single), "not one earlier"
        assert "101 updates were skipped within 10000 windows" in course.reason


def test_a_resume_takes_the_skips_from_the_checkpoint() -> None:
    judge = responder(max_skips=3)
    spend(judge, range(20_000, 20_003), SKIP)
    _, meta = TrainState({}, judge.ledger, step=20_003).state_dict()
    state = TrainState({}, RunLedger())
    state.resume({}, json.loads(json.dumps(meta)))
    assert isinstance(responder(state.ledger, max_skips=3).decide(SKIP, 20_005), Halt)
    assert responder(state.ledger, max_skips=3).decide(SKIP, 30_003) == Continue()
