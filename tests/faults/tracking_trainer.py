"""A trainer without a model: the real journal and the real shipper, told by lines on stdin what to do.

`python tracking_trainer.py RUN_DIR FIRST_STEP`. "steps N" does N steps and prints how long the journal's calls took, as
JSON; "end STATUS" ends as a run does and prints whether all was delivered. Every second step goes into a journal that
nobody follows, so that both see the same machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.tracking import shipper
from harness.tracking.journal import JOURNAL, Journal, delivered, read_rows

ROOT = Path(__file__).resolve().parents[2]
PACE = 0.001
Timings = dict[str, list[float]]
Point = tuple[int, int, float | None]


def step_of(journal: Journal, step: int) -> float:
    """What the loop asks of the journal in one step; the seconds of its rows, without those of a flush."""
    began = time.perf_counter()
    figures = {
        f"train/{name}": step / divisor
        for name, divisor in (("loss", 3), ("grad_norm", 7), ("lr", 1e6))
    }
    journal.metrics(step, figures | {"fp8_amax/blocks.00.mlp.up.input": 1.0 + step % 13})
    if step % 10 == 0:
        journal.event(step, "nonfinite.skip", window=step)
    logged = time.perf_counter()
    if step % 50 == 0:
        if step % 500 == 0:
            journal.note(
                "checkpoint",
                step=step,
                state="saved",
                path=f"step-{step}",
                metrics={"train_loss": step / 3},
            )
        journal.flush()
    return logged - began


def main() -> None:
    run_dir, first = Path(sys.argv[1]), int(sys.argv[2])
    journal = Journal(run_dir / JOURNAL, resume_step=first if first > 1 else None)
    calm = Journal(run_dir.parent / f"calm-{os.getpid()}.jsonl")
    journal.note("run", tags={"first": first}, params={"seed": 1})
    handle = shipper.start(run_dir, "outages")
    step = first
    print(handle.process.pid, flush=True)
    for line in sys.stdin:
        verb, argument = line.split()
        if verb == "end":
            journal.note("end", status=argument)
            journal.close()
            print(json.dumps(handle.drain(60.0)), flush=True)
            return
        times: Timings = defaultdict(list)
        for _ in range(int(argument)):
            pair = [("watched", journal), ("alone", calm)]
            for name, each in pair if (step + step // 50) % 2 else reversed(pair):
                times[name].append(step_of(each, step))
            step += 1
            time.sleep(PACE)
        print(json.dumps(times), flush=True)


class Trainer:
    """The test's end of such a process. shipper: the pid of its shipper."""

    def __init__(self, run_dir: Path, first: int, environment: Mapping[str, str]) -> None:
        paths = [environment.get("PYTHONPATH"), str(ROOT)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(run_dir), str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=run_dir.parent,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self.shipper = int(self._answer())

    def steps(self, number: int) -> Timings:
        """The seconds that the journal's calls took in `number` steps, by kind."""
        return json.loads(self._ask(f"steps {number}"))

    def end(self, status: str = "done") -> bool:
        """Whether all was delivered when it ended."""
        drained = json.loads(self._ask(f"end {status}"))
        assert self._process.wait(300) == 0
        self._close()
        return drained

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        assert self._process.wait(300) == -9
        self._close()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody reaps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def query(database: Path, text: str, *values: object) -> list[tuple[Any, ...]]:
    """Rows of an MLflow store, read past MLflow."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)
    try:
        return connection.execute(text, values).fetchall()
    finally:
        connection.close()


def check_delivered(run_dir: Path, database: Path, ended: str = "FINISHED") -> int:
    """The run in the store is the journal's, row for row: histories in MLflow's own order and in the order in which
    they arrived, events, status, and nothing twice. Returns the number of points."""
    assert delivered(run_dir)
    ((run, status),) = query(
        database, "select run_uuid, status from runs where name = ?", run_dir.name
    )
    assert status == ended
    told: dict[str, list[Point]] = defaultdict(list)
    counts: Counter[str] = Counter()
    models: set[str] = set()
    for row in read_rows(run_dir / JOURNAL):
        if row["kind"] == "metrics":
            for name, value in row["metrics"].items():
                told[name].append(
                    (row["step"], round(row["time"] * 1000), None if math.isnan(value) else value)
                )
        elif row["kind"] == "checkpoint" and row["state"] == "saved":
            models.add(f"step-{row['step']:08d}")
            for name, value in row["metrics"].items():
                point = row["step"], round(row["time"] * 1000), None if math.isnan(value) else value
                told[f"checkpoint/{name}"].append(point)
        elif row["kind"] == "event":
            counts[row["code"]] += 1
    for order in ("timestamp, step, value", "rowid"):
        stored: dict[str, list[Point]] = defaultdict(list)
        points = f"select key, step, timestamp, value, is_nan from metrics where run_uuid = ? order by {order}"
        for name, *point, nan in query(database, points, run):
            if not name.startswith("system/"):  # of the machine, which no journal has
                stored[name].append((point[0], point[1], None if nan else point[2]))
        assert stored.keys() == told.keys(), order
        wrong = [name for name in told if stored[name] != told[name]]
        assert not wrong, (order, wrong)
    known = query(
        database, "select name from logged_models where source_run_id = ? order by name", run
    )
    assert [name for (name,) in known] == sorted(models)
    if counts:
        ((tag,),) = query(
            database, "select value from tags where key = 'events.count' and run_uuid = ?", run
        )
        assert json.loads(tag) == counts
    return sum(map(len, told.values()))


if __name__ == "__main__":
    main()
