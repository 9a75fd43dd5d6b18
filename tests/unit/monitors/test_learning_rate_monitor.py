"""A learning rate that jumps is named; schedules are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from harness.core.config import GuardConfig
from harness.core.facts import Continue, Halt, Rollback, StepFacts, Verdict
from harness.core.state import RunLedger
from harness.monitors.responder import Responder
from harness.monitors.rise import LearningRateMonitor

MakeFacts = Callable[..., StepFacts]


def jumps(make_facts: MakeFacts, rates: Sequence[float]) -> list[int]:
    monitor = LearningRateMonitor()
    return [
        step for step, lr in enumerate(rates) if not monitor.observe(make_facts(step, lr=lr)).ok
    ]


def test_a_jump_is_told_once_with_its_factor(make_facts: MakeFacts) -> None:
    monitor = LearningRateMonitor()
    for step in range(50):
        assert monitor.observe(make_facts(step, lr=1e-3)).ok
    verdict = monitor.observe(make_facts(50, lr=10.0))
    assert (verdict.code, verdict.healthy) == ("lr.jump", True)
    assert (
        "the learning rate is 10, 1e+04 times the largest of the run so far (0.001)" in verdict.text
    )
    assert monitor.observe(make_facts(51, lr=10.0)).ok


@pytest.mark.parametrize(
    "rates",
    [
        [1e-3 * (step + 1) / 100 for step in range(100)] + [1e-3] * 50,
        [0.0, 0.0, 1e-3, 1e-3],
        [1e-3 * (1 + math.cos(math.pi * (step % 50) / 50)) / 2 + 1e-12 for step in range(200)],
        [1e-3] * 10 + [1e-2] * 10,
        [math.nan, 1e-3, math.nan, 1e-3],
    ],
    ids=["warm-up", "zero first", "restarts", "tenfold", "unknown"],
)
def test_schedules_are_no_jumps(make_facts: MakeFacts, rates: list[float]) -> None:
    assert jumps(make_facts, rates) == []


@pytest.mark.parametrize("factor", [11.0, 1e4, 1e8])
def test_more_than_tenfold_is_one(make_facts: MakeFacts, factor: float) -> None:
    assert jumps(make_facts, [0.0, 1e-5, 2e-5, 2e-5 * factor]) == [3]


def test_the_largest_is_kept_in_checkpoints(make_facts: MakeFacts) -> None:
    monitor, resumed = LearningRateMonitor(), LearningRateMonitor()
    monitor.observe(make_facts(1, lr=1e-3))
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.observe(make_facts(2, lr=1.0)).code == "lr.jump"


def test_what_ends_a_run_after_a_jump_names_it(make_facts: MakeFacts) -> None:
    monitor, responder = LearningRateMonitor(), Responder(GuardConfig(max_rollbacks=1), RunLedger())
    broke = Verdict(
        "test.broke", 9, "it broke", proposal=Rollback("5 updates in a row were skipped", (7,))
    )
    assert responder.decide([monitor.observe(make_facts(1, lr=1e-3))]) == Continue()
    assert responder.decide([monitor.observe(make_facts(2, lr=10.0))]) == Continue()
    back = responder.decide([monitor.observe(make_facts(3, lr=10.0)), broke])
    halt = responder.decide([broke])
    assert isinstance(back, Rollback)
    assert back.bad == (7,)
    assert isinstance(halt, Halt)
    for reason in (back.reason, halt.reason):
        assert "before that, at step 2, the learning rate is 10, 1e+04 times the largest" in reason
    assert Responder(GuardConfig(), RunLedger()).decide([broke]) == broke.proposal, (
        "nothing is said without a jump"
    )
