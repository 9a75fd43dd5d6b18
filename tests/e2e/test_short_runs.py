"""Runs of a few steps: fewer than `tracking.fp8_every` have FP8 figures, and the proof counts what ran."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas
import pytest

from tests.support.runs import ROOT, harness, metrics, train


@pytest.mark.slow
def test_a_run_shorter_than_fp8_every_proves_what_ran(tmp_path: Path) -> None:
    done = train(
        tmp_path, "--name", "r", "train.steps=3", "tracking.fp8_every=10", "tracking.report=true"
    )
    assert done.returncode == 0, done.stdout
    assert "24 of 24 FP8 slots saw a nonzero amax" in done.stdout
    run = tmp_path / "runs" / "r"
    assert [step for step, _ in metrics(run, "fp8_amax/blocks.00.mlp.down.input")] == [3], (
        "of the last step"
    )
    table = pandas.read_parquet(run / "fp8_telemetry.parquet")
    assert sorted(table.step) == [step for step in (1, 2, 3) for _ in range(24)]
    shown = harness(tmp_path, "inspect", "runs/r")
    assert "24 of 24 FP8 slots saw a nonzero amax" in shown.stdout


def test_a_run_that_was_stopped_early_proves_what_ran(tmp_path: Path) -> None:
    """Stopped at once: no row of figures is due yet, and none is made up."""
    done = train(
        tmp_path,
        "--name",
        "r",
        "train.steps=50",
        "tracking.fp8_every=50",
        "train.max_minutes=0.0001",
    )
    assert done.returncode == 75, done.stdout
    run = tmp_path / "runs" / "r"
    assert metrics(run, "fp8_amax/blocks.00.mlp.down.input") == []
    assert "24 of 24 FP8 slots saw a nonzero amax" in harness(tmp_path, "inspect", "runs/r").stdout


@pytest.mark.slow
def test_a_resume_with_no_step_left_counts_those_that_were(tmp_path: Path) -> None:
    """The outcome was lost, the run was not."""
    line = ("--name", "r", "train.steps=4")
    assert train(tmp_path, *line).returncode == 0
    outcome = tmp_path / "runs" / "r" / "outcome.json"
    before = json.loads(outcome.read_text())
    outcome.unlink()
    again = train(tmp_path, *line)
    assert again.returncode == 0, again.stdout
    counts = {
        name: json.loads(outcome.read_text())[name] for name in ("applied", "skipped", "rollbacks")
    }
    assert (
        counts
        == {name: before[name] for name in counts}
        == {"applied": 4, "skipped": 0, "rollbacks": 0}
    )


@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_engine_deterministic_names_an_operation_that_is_not(
    deterministic: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "tests" / "e2e" / "faulty_models.py", tmp_path)
    model = ("model.target=faulty_models:Orderless", f"engine.deterministic={deterministic}")
    done = train(tmp_path, "--name", "r", "train.steps=2", *model)
    assert done.returncode == (2 if deterministic == "true" else 0), done.stdout
    assert ("put_ does not have a deterministic implementation" in done.stdout) == (
        deterministic == "true"
    )
