"""The fallback controller, driven through facts the way the loop does: decisions act one step late."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from fallback_support import LAYERS, NAMES, drive, make_facts, over
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.config import FallbackConfig
from harness.core.errors import MisuseError
from harness.core.facts import ROLES, SlotStats, StepFacts, Switch, Verdict
from harness.monitors.fallback import FallbackController
from tests.support.matrix import rest_nightly

LIMIT = {"input": 1.5, "weight": 1.25, "grad_output": 8.0}
FLUSHED = {"input": 0.25, "weight": 0.25, "grad_output": 0.85}
# The measured table of a clean run: largest ratio by role, largest underflow.
HEALTHY = {"input": 1.26, "weight": 1.01, "grad_output": 4.5}
HEALTHY_UNDERFLOW = 0.003


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_healthy_run_never_switches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    top = np.array([HEALTHY[name.rpartition(".")[2]] for name in NAMES])

    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        # Half of the values sit exactly on the largest ever measured: the hardest healthy run there is.
        ratios = np.where(rng.random(len(NAMES)) < 0.5, top, top * rng.random(len(NAMES)))
        flushed = rng.uniform(0, HEALTHY_UNDERFLOW, len(NAMES))
        return make_facts(
            step,
            dict(zip(NAMES, ratios, strict=True)),
            dict(zip(NAMES, flushed, strict=True)),
            demoted=demoted,
        )

    assert drive(FallbackController(FallbackConfig(), LAYERS), trace, range(150)) == []


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    slot=st.sampled_from(NAMES),
    excess=st.floats(1.01, 1e6),
    start=st.integers(0, 30),
    lag=st.integers(0, 1),
)
def test_a_persistently_clipped_slot_demotes_its_layer_alone(
    slot: str, excess: float, start: int, lag: int
) -> None:
    layer, _, role = slot.rpartition(".")

    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        return make_facts(
            step, {slot: LIMIT[role] * excess} if step >= start else None, demoted=demoted
        )

    # The shadow ratio stays over its limit too, so that the dwell alone brings nothing back.
    policy = FallbackConfig(dwell_steps=5)
    switches = drive(FallbackController(policy, LAYERS), trace, range(start + 40), lag=lag)
    assert [(switch.demote, switch.promote) for _, switch in switches] == [((layer,), ())]
    assert start <= switches[0][0] <= max(start, policy.warmup_steps) + policy.window + policy.hits


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_first_demotion_is_the_scores_to_the_step(data: st.DataObject) -> None:
    """Oracle: the rule of `FallbackConfig` written down once more, one slot and statistic at a time."""
    hits, window = data.draw(st.sampled_from([(2, 4), (3, 8), (1, 2), (1, 1), (3, 3)]))
    policy = FallbackConfig(
        hits=hits, window=window, warmup_steps=1, max_demoted_share=1.0, dwell_steps=10_000
    )
    taken = 0.5 / (window - hits) if window > hits else 1.0
    enough = hits - 0.5 if window > hits else hits
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    share_bad = data.draw(st.floats(0.02, 0.3))
    expected: dict[str, int] = {}
    seen: dict[tuple[str, str], tuple[float, int]] = {}
    applied_steps = 0
    trace: list[StepFacts] = []
    for step in range(60):
        applied = bool(rng.random() < 0.8)
        applied_steps += applied
        far = 2.0 ** rng.uniform(0.01, 4)
        ratios = {
            n: LIMIT[n.rpartition(".")[2]] * (far if rng.random() < share_bad else 0.5)
            for n in NAMES
        }
        flushed = {
            n: 0.95 if rng.random() < share_bad else 0.1 for n in NAMES if rng.random() < 0.4
        }
        trace.append(
            make_facts(step, ratios, flushed, applied=applied, applied_steps=applied_steps)
        )
        if not applied or applied_steps <= policy.warmup_steps:
            continue
        for name in NAMES:
            layer, _, role = name.rpartition(".")
            observed = {"saturation": ratios[name] / LIMIT[role]}
            observed |= {"underflow": flushed[name] / FLUSHED[role]} if name in flushed else {}
            for kind, value in observed.items():
                score, bad = seen.get((name, kind), (0.0, 0))
                score += 1 + math.log2(value) / 2 if value > 1 else -taken
                score = min(max(score, 0.0), enough + 0.5)
                seen[name, kind] = score, bad + (value > 1) if score > 0 else 0
                if score >= enough and seen[name, kind][1] >= hits:
                    expected.setdefault(layer, step)
    controller = FallbackController(policy, LAYERS)
    found: dict[str, int] = {}
    for facts in trace:
        proposal = controller.observe(facts).proposal
        if isinstance(proposal, Switch):
            for layer in proposal.demote:
                found.setdefault(layer, facts.step)
    assert found == expected


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 7, 10, 15, 25])
@pytest.mark.parametrize("role", ROLES)
def test_an_overflow_that_comes_ever_so_often_demotes_at_the_third_time(
    every: int, role: str
) -> None:
    slot = f"{LAYERS[1]}.{role}"

    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        return make_facts(
            step, {slot: 128 * LIMIT[role]} if step % every == 0 and step else None, demoted=demoted
        )

    (step, switch), *_ = drive(
        FallbackController(FallbackConfig(), LAYERS), trace, range(5 * every + 10)
    )
    first = next(step for step in range(1, 100) if step % every == 0 and step > 1)
    assert (step, switch.demote) == (first + 2 * every, (LAYERS[1],))


@pytest.mark.parametrize(("excess", "acts"), [(1.01, 4), (2.0, 3), (8.0, 3)])
def test_the_further_over_the_fewer_are_needed_of_those_far_apart(excess: float, acts: int) -> None:
    """At every fourth step there are two in a window, however many windows: each of them is evidence."""
    slot = f"{LAYERS[1]}.input"

    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        return make_facts(
            step,
            {slot: LIMIT["input"] * excess} if step % 4 == 0 and step else None,
            demoted=demoted,
        )

    switches = drive(FallbackController(FallbackConfig(), LAYERS), trace, range(60))
    assert [step for step, _ in switches] == [4 * acts]


APART = [[20], [20, 21], [20, 40], [20, 90, 160, 230], [20, 60, 61, 140]]


@pytest.mark.slow
@pytest.mark.parametrize("bad", rest_nightly(APART, *APART[2:4]))
def test_a_few_overflows_far_apart_are_no_fault(bad: list[int]) -> None:
    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        return make_facts(step, {NAMES[2]: 1e6} if step in bad else None, demoted=demoted)

    assert drive(FallbackController(FallbackConfig(), LAYERS), trace, range(1000)) == []


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    dwell=st.integers(5, 40),
    period=st.integers(1, 40),
    steps=st.integers(200, 600),
    role=st.sampled_from(ROLES),
)
def test_flapping_is_bounded_by_the_back_off(
    dwell: int, period: int, steps: int, role: str
) -> None:
    """The m-th demotion cannot come before dwell * (2^(m-1) - 1) steps, so switches grow with the logarithm.

    As long as no calm is longer than the stay that would follow it.
    """
    period = min(period, dwell)
    policy = FallbackConfig(dwell_steps=dwell, hits=1, window=2)
    slot = f"{LAYERS[0]}.{role}"

    def hostile(step: int, demoted: tuple[str, ...]) -> StepFacts:
        bad = LAYERS[0] not in demoted and step // period % 2 == 0
        return make_facts(step, {slot: 1e3} if bad else None, demoted=demoted)

    switches = drive(FallbackController(policy, LAYERS), hostile, range(steps))
    moves = sum(len(switch.demote) + len(switch.promote) for _, switch in switches)
    assert moves >= 2, "the layer must have flapped for the bound to mean anything"
    assert moves <= 2 * math.log2(steps / dwell) + 2


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 119))
def test_a_state_saved_in_mid_trace_decides_the_same(seed: int, cut: int) -> None:
    policy = FallbackConfig(dwell_steps=6, window=4, hits=2)
    rng = np.random.default_rng(seed)
    trace: list[StepFacts] = []
    demoted: tuple[str, ...] = ()
    live = FallbackController(policy, LAYERS)
    verdicts: list[Verdict] = []
    saved = ""
    for step in range(120):
        ratios = {
            name: float(rng.choice([0.5, 20.0, math.inf], p=[0.85, 0.1, 0.05])) for name in NAMES
        }
        flushed = {name: float(rng.choice([0.01, 0.9])) for name in NAMES if rng.random() < 0.1}
        trace.append(make_facts(step, ratios, flushed, demoted, applied=bool(rng.random() < 0.9)))
        if step == cut:
            saved = json.dumps(live.state_dict(), allow_nan=False)
        verdicts.append(live.observe(trace[-1]))
        proposal = verdicts[-1].proposal
        if isinstance(proposal, Switch):
            demoted = tuple(
                layer
                for layer in LAYERS
                if layer in {*demoted, *proposal.demote} - {*proposal.promote}
            )
    assert any(isinstance(verdict.proposal, Switch) for verdict in verdicts)
    resumed = FallbackController(policy, LAYERS)
    resumed.load_state_dict(json.loads(saved))
    assert [resumed.observe(facts) for facts in trace[cut:]] == verdicts[cut:]
    assert resumed.state_dict() == live.state_dict()


def test_a_demoted_layer_returns_after_its_dwell_and_the_dwell_doubles() -> None:
    policy = FallbackConfig(dwell_steps=20)
    slot = f"{LAYERS[2]}.input"

    def clipped_in_fp8(step: int, demoted: tuple[str, ...]) -> StepFacts:
        return make_facts(step, {slot: 3.0} if LAYERS[2] not in demoted else None, demoted=demoted)

    switches = drive(FallbackController(policy, LAYERS), clipped_in_fp8, range(120), lag=1)
    steps = [step for step, _ in switches]
    assert [(s.demote, s.promote) for _, s in switches[:4]] == [
        ((LAYERS[2],), ()),
        ((), (LAYERS[2],)),
    ] * 2
    # Two steps from the decision to the first step in BF16, then the dwell.
    assert steps[1] - steps[0] == 2 + 20
    assert steps[3] - steps[2] == 2 + 40
    # Back in FP8 two steps later, of which the first is no evidence, then three hits.
    assert steps[2] - steps[1] == 2 + 3


@pytest.mark.slow
@pytest.mark.parametrize("far_apart", [True, False])
def test_only_a_layer_that_leaves_again_soon_stays_away_for_longer(far_apart: bool) -> None:
    """One value just over its limit, three times: what each costs does not depend on what was long ago."""
    bad = (30, 200, 500) if far_apart else (30, 130, 330)
    away = 0

    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        nonlocal away
        away += len(demoted)
        return make_facts(step, {NAMES[0]: 1.6} if step in bad else None, demoted=demoted)

    switches = drive(FallbackController(FallbackConfig(hits=1), LAYERS), trace, range(1, 1001))
    assert [step for step, switch in switches if switch.demote] == list(bad)
    stays = 3 * [50] if far_apart else [50, 100, 200]
    assert away == sum(stays) + 2 * len(stays), (
        "two steps from the decision to return to the first one back"
    )


def test_a_role_that_is_never_reported_does_not_keep_a_layer_away() -> None:
    name = NAMES[0]

    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        one, none = np.array([[0.9 if demoted else 9.0], [np.nan]], dtype=np.float32)
        return replace(
            make_facts(step, demoted=demoted),
            slots=SlotStats((name,), one, one, one, none, none, none),
        )

    switches = drive(FallbackController(FallbackConfig(dwell_steps=10), LAYERS), trace, range(20))
    assert [(switch.demote, switch.promote) for _, switch in switches] == [
        ((LAYERS[0],), ()),
        ((), (LAYERS[0],)),
    ]


def test_underflow_on_sampled_steps_demotes_and_keeps_a_layer_away() -> None:
    slot = f"{LAYERS[1]}.input"

    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        # While demoted the share is that of a cast that is made for measuring only.
        lost = 0.5 if step < 200 else 0.001
        return make_facts(step, underflow={slot: lost} if step % 10 == 0 else None, demoted=demoted)

    switches = drive(FallbackController(FallbackConfig(dwell_steps=30), LAYERS), trace, range(400))
    assert [(s.demote, s.promote) for _, s in switches] == [((LAYERS[1],), ()), ((), (LAYERS[1],))]
    assert switches[0][0] == 30
    # The last bad sample is of step 190; `hits` good ones have followed at step 220.
    assert switches[1][0] == 220


def test_evidence_names_slot_figures_and_layer() -> None:
    controller = FallbackController(FallbackConfig(), LAYERS)
    slot = f"{LAYERS[3]}.weight"
    ratios = [9.0, 9.0, 2.0, 1.0, 3.0, math.inf]
    verdicts = [
        controller.observe(make_facts(step, {slot: ratio})) for step, ratio in enumerate(ratios)
    ]
    assert [verdict.code for verdict in verdicts] == ["precision.ok"] * 5 + ["precision.demote"]
    last = verdicts[-1]
    assert (last.step, last.healthy) == (5, True)
    # An infinite amax is clipping too; strict JSON has no infinity, so it is reported as the largest float32.
    found = last.evidence["demote"][LAYERS[3]]["slots"]
    # The amaxes show the trend; here they are the ratios, as the scale is 1.
    assert found == {
        slot: {"saturation": [2.0, 3.0, 3.403e38], "amax": [9.0, 9.0, 2.0, 1.0, 3.0, 3.403e38][-4:]}
    }
    assert f"{slot} saturation 2, 3, 3.403e+38; limit " in last.text
    json.dumps(last.evidence, allow_nan=False)


@pytest.mark.parametrize(
    ("applied", "applied_steps"),
    [
        pytest.param(False, None, id="a step not applied"),
        pytest.param(True, 2, id="warm-up, in applied steps"),
    ],
)
def test_no_evidence_from(applied: bool, applied_steps: int | None) -> None:
    controller = FallbackController(FallbackConfig(), LAYERS)
    clipped = {f"{LAYERS[0]}.input": 100.0}
    silent = [
        make_facts(step, clipped, applied=applied, applied_steps=applied_steps)
        for step in range(20)
    ]
    verdicts = [controller.observe(facts) for facts in silent]
    assert {verdict.code for verdict in verdicts} == {"precision.ok"}
    loud = [controller.observe(make_facts(step, clipped)) for step in range(20, 23)]
    assert loud[-1].code == "precision.demote"


def test_over_budget_the_worst_leave_and_the_rest_is_told_once_a_streak() -> None:
    policy = FallbackConfig(max_demoted_share=0.5, over_budget="stay")
    worst = {f"{layer}.input": 10.0 + index for index, layer in enumerate(LAYERS[:5])}
    controller = FallbackController(policy, LAYERS)
    demoted: tuple[str, ...] = ()
    verdicts: list[Verdict] = []
    for step in range(60):
        calm = 25 <= step < 45
        verdicts.append(
            controller.observe(make_facts(step, None if calm else worst, demoted=demoted))
        )
        proposal = verdicts[-1].proposal
        if isinstance(proposal, Switch):
            demoted = (*demoted, *proposal.demote)
    assert demoted == (LAYERS[4], LAYERS[3], LAYERS[2])
    told = [verdict for verdict in verdicts if verdict.code == "precision.budget"]
    # In the calm of 20 steps the score of 3 falls to 1, so that the first bad one counts.
    assert [verdict.step for verdict in told] == [5, 45]
    assert sorted(told[0].evidence["layers"]) == [LAYERS[0], LAYERS[1]]
    assert told[0].evidence["allowed"] == 3


def test_layers_on_their_way_out_count_against_the_budget() -> None:
    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        # The first half's third hit comes one step before the other half's, and its first leaves the window then.
        early, late = step in {4, 10, 11}, step in {10, 11, 12}
        bad = {f"{name}.input": 9.0 for i, name in enumerate(LAYERS) if (early if i < 3 else late)}
        return make_facts(step, bad, demoted=demoted)

    switches = drive(FallbackController(FallbackConfig(), LAYERS), trace, range(20))
    assert [(step, switch.demote) for step, switch in switches] == [(11, LAYERS[:3])]


def test_a_refused_proposal_is_repeated_only_after_a_window() -> None:
    policy = FallbackConfig()
    switches = drive(FallbackController(policy, LAYERS), over(NAMES[0]), range(40), refuse=True)
    steps = [step for step, _ in switches]
    assert len(steps) > 1
    assert set(np.diff(steps)) == {policy.window + 1}


def test_switched_off_it_stays_silent() -> None:
    assert (
        drive(FallbackController(FallbackConfig(enabled=False), LAYERS), over(NAMES[0]), range(50))
        == []
    )


def test_unknown_slots_and_layers_are_named() -> None:
    controller = FallbackController(FallbackConfig(), LAYERS[:-1])
    with pytest.raises(MisuseError, match=rf"slots that.*{LAYERS[-1]}\.input"):
        controller.observe(make_facts(4))
    with pytest.raises(MisuseError, match=r"demoted layers that.*nowhere"):
        controller.observe(make_facts(5, demoted=("nowhere",)))
