"""What an attacker of the finished job found, kept as tests: kills inside a rollback, odd seeds, models and losses."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.runs import ROOT, command, environment, events, metrics, train

# launch/train.py with a SIGKILL at one place inside a rollback.
KILLER = """
import os, signal, sys
sys.path.insert(0, {root!r})
from harness.checkpoint import store
real = store.Store.discard_after
def discard_after(self, step):
    if {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, step)
    os.kill(os.getpid(), signal.SIGKILL)
store.Store.discard_after = discard_after
from harness.cli import train_main
train_main()
"""
# NaN whenever the batch has a byte of one window, so that the fault repeats after a resume.
POISON = """
import math
from harness.models.gpt import build
from torch import nn
class Poisoned(nn.Module):
    def __init__(self):
        super().__init__()
        self.gpt = build(dim=64, layers=1, heads=2, ffn=176, tied=True)
    def forward(self, inputs, targets):
        loss = self.gpt(inputs, targets)
        return loss * math.nan if bool((inputs == 7).any()) else loss
def poisoned(): return Poisoned()
def half(): return Poisoned().bfloat16()
def bad_validation():
    class Bad(Poisoned):
        def forward(self, inputs, targets):
            loss = self.gpt(inputs, targets)
            return loss if self.training else loss * math.nan
    return Bad()
def broken(): raise RuntimeError("no such luck")
"""
ROLLBACK = (
    "--name", "r", "train.steps=30", "train.global_batch=2", "train.micro_batch=2", "checkpoint.every=5",
    "checkpoint.healthy_steps=3", "guard.max_consecutive_skips=1", "model.target=mine:poisoned",
)  # fmt: skip


def prepare(folder: Path) -> str:
    (folder / "mine.py").write_text(POISON)
    text = (ROOT / "tests" / "golden" / "text" / "chapters.txt").read_bytes()
    (folder / "text.txt").write_bytes(text[:1500] + b"\x07" + text[1500:9000])
    return f"data.path={folder / 'text.txt'}"


def prepare_two(folder: Path) -> tuple[Path, Path, str]:
    """Two folders to run the same in, one of them undisturbed, and the argument that names their text."""
    undisturbed, killed = folder / "a", folder / "b"
    for each in (undisturbed, killed):
        each.mkdir()
    text = prepare(undisturbed)
    for name in ("mine.py", "text.txt"):
        shutil.copy(undisturbed / name, killed)
    return undisturbed, killed, text


def die_in_rollback(folder: Path, before: bool, *arguments: str) -> None:
    """Run in `folder` until KILLER strikes, before or after the rollback's second half."""
    (folder / "killer.py").write_text(KILLER.format(root=str(ROOT), before=before))
    died = warm.run([str(folder / "killer.py"), *command(*arguments)[2:]], folder, environment())
    assert died.returncode == -signal.SIGKILL, "the kill must fire"


@pytest.mark.slow
@pytest.mark.faults(2)
@pytest.mark.parametrize("before", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_kill_inside_a_rollback_changes_nothing(tmp_path: Path, before: bool) -> None:
    undisturbed, killed, text = prepare_two(tmp_path)
    seed = "train.seed=3"
    assert train(undisturbed, *ROLLBACK, text, seed).returncode == 0
    assert len(events(undisturbed / "runs" / "r", "guard.rollback")) == 1, (
        "the fault must fire exactly once"
    )
    die_in_rollback(killed, before, *ROLLBACK, text, seed)
    done = train(killed, *ROLLBACK, text, seed)
    assert done.returncode == 0, done.stdout
    a, b = undisturbed / "runs" / "r", killed / "runs" / "r"
    for attempt in (1, 2):
        assert metrics(a, attempt=attempt) == metrics(b, attempt=attempt) or _same_with_nan(
            a, b, attempt
        )
    assert len(events(b, "guard.rollback")) == 1
    assert events(b, "resume.mismatch") == []
    assert json.loads((a / "incidents.json").read_text()) == json.loads(
        (b / "incidents.json").read_text()
    )


def _same_with_nan(a: Path, b: Path, attempt: int) -> bool:
    return repr(metrics(a, attempt=attempt)) == repr(metrics(b, attempt=attempt))


@pytest.mark.slow
def test_a_date_as_a_seed(tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "r", "train.steps=2", "train.seed=20261120")
    assert done.returncode == 0, done.stdout
    refused = train(tmp_path, "--name", "s", f"train.seed={2**63}")
    assert refused.returncode == 2


def test_a_validation_loss_that_is_nan_still_ends_the_run(tmp_path: Path) -> None:
    text = prepare(tmp_path)
    done = train(tmp_path, "--name", "r", "train.steps=2", "model.target=mine:bad_validation", text)
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "runs" / "r" / "outcome.json").read_text())["val_loss"] == "nan"


