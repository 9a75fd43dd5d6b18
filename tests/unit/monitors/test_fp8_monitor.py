from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from harness.core.facts import Continue, SlotStats, StepFacts, Verdict
from harness.monitors.fp8 import Fp8Monitor
from harness.monitors.fp8_frozen import Fp8FrozenMonitor
from harness.monitors.fp8_storm import Fp8StormMonitor
from harness.precision import scaling

MakeFacts = Callable[..., StepFacts]
NAMES = tuple(
    f"blocks.{index:02d}.proj.{role}"
    for index in range(3)
    for role in ("input", "weight", "grad_output")
)


def slots(amax: Mapping[str, float] | None = None, scrubbed: int = 0) -> SlotStats:
    values = np.array([(amax or {}).get(name, 1.0) for name in NAMES], dtype=np.float32)
    ones = np.ones_like(values)
    return SlotStats(NAMES, values, ones, ones, ones, ones, ones, scrubbed=scrubbed)


def test_without_fp8_it_is_silent(make_facts: MakeFacts) -> None:
    assert Fp8Monitor().observe(make_facts(0)).code == "fp8.ok"


def test_scrubbed_infinities_are_named_once_a_streak(make_facts: MakeFacts) -> None:
    monitor = Fp8Monitor()
    hit = slots({NAMES[4]: math.inf}, scrubbed=1)
    verdicts = [
        monitor.observe(make_facts(i, slots=hit if i in {3, 4, 8} else slots())) for i in range(10)
    ]
    told = [verdict for verdict in verdicts if verdict.code != "fp8.ok"]
    assert [(verdict.code, verdict.step) for verdict in told] == [
        ("fp8.scrubbed", 3),
        ("fp8.scrubbed", 8),
    ]
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
        monitor.observe(make_facts(i, slots=slots({NAMES[0]: 0.0 if i % 50 != 49 else 1e-9})))
        for i in range(300)
    ]
    assert {verdict.code for verdict in verdicts} == {"fp8.ok"}


def test_dead_slots_are_told_after_a_scrub_of_the_same_step(make_facts: MakeFacts) -> None:
    monitor = Fp8Monitor(dead_after=5)
    zeros = dict.fromkeys(NAMES, 0.0)
    verdicts = [
        monitor.observe(make_facts(i, slots=slots(zeros, scrubbed=int(i == 4)))) for i in range(7)
    ]
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


def storm(
    saturation: Mapping[str, float] | None = None, underflow: Mapping[str, float] | float = math.nan
) -> SlotStats:
    """Statistics at which nothing is wrong but what is given; underflow: a number for all, NaN: not sampled."""
    ones = np.ones(len(NAMES), dtype=np.float32)
    ratios = np.array([(saturation or {}).get(name, 1.0) for name in NAMES], dtype=np.float32)
    each = [
        underflow.get(name, 0.0) if isinstance(underflow, Mapping) else underflow for name in NAMES
    ]
    flushed = np.array(each, dtype=np.float32)
    return SlotStats(NAMES, ones, ones, ratios, ones, flushed, ones)


def storm_monitor() -> Fp8StormMonitor:
    return Fp8StormMonitor((1.5, 1.25, 8.0), 0.25)


def over(names: tuple[str, ...], ratio: float) -> dict[str, float]:
    return dict.fromkeys(names, ratio)


def test_a_saturation_storm_is_told_once_and_again_after_a_calm(make_facts: MakeFacts) -> None:
    monitor = storm_monitor()
    bad = storm({NAMES[0]: 1.6, NAMES[3]: math.inf, NAMES[4]: 1.3})  # 3 of 9
    trace = [storm()] * 5 + [bad] * 20 + [storm()] + [bad] * 4
    verdicts = [
        monitor.observe(make_facts(i, applied_steps=10 + i, slots=each))
        for i, each in enumerate(trace)
    ]
    told = [verdict for verdict in verdicts if verdict.text]
    assert [(verdict.code, verdict.step) for verdict in told] == [
        ("fp8.saturation", 7),
        ("fp8.saturation", 28),
    ]
    assert told[0].evidence["slots"] == {
        NAMES[3]: "inf",
        NAMES[0]: pytest.approx(1.6),
        NAMES[4]: pytest.approx(1.3),
    }
    assert (told[0].evidence["count"], told[0].evidence["of"]) == (3, 9)
    assert NAMES[3] in told[0].text
    assert all(verdict.healthy and verdict.proposal == Continue() for verdict in verdicts)


