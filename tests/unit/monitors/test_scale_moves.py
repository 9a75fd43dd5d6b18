from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

from harness.core.facts import StepFacts
from harness.monitors.scale_moves import GAP, ScaleMoves

MakeFacts = Callable[..., StepFacts]
Step = tuple[float, bool]
"""(loss scale in use, whether the update was applied)."""


def said(
    make_facts: MakeFacts, monitor: ScaleMoves, steps: list[Step], first: int = 1
) -> dict[int, tuple[str, str]]:
    """{step: (code, text)} of every event."""
    found: dict[int, tuple[str, str]] = {}
    for step, (scale, applied) in enumerate(steps, start=first):
        verdict = monitor.observe(make_facts(step, loss_scale=scale, applied=applied))
        assert verdict.healthy, "whether a move is a fault is judged elsewhere"
        if verdict.text:
            found[step] = verdict.code, verdict.text
    return found


def test_the_burst_at_the_start_is_one_event_when_it_is_over(make_facts: MakeFacts) -> None:
    burst = [(65536.0 / 2**fall, False) for fall in range(6)]
    steps = [*burst, (1024.0, True), *[(1024.0, True)] * 50]
    text = "the loss scale was lowered: 65536 before step 2, 1024 now, 6 times since then"
    assert said(make_facts, ScaleMoves(), steps) == {7: ("scaler.backed_off", text)}


def test_growth_and_the_overflow_after_it_are_an_event_each(make_facts: MakeFacts) -> None:
    steps = [*[(1024.0, True)] * 10, (2048.0, False), *[(1024.0, True)] * 10]
    assert said(make_facts, ScaleMoves(), steps) == {
        11: ("scaler.grew", "the loss scale was raised: 1024 before step 11, 2048 now"),
        12: ("scaler.backed_off", "the loss scale was lowered: 2048 before step 12, 1024 now"),
    }


def test_a_scale_that_never_rests_cannot_flood(make_facts: MakeFacts) -> None:
    restless = [(2048.0 if step % 5 else 1024.0, bool(step % 5)) for step in range(10_000)]
    found = said(make_facts, ScaleMoves(), restless)
    for code in ("scaler.grew", "scaler.backed_off"):
        steps = [step for step, (each, _) in found.items() if each == code]
        gaps = [later - earlier for earlier, later in pairwise(steps)]
        assert 40 <= len(steps) <= 50
        assert min(gaps) >= GAP
    changes = [text for _, text in list(found.values())[2:]]
    assert all("40 times since then" in text for text in changes), "none is left out"


def test_a_run_that_left_fp16_lowers_no_scale(make_facts: MakeFacts) -> None:
    monitor = ScaleMoves()
    monitor.observe(make_facts(1, loss_scale=65536.0))
    assert not monitor.observe(make_facts(2, loss_scale=1.0, fell_back_to="bf16")).text


def test_a_restored_monitor_says_the_same(make_facts: MakeFacts) -> None:
    before = [(65536.0, False), (32768.0, False)]
    after = [(16384.0, True), (16384.0, True), (32768.0, True)]
    live, resumed = ScaleMoves(), ScaleMoves()
    said(make_facts, live, before)
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    found = said(make_facts, live, after, first=3)
    assert [code for code, _ in found.values()] == ["scaler.backed_off", "scaler.grew"]
    assert said(make_facts, resumed, after, first=3) == found
