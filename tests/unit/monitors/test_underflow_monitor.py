from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from harness.core.facts import Continue, StepFacts, Verdict
from harness.monitors.underflow import BASELINE, UnderflowMonitor

MakeFacts = Callable[..., StepFacts]


def observe(make_facts: MakeFacts, zeros: Sequence[float], **fields: Any) -> list[Verdict]:
    """One monitor's verdicts on shares of zeros, measured at every step under a loss scale."""
    monitor = UnderflowMonitor()
    usual: dict[str, Any] = {"loss_scale": 65536.0, "grad_near_limit": 0.0} | fields
    return [
        monitor.observe(make_facts(step, grad_zeros=share, **usual))
        for step, share in enumerate(zeros)
    ]


def told(verdicts: Sequence[Verdict]) -> list[tuple[str, int]]:
    assert all(verdict.healthy and verdict.proposal == Continue() for verdict in verdicts)
    assert all((verdict.code == "underflow.ok") == (verdict.text == "") for verdict in verdicts)
    return [(verdict.code, verdict.step) for verdict in verdicts if verdict.text]


def test_zeros_that_grow_are_told_once(make_facts: MakeFacts) -> None:
    verdicts = observe(make_facts, [0.01] * 20 + [0.01 + 0.004 * step for step in range(1, 40)])
    # The second lowest of the last four passes 6% when they are 5.8, 6.2, 6.6 and 7.0%.
    assert told(verdicts) == [("gradient.underflow", 34)]
    alarm = verdicts[34]
    assert alarm.evidence["zeros"] == pytest.approx(0.07)
    assert alarm.evidence["first_zeros"] == pytest.approx(0.01)
    assert "7.0%" in alarm.text
    assert "65536" in alarm.text


def test_a_second_streak_is_told_again(make_facts: MakeFacts) -> None:
    wave = [0.01] * BASELINE + [0.2] * 10 + [0.01] * 10 + [0.2] * 10
    assert [code for code, _ in told(observe(make_facts, wave))] == ["gradient.underflow"] * 2


@pytest.mark.parametrize(
    "zeros",
    [
        [0.30] * 100,  # sparse activations: many zeros, always the same
        [0.13 - 0.001 * step for step in range(100)],  # and fewer as the network learns
        [0.02 + 0.04 * (step % 2) for step in range(100)],  # noise under the level
        [0.01] * 30 + [0.9] + [0.01] * 30,  # one odd batch
    ],
)
def test_zeros_that_are_no_underflow_are_no_alarm(
    make_facts: MakeFacts, zeros: list[float]
) -> None:
    assert told(observe(make_facts, zeros)) == []


def test_a_run_that_never_had_gradients_is_told_from_its_start(make_facts: MakeFacts) -> None:
    assert told(observe(make_facts, [0.7] * 50)) == [("gradient.underflow", BASELINE // 2 - 1)]


def test_high_zeros_that_no_longer_rise_do_not_start_a_streak(make_facts: MakeFacts) -> None:
    monitor = UnderflowMonitor()
    monitor.load_state_dict(
        {"first": [0.01] * 8, "latest": [0.2] * 8, "vanishing": False, "overflowing": False}
    )
    flat = [
        monitor.observe(make_facts(step, grad_zeros=0.2, grad_near_limit=0.0)) for step in range(5)
    ]
    assert told(flat) == []
    rising = [
        monitor.observe(make_facts(5 + step, grad_zeros=0.21, grad_near_limit=0.0))
        for step in range(5)
    ]
    assert [code for code, _ in told(rising)] == ["gradient.underflow"]


@pytest.mark.parametrize("silent", [{"applied": False}, {"fell_back_to": "bf16"}])
def test_steps_that_say_nothing_of_the_gradient_do_not_count(
    make_facts: MakeFacts, silent: dict[str, Any]
) -> None:
    rising = [0.01] * BASELINE + [0.4] * 10
    assert told(observe(make_facts, rising))
    assert told(observe(make_facts, rising, **silent)) == []
    assert told(observe(make_facts, rising, grad_near_limit=0.5, **silent)) == []


def test_steps_between_measurements_do_not_count(make_facts: MakeFacts) -> None:
    sparse = [
        share for each in [0.01] * BASELINE + [0.4] * 4 for share in (each, math.nan, math.nan)
    ]
    assert told(observe(make_facts, sparse)) == [("gradient.underflow", 3 * (BASELINE + 2))]


def test_gradients_near_the_limit_are_told_once_a_streak(make_facts: MakeFacts) -> None:
    monitor = UnderflowMonitor()
    shares = [0.0, 0.009, 0.02, 0.3, 0.0, 0.011, 0.0]
    verdicts = [
        monitor.observe(make_facts(step, grad_zeros=0.0, grad_near_limit=share, loss_scale=2.0**20))
        for step, share in enumerate(shares)
    ]
    assert told(verdicts) == [("gradient.overflow", 2), ("gradient.overflow", 5)]
    assert verdicts[2].evidence["near_limit"] == 0.02


def test_a_restored_monitor_says_the_same(make_facts: MakeFacts) -> None:
    zeros = [0.01] * BASELINE + [0.01 + 0.01 * step for step in range(12)] + [0.01] * 6 + [0.3] * 6
    whole = observe(make_facts, zeros)
    assert len(told(whole)) == 2
    for cut in range(len(zeros)):
        resumed = UnderflowMonitor()
        first = UnderflowMonitor()
        facts = [
            make_facts(i, grad_zeros=z, grad_near_limit=0.0, loss_scale=65536.0)
            for i, z in enumerate(zeros)
        ]
        before = [first.observe(each) for each in facts[:cut]]
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert before + [resumed.observe(each) for each in facts[cut:]] == whole
