"""Somebody whose run is broken learns from the terminal alone what happened, where, and what to type next."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.runs import ROOT, TEXT, events, harness, metrics, train

pytestmark = pytest.mark.faults(8, 11, 16)

# What people write: a loss with exp in the precision that autocast left, and a model that cannot take some bytes.
MODELS = """
import math
import torch
from torch import nn
from harness.models.gpt import build
SIZES = dict(dim=64, layers=1, heads=2, ffn=176, tied=True)
class Handmade(nn.Module):
    def __init__(self):
        super().__init__()
        self.gpt = build(**SIZES)
    def forward(self, inputs, targets):
        logits = 12.0 * self.gpt(inputs)
        picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return (logits.exp().sum(-1).log() - picked).mean()
class Poisoned(nn.Module):
    def __init__(self):
        super().__init__()
        self.gpt = build(**SIZES)
    def forward(self, inputs, targets):
        loss = self.gpt(inputs, targets)
        return loss * math.nan if bool((inputs == 7).any()) else loss
def ascii_only(): return build(vocab=128, **SIZES)
class Averaging(nn.Module):
    # Training normalises by the batch, evaluation by running means, which something breaks.
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(256, 64), nn.BatchNorm1d(64), nn.Linear(64, 256)
        self.register_buffer("mask", torch.full((4,), -math.inf))
        self.forwards = 0
    def forward(self, inputs, targets):
        if self.training and torch.is_grad_enabled():
            self.forwards += 1
            self.norm.running_mean[3] = math.nan if self.forwards in (7, 8) else 0.0
        logits = self.head(self.norm(self.embedding(inputs).flatten(0, 1)))
        return nn.functional.cross_entropy(logits.float(), targets.flatten())