@pytest.mark.parametrize(
    ("target", "expected"), [("half", "not float32"), ("broken", "RuntimeError: no such luck")]
)
def test_models_that_cannot_be_used_are_named(tmp_path: Path, target: str, expected: str) -> None:
    text = prepare(tmp_path)
    done = train(tmp_path, "--name", "r", f"model.target=mine:{target}", text)
    assert done.returncode == 2
    assert expected in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.slow
def test_a_report_that_cannot_be_drawn_does_not_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "plots").write_text("in the way")
    done = train(tmp_path, "--name", "r", "train.steps=2", "tracking.report=true")
    assert done.returncode == 0, done.stdout
    assert "harness report" in done.stdout


@pytest.mark.slow
def test_remains_without_a_config_are_never_taken_over(tmp_path: Path) -> None:
    assert train(tmp_path, "--name", "r", "train.steps=2").returncode == 0
    (tmp_path / "runs" / "r" / "config.yaml").unlink()
    done = train(tmp_path, "--name", "r", "train.steps=4")
    assert done.returncode == 2
    assert "remains of a run" in done.stdout


def test_a_resume_path_that_is_no_checkpoint_is_refused_before_any_write(tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "r", "--resume", "runs/other/checkpoints/step-²")
    assert done.returncode == 2
    assert "is no checkpoint" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.faults(1)
@pytest.mark.parametrize("named", [True, False])
def test_a_kill_before_the_first_save_keeps_the_checkpoint_to_start_from(
    tmp_path: Path, named: bool
) -> None:
    some = ("train.steps=6", "checkpoint.every=3")
    assert train(tmp_path, "--name", "a", *some).returncode == 0
    source = ("--resume", "runs/a/checkpoints/step-00000003")
    (tmp_path / "killer.py").write_text(
        f"import os, signal, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from harness.tools import train\n"
        "train.load_state = lambda *given: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from harness.cli import train_main\n"
        "train_main()\n"
    )
    died = warm.run(
        [str(tmp_path / "killer.py"), *command("--name", "b", *some, *source)[2:]],
        tmp_path,
        environment(),
    )
    assert died.returncode == -signal.SIGKILL, "the kill must fire"
    assert not list((tmp_path / "runs" / "b" / "checkpoints").glob("step-*"))
    again = source if named else ()
    done, once_more = (train(tmp_path, "--name", "b", *some, *again) for _ in range(2))
    assert (done.returncode, once_more.returncode) == (0, 0), done.stdout + once_more.stdout
    assert metrics(tmp_path / "runs" / "b") == metrics(tmp_path / "runs" / "a")[3:]
    assert "has finished" in once_more.stdout


@pytest.mark.slow
@pytest.mark.faults(2)
def test_a_kill_after_a_rollback_to_memory_resumes_on_the_same_branch(tmp_path: Path) -> None:
    """The disk has only older checkpoints: the steps up to the snapshot run once more, at their own learning rate."""
    undisturbed, killed, text = prepare_two(tmp_path)
    arguments = (
        *ROLLBACK, text, "train.seed=3", "checkpoint.every=100", "guard.snapshot_every=4",
        "guard.rollback_lr_factor=0.5",
    )  # fmt: skip
    done = train(undisturbed, *arguments)
    assert done.returncode == 0, done.stdout
    a, b = undisturbed / "runs" / "r", killed / "runs" / "r"
    (rollback,) = events(a, "guard.rollback")
    assert rollback["source"] == "memory"
    die_in_rollback(killed, False, *arguments)
    done = train(killed, *arguments)
    assert done.returncode == 0, done.stdout
    target = rollback["to_step"]
    for name in ("train/loss", "train/lr"):
        first, second = (dict(metrics(b, name, attempt=attempt)) for attempt in (1, 2))
        assert repr(dict(metrics(a, name, attempt=1))) == repr(first)
        for step in range(1, target + 1):
            assert second[step] == first[step], "up to the snapshot, as in the first attempt"
        assert {step: value for step, value in second.items() if step > target} == dict(
            metrics(a, name, attempt=2)
        )
    assert events(b, "resume.mismatch") == []
