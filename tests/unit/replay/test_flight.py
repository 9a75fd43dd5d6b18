"""The flight recorder: what it keeps of bad steps, for how long, and what it costs."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from harness.checkpoint.store import Store
from harness.core.config import RunConfig, TrainConfig
from harness.core.facts import Limits, StepFacts
from harness.core.state import RunLedger
from harness.replay.flight import (
    KEEP,
    Branches,
    Environment,
    FlightRecorder,
    base_store,
    nearest,
    read_records,
    record_folder,
    same,
)
from harness.tracking.journal import Journal

HERE = Environment("fp8_hybrid", 2, "ddp", "cpu")


def facts(step: int) -> StepFacts:
    return StepFacts(
        step=step, window=step + 1, loss=math.nan, grad_norm=math.inf, lr=1e-3, loss_scale=2.0, applied=False,
        applied_steps=step - 1, tokens=4, seconds=0.1, demoted=("a.b",), limits=Limits(norm=3.5), bad_data=2,
    )  # fmt: skip


class Folder:
    """A run with checkpoints at `steps`, and its recorder."""

    def __init__(self, root: Path, *steps: int) -> None:
        self.root = root
        self.store = Store(root / "checkpoints")
        for step in steps:
            self.store.save(step, {"model": {"w": torch.full((8,), float(step))}}, {"step": step})
        self.recorder = FlightRecorder(root, self.store, HERE)

    def keep(self, step: int, attempt: int = 1) -> bool:
        return self.recorder.keep(facts(step), [5, 9], ["nonfinite.skip"], RunLedger(attempt, [3]))

    def recorded(self) -> list[int]:
        return [record.step for record in read_records(self.root)]


def test_a_record_says_what_a_re_run_needs(tmp_path: Path) -> None:
    run = Folder(tmp_path, 10, 20)
    assert run.keep(25)
    (record,) = read_records(tmp_path)
    assert (record.step, record.base, record.window, record.samples) == (25, 20, 26, (5, 9))
    assert (record.loss, record.grad_norm, record.loss_scale, record.bad_data) == (
        "nan",
        "inf",
        2.0,
        2,
    )
    assert record.limits_then == Limits(norm=3.5)
    assert (record.codes, record.demoted, record.applied) == (("nonfinite.skip",), ("a.b",), False)
    assert record.ledger == RunLedger(1, [3])
    assert (record.world_size, record.engine, record.recipe, record.device) == (
        2,
        "ddp",
        "fp8_hybrid",
        "cpu",
    )
    assert (record.threads, record.torch_version) == (torch.get_num_threads(), torch.__version__)


def test_the_base_costs_no_space_and_outlives_retention(tmp_path: Path) -> None:
    run = Folder(tmp_path, 10, 20)
    original = run.store.path(20) / "model.safetensors"
    run.keep(25)
    run.keep(26)
    linked = base_store(tmp_path, 25).path(20) / "model.safetensors"
    assert os.stat(linked).st_ino == os.stat(original).st_ino
    assert os.stat(original).st_nlink == 3, "consecutive bad steps share one base"
    run.store.remove(20)
    assert not original.exists()
    tensors, meta = base_store(tmp_path, 25).load(20)
    assert meta == {"step": 20}
    assert tensors["model"]["w"].tolist() == [20.0] * 8


def test_without_hard_links_the_base_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("not supported")

    run = Folder(tmp_path, 10)
    monkeypatch.setattr(os, "link", refuse)
    run.keep(25)
    assert base_store(tmp_path, 25).verify(10) == []
    assert os.stat(run.store.path(10) / "model.safetensors").st_nlink == 1


def test_of_a_streak_the_first_and_the_last_are_kept(tmp_path: Path) -> None:
    run = Folder(tmp_path, 10)
    assert [run.keep(step) for step in (12, 13, 14, 15)] == [True, False, False, False]
    assert run.recorded() == [12, 15]
    assert run.keep(40)
    assert run.recorded() == [12, 15, 40]
    assert run.keep(41, attempt=2), "another attempt, another streak"
    assert run.recorded() == [15, 40, 41]


def test_the_newest_records_are_kept(tmp_path: Path) -> None:
    run = Folder(tmp_path)
    for step in (30, 40, 50, 60):
        run.keep(step)
    assert run.recorded() == [40, 50, 60]
    run.keep(35, attempt=2)
    assert run.recorded() == [35, 50, 60], "newest means in time, also after a rollback"
    assert len(run.recorded()) == KEEP
    assert sorted(os.listdir(tmp_path / "flight")) == [
        "step-00000035",
        "step-00000050",
        "step-00000060",
    ]


@pytest.mark.parametrize(
    ("steps", "step", "base"),
    [([], 7, 0), ([10], 10, 0), ([10], 11, 10), ([5, 10], 11, 5), ([5, 10], 12, 10)],
)
def test_the_base_leaves_a_step_before_the_bad_one_if_it_can(
    steps: list[int], step: int, base: int
) -> None:
    assert nearest(steps, step) == base


def test_without_a_checkpoint_the_base_is_the_initial_state(tmp_path: Path) -> None:
    run = Folder(tmp_path)
    run.keep(4)
    assert read_records(tmp_path)[0].base == 0
    assert base_store(tmp_path, 4).steps() == []


def test_a_record_that_cannot_be_written_leaves_nothing_and_raises(tmp_path: Path) -> None:
    run = Folder(tmp_path, 10)
    run.keep(12)
    (tmp_path / "flight" / ".tmp-step-00000020").write_text("in the way")
    with pytest.raises(OSError, match="exists"):
        run.keep(20)
    assert run.recorded() == [12]


def test_a_damaged_record_is_passed_over(tmp_path: Path) -> None:
    run = Folder(tmp_path, 10)
    run.keep(12)
    run.keep(20)
    path = record_folder(tmp_path, 12) / "record.json"
    for text in ("", "[1]", "{}", path.read_text().replace('"base"', '"vase"')):
        path.write_text(text)
        assert run.recorded() == [20]


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1.5, 1.5, True),
        (1.5, math.nextafter(1.5, 2.0), False),
        (0.0, -0.0, False),
        (math.nan, -math.nan, True),
        (math.inf, -math.inf, False),
    ],
)
def test_figures_are_compared_bit_for_bit(a: float, b: float, equal: bool) -> None:
    assert same(a, b) is same(b, a) is equal


def test_a_step_has_the_config_of_the_attempt_that_ran_it(tmp_path: Path) -> None:
    """Changed after step 8, rolled back to step 4, and changed again after step 6 of the second attempt."""
    train = TrainConfig()
    rates = [RunConfig(train=train.model_copy(update={"lr": lr})) for lr in (0.1, 0.2, 0.3)]
    was = [each.model_dump(mode="json") for each in rates]
    was[0]["engine"]["name"] = "ddp"
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.note("run", tags={}, params={}, data={})
        for step in range(1, 10):
            if step == 9:
                journal.event(8, "run.changed", config=was[0])
            journal.metrics(step, {"train/loss": 9.0})
        journal.event(9, "guard.rollback", to_step=4, passed_over=[])
        journal.attempt = 2
        for step in range(5, 9):
            if step == 7:
                journal.event(6, "run.changed", config=was[1])
            journal.metrics(step, {"train/loss": 9.0})
    branches = Branches(tmp_path)
    found = [branches.config_of(step, rates[2]).train.lr for step in range(1, 10)]
    assert found == [0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.2]
    assert branches.config_of(6, rates[2], attempt=1).train.lr == 0.1
    assert branches.config_of(1, rates[2]).engine.name == "auto", "one process runs it again"
    assert [branches.last_attempt_of(step) for step in (4, 5, 9, 10)] == [1, 2, 1, None]
