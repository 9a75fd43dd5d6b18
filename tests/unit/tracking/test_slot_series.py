"""Which FP8 figures become series: under public names, bounded for any model, no extreme lost, same after a resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from harness.core.config import TrackingConfig
from harness.core.facts import ROLES, SlotStats, StepFacts
from harness.tracking.journal import JOURNAL, Journal
from harness.tracking.slot_file import FIGURES
from harness.tracking.slot_series import MAX_PICKED, Kept, SlotLimits, SlotSeries, slot_figures

LIMITS = SlotLimits(
    (1.5, 1.25, 8.0),
    clipped=0.05,
    underflow=(0.25, 0.25, 0.75),
    sqnr_db=5.0,
    warmup_steps=2,
    even_db=(8.0, 16.0, math.nan),
    centred_db=5.0,
)
Change = Callable[[int, SlotStats], None]


def facts(
    step: int, layers: int = 64, change: Change | None = None, demoted: tuple[str, ...] = ()
) -> StepFacts:
    """A step of a model that is well, but for what `change` does to it."""
    names = tuple(f"blocks.{layer:02d}.up.{role}" for layer in range(layers) for role in ROLES)
    made = (
        np.random.default_rng(step).uniform(0.5, 1.0, (len(FIGURES), len(names))).astype(np.float32)
    )
    made[3:5] *= 0.01
    made[5:] += 20
    slots = SlotStats(names, *made)
    if change is not None:
        change(step, slots)
    return StepFacts(
        step, step - 1, 1.0, 1.0, 1e-3, 1.0, True, step, 16, 0.1, slots=slots, demoted=demoted
    )


def put(at: int, layer: int, role: str, **figures: float) -> Change:
    def change(step: int, slots: SlotStats) -> None:
        if step == at:
            for figure, value in figures.items():
                getattr(slots, figure)[slots.names.index(f"blocks.{layer:02d}.up.{role}")] = value

    return change


def series(folder: Path | None = None, **settings: object) -> SlotSeries:
    return SlotSeries(TrackingConfig(**settings), folder, LIMITS)  # type: ignore[arg-type]


def figures(series_: SlotSeries, until: int, start: int = 1, **more: object) -> Mapping[int, Kept]:
    return {step: series_.take(1, facts(step, **more)) for step in range(start, until + 1)}  # type: ignore[arg-type]


def of_roles(kept: Kept) -> dict[str, float]:
    """The figures of the roles."""
    return {name: value for name, value in kept.figures.items() if name.startswith("fp8/")}


def slots_in(kept: Kept) -> list[str]:
    """Slots with a series of their amax in the row."""
    prefix = "fp8_amax/"
    return [name.removeprefix(prefix) for name in kept.figures if name.startswith(prefix)]


def figures_of(kept: Kept, figure: str) -> list[float]:
    """One figure of every slot that has it in the row."""
    return [value for name, value in kept.figures.items() if name.startswith(f"fp8_{figure}/")]


@pytest.mark.parametrize("layers", [1, 14, 1344])
def test_the_roles_have_a_fixed_number_of_series(layers: int) -> None:
    kept = figures(series(), 10, layers=layers)[10]
    assert len(of_roles(kept)) == 60
    assert all(name.split("/")[1] in ROLES for name in of_roles(kept))


def test_quantiles_are_those_of_the_layers() -> None:
    kept = figures(series(fp8_every=1), 3)[3]
    slots = facts(3).slots
    assert slots is not None
    weights = slots.amax[1::3]
    assert kept.figures["fp8/weight/amax_min"] == weights.min()
    assert kept.figures["fp8/weight/amax_max"] == weights.max()
    for quantile, rank in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        value = kept.figures[f"fp8/weight/amax_{quantile}"]
        assert value in weights
        assert np.mean(weights <= value) == pytest.approx(rank, abs=0.02)


def test_an_extreme_between_two_rows_is_told_by_the_next() -> None:
    spike = put(13, 5, "grad_output", amax=1e6, saturation=7.0)
    kept = figures(series(), 30, change=spike)
    assert [step for step, each in kept.items() if each.figures] == [10, 20, 30]
    assert [kept[step].figures["fp8/grad_output/amax_max"] > 1e5 for step in (10, 20, 30)] == [
        False,
        True,
        False,
    ]
    assert kept[20].figures["fp8/grad_output/saturation_max"] == 7.0
    low = figures(series(), 20, change=put(14, 5, "input", amax=0.0))
    assert low[20].figures["fp8/input/amax_min"] == 0.0
    assert "blocks.05.up" in kept[20].worst["fp8.worst.grad_output"]


def test_an_infinite_amax_leaves_the_others_readable() -> None:
    kept = figures(series(), 10, change=put(10, 5, "input", amax=math.inf))[10]
    assert kept.figures["fp8/input/amax_max"] == math.inf
    assert 0.5 <= kept.figures["fp8/input/amax_p90"] <= 1.0


@pytest.mark.parametrize(("layers", "every"), [(42, True), (43, False)])
def test_small_models_have_series_for_every_slot(layers: int, every: bool) -> None:
    kept = figures(series(), 10, layers=layers)[10]
    names = [f"blocks.{layer:02d}.up.{role}" for layer in range(layers) for role in ROLES]
    assert slots_in(kept) == (names if every else [])
    assert len(kept.figures) == 60 + (len(names) * len(FIGURES) if every else 0)


def test_in_a_large_model_slots_are_picked_for_what_they_do() -> None:
    policy = series(fp8_slots=["blocks.0[01].up.input"])
    kept = figures(policy, 20, change=put(13, 7, "weight", saturation=1.3))
    assert slots_in(kept[10]) == ["blocks.00.up.input", "blocks.01.up.input"]
    assert slots_in(kept[13]) == ["blocks.07.up.weight"], (
        "the figure that it was picked for is logged in its own step"
    )
    assert not of_roles(kept[13])
    (told,) = kept[13].events
    assert (told["code"], told["slots"]) == ("fp8.picked", ["blocks.07.up.weight"])
    assert slots_in(kept[20]) == ["blocks.00.up.input", "blocks.01.up.input", "blocks.07.up.weight"]
    assert len(kept[20].figures) == 60 + 3 * len(FIGURES)
    left = policy.take(1, facts(21, demoted=("blocks.09.up",)))
    assert slots_in(left) == [f"blocks.09.up.{role}" for role in ROLES]


@pytest.mark.parametrize(
    "bad",
    [
        {"amax": math.inf},
        {"clipped": 0.1},
        {"underflow": 0.3},
        {"sqnr_db": 4.0},
        {"saturation": 1.6},
        {"even_db": 7.0},
        {"centred_db": 4.0},
    ],
)
def test_each_limit_picks(bad: dict[str, float]) -> None:
    kept = figures(series(), 5, change=put(5, 3, "input", **bad))[5]
    assert slots_in(kept) == ["blocks.03.up.input"]


def test_scales_that_are_not_set_yet_pick_nothing() -> None:
    kept = figures(series(), 3, change=put(2, 3, "input", saturation=100.0))
    assert not any(each.events for each in kept.values())


def test_what_has_no_room_is_named_once() -> None:
    def storm(step: int, slots: SlotStats) -> None:
        if step >= 5:
            slots.saturation[:] = 100.0 + np.arange(len(slots.names))

    kept = figures(series(), 9, change=storm)
    picked, left_out = kept[5].events
    assert len(picked["slots"]) == MAX_PICKED
    assert picked["slots"][0] == "blocks.63.up.weight", "the worst against its limit first"
    assert left_out["code"] == "fp8.not_picked"
    assert len(left_out["slots"]) == 64 * 3 - MAX_PICKED
    assert not any(kept[step].events for step in (6, 7, 8, 9))
    asked = figures(series(fp8_slots=["*"]), 1)[1].events
    assert [(event["code"], len(event["slots"])) for event in asked] == [("fp8.not_picked", 64)]


def test_a_pattern_that_matches_nothing_is_named() -> None:
    (event,) = figures(series(fp8_slots=["block.*", "*.up.input"]), 1)[1].events
    assert (event["code"], event["pattern"]) == ("fp8.unmatched", "block.*")


def test_a_run_that_goes_on_has_the_rows_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    def change(step: int, slots: SlotStats) -> None:
        put(12, 5, "grad_output", amax=1e6)(step, slots)
        put(4, 7, "weight", saturation=1.3)(step, slots)

    whole = figures(series(), 20, change=change)
    with Journal(tmp_path / JOURNAL) as journal:
        killed = series(tmp_path)
        for step, kept in figures(killed, 17, change=change).items():
            for event in kept.events:
                journal.event(step, **event)
    again = figures(series(tmp_path), 20, start=15, change=change)
    assert again[20].figures == whole[20].figures
    assert again[20].figures["fp8/grad_output/amax_max"] == 1e6, (
        "of step 12, which was not run again"
    )
    assert slots_in(again[20]) == slots_in(whole[20]) == ["blocks.07.up.weight"]


def test_a_rollback_forgets_the_steps_that_were_thrown_away(tmp_path: Path) -> None:
    policy = series(tmp_path)
    figures(policy, 17, change=put(15, 5, "input", amax=1e6))
    kept = {step: policy.take(2, facts(step)) for step in range(13, 21)}
    oracle = max(
        float(each.amax[0::3].max())
        for each in (facts(step).slots for step in range(11, 21))
        if each
    )
    assert kept[20].figures["fp8/input/amax_max"] == oracle < 1.0


def test_a_last_step_beside_the_rhythm_has_its_figures() -> None:
    policy = series()
    figures(policy, 13)
    rest = policy.rest(1)
    assert rest is not None
    assert (rest.step, len(rest.figures)) == (13, 60)
    figures(policy, 20, start=14)
    assert policy.rest(1) is None, "step 20 has its row"
    assert policy.rest(2) is None


def sampled_in(*steps: int) -> Change:
    """Clipped share, underflow and SQNR were measured in these steps alone."""

    def change(step: int, slots: SlotStats) -> None:
        if step not in steps:
            for figure in ("clipped", "underflow", "sqnr_db", "even_db", "centred_db"):
                getattr(slots, figure)[:] = math.nan

    return change


def test_a_row_has_the_last_sample_since_the_row_before(tmp_path: Path) -> None:
    change = sampled_in(4, 7, 33)
    policy = series(tmp_path)
    kept = figures(policy, 37, change=change, layers=14)
    sample, now = facts(7, layers=14).slots, facts(10, layers=14).slots
    assert sample is not None
    assert now is not None
    assert figures_of(kept[10], "underflow") == sample.underflow.tolist()
    assert figures_of(kept[10], "amax") == now.amax.tolist(), (
        "what every step measures is of the step itself"
    )
    assert kept[10].figures["fp8/input/underflow_p90"] in sample.underflow
    for step in (20, 30):
        assert not any("underflow" in name for name in kept[step].figures), (
            "not sampled since the row before"
        )
        assert len(figures_of(kept[step], "amax")) == len(now.names)
    last, of_33 = policy.rest(1), facts(33, layers=14).slots
    assert last is not None
    assert of_33 is not None
    assert figures_of(last, "sqnr_db") == of_33.sqnr_db.tolist()
    again = figures(series(tmp_path), 40, start=36, change=change, layers=14)[40]
    assert figures_of(again, "sqnr_db") == of_33.sqnr_db.tolist(), (
        "of step 33, which was not run again"
    )


NAMES = ("blocks.00.mlp.down.input", "blocks.00.mlp.down.grad_output")


def _row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def _slots(clipped: float) -> SlotStats:
    return SlotStats(
        names=NAMES,
        amax=_row(2.0, 0.5),
        scale=_row(224.0, 2.0**17),
        saturation=_row(1.0, 1.25),
        clipped=_row(clipped, 0.0),
        underflow=_row(0.0, 0.5),
        sqnr_db=_row(31.5, 25.5),
    )


def test_every_statistic_of_a_sampled_step_is_kept_under_its_public_name() -> None:
    metrics = slot_figures(_slots(clipped=0.25))
    assert metrics == {
        "fp8_amax/blocks.00.mlp.down.input": 2.0,
        "fp8_amax/blocks.00.mlp.down.grad_output": 0.5,
        "fp8_scale/blocks.00.mlp.down.input": 224.0,
        "fp8_scale/blocks.00.mlp.down.grad_output": 2.0**17,
        "fp8_saturation/blocks.00.mlp.down.input": 1.0,
        "fp8_saturation/blocks.00.mlp.down.grad_output": 1.25,
        "fp8_clipped/blocks.00.mlp.down.input": 0.25,
        "fp8_clipped/blocks.00.mlp.down.grad_output": 0.0,
        "fp8_underflow/blocks.00.mlp.down.input": 0.0,
        "fp8_underflow/blocks.00.mlp.down.grad_output": 0.5,
        "fp8_sqnr_db/blocks.00.mlp.down.input": 31.5,
        "fp8_sqnr_db/blocks.00.mlp.down.grad_output": 25.5,
    }


def test_what_was_not_sampled_is_left_out() -> None:
    metrics = slot_figures(_slots(clipped=math.nan))
    assert "fp8_clipped/blocks.00.mlp.down.input" not in metrics
    assert metrics["fp8_clipped/blocks.00.mlp.down.grad_output"] == 0.0