@pytest.mark.parametrize(
    "ratios",
    [
        over(NAMES[:2], 100.0),  # 2 of 9
        over(NAMES[2::3], 7.9),  # gradients may
        over(NAMES[::3], 1.49),
    ],
)
def test_a_few_tensors_or_small_ratios_are_no_storm(
    make_facts: MakeFacts, ratios: dict[str, float]
) -> None:
    monitor = storm_monitor()
    for step in range(3, 50):
        assert monitor.observe(make_facts(step, slots=storm(ratios))).code == "fp8.ok"


def test_short_gusts_and_the_first_updates_are_no_storm(make_facts: MakeFacts) -> None:
    monitor = storm_monitor()
    bad = storm(over(NAMES, 50.0))
    for step in range(2):
        assert monitor.observe(make_facts(step, applied_steps=step + 1, slots=bad)).code == "fp8.ok"
    for step in range(3, 90):
        slots = storm() if step % 3 == 2 else bad
        assert monitor.observe(make_facts(step, slots=slots)).code == "fp8.ok"
    assert monitor.observe(make_facts(90, slots=bad, applied=False)).code == "fp8.ok"


def test_layers_in_bf16_do_not_count(make_facts: MakeFacts) -> None:
    monitor = storm_monitor()
    bad = storm(over(NAMES[:3], 50.0))
    layer = NAMES[0].rpartition(".")[0]
    for step in range(3, 20):
        assert monitor.observe(make_facts(step, slots=bad, demoted=(layer,))).code == "fp8.ok"
    codes = [monitor.observe(make_facts(step, slots=bad)).code for step in range(20, 24)]
    assert codes == ["fp8.ok", "fp8.ok", "fp8.saturation", "fp8.ok"]


def test_an_underflow_storm_counts_samples(make_facts: MakeFacts) -> None:
    monitor = storm_monitor()
    bad = storm(underflow=dict.fromkeys(NAMES[:4], 0.9))
    verdicts = [
        monitor.observe(make_facts(step, slots=bad if step % 10 == 0 else storm()))
        for step in range(3, 60)
    ]
    (told,) = [verdict for verdict in verdicts if verdict.text]
    assert (told.code, told.step) == ("fp8.underflow", 30)
    assert list(told.evidence["slots"]) == list(NAMES[:4])


def test_both_storms_are_told_one_after_the_other_even_across_a_resume(
    make_facts: MakeFacts,
) -> None:
    bad = storm(over(NAMES, 50.0), underflow=0.9)
    live, resumed = storm_monitor(), storm_monitor()
    before = [live.observe(make_facts(step, slots=bad)).code for step in range(3, 6)]
    assert before[-1] == "fp8.saturation"
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    after = [live.observe(make_facts(step, slots=bad)) for step in range(6, 9)]
    assert [verdict.code for verdict in after] == ["fp8.underflow", "fp8.ok", "fp8.ok"]
    assert [resumed.observe(make_facts(step, slots=bad)) for step in range(6, 9)] == after


def delayed(
    amaxes: np.ndarray, length: int, algo: str, margin: int, broken_from: int
) -> list[SlotStats]:
    """Statistics of the columns of `amaxes` under the real rule, whose update does nothing from a step on."""
    slots = amaxes.shape[1]
    history, scale = torch.zeros(length, slots), torch.ones(slots)
    names, nan = (
        tuple(f"{number}.input" for number in range(slots)),
        np.full(slots, np.nan, dtype=np.float32),
    )
    told: list[SlotStats] = []
    for step, amax in enumerate(amaxes.astype(np.float32)):
        used = scale.numpy().copy()
        told.append(SlotStats(names, amax, used, amax * used / np.float32(448.0), nan, nan, nan))
        history[0] = torch.from_numpy(amax)
        history, fresh = scaling.update(scaling.scrub(history)[0], scale, 448.0, margin, algo)
        scale = fresh if step < broken_from else scale
    return told


