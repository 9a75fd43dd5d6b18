from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from harness.core.facts import Continue, Rollback, StepFacts
from harness.monitors.gradients import GradientMonitor

MakeFacts = Callable[..., StepFacts]


def test_a_skipped_step_is_unhealthy_and_left_to_the_gate(make_facts: MakeFacts) -> None:
    verdict = GradientMonitor(5).observe(make_facts(7, applied=False, grad_norm=math.nan, loss=math.inf))
    assert (verdict.code, verdict.step, verdict.healthy) == ("nonfinite.skip", 7, False)
    assert verdict.proposal == Continue()
    assert verdict.evidence["window"] == 1007
    assert "window 1007" in verdict.text
    json.dumps(verdict.evidence, allow_nan=False)


def test_skips_in_a_row_roll_back_past_all_their_windows(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(3)
    applied = [False, False, True, False, False, False, False]
    verdicts = [monitor.observe(make_facts(i, applied=ok, grad_norm=math.nan)) for i, ok in enumerate(applied)]
    found = [v.proposal.bad if isinstance(v.proposal, Rollback) else None for v in verdicts]
    assert found == [None, None, None, None, None, (1003, 1004, 1005), (1003, 1004, 1005, 1006)]


def test_a_falling_loss_scale_is_calibration_down_to_its_floor(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(5)
    scales = [2.0**power for power in range(16, -1, -1)]
    verdicts = [
        monitor.observe(make_facts(i, applied=False, grad_norm=math.inf, loss_scale=s)) for i, s in enumerate(scales)
    ]
    codes = [verdict.code for verdict in verdicts]
    assert codes == ["scaler.calibration"] * 7 + ["nonfinite.skip"] * 10  # 65536 .. 1024, then 512 ..
    assert not any(verdict.healthy for verdict in verdicts)
    rollbacks = [(v.step, v.proposal.bad) for v in verdicts if isinstance(v.proposal, Rollback)]
    # Five real skips: 512, 256, 128, 64, 32. Windows that only calibrated the scaler are not thrown away.
    assert rollbacks[0] == (11, tuple(range(1007, 1012)))


@pytest.mark.parametrize(
    ("scales", "loss", "codes"),
    [
        pytest.param([8192.0, 8192.0], 2.0, ["scaler.calibration", "nonfinite.skip"], id="scale does not fall"),
        pytest.param([8192.0, 4096.0], math.nan, ["nonfinite.skip"] * 2, id="loss itself not finite"),
        pytest.param([1.0, 1.0], 2.0, ["nonfinite.skip"] * 2, id="no scaler"),
    ],
)
def test_what_is_not_calibration(make_facts: MakeFacts, scales: list[float], loss: float, codes: list[str]) -> None:
    monitor = GradientMonitor(5)
    steps = [make_facts(i, applied=False, grad_norm=math.inf, loss=loss, loss_scale=s) for i, s in enumerate(scales)]
    assert [monitor.observe(facts).code for facts in steps] == codes


def test_each_search_for_the_scale_is_calibration_anew(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(5)
    codes = [monitor.observe(make_facts(i, applied=i % 2 == 1, loss_scale=8192.0)).code for i in range(6)]
    assert codes == ["scaler.calibration", "gradient.ok"] * 3


def test_growth_is_reported_once_a_streak_and_only_once_armed(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(5)
    norms = [50.0] + [1.0] * 20 + [9.9, 10.0, 30.0, 1.0, 12.0]
    verdicts = [monitor.observe(make_facts(step, grad_norm=norm)) for step, norm in enumerate(norms)]
    grown = [verdict for verdict in verdicts if verdict.code == "gradient.growth"]
    assert [verdict.step for verdict in grown] == [22, 25]
    assert all(verdict.healthy and verdict.proposal == Continue() for verdict in grown)
    assert grown[0].evidence["median"] == 1.0


def test_a_skipped_norm_never_enters_the_median(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(1000)
    for step in range(200):
        monitor.observe(make_facts(2 * step, grad_norm=1.0))
        monitor.observe(make_facts(2 * step + 1, grad_norm=math.nan if step % 2 else 1e9, applied=False))
    assert monitor.observe(make_facts(400, grad_norm=10.0)).code == "gradient.growth"


@pytest.mark.parametrize("cut", [3, 19, 23, 26])
def test_a_restored_monitor_says_the_same(make_facts: MakeFacts, cut: int) -> None:
    norms = [1.0 + 0.1 * (i % 7) for i in range(20)] + [40.0, 50.0] + [math.nan] * 4 + [1.0, 15.0]
    trace = [
        make_facts(i, grad_norm=n, applied=math.isfinite(n), loss_scale=2.0 ** (14 - i)) for i, n in enumerate(norms)
    ]
    live = GradientMonitor(3)
    for facts in trace[:cut]:
        live.observe(facts)
    resumed = GradientMonitor(3)
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    verdicts = [live.observe(facts) for facts in trace[cut:]]
    assert [resumed.observe(facts) for facts in trace[cut:]] == verdicts
    assert any(verdict.text for verdict in verdicts)
