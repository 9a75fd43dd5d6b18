"""A loss scale that only falls, and one that only grows: row 14 of the fault matrix, on real fp16 runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from harness.core.files import find
from tests.support.runs import ROOT, events, metrics, train

pytestmark = pytest.mark.faults(14)


def run_fp16(
    folder: Path, model: str, loss_scale: dict[str, Any], *arguments: str
) -> tuple[Path, CompletedProcess[str]]:
    """fp16 on a CPU is slow: one block, small batches. The whole-run fall to bf16 is off: it would come first."""
    shutil.copy(ROOT / "tests" / "e2e" / "faulty_models.py", folder)
    recipe = yaml.safe_load(find("recipes", "fp16_scaler").read_text())
    recipe["loss_scale"] |= loss_scale
    recipe["fallback"] = {"enabled": False}
    (folder / "fp16.yaml").write_text(yaml.safe_dump(recipe))
    small = ("data.context=16", "data.val_samples=2", "train.global_batch=2", "train.micro_batch=2")
    done = train(folder, "--name", "r", "--recipe", "fp16.yaml", model, *small, *arguments)
    return folder / "runs" / "r", done


def test_nan_for_ever_halts_long_before_the_scale_is_nothing(tmp_path: Path) -> None:
    run, done = run_fp16(
        tmp_path, "model.target=faulty_models:nan_from", {}, "model.args={first: 3}", "train.steps=200",
        "guard.max_consecutive_skips=1000", "guard.max_skips=1000",
    )  # fmt: skip
    assert done.returncode == 3, done.stdout
    scales = [value for _, value in metrics(run, "train/loss_scale")]
    assert scales[0] == 65536.0
    assert min(scales) == 1.0, (
        "the floor; GradScaler's would be 0.0 after 166 such steps, and write NaN"
    )
    assert max(step for step, _ in metrics(run)) < 30
    assert events(run, "scaler.collapse")
    assert "bf16" in json.loads((run / "outcome.json").read_text())["reason"]


def test_a_scale_that_only_grows_stops_at_its_cap(tmp_path: Path) -> None:
    growing = {"init": 1.0, "growth_factor": 65536.0, "growth_interval": 1, "cap": 2.0**10}
    run, done = run_fp16(
        tmp_path,
        "model.target=faulty_models:nan_from",
        growing,
        "model.args={first: 1000}",
        "train.steps=6",
    )
    assert done.returncode == 0, done.stdout
    assert [value for _, value in metrics(run, "train/loss_scale")] == [1.0, *[1024.0] * 5]
    assert all(value == 1.0 for _, value in metrics(run, "train/step_applied"))