def frozen(
    make_facts: MakeFacts, trace: list[SlotStats], length: int, margin: int
) -> list[Verdict]:
    monitor = Fp8FrozenMonitor(length, margin)
    verdicts = [monitor.observe(make_facts(step, slots=slots)) for step, slots in enumerate(trace)]
    return [verdict for verdict in verdicts if verdict.text]


RNG = np.random.default_rng(0)
STEPS = np.arange(400)
TENSORS = {
    "noise": np.exp(RNG.standard_normal(400)),
    "constant": np.full(400, 3.0),
    "alternating": np.where(STEPS % 2, 1.0, 100.0),
    "rare peaks": np.where(STEPS % 9 == 0, 50.0, 1e-4),
    "often unused": np.where(STEPS % 5 == 0, np.exp(RNG.standard_normal(400)), 0.0),
    "one peak, then unused, then small": np.where(
        STEPS == 5, 80.0, np.where(STEPS % 50 == 0, 0.01, 0.0)
    ),
    "sometimes infinite": np.where(STEPS % 7 == 0, np.inf, np.exp(RNG.standard_normal(400))),
    "growing": 1.05**STEPS,
    "steps": 10.0 ** (STEPS // 60),
    "shrinking": 0.9**STEPS,
    "tiny": np.full(400, 1e-37),
}


@pytest.mark.parametrize("length", [2, 16])
@pytest.mark.parametrize(("algo", "margin"), [("max", 0), ("max", 3), ("most_recent", 0)])
def test_a_correct_update_never_looks_frozen(
    make_facts: MakeFacts, length: int, algo: str, margin: int
) -> None:
    trace = delayed(
        np.stack(list(TENSORS.values()), axis=1), length, algo, margin, broken_from=1000
    )
    assert frozen(make_facts, trace, length, margin) == []


@pytest.mark.parametrize(("factor", "told"), [(0.2, True), (5.0, True), (1.3, False), (0.7, False)])
def test_a_scale_that_was_not_updated_is_named_once(
    make_facts: MakeFacts, factor: float, told: bool
) -> None:
    amaxes = np.where(STEPS < 100, 4.0, 4.0 * factor) * np.exp(0.05 * RNG.standard_normal(400))
    verdicts = frozen(make_facts, delayed(amaxes[:, None], 8, "max", 0, broken_from=100), 8, 0)
    assert [verdict.code for verdict in verdicts] == ["fp8.frozen"] * told
    if told:
        assert 100 < verdicts[0].step <= 100 + 4 * 8 + 3
        assert verdicts[0].evidence["slots"]["0.input"] == pytest.approx(factor, rel=0.5)
        assert "0.input" in verdicts[0].text


def test_a_scale_that_never_moved_is_found(make_facts: MakeFacts) -> None:
    (verdict,) = frozen(
        make_facts, delayed(np.full((100, 1), 3.0), 16, "max", 0, broken_from=0), 16, 0
    )
    assert verdict.step == 32


@pytest.mark.parametrize("cut", [1, 90, 105, 120])
def test_a_restored_frozen_monitor_says_the_same(make_facts: MakeFacts, cut: int) -> None:
    amaxes = np.where(STEPS < 100, 4.0, 40.0) * np.exp(0.05 * RNG.standard_normal(400))
    told = delayed(amaxes[:200, None], 8, "max", 0, broken_from=100)
    trace = [make_facts(step, slots=slots) for step, slots in enumerate(told)]
    live, resumed = Fp8FrozenMonitor(8), Fp8FrozenMonitor(8)
    for facts in trace[:cut]:
        live.observe(facts)
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    verdicts = [live.observe(facts) for facts in trace[cut:]]
    assert [resumed.observe(facts) for facts in trace[cut:]] == verdicts
    assert any(verdict.text for verdict in verdicts) == (cut < 119)
