"""Checkpoints that somebody has deleted: a run that came far does not start over, nor go back, without a word."""

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


def test_a_run_whose_checkpoints_are_gone_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    assert train(tmp_path, *RUN, "train.steps=12").returncode == 0
    journal = (run / "journal.jsonl").read_bytes()
    kept = tmp_path / "kept"
    (run / "checkpoints").rename(kept)
    refused = train(tmp_path, *RUN, "train.steps=20")
    assert refused.returncode == 2, refused.stdout
    assert "the checkpoint of step 12 was saved, by the journal or good.json, and none is there" in refused.stdout
    assert "--resume never" in refused.stdout
    assert (run / "journal.jsonl").read_bytes() == journal, "untouched"
    shutil.rmtree(run / "checkpoints")
    kept.rename(run / "checkpoints")
    assert "resumed at step 12" in train(tmp_path, *RUN, "train.steps=14").stdout


def test_one_that_is_gone_is_refused_until_that_is_meant(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    assert train(tmp_path, *RUN, "train.steps=12").returncode == 0
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    before = {name: (run / name).read_bytes() for name in ("journal.jsonl", "outcome.json", "config.yaml")}
    refused = train(tmp_path, *RUN, "train.steps=14")
    assert refused.returncode == 2, refused.stdout
    assert "the checkpoint of step 12 was saved, by the journal or good.json" in refused.stdout
    assert "the newest that is there is of step 10" in refused.stdout
    assert "where steps 11 to 12 are to be done again: --accept-changed checkpoint" in refused.stdout
    assert before == {name: (run / name).read_bytes() for name in before}, "untouched"
    for step, told in ((14, True), (16, False)):
        done = train(tmp_path, *RUN, f"train.steps={step}", "--accept-changed", "checkpoint")
        assert done.returncode == 0, done.stdout
        assert ("the checkpoint of step 12 was saved and is gone" in done.stdout) is told, "once"
    assert train(tmp_path, *RUN, "train.steps=18").returncode == 0, "answered for"
    assert [event["step"] for event in events(run, "checkpoint.missing")] == [10]
    assert {step for step, _ in metrics(run)} == set(range(1, 19))


def test_a_refusal_leaves_damaged_ones_where_they_are(tmp_path: Path) -> None:
    """The newest is damaged, the one before it is gone: refused as it lies there, and set aside once that is meant."""
    checkpoints = tmp_path / "runs" / "r" / "checkpoints"
    assert train(tmp_path, *RUN, "train.steps=12").returncode == 0
    (checkpoints / "step-00000012" / "state.json").write_text("{}")
    (checkpoints / "step-00000010").rename(tmp_path / "kept")
    there = sorted(checkpoints.rglob("*"))
    refused = train(tmp_path, *RUN, "train.steps=14")
    assert refused.returncode == 2, refused.stdout
    assert "the checkpoint of step 10 was saved" in refused.stdout
    assert "the newest that is there is of step 5" in refused.stdout
    assert sorted(checkpoints.rglob("*")) == there, "untouched"
    done = train(tmp_path, *RUN, "train.steps=14", "--accept-changed", "checkpoint")
    assert done.returncode == 0, done.stdout
    assert "resumed at step 5" in done.stdout
    assert (checkpoints / "quarantine-step-00000012-1" / "state.json").read_text() == "{}"
    assert len(events(tmp_path / "runs" / "r", "checkpoint.quarantined")) == 1


def test_the_mark_of_one_that_is_gone_is_enough(tmp_path: Path) -> None:
    run, healthy = tmp_path / "runs" / "r", "checkpoint.healthy_steps=2"
    assert train(tmp_path, *RUN, healthy, "train.steps=13").returncode == 0
    for step in (10, 13):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    (run / "journal.jsonl").write_text("")
    refused = train(tmp_path, *RUN, healthy, "train.steps=14")
    assert refused.returncode == 2, refused.stdout
    assert "the checkpoint of step 10 was saved" in refused.stdout
    meant = ("--accept-changed", "checkpoint", "checkpoint.healthy_steps=50")
    assert train(tmp_path, *RUN, "train.steps=14", *meant).returncode == 0
    assert read_marks(run / "checkpoints") == [5], "what is gone is no longer good"
    assert train(tmp_path, *RUN, healthy, "train.steps=15").returncode == 0, "answered for"


@pytest.mark.parametrize("told", [True, False])
def test_what_the_run_itself_put_away_is_not_missed(tmp_path: Path, told: bool) -> None:
    """Damaged and set aside, also where the run was killed before it could say so; deleted later, it is missed."""
    run = tmp_path / "runs" / "r"
    checkpoints = run / "checkpoints"
    assert train(tmp_path, *RUN, "train.steps=12").returncode == 0
    if told:
        (checkpoints / "step-00000012" / "state.json").write_text("{}")
    else:
        (checkpoints / "step-00000012").rename(checkpoints / "quarantine-step-00000012-1")
    done = train(tmp_path, *RUN, "train.steps=14")
    assert done.returncode == 0, done.stdout
    assert events(run, "checkpoint.missing") == []
    for aside in checkpoints.glob("quarantine-*"):
        shutil.rmtree(aside)
    assert train(tmp_path, *RUN, "train.steps=15").returncode == 0, "looked at and thrown away"
    shutil.rmtree(checkpoints / "step-00000015")
    assert train(tmp_path, *RUN, "train.steps=16").returncode == 2


def test_one_that_was_set_aside_once_is_missed_when_it_is_deleted(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    newest = run / "checkpoints" / "step-00000015"
    assert train(tmp_path, *RUN, "train.steps=15").returncode == 0
    (newest / "state.json").write_text("{}")
    assert train(tmp_path, *RUN, "train.steps=16").returncode == 0
    assert len(list((run / "checkpoints").glob("quarantine-step-00000015-*"))) == 1
    for step in (15, 16):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    with (run / "journal.jsonl").open("r+b") as journal:  # as if killed after the save of step 15
        text = journal.read()
        journal.truncate(text.index(b"\n", text.rindex(b'"step": 15, "state": "saved"')) + 1)
    refused = train(tmp_path, *RUN, "train.steps=17")
    assert refused.returncode == 2, refused.stdout
    assert "the checkpoint of step 15 was saved" in refused.stdout


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


def test_a_run_killed_before_its_first_save_starts_over_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    process = start(tmp_path, "--name", "r", "checkpoint.every=0", "train.steps=100000")
    wait_for_step(run, 3, process)
    process.kill()
    process.wait(60)
    done = train(tmp_path, "--name", "r", "checkpoint.every=0", "train.steps=100000", "train.max_minutes=0.01")
    assert done.returncode == 75, done.stdout
    assert "no checkpoint was saved before the run ended: it starts over" in done.stdout


def test_a_folder_that_is_deleted_in_mid_run_is_made_again(tmp_path: Path) -> None:
    """Told as a save that failed; the next one finds the folder, and what is asked to stop is saved."""
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
    assert "the folder was deleted, with every checkpoint in it; it is made again for the next save" in told
    assert [event["failures"] for event in events(run, "checkpoint.failed") if "failures" in event] == [1]
    stopped = json.loads((run / "outcome.json").read_text())["step"]
    assert f"resumed at step {stopped}" in train(tmp_path, *command, "train.max_minutes=0.001").stdout


@pytest.mark.parametrize("to", [0, 5])
def test_a_rollback_that_the_run_never_made_is_not_carried_out(tmp_path: Path, to: int) -> None:
    checkpoints = tmp_path / "runs" / "r" / "checkpoints"
    assert train(tmp_path, *RUN, "train.steps=12").returncode == 0
    there = sorted(path.name for path in checkpoints.iterdir())
    (checkpoints / "rollback.json").write_text(json.dumps({"to": to}))
    refused = train(tmp_path, *RUN, "train.steps=14")
    assert refused.returncode == 2, refused.stdout
    assert "checkpoints/rollback.json" in refused.stdout
    assert sorted(path.name for path in checkpoints.iterdir() if path.name != "rollback.json") == there, "untouched"
    (checkpoints / "rollback.json").unlink()
    assert "resumed at step 12" in train(tmp_path, *RUN, "train.steps=14").stdout
