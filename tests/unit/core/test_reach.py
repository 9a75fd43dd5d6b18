"""Settings that the run is too short for, or its data too small, are reported before the first step, with a fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch

from harness.core.config import (
    GuardConfig,
    RunConfig,
    TrainConfig,
    data_doubts,
    left_out,
    snapshot_gap,
    snapshot_plan,
    warmup_doubt,
)
from harness.optim.schedule import Schedule

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def train(**keys: object) -> TrainConfig:
    return TrainConfig.model_validate({"lr": 1e-2, **keys})


def rates(config: TrainConfig) -> list[float]:
    return Schedule.of(config)(torch.arange(config.steps)).tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 30])
def test_it_speaks_where_the_schedule_never_gets_there(schedule: str, steps: int) -> None:
    config = train(schedule=schedule, steps=steps, warmup_steps=10, decay_share=0.1)
    reached = [each for each in rates(config) if each == pytest.approx(config.lr)]
    told = warmup_doubt(config)
    if not reached:
        assert "longer than the run" in told
        named = float(re.search(r"ends at ([0-9.e-]+),", told)[1])  # pyright: ignore[reportOptionalSubscript]
        assert named == pytest.approx(max(rates(config)), rel=5e-3), (
            "the rate that it names is the one that comes"
        )
    else:
        assert ("as long as the run" in told) == (steps == 10)
        assert bool(told) == (steps == 10)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 3, 50])
def test_what_it_suggests_gets_there(schedule: str, steps: int) -> None:
    told = warmup_doubt(train(schedule=schedule, steps=steps, warmup_steps=500))
    suggested = int(re.search(r"set train.warmup_steps=(\d+)", told)[1])  # pyright: ignore[reportOptionalSubscript]
    config = train(schedule=schedule, steps=steps, warmup_steps=suggested)
    assert max(rates(config)) == pytest.approx(config.lr)
    assert warmup_doubt(config) == ""


def test_a_decay_that_the_warm_up_cuts_is_told() -> None:
    told = warmup_doubt(train(schedule="wsd", steps=20, warmup_steps=10, decay_share=0.8))
    assert "has 10 steps in place of 16" in told
    assert warmup_doubt(train(schedule="wsd", steps=20, warmup_steps=4, decay_share=0.8)) == ""
    assert warmup_doubt(train(schedule="wsd", steps=20, warmup_steps=0, decay_share=1.0)) == ""


def config(**sections: Mapping[str, object]) -> RunConfig:
    return RunConfig.model_validate(sections)


def test_what_a_short_run_leaves_out_is_one_line() -> None:
    short = config(
        train={"steps": 15, "eval_every": 16},
        checkpoint={"every": 17},
        guard={"snapshot_every": 18},
    )
    told = left_out(short, stats_every=19, ranks=2)
    for name in ("eval_every 16", "checkpoint.every 17", "stats_every 19"):
        assert name in told
    assert "compare_ranks_every 100" in told
    assert "snapshot" not in told, "the plan's note says it"
    assert "compare_ranks_every" not in left_out(short, 19)
    assert "stats_every" not in left_out(short, None)


def test_what_happens_or_is_turned_off_is_not_named() -> None:
    every = {"eval_every": 5}, {"every": 5}, {"snapshot_every": 5}
    names = ("train", "checkpoint", "guard")
    sections = dict(zip(names, every, strict=True))
    sections["train"]["steps"] = 5
    assert left_out(config(**sections), stats_every=5) == ""
    off = config(
        train={"steps": 5, "eval_every": 0}, checkpoint={"every": 0}, guard={"snapshot_every": 0}
    )
    assert left_out(off, stats_every=1) == ""
    assert "snapshot" not in left_out(config(train={"steps": 5}, guard={"enabled": False}), 1)


def test_data_that_are_too_small_for_a_setting_are_told() -> None:
    wanted = config(train={"global_batch": 16}, data={"val_samples": 64, "context": 256})
    facts = {"train_samples": 10, "val_samples": 3, "longest_document": 100}
    few, validation, positions = data_doubts(wanted, facts)
    assert "16 samples" in few
    assert "there are 10" in few
    assert "validation has 3 samples" in validation
    assert "the longest document has 100 tokens" in positions
    assert (
        data_doubts(wanted, {"train_samples": 16, "val_samples": 64, "longest_document": 200}) == []
    )
    parts = [
        {"source": "a", "share": 0.9, "train_samples": 9},
        {"source": "b", "share": 0.1, "train_samples": 900},
    ]
    (told,) = data_doubts(wanted, {"train_samples": 909, "val_samples": 64, "mixture": parts})
    assert "of a a step takes 14.4 samples, and it has 9" in told


@pytest.mark.parametrize(
    ("every", "seldom_after", "expected"),
    [
        (20, 200, [*range(20, 201, 20), *range(300, 1001, 100)]),
        (250, 200, [250, 500, 750, 1000]),
        (41, 200, [41, 82, 123, 164, 246, 328, 410, 492, 574, 656, 738, 820, 902, 984]),
        (99, 200, list(range(99, 1001, 99))),
        (4, 20, [4, 8, 12, 16, *range(20, 1001, 20)]),
        (300, 0, [300, 600, 900]),
        (2000, 200, []),
        (0, 200, []),
    ],
)
def test_the_plan_says_at_which_steps_snapshots_come(
    every: int, seldom_after: int, expected: list[int]
) -> None:
    guard = GuardConfig(snapshot_every=every, snapshot_seldom_after=seldom_after)
    due = [
        step for step in range(1, 1001) if (gap := snapshot_gap(guard, step)) and step % gap == 0
    ]
    assert due == expected
    gaps = [after - before for before, after in pairwise([0, *due])]
    assert max(gaps, default=0) <= max(100, every), "no gap over 100 steps that nobody asked for"
    assert max(gaps, default=0) <= 5 * every
    text = snapshot_plan(guard, 1000)
    if not expected:
        assert f"none in 1,000 steps (guard.snapshot_every {every})" in text
        return
    assert f"every {every} steps" in text
    assert f"the last after step {expected[-1]} " in text
    assert ("then every" in text) == (max(gaps) > min(gaps))


def test_the_plan_says_how_snapshots_are_copied() -> None:
    assert "copied" not in snapshot_plan(GuardConfig(), 1000)
    text = snapshot_plan(GuardConfig(snapshot_copy="overlapped"), 1000)
    assert "on a GPU copied while training goes on" in text
    assert "snapshot_copy)" in text
