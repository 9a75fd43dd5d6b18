"""A place where checkpoints will not fit, or cannot be written, met by the real command: row 5 of the fault matrix."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from harness.checkpoint.store import Store
from tests.support import warm
from tests.support.runs import command, environment, metrics, train, wait_for_step

pytestmark = pytest.mark.faults(5)

LIMIT = 5_000_000


@pytest.mark.slow
def test_a_run_that_could_not_save_is_refused_first_and_can_start_later(tmp_path: Path) -> None:
    arguments = ("--name", "r", "train.steps=2")
    refused = warm.run(command(*arguments)[1:], tmp_path, environment(), file_limit=LIMIT)
    assert refused.returncode == 2, refused.stdout
    assert "files of at most 5 MB" in refused.stdout
    assert "ulimit" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert not (tmp_path / "runs" / "r" / "journal.jsonl").exists()
    done = train(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout
    assert [step for step, _ in metrics(tmp_path / "runs" / "r")] == [1, 2]


@pytest.mark.slow
def test_a_runs_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_bytes(b"")
    done = train(tmp_path, "--name", "r", "train.steps=2")
    assert done.returncode == 2
    assert "runs/r" in done.stdout
    assert "Traceback" not in done.stdout


# A user's model, under which the disk fails once as the last save is committed.
ONCE = """
import harness.checkpoint.store as store
from harness.models.gpt import build
def failing():
    real, left = store.sync_folder, [1]
    def sync(folder):
        if folder.name == "checkpoints" and left:
            left.clear()
            open("fired", "w").close()
            raise OSError(5, "Input/output error")
        real(folder)
    store.sync_folder = sync
    return build(dim=64, layers=1, heads=2, ffn=176, tied=True)
"""


@pytest.mark.slow
@pytest.mark.faults(3)
def test_a_last_save_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ONCE)
    own = ("--name", "r", "model.target=mine:failing", "model.args={}", "checkpoint.every=0")
    done = train(tmp_path, *own, "train.steps=100000", "train.max_minutes=0.01")
    assert (tmp_path / "fired").exists()
    assert done.returncode == 75, done.stdout
    assert "checkpoint.failed" in done.stdout
    outcome = json.loads((tmp_path / "runs" / "r" / "outcome.json").read_text())
    assert outcome["status"] == "stopped"
    assert (
        Store(tmp_path / "runs" / "r" / "checkpoints", readonly=True).verify(outcome["step"]) == []
    )


# A user's model, whose second and later saves fail by an error that no disk makes.
DEFECT = """
import harness.checkpoint.store as store
from harness.models.gpt import build
def failing():
    real, saves = store._state_bytes, []
    def state_bytes(*given):
        saves.append(1)
        if len(saves) > 1:
            raise ValueError("Object of type set is not JSON serializable")
        return real(*given)
    store._state_bytes = state_bytes
    return build(dim=64, layers=1, heads=2, ffn=176, tied=True)
"""


@pytest.mark.slow
@pytest.mark.faults(3)
def test_a_save_that_fails_by_no_disk_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DEFECT)
    own = ("--name", "r", "model.target=mine:failing", "model.args={}", "train.steps=100000")
    done = train(tmp_path, *own, "checkpoint.every=2", "checkpoint.max_failures=1")
    run = tmp_path / "runs" / "r"
    assert done.returncode == 1, done.stdout
    assert "checkpoint.paused" not in done.stdout
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["status"], outcome["exit_code"], outcome["step"]) == ("failed", 1, 6)
    for text in (outcome["reason"], done.stdout):
        assert "not because of the disk" in text
        assert "Object of type set is not JSON serializable" in text
        assert "mine.py, line" in text
        assert "fix: " in text
    assert Store(run / "checkpoints", readonly=True).verify(2) == []
    assert [step for step, _ in metrics(run)] == [1, 2, 3, 4, 5, 6]


PLANTING = """
from pathlib import Path
import torch
from harness.models.gpt import build
class Planting(torch.nn.Module):
    vocab_size = 256
    def __init__(self):
        super().__init__()
        self.gpt = build(dim=32, layers=1, heads=2, ffn=64)
    def forward(self, inputs, targets):
        if Path("runs/r/journal.jsonl").exists() and torch.is_grad_enabled():
            Path("runs/r/outcome.json").mkdir(exist_ok=True)
        return self.gpt(inputs, targets)
"""


@pytest.mark.slow
def test_the_last_words_are_true_where_outcome_is_refused(tmp_path: Path) -> None:
    (tmp_path / "planting.py").write_text(PLANTING)
    done = train(
        tmp_path,
        "--name",
        "r",
        "train.steps=3",
        "model.target=planting:Planting",
        PYTHONPATH=str(tmp_path),
    )
    assert "outcome.json could not be written" in done.stdout
    assert "done at step 3" in done.stdout
    assert "still running" not in done.stdout


def to_full_disk(folder: Path, *arguments: str, wait_for: int = 0, number: int = 0) -> int:
    """The exit code of a run whose screen is a log on a full disk; after so many steps it gets signal `number`."""
    with Path("/dev/full").open("wb") as full:
        log = full.fileno()
        process = warm.start(
            command("--name", "r", *arguments)[1:], folder, environment(), log, log
        )
        if wait_for:
            wait_for_step(folder / "runs" / "r", wait_for, process)
            process.send_signal(number)
        return process.wait(warm.PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_screen_that_takes_no_word_costs_no_save(tmp_path: Path, number: int) -> None:
    assert to_full_disk(tmp_path, "train.steps=100000", wait_for=3, number=number) == 75
    outcome = json.loads((tmp_path / "runs" / "r" / "outcome.json").read_text())
    assert outcome["status"] == "stopped"
    assert (
        Store(tmp_path / "runs" / "r" / "checkpoints", readonly=True).verify(outcome["step"]) == []
    )


@pytest.mark.slow
def test_a_screen_that_takes_no_word_changes_no_exit_code(tmp_path: Path) -> None:
    assert to_full_disk(tmp_path, "train.stepz=1") == 2
    assert to_full_disk(tmp_path, "train.steps=2") == 0
