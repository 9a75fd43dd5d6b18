"""`harness runs`: every folder of a folder of runs is listed as what it is."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.core.errors import number_of
from harness.run_folder import RunLock, is_locked
from harness.tracking.journal import Journal
from tests.support import runs

PLAN = {
    "requested": "r",
    "resolved": "native:fp8",
    "recipe": "r",
    "layers": [
        {"module": f"l{place}", "precision": precision, "backend": "b", "reason": "x"}
        for place, precision in enumerate(["fp8", "fp8", "fp8", "bf16"])
    ],
}


def make(folder: Path, steps: int = 3, status: str = "", **extra: Any) -> Path:
    """A run of `steps` steps that ended with `status`; empty: it was killed."""
    with Journal(folder / "journal.jsonl") as journal:
        journal.note("run", tags={}, params={"train.steps": 5, "recipe": "r"}, data={})
        for step in range(1, steps + 1):
            row = {"train/loss": 4.0 - step, "guard/demoted_layers": float(step == 3)}
            journal.metrics(step, row)
        journal.metrics(steps, {"val/loss": 2.5})
    (folder / "plan.json").write_text(json.dumps(PLAN))
    if status:
        outcome = {"status": status, "reason": "because", "step": steps, **extra}
        (folder / "outcome.json").write_text(json.dumps(outcome))
    return folder


def listed(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What `harness runs FOLDER --json` lists."""
    done = CliRunner().invoke(app, ["runs", str(folder), "--json", *words])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["runs"]


@pytest.mark.slow
def test_a_real_run_has_its_figures_in_its_line(tmp_path: Path) -> None:
    done = runs.train(tmp_path, "--name", "r", "--recipe", "fp8_hybrid", "train.steps=3")
    assert done.returncode == 0, done.stdout[-2000:]
    (found,) = listed(tmp_path / "runs")
    run = tmp_path / "runs" / "r"
    assert (found["name"], found["state"], found["step"], found["steps"]) == ("r", "done", 3, 3)
    assert found["train_loss"] == runs.metrics(run)[-1][1]
    assert found["val_loss"] == runs.metrics(run, "val/loss")[-1][1]
    effective = json.loads((run / "plan.json").read_text())["effective"]
    counts = [f"{name}: {number_of(n, 'module')}" for name, n in sorted(found["layers"].items())]
    assert effective == ", ".join(counts)
    assert math.isclose(sum(found["share"].values()), 1.0)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert found["bytes"] == sum(path.stat().st_blocks * 512 for path in files)

    shown = runs.harness(tmp_path, "runs")
    assert shown.returncode == 0, shown.stderr
    line = next(line for line in shown.stdout.splitlines() if line.startswith("r "))
    assert "3/3" in line
    assert "fp8_hybrid" in line
    assert shown.stdout.splitlines()[-1] == "1 done"


def test_every_kind_of_folder_is_listed_as_what_it_is(tmp_path: Path) -> None:
    for status in ("done", "halted", "stopped", "failed"):
        make(tmp_path / status, status=status)
    make(tmp_path / "killed")
    for name in ("killed at once", "emptied"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").write_bytes(b"")
    (tmp_path / "emptied" / "outcome.json").write_text('{"status": "done"}')
    locked = make(tmp_path / "locked")
    (tmp_path / "nothing").mkdir()
    with RunLock(tmp_path / "refused"):
        (tmp_path / "refused" / "data").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.yaml").write_text("recipe: r\n")
    (tmp_path / "rubbish").mkdir()
    (tmp_path / "rubbish" / "journal.jsonl").write_bytes(b"\xff\xfe rubbish\n")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "journal.jsonl")
    os.mkfifo(tmp_path / "pipe" / "lock")
    make(tmp_path / "odd", status="levitated")
    for name, content in (("list", '{"status": ["done"]}'), ("torn", '{"status": "do')):
        (make(tmp_path / name) / "outcome.json").write_text(content)
    (tmp_path / "a file").write_text("no run")
    (tmp_path / "loop").symlink_to("loop")
    with RunLock(locked):
        found = {each["name"]: each["state"] for each in listed(tmp_path)}
    assert found == {
        "done": "done",
        "halted": "halted",
        "stopped": "stopped",
        "failed": "crashed",
        "killed": "crashed",
        "killed at once": "crashed",
        "emptied": "broken",
        "locked": "running",
        "nothing": "empty",
        "refused": "empty",
        "other": "foreign",
        "half": "broken",
        "rubbish": "broken",
        "pipe": "broken",
        "odd": "broken",
        "list": "broken",
        "torn": "broken",
    }
    assert {each["name"] for each in listed(tmp_path, "--state", "stopped")} == {"stopped"}


