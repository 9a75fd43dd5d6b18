"""A journal of a million rows: what reads it stays small, and a resume decodes none of what it does not need."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.tracking.figures import Figures, MetricsRow
from harness.tracking.history import RunHistory
from harness.tracking.journal import Journal, read_rows

ROWS = 1_000_000
# A process of its own, as its peak counts: (MiB over what the imports took, seconds of CPU).
MEASURED = """
import json, resource, sys, time
from pathlib import Path
from harness.core.screen import Screen
from harness.report.inspect import inspect
from harness.tracking.journal import Journal
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
what, folder = sys.argv[1], Path(sys.argv[2])
before, began = peak(), time.process_time()
if what == "inspect":
    inspect(folder, Screen(file=open(folder / "told.txt", "w")))
elif what == "resume":
    with Journal(folder / "journal.jsonl", 1, int(sys.argv[3])) as journal:
        assert journal.last_step == int(sys.argv[3]) - 1, journal.last_step
        assert not journal.damage, journal.damage
else:
    for line in (folder / "journal.jsonl").open("rb"):
        json.loads(line)
print(json.dumps([peak() - before, time.process_time() - began]))
"""


def measured(what: str, folder: Path, *more: str) -> tuple[float, float]:
    command = [sys.executable, "-c", MEASURED, what, str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, env={**os.environ})
    assert done.returncode == 0, done.stderr
    memory, seconds = json.loads(done.stdout.splitlines()[-1])
    return memory, seconds


def write(path: Path, rows: int) -> None:
    run = {
        "kind": "run",
        "attempt": 1,
        "time": 1e9,
        "tags": {"ranks": "1"},
        "params": {"train.steps": rows},
        "data": {},
    }
    with path.open("w") as journal:
        journal.write(json.dumps(run) + "\n")
        for step in range(1, rows + 1):
            figures = f'{{"train/loss": {1 + step / rows}, "train/step_applied": 1.0, "train/lr": 0.001}}'
            head = f'{{"kind": "metrics", "step": {step}, "attempt": 1, "time": {1e9 + step}, "metrics": '
            journal.write(f"{head}{figures}}}\n")


@pytest.mark.slow
def test_a_million_rows_are_read_in_little_memory(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl", ROWS)
    _, plain = measured("plain", tmp_path)
    memory, seconds = measured("resume", tmp_path, str(ROWS - 5))
    assert memory < 32, "what a resume needs does not grow with the run"
    assert seconds < 2 * plain, "rows of steps that are not done again are not decoded"
    memory, seconds = measured("inspect", tmp_path)
    assert memory < 300, "8 bytes a figure, and what one series takes at a time"
    assert seconds < 15 * plain
    assert f"steps: {ROWS}: {ROWS} applied, 0 skipped" in (tmp_path / "told.txt").read_text()


def test_attempts_cost_by_their_number() -> None:
    """A journal may have as many attempts as rows."""
    attempts, figures = range(1, 80_001), Figures()
    begin = time.process_time()
    for attempt in attempts:
        figures.add(MetricsRow(attempt, 9, {"a": float(attempt)}, None))
    adding = time.process_time() - begin
    begin = time.process_time()
    assert figures.begins() == dict.fromkeys(attempts, 9)
    kept = figures.points("a", lambda attempt: 9 if attempt < len(attempts) else math.inf, replaced=False)
    assert dict(kept) == {9: float(len(attempts))}
    assert time.process_time() - begin < 2 * adding


def test_figures_are_those_of_the_rows_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for step in range(1, 8):
            journal.metrics(step, {"train/loss": step / 7} | ({"val/loss": float("nan")} if step % 3 == 0 else {}))
    with Journal(path, attempt=2) as journal:
        for step in (4, 5):
            journal.metrics(step, {"train/loss": -1.0 * step})
        journal.metrics(5, {"train/loss": -50.0})
    history = RunHistory.read(tmp_path)
    rows = [row for row in read_rows(path) if row["kind"] == "metrics"]
    assert [(row.attempt, row.step, str(dict(row.values))) for row in history.rows] == [
        (row["attempt"], row["step"], str(row["metrics"])) for row in rows
    ]
    assert len(history.rows) == len(rows)
    kept, thrown = {}, {}
    for row in rows:  # attempt 2 does steps 4 and later again
        branch = thrown if row["attempt"] == 1 and row["step"] >= 4 else kept
        branch[row["step"]] = row["metrics"]["train/loss"]
    assert dict(history.series["train/loss"]) == kept == {1: 1 / 7, 2: 2 / 7, 3: 3 / 7, 4: -4.0, 5: -50.0}
    assert dict(history.abandoned["train/loss"]) == thrown
    assert list(history.series) == ["train/loss", "val/loss"]
    assert list(history.series["val/loss"]) == [3]
    assert "val/loss" in history.abandoned
    assert history.last("train/loss") == -50.0
    assert [row.attempt for row in history.rows.of_step(5)] == [1, 2, 2]
    assert 6 not in history.series["train/loss"]


def test_no_rows_have_no_figures() -> None:
    figures = Figures()
    assert (list(figures), figures.of_step(1), figures.begins()) == ([], [], {})
    figures.add(MetricsRow(1, 3, {}, None))
    assert [row.step for row in figures] == [3], "a row without figures is a row"


def test_a_head_is_read_alone_only_of_rows_as_the_writer_puts_them(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for step in (1, 2, 3):
            journal.metrics(step, {"train/loss": 1.0})
        journal.event(1, "precision.demote")
    lines = path.read_bytes().splitlines(keepends=True)
    foreign = json.dumps({"kind": "metrics", "attempt": 1, "step": 1, "time": 5.0, "metrics": {"a": 1.0}}).encode()
    late = lines[0].replace(b'"time": ', b'"time": 9999999')
    path.write_bytes(b"".join([*lines, foreign + b"\n", late, lines[0][:-9] + b"\n"]))
    rows = list(read_rows(path, since=3))
    assert [(row["kind"], row["step"], row.get("metrics")) for row in rows] == [
        ("metrics", 1, None),
        ("metrics", 2, None),
        ("metrics", 3, {"train/loss": 1.0}),
        ("event", 1, None),
        ("metrics", 1, {"a": 1.0}),
    ], "another order is decoded; a time beyond all times and a torn row are passed over"
