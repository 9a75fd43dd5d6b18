"""Checkpoints that somebody has deleted: a run that came far does not start over, nor go back, without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.runs import events, metrics, start, train, wait_for_step

pytestmark = pytest.mark.faults(4)

RUN = ("--name", "r", "checkpoint.every=5")


def test_a_run_whose_checkpoints_are_gone_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    assert train(tmp_path, *RUN, "train.steps=12").returncode == 0
    journal = (run / "journal.jsonl").read_bytes()
    kept = tmp_path / "kept"
    (run / "checkpoints").rename(kept)
    refused = train(tmp_path, *RUN, "train.steps=20")
    assert refused.returncode == 2, refused.stdout
    assert "the checkpoint of step 12 was saved, by the journal, and none is there" in refused.stdout
    assert "--resume never" in refused.stdout
    assert (run / "journal.jsonl").read_bytes() == journal, "untouched"
    shutil.rmtree(run / "checkpoints")
    kept.rename(run / "checkpoints")
    assert "resumed at step 12" in train(tmp_path, *RUN, "train.steps=14").stdout


def test_one_that_is_gone_is_told_and_done_again(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    assert train(tmp_path, *RUN, "train.steps=12").returncode == 0
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    for step, told in ((14, True), (16, False)):
        done = train(tmp_path, *RUN, f"train.steps={step}")
        assert done.returncode == 0, done.stdout
        assert ("the checkpoint of step 12 was saved and is gone" in done.stdout) is told, "once"
    assert [event["step"] for event in events(run, "checkpoint.missing")] == [10]
    assert {step for step, _ in metrics(run)} == set(range(1, 17))


def test_an_outcome_without_its_checkpoint_is_not_believed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    assert train(tmp_path, *RUN, "train.steps=12").returncode == 0
    outcome = json.loads((run / "outcome.json").read_text())
    (run / "outcome.json").write_text(json.dumps({**outcome, "step": 20}))
    done = train(tmp_path, *RUN, "train.steps=20")
    assert done.returncode == 0, done.stdout
    assert "resumed at step 12" in done.stdout
    assert {step for step, _ in metrics(run)} == set(range(1, 21))
    assert "has finished its 20 steps" in train(tmp_path, *RUN, "train.steps=20").stdout


def test_a_run_that_was_killed_before_its_first_save_starts_over_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    process = start(tmp_path, "--name", "r", "checkpoint.every=0", "train.steps=100000")
    wait_for_step(run, 3, process)
    process.kill()
    process.wait(60)
    done = train(tmp_path, "--name", "r", "checkpoint.every=0", "train.steps=100000", "train.max_minutes=0.01")
    assert done.returncode == 75, done.stdout
    assert "no checkpoint was saved before the run ended: it starts over" in done.stdout
