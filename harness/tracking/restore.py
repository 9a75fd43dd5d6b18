"""Figures that a run's journal lacks, as MLflow has them: for a journal that was cut off, deleted or changed.

They are written at the journal's end, as rows with `"restored": "mlflow"`: a journal only grows. What stands is left as
it stands. Events are not in MLflow, only how many there were of each.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from harness.core.errors import ConfigError, Problem
from harness.core.files import parse_json
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL, Position, encode, finished_size
from harness.tracking.mlflow import KEY_TAG, metric_name
from harness.tracking.seal import LOSS, Seal, first_step, read_seal, spans

# Of the machine, and of checkpoints: MLflow has them from elsewhere.
_OTHERS = ("system/", "checkpoint/")
# SQL has no infinity: MLflow's stores keep the largest number for it.
_INFINITE = 1.797e308


def find_run(run_dir: Path, experiment: str, uri: str) -> str:
    """Id of MLflow's run of this folder: by shipper.json, else the only one of its name. Raises ConfigError."""
    client = MlflowClient(tracking_uri=uri)
    position = Position.load(run_dir)
    fix = "set MLFLOW_TRACKING_URI as it was in the run, and call this from the folder where the run was started"
    try:
        if position.run_id is not None:
            return client.get_run(position.run_id).info.run_id
        found = client.get_experiment_by_name(experiment)
        name = run_dir.name.replace("\\", "").replace("'", "")
        named = client.search_runs([found.experiment_id], f"attributes.run_name = '{name}'") if found else []
    except MlflowException as error:
        raise ConfigError(Problem("MLflow does not give its run", str(run_dir), str(error)[:400], fix)) from error
    if len(named) != 1:
        what = f"MLflow has {len(named)} runs of this name, and shipper.json, which knows which, is gone"
        raise ConfigError(Problem(what, f"{run_dir}: experiment {experiment}", fix=fix))
    run = named[0].info
    Position(run.run_id, 0, str(named[0].data.tags.get(KEY_TAG, "")), run.experiment_id).save(run_dir)
    return run.run_id


@dataclass
class _Lacking:
    """What the journal has. figures: steps by MLflow's name of a metric. spelled: the journal's own names. attempts: of
    the steps that count, in order."""

    figures: dict[str, set[int]] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, history: RunHistory) -> _Lacking:
        made = cls()
        for row in history.rows:
            counts = not history.replaced(row.attempt, row.step)
            if counts:
                made.attempts[row.step] = row.attempt
            for name in row.values:
                plain = metric_name(name)
                made.spelled[plain] = name
                if counts:
                    made.figures.setdefault(plain, set()).add(row.step)
        return made

    def attempt(self, step: int, newest: int) -> int:
        """In which `step` was done: what counts of a run has ever higher attempts."""
        return self.attempts.get(step) or next((self.attempts[s] for s in sorted(self.attempts) if s > step), newest)


def restore(run_dir: Path, run_id: str, uri: str) -> str:
    """Write what MLflow has of the run and its journal lacks, under the run's lock; what came back, in words.

    Everything that the journal has must have been delivered. Raises OSError, and what mlflow raises.
    """
    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(run_id)
    journal, history = run_dir / JOURNAL, RunHistory.read(run_dir)
    there, seal = _Lacking.of(history), read_seal(journal)
    last = history.outcome.get("step")
    if not isinstance(last, int):
        last = max([seal.get("step", 0), *there.attempts])
    tag = str(run.data.tags.get("attempt", ""))
    newest = max([1, *there.attempts.values(), int(tag) if tag.isdecimal() else 1])
    rows: dict[int, dict[str, Any]] = {}
    for name in sorted(run.data.metrics):
        if name.startswith(_OTHERS):
            continue
        known = there.figures.get(name, set())
        # The last of a step counts: one that was done again after a rollback has two.
        points = sorted(client.get_metric_history(run.info.run_id, name), key=lambda each: each.timestamp)
        for step, point in {each.step: each for each in points}.items():
            if step in known or not 0 <= step <= last:
                continue
            row = rows.setdefault(step, {"time": 0.0, "metrics": {}})
            row["time"] = max(row["time"], point.timestamp / 1000)
            row["metrics"][there.spelled.get(name, name)] = _value(point.value)
    lines = [
        encode({"kind": "metrics", "step": step, "attempt": there.attempt(step, newest), **row, "restored": "mlflow"})
        for step, row in sorted(rows.items())
    ]
    told = _told(rows, there, (first_step(run_dir) or 1, last), _missing_events(run, history))
    now = max([row["time"] for row in rows.values()], default=0.0)
    event = {"kind": "event", "step": last, "attempt": newest, "time": now, "code": "journal.restored", "text": told}
    _append(run_dir, lines, encode(event))
    return told


def _value(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) >= _INFINITE else value


def _told(
    rows: Mapping[int, Mapping[str, Any]], there: _Lacking, steps: tuple[int, int], events: Mapping[str, int]
) -> str:
    loss = {step for step, row in rows.items() if LOSS in row["metrics"]} | there.figures.get(LOSS, set())
    still = [step for step in range(steps[0], steps[1] + 1) if step not in loss]
    figures = sum(len(row["metrics"]) for row in rows.values())
    told = [
        f"{figures:,} figures of {len(rows)} steps came back from MLflow" + (f": {spans(sorted(rows))}" * bool(rows))
    ]
    told += [f"it has no figures of {len(still)} steps either: {spans(still)}"] if still else []
    if events:
        missing = ", ".join(f"{code} x {count}" for code, count in sorted(events.items()))
        told.append(f"events that it counted, and the journal lacks: {missing}")
    return "; ".join(told)


def _missing_events(run: Run, history: RunHistory) -> dict[str, int]:
    try:
        counted = parse_json(run.data.tags.get("events.count", "{}").encode())
        here = Counter(event["code"] for event in history.events)
        return {str(code): count - here[code] for code, count in counted.items() if count > here[code]}
    except (ValueError, TypeError, AttributeError):
        return {}


def _append(run_dir: Path, lines: list[bytes], event: bytes) -> None:
    """The rows, which MLflow has, and the event, which it has not yet; sealed."""
    journal = run_dir / JOURNAL
    step = read_seal(journal).get("step", 0)
    end = finished_size(journal)
    with journal.open("r+b") as stream:
        stream.truncate(end)
        stream.seek(end)
        stream.writelines(lines)
        stream.flush()
        position = Position.load(run_dir)
        position.offset = stream.tell()
        stream.write(event)
        stream.flush()
        os.fsync(stream.fileno())
    position.save(run_dir)
    seal, _ = Seal.of(journal, {})
    seal.step = step
    seal.write(journal)
