"""Optimizers on the real job: a rollback from memory, a resume bit for bit, two ranks, what DeepSpeed refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from harness.core.files import find
from tests.support.matrix import rest_nightly
from tests.support.runs import ROOT, events, metrics, train, train_ranks

STEPS = 16
OWN = "own_optimizer:Slowing"


def write(folder: Path, optimizer: str) -> tuple[str, ...]:
    """The command line of a run with NaN in the 7th and 8th forward: two skipped updates, then a rollback."""
    for name in ("faulty_models.py", "own_optimizer.py"):
        shutil.copy(ROOT / "tests" / "e2e" / name, folder)
    config = yaml.safe_load(find("configs", "tiny").read_text())
    config["model"] = {"target": "faulty_models:nan_between", "args": {"first": 7, "last": 9}}
    config["train"] |= {"optimizer": optimizer, "steps": STEPS, "warmup_steps": 2, "micro_batch": 4}
    config["checkpoint"] = {"every": 4, "healthy_steps": 1}
    config["guard"] = {"max_consecutive_skips": 2, "snapshot_every": 2}
    (folder / "own.yaml").write_text(yaml.safe_dump(config))
    return ("--config", "own.yaml", "--name", "r")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("optimizer", rest_nightly(["adamw_fp8", "muon", OWN, "adamw8bit"], OWN))
@pytest.mark.slow
def test_a_rolled_back_run_resumes_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    line = write(tmp_path, optimizer)
    done = train(tmp_path, *line)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "runs" / "r"
    (rollback,) = events(run, "guard.rollback")
    assert rollback["source"] == "memory", rollback
    assert [event["code"] for event in events(run, "train.optimizer_waits")] == [
        "train.optimizer_waits"
    ]
    assert "the host waits for it once a step" in done.stdout
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    expected = {path.name: load_file(path) for path in last.glob("*.safetensors")}
    losses = metrics(run)
    assert losses[-1][1] < losses[0][1]
    shutil.rmtree(last)
    (run / "outcome.json").unlink()
    again = train(tmp_path, *line)
    assert again.returncode == 0, again.stdout
    assert "resumed at step 12" in again.stdout
    assert events(run, "resume.mismatch") == []
    for name, tensors in expected.items():
        found = load_file(last / name)
        assert found.keys() == tensors.keys()
        assert all(raw(found[key]) == raw(tensors[key]) for key in tensors), name


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", rest_nightly(["adamw_fp8", "muon"], "muon"))
def test_ranks_stay_equal_and_resume_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    line = ("--name", "r", "train.steps=8", "checkpoint.every=4", f"train.optimizer={optimizer}")
    compared = ("guard.compare_ranks_every=2", "--recipe", "bf16")
    done = train_ranks(tmp_path, 2, *line, *compared)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "runs" / "r"
    losses = metrics(run)
    assert len(losses) == 8
    assert losses[-1][1] < losses[0][1]
    sizes = [value for _, value in metrics(run, "train/peak_memory_gib")]
    assert len(sizes) == 8
    assert 0.05 < sizes[0] <= sizes[-1] < 50, (
        "GiB, the larger of both ranks, and never less than before"
    )
    assert sizes == sorted(sizes)
    assert metrics(run, "train/mfu") == [], "a CPU's peak is not known"
    last = run / "checkpoints" / "step-00000008"
    expected = {path.name: load_file(path) for path in last.glob("*.safetensors")}
    shutil.rmtree(last)
    (run / "outcome.json").unlink()
    again = train_ranks(tmp_path, 2, *line, *compared)
    assert again.returncode == 0, again.stdout
    assert "resumed at step 4" in again.stdout
    assert events(run, "resume.mismatch") == events(run, "ranks.diverged") == []
    for name, tensors in expected.items():
        found = load_file(last / name)
        assert all(raw(found[key]) == raw(tensors[key]) for key in tensors), name


def test_deepspeed_refuses_them_by_name(tmp_path: Path) -> None:
    done = train_ranks(tmp_path, 1, "--name", "r", "train.optimizer=muon", kind="deepspeed")
    assert done.returncode == 2, done.stdout
    assert "train.optimizer 'muon': the engine deepspeed does not take it" in done.stdout
    assert not (tmp_path / "runs" / "r" / "config.yaml").exists()
