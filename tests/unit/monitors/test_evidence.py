"""Every statistic speaks for itself: which values are bad, and that the whole run falls only when layers cannot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from fallback_support import LAYERS, NAMES, drive, make_facts

from harness.core.config import FallbackConfig
from harness.core.facts import SamplingSpan, StepFacts, Switch
from harness.monitors.fallback import FallbackController

Value = float | Callable[[int], float]
SLOT = f"{LAYERS[2]}.grad_output"
LITERAL = FallbackConfig(amax_over=440.0)
TREND = FallbackConfig(amax_growth=4.0)


def demoted_by(
    policy: FallbackConfig, values: Mapping[str, Value], steps: int = 12, slot: str = SLOT
) -> tuple[str, ...]:
    """Which statistics of `slot` are named when it has these values at every step; empty if it stays in FP8."""
    controller = FallbackController(policy, LAYERS)
    for step in range(steps):
        given = {
            kind: {slot: value(step) if callable(value) else value}
            for kind, value in values.items()
        }
        verdict = controller.observe(make_facts(step, **given))  # pyright: ignore[reportArgumentType]
        json.dumps(dict(verdict.evidence), allow_nan=False)
        if isinstance(verdict.proposal, Switch):
            assert verdict.proposal.demote == (LAYERS[2],)
            found = verdict.evidence["demote"][LAYERS[2]]["slots"]
            assert set(found) == {slot}
            assert slot in verdict.text
            return tuple(kind for kind in found[slot] if kind != "amax")
    return ()


@pytest.mark.parametrize(
    ("policy", "bad", "fine"),
    [
        (FallbackConfig(), {"saturation": 8.1}, {"saturation": 7.9}),
        (FallbackConfig(), {"clipped": 0.051}, {"clipped": 0.049}),
        (FallbackConfig(), {"underflow": 0.86}, {"underflow": 0.84}),
        (FallbackConfig(), {"sqnr_db": 4.9}, {"sqnr_db": 5.1}),
        (FallbackConfig(), {"sqnr_db": 0.0}, {"sqnr_db": 31.0}),
        (FallbackConfig(), {"sqnr_db": -20.0}, {"sqnr_db": math.nan}),
    ],
)
def test_a_value_beyond_its_limit_demotes_and_one_within_does_not(
    policy: FallbackConfig, bad: dict[str, float], fine: dict[str, float]
) -> None:
    assert demoted_by(policy, bad) == tuple(bad)
    assert demoted_by(policy, fine) == ()


@pytest.mark.parametrize(
    ("role", "kind", "bad", "fine"),
    [
        ("input", "underflow", 0.26, 0.24),
        ("weight", "underflow", 0.26, 0.24),
        ("input", "even_db", 7.9, 8.1),
        ("weight", "even_db", 21.9, 22.1),
        ("grad_output", "even_db", 6.9, 7.1),
    ],
)
def test_roles_have_limits_of_their_own(role: str, kind: str, bad: float, fine: float) -> None:
    slot = f"{LAYERS[2]}.{role}"
    assert demoted_by(FallbackConfig(), {kind: bad}, slot=slot) == (kind,)
    assert demoted_by(FallbackConfig(), {kind: fine}, slot=slot) == ()


def test_an_infinite_amax_is_named_as_such() -> None:
    assert demoted_by(FallbackConfig(), {"amax": math.inf}) == ("nonfinite",)


def test_the_literal_amax_is_looked_at_only_when_asked_for() -> None:
    assert demoted_by(LITERAL, {"amax": 441.0}) == ("amax_over",)
    assert demoted_by(LITERAL, {"amax": 439.0}) == ()
    assert demoted_by(FallbackConfig(), {"amax": 1e6}) == ()


def test_the_trend_compares_with_a_window_before() -> None:
    # 1.3 ** 8 = 8.2, 1.15 ** 8 = 3.1: over and under a factor of 4 in a window of 8
    assert demoted_by(TREND, {"amax": lambda step: 1.3**step}, steps=40) == ("amax_growth",)
    assert demoted_by(TREND, {"amax": lambda step: 1.15**step}, steps=40) == ()
    assert demoted_by(FallbackConfig(), {"amax": lambda step: 1.3**step}, steps=40) == ()


def test_the_trend_is_in_the_evidence_whatever_demoted() -> None:
    controller = FallbackController(FallbackConfig(), LAYERS)
    verdicts = [
        controller.observe(
            make_facts(step, {SLOT: 9.0 if step > 9 else 0.9}, amax={SLOT: 2.0**step})
        )
        for step in range(13)
    ]
    amax = verdicts[-1].evidence["demote"][LAYERS[2]]["slots"][SLOT]["amax"]
    assert amax == [2.0**step for step in range(4, 13)]


def test_the_one_furthest_beyond_its_limit_leaves_first() -> None:
    policy = FallbackConfig(max_demoted_share=0.17, over_budget="stay")  # one layer of six
    controller = FallbackController(policy, LAYERS)
    # 20 dB under the limit is a factor of 10 in amplitude; 8.0 * 9 is one of 9; 0.05 * 8 one of 8.
    values = {
        "sqnr_db": {f"{LAYERS[4]}.input": -15.0},
        "saturation": {f"{LAYERS[1]}.grad_output": 72.0},
        "clipped": {f"{LAYERS[0]}.weight": 0.4},
    }
    verdicts = [controller.observe(make_facts(step, **values)) for step in range(6)]  # pyright: ignore[reportArgumentType]
    proposals = [verdict.proposal for verdict in verdicts if isinstance(verdict.proposal, Switch)]
    assert [proposal.demote for proposal in proposals] == [(LAYERS[4],)]


def test_the_whole_run_falls_once_layers_were_stuck_in_fp8_for_a_window() -> None:
    policy = FallbackConfig(max_demoted_share=0.5)
    worst = {f"{layer}.input": 10.0 for layer in LAYERS[:5]}

    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        return make_facts(step, worst, demoted=demoted)

    switches = drive(FallbackController(policy, LAYERS), trace, range(60))
    assert [(step, s.demote, s.whole_run_to) for step, s in switches] == [
        (4, LAYERS[:3], ""),
        (12, (), "bf16"),
    ]
    assert LAYERS[3] in switches[1][1].reason
    assert "for good" in switches[1][1].reason


def test_a_burst_that_passes_does_not_cost_the_whole_run_its_precision() -> None:
    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        burst = dict.fromkeys(NAMES, 100.0) if 20 <= step < 23 else None
        return make_facts(step, burst, demoted=demoted)

    switches = drive(FallbackController(FallbackConfig(), LAYERS), trace, range(60))
    assert len(switches) == 1, "the burst itself must be seen"
    assert not switches[0][1].whole_run_to


def test_nothing_is_proposed_after_the_whole_run_fell() -> None:
    controller = FallbackController(FallbackConfig(), LAYERS)
    loud = dict.fromkeys(NAMES, 100.0)
    for step in range(40):
        facts = replace(make_facts(step, loud, demoted=LAYERS), fell_back_to="bf16")
        assert controller.observe(facts).code == "precision.ok"


def test_a_bad_sample_is_followed_by_samples_at_every_step() -> None:
    controller = FallbackController(FallbackConfig(), LAYERS)
    look = SamplingSpan()
    sampled: list[int] = []
    for step in range(1, 40):
        measured = step % 10 == 0 or step in look
        sampled += [step] if measured else []
        lost = 0.001 if step < 20 else 0.9
        verdict = controller.observe(make_facts(step, underflow={SLOT: lost} if measured else None))
        if verdict.sample_steps:
            look = look.extended(step + 2, verdict.sample_steps)
        if isinstance(verdict.proposal, Switch):
            break
    # Step 20 is bad; its facts are judged while step 21 runs, so that 22 is the first that can be measured for it.
    # The first steps that are evidence are measured, too.
    assert sampled == [3, 4, 5, 10, 20, 22, 23]


def test_one_bad_sample_does_not_keep_the_measuring_up() -> None:
    controller = FallbackController(FallbackConfig(), LAYERS)
    asked = [
        controller.observe(
            make_facts(step, underflow={SLOT: 0.9 if step == 5 else 0.001})
        ).sample_steps
        for step in range(20)
    ]
    assert [step for step, closer in enumerate(asked) if closer and step > 1] == [5]


def asked_at(ratios: Mapping[int, float], role: str = "input") -> list[int]:
    """Steps after which everything is to be measured, where a slot has these saturations, else 0.9."""
    controller, slot = FallbackController(FallbackConfig(), LAYERS), f"{LAYERS[2]}.{role}"
    verdicts = [
        controller.observe(make_facts(step, {slot: ratios.get(step, 0.9)})) for step in range(2, 20)
    ]
    return [verdict.step for verdict in verdicts if verdict.sample_steps]


def test_what_every_step_measures_says_when_to_measure_more() -> None:
    assert asked_at({}) == []
    assert asked_at({7: 1.6, 9: 100.0}) == [7, 9], (
        "it went over: what the scale does next may lose the rest"
    )
    assert asked_at({7: 2.0**-7, 9: 2.0**-5}) == [7], "it is far under what was there before"
    assert asked_at({7: 2.0**-13, 9: 2.0**-15}, "grad_output") == [9], (
        "gradients swing, and E5M2 has the room"
    )
    assert asked_at({7: 0.0}) == [], "a tensor of zeros loses nothing"


def test_the_first_steps_are_measured() -> None:
    """A fault that is there from the start waits for no sample."""
    controller, look = FallbackController(FallbackConfig(), LAYERS), SamplingSpan()
    for step in range(1, 4):
        verdict = controller.observe(make_facts(step, applied_steps=step))
        look = look.extended(step + 2, verdict.sample_steps) if verdict.sample_steps else look
    assert [step for step in range(1, 20) if step in look] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("seen", "leaves"),
    [
        ({"underflow": 0.9}, True),
        ({"even_db": 1.0}, True),
        ({"underflow": 0.4}, False),  # not far enough over to be sure at once
        ({"clipped": 0.9}, False),  # its scale is of the time before
        ({"saturation": 100.0}, False),
    ],
)
@pytest.mark.parametrize("later", [0, 1, 2, 3])
def test_what_was_hidden_behind_a_layer_leaves_right_after_it(
    seen: dict[str, float], leaves: bool, later: int
) -> None:
    controller = FallbackController(FallbackConfig(), LAYERS)
    verdict = controller.observe(make_facts(2))
    for step in range(3, 6):
        verdict = controller.observe(make_facts(step, underflow={f"{LAYERS[1]}.input": 0.9}))
    assert isinstance(verdict.proposal, Switch)
    assert verdict.sample_steps, "what follows is measured"
    controller.observe(make_facts(6))
    second: list[tuple[str, ...]] = []
    for step in range(7, 12):
        values = (
            {kind: {f"{LAYERS[2]}.input": value} for kind, value in seen.items()}
            if step == 7 + later
            else {}
        )
        verdict = controller.observe(make_facts(step, demoted=(LAYERS[1],), **values))  # pyright: ignore[reportArgumentType]
        saved = json.dumps(controller.state_dict(), allow_nan=False)
        controller = FallbackController(
            FallbackConfig(), LAYERS
        )  # a resume in between changes nothing
        controller.load_state_dict(json.loads(saved))
        second += [verdict.proposal.demote] if isinstance(verdict.proposal, Switch) else []
    assert second == ([(LAYERS[2],)] if leaves and later < 3 else [])


def test_dense_sampling_is_extended_without_a_gap() -> None:
    look = SamplingSpan().extended(12, 8)
    assert [step for step in range(40) if step in look] == list(range(12, 20))
    assert [step for step in range(40) if step in look.extended(15, 8)] == list(range(12, 23))
    assert [step for step in range(40) if step in look.extended(30, 2)] == [30, 31]
    assert 0 not in SamplingSpan()
