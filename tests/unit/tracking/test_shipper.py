"""The shipper against a real SQLite MLflow store, read back by plain SQL: everything once, in order, whatever dies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.core.errors import ConfigError
from harness.tracking import shipper
from harness.tracking.journal import (
    JOURNAL,
    POSITION,
    SET_ASIDE,
    Journal,
    Position,
    delivered,
    read_rows,
    tracking_uri,
)
from harness.tracking.store import choose_for_sync

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a run folder in it; the store is its mlflow.db."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "runs" / "r1").mkdir(parents=True)
    return tmp_path


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "mlflow.db") as database:
        rows = database.execute(sql).fetchall()
    database.close()
    return rows


def series_in_store(folder: Path, run_id: str | None = None) -> list[tuple[Any, ...]]:
    chosen = f"where run_uuid = '{run_id}'" if run_id else ""
    return query(
        folder, f"select key, step, timestamp, is_nan, value from metrics {chosen} order by 1, 3, 2"
    )


def series_in_journal(run_dir: Path) -> list[tuple[Any, ...]]:
    points: list[tuple[Any, ...]] = []
    for row in read_rows(run_dir / JOURNAL):
        if row["kind"] == "metrics":
            stamp = round(row["time"] * 1000)
            for name, value in row["metrics"].items():
                nan = value != value
                clamped = max(min(value, sys.float_info.max), -sys.float_info.max)
                points.append((name, row["step"], stamp, int(nan), 0.0 if nan else clamped))
    return sorted(points, key=lambda point: (point[0], point[2], point[1]))


def wide_rows(journal: Journal, steps: range) -> None:
    for step in steps:
        journal.metrics(
            step, {f"fp8_amax/blocks.{i:03d}.up.input": step + i / 3 for i in range(400)}
        )


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_whole_run_arrives(folder: Path) -> None:
    run_dir = folder / "runs" / "r1"
    (run_dir / "plots").mkdir()
    (run_dir / "plots" / "loss.png").write_bytes(b"png")
    (run_dir / "plan.json").write_text("{}")
    with Journal(run_dir / JOURNAL) as journal:
        params = {"train.steps": 20, "long": "x" * 7000, "odd[0]": None}
        journal.note("run", tags={"tier": "CPU", "precision.requested": "fp8"}, params=params)
        handle = shipper.start(run_dir, "my-experiment")
        for step in range(20):
            journal.metrics(
                step,
                {
                    "train/loss": 1 / (step + 1),
                    "train/grad_norm": float("nan" if step == 3 else step),
                },
            )
            time.sleep(0.001)
        journal.metrics(20, {"train/loss": float("inf")})
        journal.event(4, "nonfinite.skip", window=4)
        journal.event(9, "precision.demote", layers=["blocks.00.up"])
        journal.event(9, "nonfinite.skip", window=9)
        for path in ("plots/loss.png", "plan.json", "plots/missing.png", "../../secret"):
            journal.note("artifact", path=path)
        journal.note("end", status="done")
        assert handle.drain(300.0)
    assert handle.process.wait(300) == 0
    assert delivered(run_dir)
    assert series_in_store(folder) == series_in_journal(run_dir)
    ((run_id, name, status, artifacts),) = query(
        folder, "select run_uuid, name, status, artifact_uri from runs"
    )
    assert (name, status, run_id) == ("r1", "FINISHED", Position.load(run_dir).run_id)
    assert query(folder, "select name from experiments where experiment_id > 0") == [
        ("my-experiment",)
    ]
    tags = dict(query(folder, "select key, value from tags"))
    assert tags["tier"] == "CPU"
    assert tags["precision.requested"] == "fp8"
    assert tags["events.count"] == '{"nonfinite.skip": 2, "precision.demote": 1}'
    assert (
        tags["events.last"].splitlines()[1]
        == 'step 9 precision.demote {"layers": ["blocks.00.up"]}'
    )
    assert dict(query(folder, "select key, value from params")) == {
        "train.steps": "20",
        "long": "x" * 6000,
        "odd_0_": "None",
    }
    stored = Path(artifacts.removeprefix("file://"))
    assert sorted(
        str(path.relative_to(stored)) for path in stored.rglob("*") if path.is_file()
    ) == [
        "plan.json",
        "plots/loss.png",
    ]
    assert "plots/missing.png" in (run_dir / "shipper.log").read_text()


@pytest.mark.nightly
def test_killed_midway_and_synced_the_series_are_whole_and_single(folder: Path) -> None:
    run_dir = folder / "runs" / "r1"
    with Journal(run_dir / JOURNAL) as journal:
        journal.note("run", tags={}, params={"a": 1})
        journal.event(0, "first")
        wide_rows(journal, range(36))
        handle = shipper.start(run_dir, "e")
        wait_for(lambda: Position.load(run_dir).offset > 0)
        handle.process.kill()
        assert handle.process.wait() == -signal.SIGKILL
        midway = Position.load(run_dir).offset
        assert 0 < midway < (run_dir / JOURNAL).stat().st_size, "the kill came midway"
        assert not handle.drain(300.0), "drain sees at once that nobody is left to deliver"
        # A batch that was sent but not yet written down: the same bytes go out a second time.
        position = Position.load(run_dir)
        position.offset = 0
        position.save(run_dir)
        journal.event(35, "first")
        journal.note("end", status="stopped")
    with (run_dir / JOURNAL).open("a") as torn:
        torn.write('{"kind": "metr')
    assert not delivered(run_dir)
    assert shipper.sync(run_dir, "e")
    assert series_in_store(folder) == series_in_journal(run_dir)
    assert len(series_in_store(folder)) == 36 * 400
    assert query(folder, "select status from runs") == [("KILLED",)]
    assert dict(query(folder, "select key, value from tags"))["events.count"] == '{"first": 2}'


class _Delivery:
    """A process that delivers a share of the journal in each wait, as `shares` says, and then ends."""

    def __init__(self, run_dir: Path, shares: list[float]) -> None:
        self._run_dir, self._shares = run_dir, shares
        self._ends = [
            0,
            *(
                at + 1
                for at, byte in enumerate((run_dir / JOURNAL).read_bytes())
                if byte == ord("\n")
            ),
        ]

    def wait(self, timeout: float) -> int:
        """0 at the end."""
        if not self._shares:
            return 0
        time.sleep(0.01)
        offset = self._ends[round(self._shares.pop(0) * (len(self._ends) - 1))]
        Position("r", offset, "key").save(self._run_dir)
        raise subprocess.TimeoutExpired("delivery", timeout)


def test_a_sync_says_how_far_it_is_whenever_more_was_delivered(folder: Path) -> None:
    run_dir = folder / "runs" / "r1"
    with Journal(run_dir / JOURNAL) as journal:
        for step in range(1, 101):
            journal.metrics(step, {"train/loss": 1.0})
    said: list[str] = []
    process = _Delivery(run_dir, [0.0, 0.0, 0.25, 0.25, 0.5, 0.0, 1.0])
    assert shipper._wait(process, run_dir, said.append) == 0  # pyright: ignore[reportArgumentType]
    percent = [line.partition("%")[0] for line in said]
    assert [round(float(each)) for each in percent] == [0, 25, 50, 0, 100], (
        "another store begins anew"
    )
    assert [("min left" in line) for line in said] == [False, True, True, False, True]


@pytest.mark.slow
def test_a_dead_server_neither_blocks_the_writer_nor_loses_a_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = folder / "runs" / "r1"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with Journal(run_dir / JOURNAL) as journal:
        handle = shipper.start(run_dir, "e")
        wait_for(lambda: "onnection" in (run_dir / "shipper.log").read_text())
        start = time.perf_counter()
        for step in range(200):
            journal.metrics(step, {"train/loss": step / 7})
        # Had each waited for one try of the shipper's, and the pause behind it.
        assert time.perf_counter() - start < 200 * shipper.POLL / 2
        journal.note("end", status="done")
        start = time.perf_counter()
        assert not handle.drain(0.3)
        assert time.perf_counter() - start < 60
    os.kill(handle.process.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert handle.process.poll() is None, "SIGTERM does not end a shipper that has rows to deliver"
    assert not shipper.sync(run_dir, "e", patience=0.5), "the shipper still holds the run"
    handle.process.kill()
    handle.process.wait()
    assert not shipper.sync(run_dir, "e", patience=0.5), "the server is still down"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert shipper.sync(run_dir, "e", choice=choose_for_sync(run_dir, elsewhere=True))
    assert series_in_store(folder) == series_in_journal(run_dir)
    assert query(folder, "select status from runs") == [("FINISHED",)]
    Position("0" * 32, first_offset := Position.load(run_dir).offset, "another key").save(run_dir)
    assert first_offset > 0
    assert shipper.sync(run_dir, "e")
    new_run = Position.load(run_dir).run_id
    assert series_in_store(folder, new_run) == series_in_journal(run_dir), (
        "a store that lost the run gets all of it"
    )


TRAINER = """
import os, pathlib, signal, sys
from harness.tracking.journal import Journal
from harness.tracking.shipper import start
run_dir, first, last, end = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
journal = Journal(run_dir / "journal.jsonl", resume_step=first)
journal.note("run", tags={"first": first}, params={"seed": first})
handle = start(run_dir, "e")
for step in range(first, last):
    journal.metrics(step, {"train/loss": step / 3})