def test_a_bad_status_is_named_with_its_file(tmp_path: Path) -> None:
    make(tmp_path / "of outcome", status="levitated")
    with Journal(make(tmp_path / "of journal") / "journal.jsonl", resume_step=4) as journal:
        journal.note("end", status="floated")
    reasons = {each["name"]: each["reason"] for each in listed(tmp_path)}
    assert reasons == {
        "of outcome": "outcome.json: no such status: levitated",
        "of journal": "journal.jsonl: no such status: floated",
    }


def test_a_name_of_several_lines_is_listed_in_one(tmp_path: Path) -> None:
    make(tmp_path / "two\nlines\t1")
    done = CliRunner().invoke(app, ["runs", str(tmp_path)])
    lines = [line for line in done.output.splitlines() if "two" in line]
    assert [line.startswith("two lines 1") for line in lines] == [True, True], "row and reason"


def test_a_torn_last_line_is_normal(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    with (run / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"kind": "metrics", "step": 4, "attempt": 1, "metrics": {"train/loss": 0')
    (found,) = listed(tmp_path)
    assert (found["step"], found["train_loss"], found["val_loss"]) == (3, 1.0, 2.5)


def test_a_damaged_last_row_leaves_the_one_before(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    damaged = b'{"kind": "metrics", "step": 4, "attempt": 1, "metrics": {"train/loss": \xff}}\n'
    with (run / "journal.jsonl").open("ab") as journal:
        journal.write(damaged)
    (found,) = listed(tmp_path)
    assert (found["step"], found["train_loss"]) == (3, 1.0)


def test_demoted_layers_count_as_bf16_while_a_run_goes_on(tmp_path: Path) -> None:
    make(tmp_path / "r")
    (found,) = listed(tmp_path)
    assert found["layers"] == {"fp8": 2, "bf16": 2}, "one of three was demoted in step 3"


def test_events_are_counted_by_severity(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    with Journal(run / "journal.jsonl", resume_step=4) as journal:
        for code in ("guard.rollback", "loss.spike", "fp8.underflow", "fp8.underflow", "x.new"):
            journal.event(3, code)
    (found,) = listed(tmp_path)
    assert found["events"] == {"error": 2, "warning": 2, "info": 1}
    assert found["worst"] == "loss.spike", "the cause, not what the guard did about it"


def test_what_went_as_planned_is_no_warning(tmp_path: Path) -> None:
    run = make(tmp_path / "r")
    with Journal(run / "journal.jsonl", resume_step=4) as journal:
        for code in ("profile.written", "scaler.calibration", "precision.promote"):
            journal.event(3, code)
    (found,) = listed(tmp_path)
    assert found["events"] == {"error": 0, "warning": 0, "info": 3}


def test_a_loss_that_is_no_number_is_listed_and_sorted_last(tmp_path: Path) -> None:
    for name, loss in (("nan", math.nan), ("low", 1.0), ("high", 2.0)):
        with Journal(tmp_path / name / "journal.jsonl") as journal:
            journal.metrics(1, {"train/loss": loss})
    (tmp_path / "none").mkdir()
    found = listed(tmp_path, "--sort", "train_loss")
    assert [each["train_loss"] for each in found[:2]] == [1.0, 2.0]
    assert {each["train_loss"] for each in found[2:]} == {"nan", None}


def test_the_newest_comes_first(tmp_path: Path) -> None:
    for name in ("a", "c", "b"):
        make(tmp_path / name)
    assert [each["name"] for each in listed(tmp_path)] == ["b", "c", "a"]
    assert [each["name"] for each in listed(tmp_path, "--sort", "oldest")] == ["a", "c", "b"]
    assert [each["name"] for each in listed(tmp_path, "--sort", "name")] == ["a", "b", "c"]


@pytest.mark.parametrize("words", [["no-such"], ["r"], [".", "--sort", "luck"]])
def test_what_cannot_be_listed_is_refused(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "r")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["runs", *words])
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def test_looking_never_refuses_a_run_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at a lock holds it for an instant; a start in that instant tries again."""
    run = make(tmp_path / "r")
    with RunLock(run):
        assert is_locked(run)
    assert not is_locked(run)

    looks = os.open(run / "lock", os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_SH)
    waits: list[float] = []

    def look_away(seconds: float) -> None:
        waits.append(seconds)
        fcntl.flock(looks, fcntl.LOCK_UN)

    monkeypatch.setattr(time, "sleep", look_away)
    with RunLock(run):
        assert len(waits) == 1
    os.close(looks)
