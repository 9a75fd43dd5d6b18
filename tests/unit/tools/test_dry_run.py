"""`harness train --dry-run`: it checks and reports what a run would begin with, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import runs

UNSAFE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x, y):
        return -(torch.log(torch.softmax(self.inner(x), -1)) * y).sum(-1).mean()

def build(**_):
    return Net()

class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {"x": torch.ones(32), "y": torch.full((32,), 1 / 32)}
"""


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`. A run's lock has the process that held it last."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "lock":
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def table_of(output: str) -> list[str]:
    """The lines of the plan's table."""
    return [line for line in output.splitlines() if line.startswith("blocks.")]


def test_it_reports_what_training_begins_with_and_writes_nothing(tmp_path: Path) -> None:
    doubtful = ("train.warmup_steps=50", "train.lr=3", "train.steps=2", "data.val_samples=4")
    checked = runs.train(tmp_path, "--dry-run", *doubtful)
    assert checked.returncode == 0, checked.stdout
    assert contents(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []

    for text in (
        "run runs/tiny-fp8_hybrid",
        "resolved native:fp8",
        "tokens to train on",
        "train.warmup: the warm-up is longer than the run",
        "train.lr_high: ",
        "memory: ",
        "disk: each checkpoint takes about",
        "start: begins with initial weights",
        "dry run: all checks passed, nothing was trained",
    ):
        assert text in checked.stdout
    assert "step " not in checked.stdout.replace("steps", "")

    # The same command without the flag begins with that plan.
    trained = runs.train(tmp_path, *doubtful)
    assert trained.returncode == 0, trained.stdout
    assert table_of(checked.stdout) == table_of(trained.stdout) != []


def test_it_lists_what_doctor_finds_in_the_run(tmp_path: Path) -> None:
    (tmp_path / "unsafe.py").write_text(UNSAFE)
    own = ("model.target=unsafe:build", "data.target=unsafe:Pairs", "data.path=null")
    done = runs.train(tmp_path, "--dry-run", "--recipe", "fp32", *own)
    assert done.returncode == 0, done.stdout
    assert "warning numerics.log_softmax" in done.stdout
    assert "warning data.repeated" in done.stdout
    assert "dry run: all checks passed" in done.stdout


@pytest.mark.parametrize(
    ("asked", "code", "expected"),
    [
        (("data.path=nowhere",), 2, "nowhere"),
        (("model.args={vocab: 10}",), 2, "a vocabulary of 10 is too small"),
        (("--recipe", "auto", "--strict"), 4, "--strict"),
        (("model.target=nowhere:build",), 2, "cannot import"),
    ],
)
def test_what_training_refuses_is_refused(
    asked: tuple[str, ...], code: int, expected: str, tmp_path: Path
) -> None:
    done = runs.train(tmp_path, "--dry-run", *asked)
    assert done.returncode == code, done.stdout
    assert expected in done.stdout
    assert contents(tmp_path) == {}


@pytest.mark.slow
def test_of_a_run_that_is_there_it_says_where_it_goes_on_and_changes_nothing(
    tmp_path: Path,
) -> None:
    trained = runs.train(tmp_path, "--name", "mine", "train.steps=2")
    assert trained.returncode == 0, trained.stdout
    before = contents(tmp_path)

    finished = runs.train(tmp_path, "--name", "mine", "--dry-run", "train.steps=2")
    assert finished.returncode == 0, finished.stdout
    assert "has finished its 2 steps" in finished.stdout

    longer = runs.train(tmp_path, "--name", "mine", "--dry-run", "train.steps=4")
    assert longer.returncode == 0, longer.stdout
    assert "start: goes on after step 2; changed: train.steps from 2 to 4" in longer.stdout

    refused = runs.train(tmp_path, "--name", "mine", "--dry-run", "train.lr=1.0")
    assert refused.returncode == 2
    assert "train.lr" in refused.stdout

    other = runs.train(
        tmp_path, "--name", "other", "--dry-run", "--resume", "runs/mine/checkpoints/step-00000002"
    )
    assert other.returncode == 0, other.stdout
    assert "start: begins from runs/mine/checkpoints/step-00000002" in other.stdout
    assert contents(tmp_path) == before


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_ranks_check_together(engine: str, tmp_path: Path) -> None:
    done = runs.train_ranks(tmp_path, 2, "--dry-run", f"engine.name={engine}", "--recipe", "bf16")
    assert done.returncode == 0, done.stdout
    assert "2 ranks" in done.stdout
    assert done.stdout.count("dry run: all checks passed") == 1
    advised = done.stdout.count("model.args.recompute=block frees them")
    assert advised == (engine == "fsdp"), "once, by rank 0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.log", "rank-1.log"]
