"""Readers of a long journal: memory per row is small and bounded, and a resume decodes only the rows it needs."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from harness.tracking.figures import Figures, MetricsRow
from harness.tracking.history import RunHistory
from harness.tracking.journal import Journal, read_rows
from harness.tracking.slot_file import FIGURES, SLOT_FILE

MANY = 1_000_000
FEW, MORE = 5_000, 50_000
# A process of its own, as its peak counts. Prints for each folder: MiB of the peak so far, seconds of CPU.
MEASURED = """
import json, resource, sys, time
from pathlib import Path
from harness.core.screen import Screen
from harness.report.inspect import inspect
from harness.tracking import shipper
from harness.tracking.journal import JOURNAL, Journal
from harness.tracking.slot_file import SlotSteps

def inspected(folder, rows):
    inspect(folder, Screen(file=open(folder / "told.txt", "w")))

def resumed(folder, rows):
    with Journal(folder / JOURNAL, 1, rows - 4) as journal:
        assert journal.existing_attempt == 1

def followed(folder, rows):
    from harness.tracking.mlflow import Sink

    class Counts(Sink):
        # Without a store: what it would send is counted.
        def __init__(self, position):
            self._run_dir, self._position, self.rows = folder, position, 0
        def deliver(self, rows):
            self.rows += len(rows)
            yield len(rows)
        def caught_up(self):
            pass

    follower, made = shipper._Follower(folder, "e", None, 0, 60.0), []
    follower._connect = lambda position: made.append(Counts(position)) or made[-1]
    assert follower.run() == 0
    assert made[-1].rows == rows + 1

def slots(folder, rows):
    found = SlotSteps(folder / "fp8_telemetry.bin", before=(1, rows + 1))
    assert len(found.steps) == rows
    assert next(found.read(back=True))[0] == rows

def synced(folder, rows):
    told = []
    shipper.PROGRESS = 1.0
    assert shipper.sync(folder, "e", said=told.append), (folder / "shipper.log").read_text()[-2000:]
    (folder / "told.txt").write_text(chr(10).join(told))

def decoded(folder, rows):
    for line in (folder / JOURNAL).open("rb"):
        json.loads(line)

what, sizes = sys.argv[1], {Path(folder): int(rows) for folder, rows in zip(sys.argv[2::2], sys.argv[3::2])}
who = resource.RUSAGE_CHILDREN if what == "synced" else resource.RUSAGE_SELF
for folder, rows in sizes.items():
    began = time.process_time()
    globals()[what](folder, rows)
    print(json.dumps([resource.getrusage(who).ru_maxrss / 1024, time.process_time() - began]))
