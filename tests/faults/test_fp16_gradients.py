"""fp16 gradients that underflow, or come near the format's limit: seen in real runs, and no alarm without the fault."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from harness.core.files import find
from tests.support.runs import ROOT, events, metrics, train

pytestmark = pytest.mark.faults(14)


def run_fp16(folder: Path, target: str, *arguments: str, **args: float) -> Path:
    """fp16 on a CPU is slow: one block, small batches. Measured at every step, so that a short run has a baseline."""
    shutil.copy(ROOT / "tests" / "faults" / "fp16_models.py", folder)
    config = yaml.safe_load(find("configs", "tiny").read_text())
    config["model"] = {"target": f"fp16_models:{target}", "args": args}
    config["data"] |= {"context": 16, "val_samples": 2}
    config["train"] |= {"steps": 24, "global_batch": 2, "micro_batch": 2}
    config["checkpoint"] = {"every": 0}
    (folder / "fp16.yaml").write_text(yaml.safe_dump(config))
    fixed = [
        "--name",
        "r",
        "--config",
        "fp16.yaml",
        "--recipe",
        "fp16_scaler",
        "guard.measure_every=1",
    ]
    done = train(folder, *fixed, *arguments)
    assert done.returncode == 0, done.stdout
    return folder / "runs" / "r"


def test_gradients_that_fade_away_are_reported_while_they_do(tmp_path: Path) -> None:
    run = run_fp16(tmp_path, "fading", first=13, factor=0.1)
    zeros = dict(metrics(run, "train/grad_zeros"))
    assert max(zeros[step] for step in range(1, 13)) < 0.02, (
        "fp16 holds the gradients of a healthy run"
    )
    assert zeros[24] > 0.5, "the fault fired"
    assert all(value == 1.0 for _, value in metrics(run, "train/step_applied")), "no gate sees it"
    (alarm,) = events(run, "gradient.underflow")
    assert 13 < alarm["step"] < 24
    assert alarm["first_zeros"] < 0.02 < 0.05 < alarm["zeros"]
    assert alarm["loss_scale"] == 65536.0
    assert "fp16_underflow" in alarm["text"]


def test_gradients_near_the_limit_are_reported_and_no_underflow_is(tmp_path: Path) -> None:
    run = run_fp16(tmp_path, "loud", first=13)
    shares = dict(metrics(run, "train/grad_near_limit"))
    assert max(shares[step] for step in range(1, 13)) < 0.01 < shares[13], "the fault fired"
    (alarm,) = events(run, "gradient.overflow")
    assert alarm["step"] == 13
    assert alarm["near_limit"] == shares[13]
    assert not events(run, "gradient.underflow")


@pytest.mark.slow
def test_without_the_guard_nothing_is_measured_or_said(tmp_path: Path) -> None:
    run = run_fp16(tmp_path, "fading", "guard.enabled=false", first=13, factor=0.1)
    assert len(metrics(run)) == 24
    assert metrics(run, "train/grad_zeros") == metrics(run, "train/param_norm") == []
    assert not events(run, "gradient.underflow")