"""
SMALL = ("--name", "r", "train.global_batch=2", "train.micro_batch=2")


def prepare(folder: Path) -> None:
    (folder / "broken.py").write_text(MODELS)
    shutil.copy(ROOT / "tests" / "e2e" / "faulty_models.py", folder)


def text_with_a_bad_part(folder: Path, bad: bytes) -> str:
    """A corpus of plain ASCII, with one damaged stretch in the middle."""
    good = (TEXT / "chapters.txt").read_bytes().decode("ascii", "ignore").encode()
    (folder / "text.txt").write_bytes(good[:4000] + bad + good[4000:8000])
    return f"data.path={folder / 'text.txt'}"


def suggested(output: str, label: str) -> list[str]:
    """The command that the terminal gives after `label`, as words."""
    line = next(line for line in output.splitlines() if line.startswith(f"{label} "))
    return line.removeprefix(label).split("  (")[0].split()


def follow(folder: Path, words: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    """Type a suggested `harness ...` command in the folder of the run."""
    assert words[0].endswith("harness")
    return harness(folder, *words[1:], *more)


def told(done: subprocess.CompletedProcess[str]) -> str:
    """What it printed, on one line."""
    return " ".join(done.stdout.split())


@pytest.mark.slow
def test_a_part_of_the_data_that_gives_nan(tmp_path: Path) -> None:
    prepare(tmp_path)
    data = text_with_a_bad_part(tmp_path, b"\x07" * 1500)
    done = train(
        tmp_path, *SMALL, data, "model.target=broken:Poisoned", "train.steps=80", "checkpoint.every=4",
        "checkpoint.healthy_steps=2", "guard.max_skips=5",
    )  # fmt: skip
    skips = events(tmp_path / "runs" / "r", "nonfinite.skip")
    assert len(skips) == 6, "the fault must fire until its budget is spent"
    assert done.returncode == 3
    for skip in skips:
        assert re.search(
            rf"! step {skip['step']}: nonfinite.skip: .*window {skip['window']}\b", done.stdout
        ), "where"
    assert done.stdout.count("[harness explain nonfinite.skip]") == 1, (
        "the hint comes with the first event, not with each"
    )
    end = done.stdout.partition("Post-mortem")[2]
    assert "guard.max_skips (5)" in end
    assert "Look for bad data" in end
    assert suggested(end, "explain")[-2:] == ["explain", "nonfinite.skip"]
    assert int(suggested(end, "origin")[-1]) in {skip["step"] for skip in skips}
    assert "point to data" in told(follow(tmp_path, suggested(end, "explain")))
    assert "steps" in follow(tmp_path, suggested(end, "in order")).stdout
    good = max(int(path.name[5:]) for path in (tmp_path / "runs/r/checkpoints").glob("step-*"))
    words = suggested(end, "go on")
    assert words[words.index("--resume") + 1].startswith("runs/r/checkpoints/step-")
    went_on = follow(tmp_path, words, f"train.steps={good + 1}")
    assert "started from runs/r/checkpoints" in went_on.stdout, went_on.stderr
    assert (tmp_path / "runs" / "r-2" / "journal.jsonl").exists()


@pytest.mark.slow
def test_a_part_of_the_data_with_labels_that_the_model_does_not_know(tmp_path: Path) -> None:
    """Known before the first step, as the data were looked at; for later ones see tests/faults/test_bad_data.py."""
    prepare(tmp_path)
    data = text_with_a_bad_part(tmp_path, "\u00e9".encode() * 700)
    done = train(tmp_path, *SMALL, data, "model.target=broken:ascii_only", "train.steps=40")
    assert done.returncode == 2, done.stdout
    assert "broken:ascii_only" in done.stdout
    assert "128" in done.stdout, "what the model has"
    assert not (tmp_path / "runs" / "r" / "journal.jsonl").exists(), "before anything was trained"


@pytest.mark.slow
def test_an_activation_that_outgrows_fp8(tmp_path: Path) -> None:
    prepare(tmp_path)
    done = train(
        tmp_path, *SMALL, "--recipe", "fp8_hybrid", "model.target=faulty_models:growing_outlier",
        "model.args={first: 10, last: 14}", "train.steps=18", "train.lr=1e-4",
    )  # fmt: skip
    run = tmp_path / "runs" / "r"
    guilty = "gpt.blocks.00.mlp.down"
    assert done.returncode == 0, done.stdout
    assert max(value for _, value in metrics(run, f"fp8_saturation/{guilty}.input")) > 1.5, (
        "the fault must fire"
    )
    step = next(
        event["step"] for event in events(run, "precision.demote") if guilty in event["text"]
    )
    line = next(
        line for line in done.stdout.splitlines() if f"! step {step}: precision.demote" in line
    )
    assert f"{guilty} to BF16" in line
    assert f"{guilty}.input saturation" in line
    assert suggested(done.stdout, "explain")[-2:] == ["explain", "precision.demote"]
    assert f"{guilty} to BF16" in told(follow(tmp_path, suggested(done.stdout, "in order")))


@pytest.mark.slow
def test_a_custom_loss_with_exp_in_fp16(tmp_path: Path) -> None:
    prepare(tmp_path)
    done = train(
        tmp_path,
        *SMALL,
        "--recipe",
        "fp16_scaler",
        "model.target=broken:Handmade",
        "train.steps=12",
    )
    run = tmp_path / "runs" / "r"
    skips = events(run, "nonfinite.skip")
    assert done.returncode == 0, done.stdout
    assert len(skips) >= 3, "the fault must fire"
    assert skips[0]["step"] == 1
    assert re.search(r"! step 1: nonfinite.skip: .*loss inf.*window 0", done.stdout), "where"
    assert "precision.lowered: 3 updates in a row failed in fp16" in done.stdout
    words = suggested(done.stdout, "explain")
    assert words[-2:] == ["explain", "nonfinite.skip"]
    assert "harness explain custom-losses" in told(follow(tmp_path, words))
    assert "logsumexp" in follow(tmp_path, [words[0], "explain", "custom-losses"]).stdout
    origin = suggested(done.stdout, "origin")
    assert origin[-2:] == ["--step", "1"]
    replayed = told(follow(tmp_path, origin))
    assert "(Handmade), output" in replayed, "the handmade loss is what overflows"
    assert "only bad in low precision" in replayed


@pytest.mark.slow
def test_a_learning_rate_thirty_times_too_high_in_fp8(tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "r", "train.lr=0.09", "train.steps=60")
    run = tmp_path / "runs" / "r"
    assert done.returncode == 0, done.stdout
    assert float(re.findall(r"ratio ([0-9.]+);", done.stdout)[0]) > 0.95, (
        "the fault must fire: nothing is learned"
    )
    assert "try train.lr" in events(run, "train.lr_high")[0]["text"], "before the first step"
    left = events(run, "precision.demote")[0]
    assert f"! step {left['step']}: precision.demote: blocks.0" in done.stdout, "where"
    words = suggested(done.stdout, "explain")
    assert words[-1] == "train.lr_high"
    assert "train.lr" in told(follow(tmp_path, words))


@pytest.mark.slow
def test_a_learning_rate_thirty_times_too_high_in_bf16(tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "r", "--recipe", "bf16", "train.lr=0.09", "train.steps=50")
    assert done.returncode == 0, done.stdout
    assert "little more is learned than how often each byte occurs" in told(done)
    words = suggested(done.stdout, "poor loss")
    assert "train.lr is far too high" in told(follow(tmp_path, words))


@pytest.mark.slow
def test_a_validation_loss_that_is_nan_where_training_is_well(tmp_path: Path) -> None:
    prepare(tmp_path)
    done = train(
        tmp_path, *SMALL, "--recipe", "fp32", "model.target=broken:Averaging", "model.args={}",
        "train.steps=12", "train.eval_every=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    run = tmp_path / "runs" / "r"
    (event,) = events(run, "validation.nonfinite")
    assert event["step"] == 8
    assert event["buffers"] == ["norm.running_mean"]
    assert (
        "validation.nonfinite: the validation loss is nan; not finite: norm.running_mean"
        in done.stdout
    )
    explained = harness(tmp_path, "explain", "validation.nonfinite")
    assert explained.returncode == 0
    assert "BatchNorm" in explained.stdout
