from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

from harness.core.facts import Continue, Rollback, StepFacts, Verdict
from harness.monitors.parameters import ParameterMonitor

MakeFacts = Callable[..., StepFacts]


def observe(make_facts: MakeFacts, norms: Mapping[int, float], steps: int) -> list[Verdict]:
    """One monitor's verdicts on steps 1 to `steps`; norms: those measured. Index 0 is step 1."""
    monitor = ParameterMonitor()
    return [
        monitor.observe(make_facts(step, param_norm=norms.get(step, math.nan)))
        for step in range(1, steps + 1)
    ]


def told(verdicts: list[Verdict]) -> list[int]:
    assert {verdict.code for verdict in verdicts if verdict.text} <= {"parameters.growth"}
    return [verdict.step for verdict in verdicts if verdict.text]


def test_tenfold_growth_in_100_steps_is_told_once_unhealthy_until_settled(
    make_facts: MakeFacts,
) -> None:
    norms = {1 + 10 * k: 7.0 for k in range(10)} | {101 + 10 * k: 71.0 for k in range(30)}
    verdicts = observe(make_facts, norms, 400)
    assert told(verdicts) == [101]
    assert verdicts[100].evidence["norm"] == 71.0
    assert verdicts[100].evidence["smallest"] == 7.0
    assert verdicts[100].proposal == Continue()
    # 7.0 was last measured at step 91, and is within a hundred steps of step 191.
    assert [verdict.step for verdict in verdicts if not verdict.healthy] == list(range(101, 201))


def test_slow_growth_is_what_training_does(make_facts: MakeFacts) -> None:
    norms = {step: 10.0 * 1.015**step for step in range(1, 2000, 10)}  # 4.4-fold in a hundred steps
    assert told(observe(make_facts, norms, 2000)) == []
    fast = {step: 10.0 * 1.024**step for step in range(1, 200, 10)}  # 10.7-fold
    assert told(observe(make_facts, fast, 200)) == [101]


def test_weights_that_start_at_zero_have_no_growth_to_measure(make_facts: MakeFacts) -> None:
    assert told(observe(make_facts, {1: 0.0, 11: 0.0, 21: 3.0, 31: 4.0}, 40)) == []


def test_non_finite_weights_are_rolled_back_without_blaming_the_data(make_facts: MakeFacts) -> None:
    verdicts = observe(make_facts, {1: 7.0, 11: 7.1, 21: math.inf, 31: 7.0}, 40)
    assert told(verdicts) == [21]
    assert verdicts[20].proposal == Rollback("the weights are not finite")
    assert verdicts[20].evidence["norm"] == "inf"
    assert [verdict.step for verdict in verdicts if not verdict.healthy] == list(range(21, 31))
    at_once = observe(make_facts, {1: math.inf}, 1)
    assert isinstance(at_once[0].proposal, Rollback)


def test_a_restored_monitor_says_the_same(make_facts: MakeFacts) -> None:
    norms = {1 + 10 * k: (7.0 if k % 20 < 10 else 80.0) for k in range(40)}
    whole = observe(make_facts, norms, 400)
    assert len(told(whole)) == 2
    for cut in (0, 5, 101, 102, 150, 300):
        first, resumed = ParameterMonitor(), ParameterMonitor()
        facts = [make_facts(step, param_norm=norms.get(step, math.nan)) for step in range(1, 401)]
        before = [first.observe(each) for each in facts[:cut]]
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert before + [resumed.observe(each) for each in facts[cut:]] == whole


def test_growth_is_seen_however_seldom_the_norm_is_measured(make_facts: MakeFacts) -> None:
    # guard.measure_every may be larger than the 100 steps that are looked back on.
    norms = {1: 7.0, 201: 8.0, 401: 81.0, 601: 82.0}
    verdicts = observe(make_facts, norms, 700)
    assert told(verdicts) == [401]
    assert "times its smallest of the last 200 steps (8)" in verdicts[400].text
    assert [verdict.step for verdict in verdicts if not verdict.healthy] == list(range(401, 601))
