"""A journal whose disk is full, fails once, or takes half a row: row 19 of the fault matrix."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.tracking.journal import JOURNAL, Journal
from tests.support.runs import ROOT, events, metrics, train

HERE = Path(__file__).parent
Tell = Callable[..., None]
Results = dict[str, list[dict[str, Any]]]
STEPS = list(range(1, 12))


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By mode, one result for each call at which the disk failed."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, (
        "no cc, gcc or clang to build the fault injector with: install one (apt-get install gcc)"
    )
    folder = tmp_path_factory.mktemp("journals")
    library = folder / "inject.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "inject.c", "-ldl"], check=True
    )
    done = subprocess.run(
        [sys.executable, str(HERE / "journal_driver.py"), str(library), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Every line of a journal that ends; fails if one of them is no row."""
    whole = path.read_bytes()
    return [json.loads(line) for line in whole[: whole.rfind(b"\n") + 1].splitlines()]


def check_accounted(result: dict[str, Any], steps: list[int]) -> int:
    """The rows that stand are whole and in order, and with those counted as dropped they are all. Their number."""
    rows = lines_of(Path(result["folder"]) / JOURNAL)
    told = [row for row in rows if row.get("code") in ("journal.dropped", "journal.late")]
    logged = [row for row in rows if row not in told]
    expected = len(steps) + sum(step % 2 == 0 for step in steps)
    assert len(logged) + result["dropped"] == expected
    assert [row["step"] for row in logged] == sorted(row["step"] for row in logged)
    assert sum(row["rows"] for row in told) == result["dropped"]
    assert (max((row["total"] for row in told), default=0)) == result["dropped"]
    return result["dropped"]


@pytest.mark.faults(19)
def test_a_disk_that_fails_at_any_call_costs_rows_that_are_counted(
    sweeps: Results, figure: Tell
) -> None:
    for mode in ("full", "once"):
        results = sweeps[f"impatient-{mode}"]
        assert len(results) >= 12, "every row and every fsync of six steps"
        dropped = [check_accounted(result, STEPS) for result in results]
        failures = [result["fired"] - result["dropped"] for result in results]
        assert all(result["status"] == 0 for result in results), "nothing is raised into training"
        assert dropped[0] == (9 if mode == "full" else 1)
        assert any(failures), "an fsync failed too"
        for result in results:
            told = [
                row
                for row in lines_of(Path(result["folder"]) / JOURNAL)
                if row.get("code") == "journal.dropped"
            ]
            assert told
            assert sum(row["failed_syncs"] for row in told) == result["fired"] - result["dropped"]
        figure(
            19, f"rows whole, others counted, the disk failing at every file call of six steps: {mode}",
            f"{len(results)} of {len(results)} calls", n=len(results), target="all",
        )  # fmt: skip


@pytest.mark.faults(19)
def test_rows_wait_in_memory_for_a_disk_that_fails_at_any_call(
    sweeps: Results, figure: Tell
) -> None:
    for mode in ("full", "once"):
        results = sweeps[mode]
        assert len(results) >= 12, "every row and every fsync of six steps"
        for result in results:
            assert (result["status"], result["fired"] > 0) == (0, True)
            assert check_accounted(result, STEPS) == 0, "all stand, in order"
            rows = lines_of(Path(result["folder"]) / JOURNAL)
            told = [row for row in rows if row.get("code") in ("journal.dropped", "journal.late")]
            assert sum(row["late"] + row["failed_syncs"] for row in told) > 0
        figure(
            19, f"disk failing at every file call of six steps ({mode}): rows that stand in the end, in order",
            f"all, {len(results)} of {len(results)} calls", n=len(results), target="all",
        )  # fmt: skip


@pytest.mark.faults(19)
def test_a_writer_killed_at_any_call_tears_at_most_its_last_row(sweeps: Results) -> None:
    results = sweeps["kill"]
    assert len(results) >= 12
    torn = 0
    for result in results:
        assert os.WIFSIGNALED(result["status"])
        assert os.WTERMSIG(result["status"]) == signal.SIGKILL
        path = Path(result["folder"]) / JOURNAL
        torn += not path.read_bytes().endswith(b"\n")
        before = lines_of(path)
        last = max(row["step"] for row in before)
        with Journal(path, resume_step=last + 1) as journal:
            journal.metrics(last + 1, {"train/loss": 1.0})
        assert path.read_bytes().endswith(b"\n")
        assert [row["step"] for row in lines_of(path)] == [
            *(row["step"] for row in before),
            last + 1,
        ]
    assert torn >= 6, "kills in the middle of a row"


