"""A whole run that leaves its precision for good: recorded, kept over a resume and a rollback, and it trains on."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml

from harness.core.files import find
from tests.support.runs import ROOT, events, metrics, train

pytestmark = pytest.mark.faults(16)


def run_loud(folder: Path, steps: int, recipe: str, *arguments: str, **model: int) -> Path:
    """fp16 on a CPU is slow: small batches, few steps. Step 4 is the first that fp16 cannot hold."""
    shutil.copy(ROOT / "tests" / "e2e" / "faulty_models.py", folder)
    config = yaml.safe_load(find("configs", "tiny").read_text())
    config["model"] = {"target": "faulty_models:loud_from", "args": {"first": 3, **model}}
    config["data"] |= {"context": 16, "val_samples": 2}
    (folder / "loud.yaml").write_text(yaml.safe_dump(config))
    fixed = ["--name", "r", "--config", "loud.yaml", "--recipe", recipe, f"train.steps={steps}"]
    done = train(folder, *fixed, "train.global_batch=2", "train.micro_batch=2", *arguments)
    assert done.returncode == 0, done.stdout
    return folder / "runs" / "r"


@pytest.mark.slow
def test_fp16_that_overflows_for_good_goes_on_in_bf16_after_a_resume_too(tmp_path: Path) -> None:
    run = run_loud(tmp_path, 10, "fp16_scaler")
    applied = dict(metrics(run, "train/step_applied"))
    # Three failures, then one more step that was on its way when they were judged.
    assert [step for step, value in applied.items() if value == 0.0] == [4, 5, 6, 7]
    (lowered,) = events(run, "precision.lowered")
    assert (lowered["step"], lowered["to"], lowered["failed_steps"]) == (6, "bf16", 3)
    (switched,) = events(run, "precision.switched")
    assert (switched["step"], switched["lowered"]) == (8, "bf16")
    scales = dict(metrics(run, "train/loss_scale"))
    assert scales[7] > 1
    assert all(scales[step] == 1.0 for step in range(8, 11))
    assert all(math.isfinite(loss) for step, loss in metrics(run) if step > 7)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["resolved"] == "autocast:fp16"
    assert "bf16" in plan["effective"]
    assert "fp16" not in plan["effective"]
    run_loud(tmp_path, 12, "fp16_scaler")
    assert [step for step, value in metrics(run, "train/step_applied") if value == 0.0] == [
        4,
        5,
        6,
        7,
    ]
    assert dict(metrics(run, "train/step_applied"))[12] == 1.0
    assert len(events(run, "precision.lowered")) == 1


@pytest.mark.slow
def test_a_rollback_to_before_the_fall_does_not_bring_fp16_back(tmp_path: Path) -> None:
    saves = ["checkpoint.every=3", "checkpoint.healthy_steps=3", "guard.max_consecutive_skips=5"]
    run = run_loud(tmp_path, 18, "fp16_scaler", *saves, nan_first=10)
    (rollback,) = events(run, "guard.rollback")
    assert rollback["to_step"] == 6, "before step 8, which was the first in bf16"
    assert [
        step for step, value in metrics(run, "train/step_applied", attempt=2) if value == 0.0
    ] == []
    assert {scale for _, scale in metrics(run, "train/loss_scale", attempt=2)} == {1.0}
    assert metrics(run, "train/loss", attempt=2)[0][0] == 7
    assert len(events(run, "precision.lowered")) == 1


@pytest.mark.slow
def test_without_the_fallback_the_same_run_breaks(tmp_path: Path) -> None:
    recipe = yaml.safe_load(find("recipes", "fp16_scaler").read_text()) | {
        "fallback": {"failed_steps": None}
    }
    (tmp_path / "stubborn.yaml").write_text(yaml.safe_dump(recipe))
    run = run_loud(tmp_path, 7, "stubborn.yaml", "guard.max_consecutive_skips=99")
    assert [step for step, value in metrics(run, "train/step_applied") if value == 0.0] == [
        4,
        5,
        6,
        7,
    ]
    assert not events(run, "precision.lowered")