print(handle.process.pid, flush=True)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
journal.note("end", status=end)
sys.exit(0 if handle.drain(300) else 1)
"""


def trainer(run_dir: Path, first: int, last: int, end: str) -> tuple[int, int]:
    """A trainer's exit status and its shipper's pid."""
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(TRAINER),
        str(run_dir),
        str(first),
        str(last),
        end,
    ]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, check=False, env=environment, stdout=subprocess.PIPE, text=True)
    return done.returncode, int(done.stdout)


@pytest.mark.slow
def test_a_killed_trainer_is_delivered_and_resumes_in_the_same_run(folder: Path) -> None:
    run_dir = folder / "runs" / "r1"
    assert trainer(run_dir, 0, 30, "kill")[0] == -signal.SIGKILL
    wait_for(
        lambda: (
            (folder / "mlflow.db").exists() and (run_dir / POSITION).exists() and delivered(run_dir)
        )
    )
    wait_for(lambda: query(folder, "select status from runs") == [("KILLED",)])
    assert trainer(run_dir, 20, 40, "done")[0] == 0
    assert query(folder, "select status from runs") == [("FINISHED",)]
    assert series_in_store(folder) == series_in_journal(run_dir)
    assert [row[1] for row in series_in_store(folder)] == list(range(40)), (
        "each step once, those done twice too"
    )
    assert dict(query(folder, "select key, value from params")) == {"seed": "0"}, (
        "params are immutable"
    )
    assert dict(query(folder, "select key, value from tags"))["first"] == "20", "tags are not"


@pytest.mark.nightly
def test_a_copied_folder_is_another_run_and_a_moved_one_the_same(folder: Path) -> None:
    def goes_on(name: str, step: int) -> str:
        """Deliver a step of the run; what the start says."""
        run_dir = folder / "runs" / name
        with Journal(run_dir / JOURNAL) as journal:
            handle = shipper.start(run_dir, "e")
            journal.metrics(step, {"train/loss": float(step)})
            journal.note("end", status="done")
            assert handle.drain(300.0)
        assert handle.process.wait(300) == 0
        return handle.announcement

    def series() -> dict[str, list[int]]:
        order = "order by runs.start_time, step"
        rows = query(
            folder,
            f"select name, step from runs join metrics on runs.run_uuid = metrics.run_uuid {order}",
        )
        return {name: [step for each, step in rows if each == name] for name, _ in rows}

    runs = folder / "runs"
    assert "copy" not in goes_on("r1", 1)
    shutil.copytree(runs / "r1", runs / "r2")
    assert goes_on("r2", 2).endswith(f"a run of its own: the folder is a copy of {runs / 'r1'}")
    (runs / "r1").rename(runs / "moved")
    assert "copy" not in goes_on("moved", 3)

    # The folder as a start saw it that knew it by another path, as in a container.
    (folder / "mounted").symlink_to(runs / "moved")
    position = Position.load(runs / "moved")
    position.folder = str(folder / "mounted")
    position.save(runs / "moved")
    assert "copy" not in goes_on("moved", 4)
    assert series() == {"r1": [1, 3, 4], "r2": [1, 2]}


@pytest.mark.nightly
def test_a_run_that_a_shipper_of_a_killed_one_delivered_to_its_end_ended(folder: Path) -> None:
    """The second shipper waits for the first one's lock, and finds that there is nothing left to deliver."""
    run_dir = folder / "runs" / "r1"
    assert trainer(run_dir, 0, 10, "kill")[0] == -signal.SIGKILL
    wait_for(
        lambda: (
            query(folder, "select status from runs") == [("KILLED",)]
            if delivered(run_dir)
            else False
        )
    )
    born = (run_dir / JOURNAL).stat().st_size
    with Journal(run_dir / JOURNAL) as journal:
        journal.note("run", tags={}, params={}, data={})
        wide_rows(journal, range(10, 12))
        journal.note("end", status="done")
    assert shipper.sync(run_dir, "e")
    assert query(folder, "select status from runs") == [("FINISHED",)]
    second = [sys.executable, "-m", "harness.tracking.shipper", str(run_dir), "--experiment", "e"]
    done = subprocess.run(
        [*second, "--pid", str(os.getpid()), "--from", str(born)], timeout=500, check=False
    )
    assert done.returncode == 0
    assert query(folder, "select status from runs") == [("FINISHED",)]