"""


def growth(what: str, *folders: tuple[Path, int]) -> tuple[float, float]:
    """MiB by which the last folder's peak is over the first's, and seconds of CPU that the last one took."""
    words = [str(word) for pair in folders for word in pair]
    command = [sys.executable, "-c", MEASURED, what, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=3000, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    (before, _), (peak, seconds) = found[0], found[-1]
    rows = folders[-1][1]
    print(
        f"{what} {rows:,}: peak {peak:.0f} MiB, {peak - before:.0f} more than the first; CPU {seconds:.1f} s"
    )
    return peak - before, seconds


def write(folder: Path, rows: int) -> tuple[Path, int]:
    """A run of so many steps without an end: journal, and FP8 figures of one layer."""
    folder.mkdir(exist_ok=True)
    run = {
        "kind": "run",
        "attempt": 1,
        "time": 1e9,
        "tags": {"ranks": "1"},
        "params": {"train.steps": rows},
        "data": {},
    }
    with (folder / "journal.jsonl").open("w") as journal:
        journal.write(json.dumps(run) + "\n")
        for step in range(1, rows + 1):
            figures = (
                f'{{"train/loss": {1 + step / rows}, "train/step_applied": 1.0, "train/lr": 0.001}}'
            )
            head = f'{{"kind": "metrics", "step": {step}, "attempt": 1, "time": {1e9 + step}, "metrics": '
            journal.write(f"{head}{figures}}}\n")
    return folder, rows


def write_slots(folder: Path, steps: int) -> None:
    """The same frame for each step, as SlotFile writes it."""
    header = struct.Struct("<4sIiq")
    names = zlib.compress(json.dumps(["a.input", "a.weight", "a.grad_output"]).encode())
    figures = zlib.compress(bytes(4 * len(FIGURES) * 3))
    with (folder / SLOT_FILE).open("wb") as file:
        file.write(header.pack(b"FP8n", len(names), 1, 1) + names)
        for step in range(1, steps + 1):
            file.write(header.pack(b"FP8s", len(figures), 1, step) + figures)


# Bytes that each of 45,000 more rows may take. inspect keeps 8 a figure, and copies a series.
ROOM = {"inspected": 150, "resumed": 100, "followed": 100, "slots": 60}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    folder = tmp_path_factory.mktemp("long")
    made = [write(folder / str(rows), rows) for rows in (FEW, MORE)]
    for path, rows in made:
        write_slots(path, rows)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("what", ROOM)
def test_memory_grows_by_little_for_each_row(runs: list[tuple[Path, int]], what: str) -> None:
    memory, _ = growth(what, *runs)
    assert memory * 2**20 < ROOM[what] * (MORE - FEW)


class Tracking(BaseHTTPRequestHandler):
    """What a delivery asks of an MLflow server. counts: values by metric. latest: the step that came last."""

    counts: ClassVar[Counter[str]] = Counter()
    latest: ClassVar[dict[str, int]] = {}
    protocol_version = "HTTP/1.1"
    RUN: ClassVar[dict[str, Any]] = {
        "info": {
            "run_id": "r" * 32,
            "run_uuid": "r" * 32,
            "experiment_id": "1",
            "status": "RUNNING",
            "lifecycle_stage": "active",
            "artifact_uri": "/nowhere",
        },
        "data": {},
    }

    def do_GET(self) -> None:
        """An experiment, or the run."""
        known = {"experiment_id": "1", "name": "e", "lifecycle_stage": "active"}
        self._answer({"run": self.RUN} if "runs/get" in self.path else {"experiment": known})

    def do_POST(self) -> None:
        """Metrics are counted and must come in order; anything else is well."""
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for metric in content.get("metrics", ()):
            key, step = metric["key"], int(metric.get("step", 0))
            assert step == self.latest.get(key, 0) + 1, (
                f"{key}: {step} after {self.latest.get(key)}"
            )
            self.counts[key] += 1
            self.latest[key] = step
        if self.path.endswith("runs/create"):
            self.counts.clear()
            self.latest.clear()
        self._answer({"run": self.RUN} if self.path.endswith("runs/create") else {})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Tracking]]:
    web = ThreadingHTTPServer(("127.0.0.1", 0), Tracking)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{web.server_port}")
    yield Tracking
    web.shutdown()
    web.server_close()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_million_rows_take_bounded_memory_and_minutes(
    tmp_path: Path, server: type[Tracking]
) -> None:
    few, many = write(tmp_path / "few", 10), write(tmp_path / "many", MANY)
    write_slots(few[0], 10)
    write_slots(many[0], MANY)
    _, plain = growth("decoded", many)
    memory, seconds = growth("resumed", few, many)
    assert memory < 32, "what a resume needs does not grow with the run"
    assert seconds < 2 * plain, "rows of steps that are not done again are not decoded"
    memory, seconds = growth("inspected", few, many)
    assert memory < 300, "8 bytes a figure, and what one series takes at a time"
    assert seconds < 15 * plain
    assert f"steps: {MANY}: {MANY} applied, 0 skipped" in (many[0] / "told.txt").read_text()
    memory, seconds = growth("slots", few, many)
    assert memory < 160, "40 bytes a step"
    memory, _ = growth("synced", few, many)
    assert memory < 32, "delivered as it is read"
    assert server.counts == dict.fromkeys(("train/loss", "train/step_applied", "train/lr"), MANY), (
        "each once, in order"
    )
    assert "of the journal delivered" in (many[0] / "told.txt").read_text(), "it says how far it is"


def test_attempts_cost_by_their_number() -> None:
    """A journal may have as many attempts as rows."""
    attempts, figures = range(1, 80_001), Figures()
    begin = time.process_time()
    for attempt in attempts:
        figures.add(MetricsRow(attempt, 9, {"a": float(attempt)}, None))
    adding = time.process_time() - begin
    begin = time.process_time()
    assert figures.begins() == dict.fromkeys(attempts, 9)
    kept = figures.points(
        "a", lambda attempt: 9 if attempt < len(attempts) else math.inf, replaced=False
    )
    assert dict(kept) == {9: float(len(attempts))}
    assert time.process_time() - begin < 2 * adding


def test_figures_are_those_of_the_rows_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for step in range(1, 8):
            journal.metrics(
                step,
                {"train/loss": step / 7} | ({"val/loss": float("nan")} if step % 3 == 0 else {}),
            )
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
    assert (
        dict(history.series["train/loss"])
        == kept
        == {1: 1 / 7, 2: 2 / 7, 3: 3 / 7, 4: -4.0, 5: -50.0}
    )
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
    foreign = json.dumps(
        {"kind": "metrics", "attempt": 1, "step": 1, "time": 5.0, "metrics": {"a": 1.0}}
    ).encode()
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
