"""From the figures of branches to the verdict: pure decisions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.core.config import FallbackConfig, load_config
from harness.core.facts import Halt, Rollback, SlotStats, StepFacts, Switch, Verdict
from harness.monitors.responder import Judgement
from harness.precision.recipe import Recipe, load_recipe
from harness.rehearse.begin import of_config
from harness.rehearse.branch import Branch, Fault, Record
from harness.rehearse.recommended import recommend
from harness.rehearse.rehearsal import Rehearsed
from harness.rehearse.slots import SlotRecord
from harness.rehearse.text import as_json
from harness.rehearse.verdict import Branches, decide, is_behind, is_doubtful, loss_gap
from harness.replay.cause import Evidence, judge

FALLING = tuple(5.0 - 0.1 * step for step in range(20))
BROKE = Fault("rollback", 12, "spikes in a row", (7, 8), ends=True)


def branch(
    name: str, precision: str = "", losses: tuple[float, ...] = FALLING, **more: Any
) -> Branch:
    made = Branch(name, precision or name, f"autocast:{name}", 0, losses, 0, None)
    return replace(made, **more)


FP32, CONTROL, FP8 = branch("fp32"), branch("one ulp", "fp32"), branch("fp8")
BAD = replace(FP32, fault=BROKE)
BAD_FP8 = replace(FP8, fault=BROKE)
WELL, BADLY = branch("x"), branch("x", fault=BROKE)
UNFIT = Fault("unfit data", 3, "sample 4: label 300", (2,))


@pytest.mark.parametrize(
    ("cause", "given"),
    [
        ("sound", Branches(FP32, CONTROL, [FP8], "fp8")),
        ("precision", Branches(FP32, CONTROL, [BAD_FP8], "fp8")),
        # Another precision's trouble is not the run's.
        ("sound", Branches(FP32, CONTROL, [FP8, replace(BAD_FP8, precision="fp16")], "fp8")),
        ("precision", Branches(FP32, CONTROL, [FP8, replace(BAD_FP8, precision="fp16")], "")),
        ("data", Branches(FP32, CONTROL, [replace(FP8, fault=UNFIT)], "fp8")),
        ("data", Branches(BAD, CONTROL, [BAD_FP8], "fp8", BADLY, WELL)),
        ("learning rate", Branches(BAD, CONTROL, [BAD_FP8], "fp8", WELL, BADLY)),
        ("learning rate", Branches(BAD, CONTROL, [BAD_FP8], "fp8", WELL, WELL)),
        ("model", Branches(BAD, CONTROL, [BAD_FP8], "fp8", BADLY, BADLY)),
        ("model or data", Branches(BAD, CONTROL, [BAD_FP8], "fp8", BADLY, None)),
        ("not reproducible", Branches(FP32, CONTROL, [FP8], "fp8", incident=12)),
        # The run's incident lies behind the last step: that it is well here says nothing.
        ("sound", Branches(FP32, CONTROL, [FP8], "fp8", incident=21)),
        ("precision", Branches(FP32, CONTROL, [BAD_FP8], "fp8", incident=12)),
    ],
)
def test_whose_fault_it_is(cause: str, given: Branches) -> None:
    verdict = decide(given)
    assert verdict.cause == cause
    assert verdict.why
    assert (verdict.advice == "") == (cause == "sound")


def test_what_is_said_of_float32_is_of_its_own_step() -> None:
    late = replace(FP32, fault=replace(BROKE, step=17))
    assert "fp32 goes bad at step 17 too" in decide(Branches(late, CONTROL, [BAD_FP8], "fp8")).why
    # FP8 breaks at a rate at which float32 only learns less than it could.
    stuck = branch("fp32", losses=(5.0,) * 20)
    given = Branches(stuck, CONTROL, [BAD_FP8], "fp8", branch("fp32, lr / 10", "fp32"))
    verdict = decide(given)
    assert verdict.cause == "learning rate"
    assert "nothing goes bad in fp32" in verdict.why


def test_a_loss_that_learns_less_at_the_full_rate_is_the_rates_fault() -> None:
    stuck = branch("fp32", losses=(5.0,) * 20, unhealthy=("parameters.growth",))
    lower = branch("fp32, lr / 10", "fp32")
    assert is_doubtful(stuck)
    assert not is_doubtful(FP32)
    given = Branches(stuck, CONTROL, [branch("fp8", losses=(5.0,) * 20)], "fp8", lower)
    verdict = decide(given)
    assert verdict.cause == "learning rate"
    assert "fp32" in verdict.bad
    # As slow as the lower rate, the rate is not the reason.
    assert decide(replace(given, lower_rate=branch("x", losses=(5.0,) * 20))).cause == "sound"


def test_behind_is_more_than_chance_and_than_a_fifth_of_what_was_learnt() -> None:
    # Float32 falls from 5.0 to 3.1; the last two steps count.
    def shifted(by: float) -> Branch:
        return branch("fp8", losses=tuple(loss + by for loss in FALLING))

    gap = loss_gap(shifted(0.5), FP32)
    assert gap is not None
    assert gap.gap == pytest.approx(0.5)
    assert is_behind(shifted(0.5), FP32, CONTROL)
    assert not is_behind(shifted(0.3), FP32, CONTROL), "under a fifth of 1.9"
    assert not is_behind(shifted(-0.5), FP32, CONTROL), "ahead"
    chance = branch("one ulp", losses=tuple(loss + 0.2 for loss in FALLING))
    assert not is_behind(shifted(0.5), FP32, chance), "three times the control's gap is 0.6"
    assert loss_gap(branch("fp8", losses=(math.nan,) * 20), FP32) is None


@pytest.mark.parametrize(
    ("cause", "evidence"),
    [
        ("data", Evidence(unfit=True, was_bad=True, is_bad=False)),
        ("sound", Evidence(unfit=False, was_bad=False, is_bad=False, unlike=True)),
        ("not reproducible", Evidence(unfit=False, was_bad=True, is_bad=False)),
        ("not reproducible", Evidence(False, True, True, unlike=True, bad_in_float32=True)),
        ("precision", Evidence(False, True, True)),
        ("precision", Evidence(False, True, True, bad_in_float32=False)),
        ("model or data", Evidence(False, True, True, bad_in_float32=True)),
        ("model or data", Evidence(False, True, True, False, True, bad_without_windows=True)),
        ("data", Evidence(False, True, True, False, True, None, False)),
    ],
)
def test_the_judge_that_replay_shares(cause: str, evidence: Evidence) -> None:
    assert judge(evidence) == cause


STEP = StepFacts(
    step=4, window=3, loss=2.0, grad_norm=1.0, lr=1e-3, loss_scale=1.0, applied=True, applied_steps=4, tokens=4,
    seconds=0.5,
)  # fmt: skip


def judged(facts: StepFacts, *verdicts: Verdict, action: Any = None) -> Judgement:
    return Judgement(facts, verdicts, (), action or Switch(), healthy=True, suspect=False)


def test_a_branch_keeps_its_first_fault_and_the_one_that_ends_it() -> None:
    record = Record()
    lost = replace(STEP, loss=math.nan, applied=False)
    record.take(judged(lost, Verdict("nonfinite.skip", 4)))
    assert record.fault is not None
    assert (record.fault.kind, record.fault.windows, record.ended) == ("not finite", (3,), False)
    record.take(judged(replace(lost, step=5, window=4), Verdict("nonfinite.skip", 5)))
    assert record.fault.step == 4
    record.take(judged(replace(lost, step=6, window=5), action=Rollback("five in a row")))
    assert (record.fault.kind, record.fault.windows, record.ended) == ("rollback", (3, 4, 5), True)
    assert record.skipped == 3

    # A loss scaler that looks for its range is no fault.
    record = Record()
    record.take(
        judged(replace(STEP, applied=False), Verdict("scaler.calibration", 4, healthy=False))
    )
    assert record.fault is None
    record.take(
        judged(replace(STEP, step=5), action=Switch(whole_run_to="bf16", reason="fp16 fails"))
    )
    assert record.fault is not None
    assert record.fault.kind == "left its precision"
    record.take(judged(replace(STEP, step=6, bad_data=2, applied=False), action=Halt("labels")))
    assert record.fault.kind == "unfit data"


def test_predicted_are_layers_that_leave_wait_or_have_left() -> None:
    record = Record()
    record.take(judged(replace(STEP, demoted=("a",))))
    leaves = Verdict("precision.demote", 5, proposal=Switch(demote=("b",)))
    waits = Verdict("precision.budget", 5, evidence={"layers": {"c": {}}, "allowed": 1})
    record.take(judged(replace(STEP, step=5), leaves, waits))
    record.take(judged(replace(STEP, step=6), leaves))
    assert record.predicted == {"a": 4, "b": 5, "c": 5}


def stats(saturation: float, clipped: float = 0.0, sqnr: float = 30.0) -> SlotStats:
    """Slots of layer blocks.0 that are well, and one of blocks.1 with these figures."""
    names = ("blocks.00.input", "blocks.01.input")

    def both(well: float, given: float) -> Any:
        return np.array([well, given], dtype=np.float32)

    return SlotStats(
        names,
        both(1, 1),
        both(1, 1),
        both(0.9, saturation),
        both(0, clipped),
        both(0, 0),
        both(30, sqnr),
    )


def record_of(*given: SlotStats) -> SlotRecord:
    made = SlotRecord(FallbackConfig(warmup_steps=1))
    made.take(stats(1000.0))  # the scales are not set yet
    for each in given:
        made.take(each)
    return made


def test_the_worst_slot_comes_first_with_its_distance_to_the_limit() -> None:
    rows = record_of(stats(3.0, sqnr=20.0), stats(0.5, sqnr=25.0)).rows()
    assert [row.layer for row in rows] == ["blocks.01", "blocks.00"]
    assert (rows[0].saturation, rows[0].sqnr_db, rows[0].worst) == (3.0, 20.0, "saturation")
    assert rows[0].beyond == pytest.approx(1.0), "3.0 is an octave over 1.5"
    assert math.isnan(rows[0].even_db)
    assert rows[0].as_json()["even_db"] is None
    assert rows[1].beyond < 0


NAMES = {"blocks.00": "blocks.0", "blocks.01": "blocks.1[a]*"}


def made(*given: SlotStats, predicted: tuple[str, ...] = (), base: Recipe | None = None) -> Any:
    return recommend(base or load_recipe("fp8_hybrid"), predicted, NAMES, record_of(*given))


def test_what_is_recommended_follows_from_what_was_seen() -> None:
    well = made(*[stats(0.9)] * 8)
    assert not well.changed
    assert well.recipe.fp8 == load_recipe("fp8_hybrid").fp8

    # A layer that leaves is excluded by a pattern that matches its name alone, and needs no margin any more.
    clips = [stats(3.0, clipped=0.02)] * 8
    leaves = made(*clips, predicted=("blocks.01",))
    assert leaves.exclude == ("blocks.1[[]a][*]",)
    assert leaves.recipe.layers.exclude == ["blocks.1[[]a][*]"]
    assert leaves.recipe.fp8.margin == 0

    # The same figures of a layer that stays: 3.0 over the limit needs two powers of two.
    assert made(*clips).recipe.fp8.margin == 2
    assert made(*[stats(3.0, clipped=0.02)] * 4, *[stats(0.9)] * 4).recipe.fp8.margin == 0, (
        "a start"
    )

    # A tensor that comes back after 20 steps is forgotten by a history of 16, and not by one of 32.
    storms = [stats(3.0) if step % 20 == 0 else stats(1.1) for step in range(70)]
    assert made(*storms).recipe.fp8.amax_history_len == 32
    chance = [stats(1.2) if step % 20 == 0 else stats(0.9) for step in range(70)]
    assert not made(*chance).changed
    assert not made(*storms, base=load_recipe("fp8_current")).changed, "no history there"


def test_the_object_has_the_gaps_beside_chance_and_the_evidence() -> None:
    control = branch("one ulp", "fp32", losses=tuple(loss + 0.1 for loss in FALLING))
    fp8 = branch("fp8", losses=tuple(loss + 0.5 for loss in FALLING))
    fp16 = branch("fp16", losses=(*FALLING[:12], math.inf), fault=BROKE)
    found = Branches(FP32, control, [fp8, fp16], "fp8")
    begin = of_config(load_config("tiny"), 20)
    made = as_json(Rehearsed(begin, found, {}), decide(found), "config tiny", "here")
    content = json.loads(json.dumps(made, allow_nan=False))

    # A fifth of 1.9 is more than three times the control's widest, and more than 1% of the last loss.
    of_fp8, of_fp16 = content["gaps"]
    assert of_fp8 == {
        "precision": "fp8",
        "gap": pytest.approx(0.5),
        "widest": pytest.approx(0.5),
        "control_gap": pytest.approx(0.1),
        "control_widest": pytest.approx(0.1),
        "limit": pytest.approx(0.38),
        "behind": True,
    }
    assert (of_fp16["precision"], of_fp16["gap"], of_fp16["behind"]) == ("fp16", None, False)
    assert content["verdict"] == "precision"
    assert content["evidence"] == {
        "unfit": False,
        "was_bad": False,
        "is_bad": True,
        "unlike": False,
        "bad_in_float32": False,
        "bad_at_lower_rate": None,
        "bad_without_windows": None,
    }
    rows = {row["name"]: row for row in content["branches"]}
    assert (rows["fp8"]["loss_first"], rows["fp8"]["loss_last"]) == (
        pytest.approx(5.5), pytest.approx(3.65),
    )  # fmt: skip
    assert [rows[name]["outcome"] for name in ("fp32", "fp8")] == ["well", "behind fp32"]
    assert rows["fp16"]["loss_last"] == "inf"
    assert rows["fp16"]["fault"]["windows"] == [7, 8]
    assert rows["fp16"]["outcome"] == "rollback at step 12: spikes in a row"
