from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from harness.core.facts import BAD_LABEL, Continue, Halt, Limits, StepFacts, Verdict
from harness.monitors.scaler import ScalerMonitor

MakeFacts = Callable[..., StepFacts]


def codes_of(
    make_facts: MakeFacts, monitor: ScalerMonitor, scales: list[float], applied: bool = True
) -> list[str]:
    return [
        monitor.observe(make_facts(i, loss_scale=s, applied=applied)).code
        for i, s in enumerate(scales)
    ]


def test_without_a_scaler_it_is_silent(make_facts: MakeFacts) -> None:
    assert set(codes_of(make_facts, ScalerMonitor(), [1.0] * 50)) == {"scaler.ok"}


def test_a_first_calibration_is_not_low(make_facts: MakeFacts) -> None:
    monitor = ScalerMonitor()
    assert set(codes_of(make_facts, monitor, [4096.0, 2048.0, 1024.0, 512.0], applied=False)) == {
        "scaler.ok"
    }
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
    assert "learning rate" in verdict.proposal.reason


def test_a_restored_monitor_says_the_same(make_facts: MakeFacts) -> None:
    live = ScalerMonitor()
    codes_of(make_facts, live, [65536.0, 512.0])
    resumed = ScalerMonitor()
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    rest = [256.0, 2048.0, 128.0, 0.5]
    assert codes_of(make_facts, resumed, rest) == [
        "scaler.ok",
        "scaler.ok",
        "scaler.low",
        "scaler.collapse",
    ]


def skipping(
    make_facts: MakeFacts, monitor: ScalerMonitor, skips: list[bool], **fields: Any
) -> list[Verdict]:
    """What it says of steps that overflow where `skips` is True, beside ok."""
    verdicts = [
        monitor.observe(
            make_facts(i, loss_scale=65536.0, applied=not skip, **(fields if skip else {}))
        )
        for i, skip in enumerate(skips)
    ]
    return [verdict for verdict in verdicts if verdict.text]


def test_neither_the_search_at_the_start_nor_a_scaler_at_rest_is_overflow(
    make_facts: MakeFacts,
) -> None:
    search = [True] * 60 + [False] * 2000
    at_rest = [False] * 5 + [step % 100 == 0 for step in range(5000)]
    assert skipping(make_facts, ScalerMonitor(), search) == []
    assert skipping(make_facts, ScalerMonitor(), at_rest) == []
    later = [False] * 300 + [True] * 10 + [False] * 500
    assert skipping(make_facts, ScalerMonitor(), later) == [], (
        "a second search, by three orders of magnitude"
    )


def test_persistent_overflow_is_told_once_and_again_after_it_was_over(
    make_facts: MakeFacts,
) -> None:
    every_tenth = [step % 10 == 9 for step in range(1000)]
    verdicts = skipping(
        make_facts, ScalerMonitor(), [True] * 5 + every_tenth + [False] * 300 + every_tenth
    )
    assert [(verdict.code, verdict.step) for verdict in verdicts] == [
        ("scaler.overflow", 5 + 109),
        ("scaler.overflow", 5 + 1300 + 109),
    ], "at the eleventh skip"
    assert all(verdict.healthy and verdict.proposal == Continue() for verdict in verdicts)
    assert verdicts[0].evidence == {"skips": 11, "steps": 110, "loss_scale": 65536.0}


@pytest.mark.parametrize(
    "fields",
    [{"bad_data": BAD_LABEL}, {"loss": math.nan}, {"grad_norm": 50.0, "limits": Limits(norm=8.0)}],
    ids=["bad_data", "nan_loss", "spike"],
)
def test_skips_for_other_reasons_are_not_the_scalers(
    make_facts: MakeFacts, fields: dict[str, Any]
) -> None:
    assert (
        skipping(make_facts, ScalerMonitor(), [step % 5 == 4 for step in range(400)], **fields)
        == []
    )


def test_overflow_follows_a_low_scale(make_facts: MakeFacts) -> None:
    monitor = ScalerMonitor(window=20)
    skips = [False, True, True, True, True]
    facts = [
        make_facts(i, applied=not skip, loss_scale=2048.0 / 2**i) for i, skip in enumerate(skips)
    ]
    assert [monitor.observe(each).code for each in facts] == [
        "scaler.ok", "scaler.ok", "scaler.low", "scaler.overflow", "scaler.ok",
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [3, 100, 130, 300])
def test_a_restored_monitor_counts_on(make_facts: MakeFacts, cut: int) -> None:
    skips = (
        [step % 10 == 9 for step in range(150)]
        + [False] * 250
        + [step % 10 == 9 for step in range(150)]
    )
    live, resumed = ScalerMonitor(), ScalerMonitor()
    skipping(make_facts, live, skips[:cut])
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    expected = skipping(make_facts, live, skips[cut:])
    assert skipping(make_facts, resumed, skips[cut:]) == expected
    assert expected


def test_an_overflow_under_limits_is_the_scalers(make_facts: MakeFacts) -> None:
    skips = [step % 10 == 9 for step in range(200)]
    (verdict,) = skipping(
        make_facts, ScalerMonitor(), skips, grad_norm=math.inf, limits=Limits(loss=9.0, norm=8.0)
    )
    assert verdict.code == "scaler.overflow"