@pytest.mark.faults(19)
def test_half_a_row_that_cannot_be_taken_back_at_once_spoils_no_other(sweeps: Results) -> None:
    (result,) = sweeps["torn"]
    assert (result["status"], result["fired"]) == (0, 1)
    assert check_accounted(result, list(range(1, 7))) == 0


# A user's model in whose n-th forward pass the disk has room for no more than a row and a half of the journal, but for
# every checkpoint, which is smaller; and later, if at all, is large again. Or that fails in that pass.
MODEL = """
import os, resource, torch
from torch import nn
from harness.models.gpt import build
class Filling(nn.Module):
    vocab_size = 256
    def __init__(self, full, free, fails):
        super().__init__()
        self.gpt, self.forwards = build(dim=64, layers=1, heads=2, ffn=64, tied=True), 0
        self.full, self.free, self.fails = full, free, fails
    def forward(self, inputs, targets):
        if torch.is_grad_enabled():
            self.forwards += 1
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            if self.forwards == self.full:
                size = os.path.getsize("runs/r/journal.jsonl")
                open("full", "w").write(str(size))
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5000, hard))
            if self.forwards == self.free:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            if self.forwards == self.fails:
                raise RuntimeError("out of luck")
        return self.gpt(inputs, targets)
def filling(full, free): return Filling(full, free, int(os.environ["FAILS"]))
"""
TOTAL = 150


def run(
    folder: Path, full: int = 0, free: int = 0, fails: str = "0"
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MODEL)
    return train(
        folder, "--name", "r", f"train.steps={TOTAL}", "train.micro_batch=4", "model.target=mine:filling",
        f"model.args={json.dumps({'full': full, 'free': free})}", FAILS=fails,
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.faults(19)
def test_training_goes_on_while_the_journals_disk_is_full(tmp_path: Path, figure: Tell) -> None:
    undisturbed, shortly, to_the_end = (
        tmp_path / name for name in ("undisturbed", "shortly", "to_the_end")
    )
    outcomes = []
    for folder, full, free in ((undisturbed, 0, 0), (shortly, 130, 138), (to_the_end, 130, 0)):
        done = run(folder, full, free)
        assert done.returncode == 0, done.stdout
        outcomes.append(json.loads((folder / "runs" / "r" / "outcome.json").read_text()))
        assert ("journal.dropped" in done.stdout) == bool(full and not free), done.stdout
        if full:
            size = int((folder / "full").read_text())
            saved = [
                path.stat().st_size
                for path in (folder / "runs" / "r" / "checkpoints").rglob("*.safetensors")
            ]
            assert max(saved) < size, "only the journal was too large"
    assert outcomes[0] == outcomes[1] == outcomes[2]
    losses = dict(metrics(undisturbed / "runs" / "r"))
    assert list(losses) == list(range(1, TOTAL + 1))
    for folder in (shortly, to_the_end):
        assert lines_of(folder / "runs" / "r" / JOURNAL), "whole rows"
        assert (folder / "runs" / "r" / JOURNAL).read_bytes().endswith(b"\n")
        stand = metrics(folder / "runs" / "r")
        assert all(losses[step] == loss for step, loss in stand), "bit for bit"
    assert 0 < TOTAL - len(stand) < TOTAL, "nothing was written any more"
    assert metrics(shortly / "runs" / "r") == list(losses.items()), (
        "each of them, once there was room, in order"
    )
    (told,) = events(shortly / "runs" / "r", "journal.late")
    assert told["late"] > 3
    assert 129 <= told["step"] < 140
    figure(
        19, "training while the journal's disk is full", f"{told['late']} rows late, none lost, every loss bit for bit",
        n=2 * TOTAL, target="bit for bit",
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_that_fails_twice_in_one_step_says_so_twice(tmp_path: Path) -> None:
    for forward in ("8", "3"):
        done = run(tmp_path, fails=forward)
        assert done.returncode == 1, done.stdout
        assert "out of luck" in done.stdout
    assert "resumed at step 5" in done.stdout
    assert [event["step"] for event in events(tmp_path / "runs" / "r", "run.failed")] == [7, 7]
    steps = [step for step, _ in metrics(tmp_path / "runs" / "r")]
    assert steps == sorted(set(steps)), "what was done again stands once"
