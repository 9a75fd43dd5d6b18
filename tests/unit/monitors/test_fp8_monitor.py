from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

import numpy as np

from harness.core.facts import Continue, SlotStats, StepFacts
from harness.monitors.fp8 import Fp8Monitor

MakeFacts = Callable[..., StepFacts]
NAMES = tuple(f"blocks.{index:02d}.proj.{role}" for index in range(3) for role in ("input", "weight", "grad_output"))


def slots(amax: Mapping[str, float] | None = None, scrubbed: int = 0) -> SlotStats:
    values = np.array([(amax or {}).get(name, 1.0) for name in NAMES], dtype=np.float32)
    ones = np.ones_like(values)
    return SlotStats(NAMES, values, ones, ones, ones, ones, ones, scrubbed=scrubbed)


def test_without_fp8_it_is_silent(make_facts: MakeFacts) -> None:
    assert Fp8Monitor().observe(make_facts(0)).code == "fp8.ok"


def test_scrubbed_infinities_are_named_once_a_streak(make_facts: MakeFacts) -> None:
    monitor = Fp8Monitor()
    hit = slots({NAMES[4]: math.inf}, scrubbed=1)
    verdicts = [monitor.observe(make_facts(i, slots=hit if i in {3, 4, 8} else slots())) for i in range(10)]
    told = [verdict for verdict in verdicts if verdict.code != "fp8.ok"]
    assert [(verdict.code, verdict.step) for verdict in told] == [("fp8.scrubbed", 3), ("fp8.scrubbed", 8)]
    assert told[0].evidence == {"scrubbed": 1, "slots": [NAMES[4]]}
    assert all(verdict.healthy and verdict.proposal == Continue() for verdict in verdicts)


def test_a_dead_slot_is_named_once_after_fifty_applied_steps(make_facts: MakeFacts) -> None:
    monitor = Fp8Monitor()
    dead = slots({NAMES[2]: 0.0})
    # Every third step is skipped and does not count: 50 applied ones are complete at step 73.
    verdicts = [monitor.observe(make_facts(i, slots=dead, applied=i % 3 != 2)) for i in range(200)]
    told = [verdict for verdict in verdicts if verdict.code == "fp8.dead"]
    assert [(verdict.step, verdict.evidence["slots"]) for verdict in told] == [(73, [NAMES[2]])]


def test_a_slot_that_sees_one_value_is_not_dead(make_facts: MakeFacts) -> None:
    monitor = Fp8Monitor()
    verdicts = [
        monitor.observe(make_facts(i, slots=slots({NAMES[0]: 0.0 if i % 50 != 49 else 1e-9}))) for i in range(300)
    ]
    assert {verdict.code for verdict in verdicts} == {"fp8.ok"}


def test_dead_slots_are_told_after_a_scrub_of_the_same_step(make_facts: MakeFacts) -> None:
    monitor = Fp8Monitor(dead_after=5)
    zeros = dict.fromkeys(NAMES, 0.0)
    verdicts = [monitor.observe(make_facts(i, slots=slots(zeros, scrubbed=int(i == 4)))) for i in range(7)]
    assert [verdict.code for verdict in verdicts[4:]] == ["fp8.scrubbed", "fp8.dead", "fp8.ok"]
    assert "and 4 more" in verdicts[5].text
    assert verdicts[5].evidence["slots"] == list(NAMES)


def test_a_restored_monitor_says_the_same(make_facts: MakeFacts) -> None:
    dead = slots({NAMES[1]: 0.0})
    live = Fp8Monitor(dead_after=10)
    for step in range(6):
        live.observe(make_facts(step, slots=dead))
    resumed = Fp8Monitor(dead_after=10)
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    after = [resumed.observe(make_facts(step, slots=dead)) for step in range(6, 20)]
    assert after == [live.observe(make_facts(step, slots=dead)) for step in range(6, 20)]
    assert [verdict.step for verdict in after if verdict.text] == [9]
