"""Skips and rollbacks count within the last `guard.budget_windows` windows, whatever the run has come through."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

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
    assert len(judge.ledger.recent_skips) == 10, "what is older is forgotten: a ledger does not grow with the run"


@pytest.mark.parametrize(("apart", "halted"), [(99, True), (100, False)])
def test_one_more_than_the_budget_within_the_windows_halts(apart: int, halted: bool) -> None:
    """101 skips, the first and the last of them 9,900 or 10,000 windows apart."""
    action = spend(responder(), range(50_000, 50_000 + 101 * apart, apart), SKIP)
    assert isinstance(action, Halt) is halted
    if isinstance(action, Halt):
        assert "101 updates were skipped within 10000 windows (guard.budget_windows)" in action.reason


def test_rollbacks_within_the_windows_halt_and_older_ones_do_not() -> None:
    far = responder()
    assert all(isinstance(far.decide(BACK, window), Rollback) for window in range(0, 100_000, 3334))
    near = responder()
    assert [type(near.decide(BACK, window)) for window in (0, 3000, 6000, 9999)] == [Rollback] * 3 + [Halt]


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


def test_a_resume_takes_the_skips_from_the_checkpoint() -> None:
    judge = responder(max_skips=3)
    spend(judge, range(20_000, 20_003), SKIP)
    _, meta = TrainState({}, judge.ledger, step=20_003).state_dict()
    state = TrainState({}, RunLedger())
    state.resume({}, json.loads(json.dumps(meta)))
    assert isinstance(responder(state.ledger, max_skips=3).decide(SKIP, 20_005), Halt)
    assert responder(state.ledger, max_skips=3).decide(SKIP, 30_003) == Continue()
