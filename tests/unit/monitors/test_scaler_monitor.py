from __future__ import annotations

import json
from collections.abc import Callable

from harness.core.facts import Halt, StepFacts
from harness.monitors.scaler import ScalerMonitor

MakeFacts = Callable[..., StepFacts]


def codes_of(make_facts: MakeFacts, monitor: ScalerMonitor, scales: list[float], applied: bool = True) -> list[str]:
    return [monitor.observe(make_facts(i, loss_scale=s, applied=applied)).code for i, s in enumerate(scales)]


def test_without_a_scaler_it_is_silent(make_facts: MakeFacts) -> None:
    assert set(codes_of(make_facts, ScalerMonitor(), [1.0] * 50)) == {"scaler.ok"}


def test_a_first_calibration_is_not_low(make_facts: MakeFacts) -> None:
    monitor = ScalerMonitor()
    assert set(codes_of(make_facts, monitor, [4096.0, 2048.0, 1024.0, 512.0], applied=False)) == {"scaler.ok"}
    assert codes_of(make_facts, monitor, [512.0]) == ["scaler.low"]


def test_low_is_told_once_a_streak(make_facts: MakeFacts) -> None:
    scales = [65536.0, 1024.0, 512.0, 256.0, 1024.0, 512.0]
    expected = ["scaler.ok", "scaler.ok", "scaler.low", "scaler.ok", "scaler.ok", "scaler.low"]
    assert codes_of(make_facts, ScalerMonitor(), scales) == expected


def test_a_collapsed_scale_proposes_a_halt_that_says_what_to_do(make_facts: MakeFacts) -> None:
    monitor = ScalerMonitor()
    codes_of(make_facts, monitor, [2.0**power for power in range(16, 0, -1)], applied=False)
    verdict = monitor.observe(make_facts(17, loss_scale=1.0, applied=False))
    assert (verdict.code, verdict.healthy) == ("scaler.collapse", False)
    assert isinstance(verdict.proposal, Halt)
    assert "train.lr" in verdict.proposal.reason


def test_a_restored_monitor_says_the_same(make_facts: MakeFacts) -> None:
    live = ScalerMonitor()
    codes_of(make_facts, live, [65536.0, 512.0])
    resumed = ScalerMonitor()
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    rest = [256.0, 2048.0, 128.0, 0.5]
    assert codes_of(make_facts, resumed, rest) == ["scaler.ok", "scaler.ok", "scaler.low", "scaler.collapse"]
