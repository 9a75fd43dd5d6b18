"""What a run's length or data cannot give is on the screen before its first step, and in the journal if it matters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import events, metrics, train

OWN = "tests.e2e.own_data"


@pytest.mark.slow
def test_a_warm_up_longer_than_the_run_is_told(tmp_path: Path) -> None:
    arguments = ["--name", "r", "train.warmup_steps=40", "train.lr=1e-3"]
    done = train(tmp_path, *arguments, "train.steps=4")
    assert done.returncode == 0, done.stdout
    assert "train.warmup: the warm-up is longer than the run" in done.stdout
    assert done.stdout.index("train.warmup") < done.stdout.index("loss "), "before the first step"
    run = tmp_path / "runs" / "r"
    assert len(events(run, "train.warmup")) == 1
    assert max(rate for _, rate in metrics(run, "train/lr")) < 1.1e-4
    longer = train(tmp_path, *arguments, "train.steps=6")
    assert "train.warmup" in longer.stdout, "at a resume too"
    mended = train(tmp_path, *arguments[:2], "train.lr=1e-3", "train.warmup_steps=2", "train.steps=8",
                   "--accept-changed", "train.warmup_steps")  # fmt: skip
    assert mended.returncode == 0, mended.stdout
    assert len(events(run, "train.warmup")) == 2, "not where it fits"


@pytest.mark.slow
def test_what_a_short_run_leaves_out_is_told(tmp_path: Path) -> None:
    done = train(
        tmp_path, "--name", "r", "train.steps=3", "train.eval_every=9", "checkpoint.every=8"
    )
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("in 3 steps: ")]
    assert "train.eval_every 9" in line
    assert "checkpoint.every 8" in line
    assert "fp8.stats_every 10" in line
    assert "snapshots in memory: none in 3 steps (guard.snapshot_every 20)" in done.stdout, (
        "the plan says so"
    )
    plain = train(tmp_path, "--name", "s", "--recipe", "bf16", "train.steps=3", "guard.snapshot_every=0",
                  "checkpoint.every=3")  # fmt: skip
    assert "in 3 steps: " not in plain.stdout, (
        "eval_every 0 means at the end, and bf16 has no FP8 to watch"
    )


def test_a_batch_larger_than_a_data_set_is_told(tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "r", "--recipe", "bf16", "data.path=null",
                 f"data.target={OWN}:images", "data.args={size: 6}", f"model.target={OWN}:classifier",
                 "train.global_batch=8", "train.steps=2")  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "a step takes 8 samples (train.global_batch) and there are 5" in done.stdout


@pytest.mark.slow
def test_copies_of_training_files_in_the_validation_are_told(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / "text" / str(number)).mkdir(parents=True)
        (tmp_path / "text" / str(number) / "a.txt").write_text(
            "the same words again and again\n" * 10
        )
    fixed = ["data.path=text", "data.context=16", "train.steps=2"]
    done = train(tmp_path, "--name", "r", *fixed)
    assert done.returncode == 0, done.stdout
    assert "3 of the files to validate on have the content of one to train on" in done.stdout
    for number in range(30):
        (tmp_path / "text" / str(number) / "a.txt").write_text(
            f"the words of {number} again and again\n" * 10
        )
    assert "the content of one to train on" not in train(tmp_path, "--name", "s", *fixed).stdout


@pytest.mark.slow
def test_documents_shorter_than_the_context_are_told(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"short {number}"}) + "\n" for number in range(300))
    (tmp_path / "docs.jsonl").write_text(rows)
    done = train(
        tmp_path, "--name", "r", "data.path=docs.jsonl", "data.packing=documents", "train.steps=2"
    )
    assert done.returncode == 0, done.stdout
    assert "the longest document has 10 tokens" in done.stdout


@pytest.mark.slow
def test_a_fallback_that_the_guard_takes_with_it_is_told(tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "r", "train.steps=2", "guard.enabled=false")
    assert done.returncode == 0, done.stdout
    assert (
        "precision.unwatched: guard.enabled is false, so the recipe's fallback is off"
        in done.stdout
    )
    assert done.stdout.index("precision.unwatched") < done.stdout.index("loss "), (
        "before the first step"
    )
    assert len(events(tmp_path / "runs" / "r", "precision.unwatched")) == 1
    plain = train(
        tmp_path, "--name", "s", "--recipe", "bf16", "train.steps=2", "guard.enabled=false"
    )
    assert "precision.unwatched" not in plain.stdout, "nothing runs in FP8"