@pytest.mark.nightly
def test_a_shipper_outlives_its_trainer_by_the_grace_and_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")
        status, pid = trainer(folder / "runs" / "r1", 0, 5, "kill")
        died = time.monotonic()
        assert status == -signal.SIGKILL
        wait_for(lambda: not alive(pid), shipper.GRACE + 15)
    assert time.monotonic() - died > shipper.GRACE - 2
    assert "not all delivered" in (folder / "runs" / "r1" / "shipper.log").read_text()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody reaps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_sync_of_no_run_names_the_near_match(tmp_path: Path) -> None:
    (tmp_path / "quick").mkdir()
    Journal(tmp_path / "quick" / JOURNAL).close()
    with pytest.raises(ConfigError, match=r'did you mean "quick"'):
        shipper.sync(tmp_path / "quik", "e")


def test_a_position_the_journal_does_not_reach_starts_over(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        journal.metrics(0, {"a": 1.0})
    size = (tmp_path / JOURNAL).stat().st_size
    for offset, kept in [(size, size), (0, 0), (size + 5, 0), (size - 3, 0)]:
        Position("id", offset, "k").save(tmp_path)
        assert Position.load(tmp_path) == Position("id", kept, "k")
    (tmp_path / POSITION).write_text("torn")
    assert Position.load(tmp_path).run_id is None


def test_the_store_is_the_users_or_a_file_here(tmp_path: Path) -> None:
    assert tracking_uri({"MLFLOW_TRACKING_URI": "http://x"}) == "http://x"
    assert tracking_uri({}, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"


@pytest.mark.nightly
def test_lines_that_are_no_rows_are_set_aside_and_the_rest_goes_on(folder: Path) -> None:
    run_dir = folder / "runs" / "r1"
    with Journal(run_dir / JOURNAL) as journal:
        journal.note("run", tags={"tier": "CPU"}, params={})
        for step in range(12):
            journal.metrics(step, {"train/loss": float(step)})
        journal.note("end", status="done")
    lines = (run_dir / JOURNAL).read_bytes().splitlines()
    damage = {
        1: (b'"kind": "metrics"', b'"kind": "checkpoint"'),
        2: (b'"kind"', b'"knid"'),
        3: (b'"time"', b'"tiem"'),
        4: (b'"step": 3', b'"step": 99999999999999999999'),
        5: (b'"train/loss": 4.0', b'"train/loss": "four"'),
        6: (b'"time": ', b'"time": 1e300, "was": '),
        7: (b'"train/loss": 6.0', b'"train/loss": ' + b"9" * 400),
        8: (b'"kind": "metrics"', b'"kind": "artifact"'),
        9: (b'"kind": "metrics"', b'"kind": "run", "tags": [1]'),
        10: (b"{", b"\xff"),
    }
    for number, (old, new) in damage.items():
        assert lines[number].count(old) >= 1
        lines[number] = lines[number].replace(old, new, 1)
    (run_dir / JOURNAL).write_bytes(b"\n".join(lines) + b"\n")
    for _ in range(2):
        assert shipper.sync(run_dir, "e")
    assert delivered(run_dir)
    assert [(step, value) for _, step, _, _, value in series_in_store(folder)] == [
        (10, 10.0),
        (11, 11.0),
    ]
    assert query(folder, "select status from runs") == [("FINISHED",)]
    assert (run_dir / SET_ASIDE).read_bytes().splitlines() == [lines[number] for number in damage]
    assert "10 lines of the journal are no rows" in (run_dir / "shipper.log").read_text()
    assert dict(query(folder, "select key, value from tags"))["rows.set_aside"] == "10"
