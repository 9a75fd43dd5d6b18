from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from harness.core.facts import Continue, StepFacts, Verdict
from harness.monitors.clipping import ClippingMonitor

MakeFacts = Callable[..., StepFacts]


def observe(make_facts: MakeFacts, norms: Sequence[float], **fields: Any) -> list[Verdict]:
    """One monitor's verdicts; the limit is 1, warm-up 40 steps. Step 0 applies update 1."""
    monitor = ClippingMonitor(max_grad_norm=1.0, warmup_steps=40)
    return [
        monitor.observe(make_facts(step, grad_norm=norm, **fields))
        for step, norm in enumerate(norms)
    ]


def told(verdicts: Sequence[Verdict]) -> list[int]:
    assert all(verdict.healthy and verdict.proposal == Continue() for verdict in verdicts)
    assert {verdict.code for verdict in verdicts if verdict.text} <= {"gradient.clipping"}
    return [verdict.step for verdict in verdicts if verdict.text]


def test_constant_clipping_is_told_once_after_the_warm_up(make_facts: MakeFacts) -> None:
    verdicts = observe(make_facts, [5.0] * 600)
    assert told(verdicts) == [239], "200 applied updates after 40 of warm-up"
    assert verdicts[239].evidence == {"share": 1.0, "median": 5.0, "max_grad_norm": 1.0}
    assert "100% of the last 200" in verdicts[239].text


def test_one_update_in_twenty_may_pass(make_facts: MakeFacts) -> None:
    assert told(observe(make_facts, [0.5 if step % 20 == 0 else 5.0 for step in range(600)])) == [
        239
    ]
    assert told(observe(make_facts, [0.5 if step % 18 == 0 else 5.0 for step in range(600)])) == []


def test_a_share_that_wavers_is_told_once_and_a_new_streak_again(make_facts: MakeFacts) -> None:
    clipped, free = [5.0] * 240, [0.5] * 15
    assert told(observe(make_facts, clipped + (free + [5.0] * 200) * 3)) == [239]
    assert len(told(observe(make_facts, clipped + [0.5] * 200 + [5.0] * 200))) == 2


def test_skipped_updates_do_not_count(make_facts: MakeFacts) -> None:
    assert told(observe(make_facts, [5.0] * 600, applied=False)) == []


@pytest.mark.parametrize("seed", range(8))
def test_norms_as_the_quickstart_has_them_are_no_alarm(make_facts: MakeFacts, seed: int) -> None:
    # Eight recorded runs: 2.5 to 4 in the first steps, median 0.45 and at most 3% over 1 after the warm-up.
    spread = np.exp(0.4 * np.random.default_rng(seed).standard_normal(2000))
    verdicts = observe(make_facts, [*(3.0 * spread[:40]), *(0.45 * spread[40:])])
    assert told(verdicts) == []


def test_a_restored_monitor_says_the_same(make_facts: MakeFacts) -> None:
    norms = [5.0] * 300 + [0.5] * 120 + [5.0] * 220
    whole = observe(make_facts, norms)
    assert len(told(whole)) == 2
    for cut in (0, 50, 239, 240, 400, 600):
        first, resumed = ClippingMonitor(1.0, 40), ClippingMonitor(1.0, 40)
        facts = [make_facts(step, grad_norm=norm) for step, norm in enumerate(norms)]
        before = [first.observe(each) for each in facts[:cut]]
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert before + [resumed.observe(each) for each in facts[cut:]] == whole
