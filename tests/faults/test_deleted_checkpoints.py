"""Checkpoints that were lost: a run that came far does not start over unasked."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from harness.checkpoint.manifest import read_marks
from tests.support.runs import events, metrics, start, train, wait_for_step

pytestmark = pytest.mark.faults(4)

RUN = ("--name", "r", "checkpoint.every=5")


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    assert train(tmp_path, *RUN, "train.steps=12").returncode == 0
    journal = (run / "journal.jsonl").read_bytes()
    kept = tmp_path / "kept"
    (run / "checkpoints").rename(kept)
    refused = train(tmp_path, *RUN, "train.steps=20")
    assert refused.returncode == 2, refused.stdout
    assert (
        "the journal says that the checkpoint of step 12 was saved, and none is there"
        in refused.stdout
    )
    assert "--resume never" in refused.stdout
    assert (run / "journal.jsonl").read_bytes() == journal, "untouched"
    shutil.rmtree(run / "checkpoints")
    kept.rename(run / "checkpoints")
    assert "resumed at step 12" in train(tmp_path, *RUN, "train.steps=14").stdout


@pytest.mark.slow
def test_a_run_whose_newest_is_gone_goes_on_from_the_one_before(tmp_path: Path) -> None:
    run, healthy = tmp_path / "runs" / "r", "checkpoint.healthy_steps=2"
    assert train(tmp_path, *RUN, healthy, "train.steps=13").returncode == 0
    assert read_marks(run / "checkpoints") == [5, 10]
    for step in (10, 13):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    done = train(tmp_path, *RUN, "train.steps=13", "checkpoint.healthy_steps=50")
    assert done.returncode == 0, done.stdout
    assert "resumed at step 5" in done.stdout
    assert read_marks(run / "checkpoints") == [5], "what is gone is no longer good"
    assert [step for step, _ in metrics(run)] == list(range(1, 14)), (
        "the same bits, and no row twice"
    )


@pytest.mark.slow
def test_what_the_run_itself_set_aside_is_not_lost(tmp_path: Path) -> None:
    checkpoints = tmp_path / "runs" / "r" / "checkpoints"
    assert train(tmp_path, *RUN, "train.steps=4", "checkpoint.every=0").returncode == 0
    (checkpoints / "step-00000004").rename(checkpoints / "quarantine-step-00000004-1")
    done = train(tmp_path, *RUN, "train.steps=6", "checkpoint.every=0")
    assert done.returncode == 0, done.stdout
    assert "it starts over" in done.stdout


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_starts_over_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    process = start(tmp_path, "--name", "r", "checkpoint.every=0", "train.steps=100000")
    wait_for_step(run, 3, process)
    process.kill()
    process.wait(60)
    done = train(
        tmp_path,
        "--name",
        "r",
        "checkpoint.every=0",
        "train.steps=100000",
        "train.max_minutes=0.01",
    )
    assert done.returncode == 75, done.stdout
    assert "no checkpoint was saved before the run ended: it starts over" in done.stdout


@pytest.mark.slow
def test_a_folder_that_is_deleted_in_mid_run_is_made_again(tmp_path: Path) -> None:
    """One save fails and is reported. The folder is made again, and the save at the stop succeeds."""
    run = tmp_path / "runs" / "r"
    command = (*RUN, "checkpoint.on_failure=continue", "train.steps=100000")
    process = start(tmp_path, *command)
    try:
        wait_for_step(run, 7, process)
        (run / "checkpoints").rename(tmp_path / "gone")
        wait_for_step(run, metrics(run)[-1][0] + 11, process)
        process.send_signal(signal.SIGTERM)
        code = process.wait(300)
    finally:
        process.kill()
    told = (tmp_path / "output.log").read_text()
    assert code == 75, told
    assert (
        "the folder was deleted, with every checkpoint in it; it is made again for the next save"
        in told
    )
    assert [
        event["failures"] for event in events(run, "checkpoint.failed") if "failures" in event
    ] == [1]
    stopped = json.loads((run / "outcome.json").read_text())["step"]
    assert (
        f"resumed at step {stopped}" in train(tmp_path, *command, "train.max_minutes=0.001").stdout
    )
