"""Rows of the journal as bytes and back, their time, and how far MLflow has them. Torch-free.

Strict JSON, floats in full precision, non-finite ones as strings. A row's time is the wall clock's, read once, and from
then on of a clock that nobody can set. `shipper.json` says what has been delivered; others ask of it here, without
importing mlflow. A run folder is told from any other by its journal.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.core.errors import ConfigError, Problem, near_match
from harness.core.files import read_json, write_json


class RowClock:
    """Seconds since 1970 that never go back, because MLflow orders a history by them and not by step.

    The machine's clock may be set, by NTP or by hand, in mid-run: rows then keep the time they would have had. The
    time that a machine sleeps is counted. not_before: the last row of an earlier process; where the clock is behind
    it, rows go on from there.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - _elapsed()

    def __call__(self) -> float:
        return self._offset + _elapsed()


def _elapsed() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
TAIL = 64 * 1024
_HEADS: Mapping[str, Mapping[str, type]] = {
    "metrics": {"step": int, "attempt": int, "metrics": dict},
    "event": {"step": int, "attempt": int, "code": str},
    "end": {"status": str},
}
MAX_ROW = 64 << 20
"""Bytes of a row. A step's FP8 statistics take a hundred bytes each, 18 for a layer."""
# `kind` is every row's first key.
_METRICS_LINE = b'{"kind": "metrics"'


def encode(row: Mapping[str, Any]) -> bytes:
    """One line, newline included. Numbers of numpy kind become Python's; anything else unknown becomes text."""
    try:
        text = json.dumps(row, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_spelled(row), allow_nan=False, default=lambda value: _spelled(_plain(value)))
    return text.encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The row in `line`, or None where it is no complete JSON object, or none that its readers can rely on."""
    try:
        row = json.loads(line)
        row = _restored(row) if isinstance(row, dict) else {}
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def read_rows(path: Path, end: int | None = None, metrics: bool = True) -> Iterator[dict[str, Any]]:
    """Rows of a journal in order, up to byte `end`. metrics: else their rows, nearly all of a file, are left unread.

    A torn last line, lines damaged by a dying disk and lines over MAX_ROW are passed over.
    """
    with path.open("rb") as lines:
        while (end is None or lines.tell() < end) and (line := lines.readline(MAX_ROW)):
            if (metrics or not line.startswith(_METRICS_LINE)) and (row := decode(line)) is not None:
                yield row


def _is_row(row: Mapping[str, Any]) -> bool:
    """Whether readers can rely on the row's head; what some other program wrote is passed over."""
    kind = row.get("kind")
    if not isinstance(kind, str) or not all(isinstance(row[name], int) for name in ("step", "attempt") if name in row):
        return False
    head = _HEADS.get(kind, {})
    values = row["metrics"].values() if kind == "metrics" and isinstance(row.get("metrics"), dict) else ()
    return (
        isinstance(row.get("time", 0.0), float | int)
        and all(isinstance(row.get(name), of) for name, of in head.items())
        and all(isinstance(value, float | int) for value in values)
    )


def finished_size(path: Path) -> int:
    """Bytes of a journal up to its last newline: what follows is a row that was never finished."""
    with path.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        while at > 0:
            start = max(0, at - TAIL)
            file.seek(start)
            newline = file.read(at - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            at = start
    return 0


def _plain(value: Any) -> Any:
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _spelled(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value


JOURNAL = "journal.jsonl"
POSITION = "shipper.json"


@dataclass
class Position:
    """run_id: MLflow's, None until it exists. offset: journal bytes delivered. key: finds a run created just before a
    kill, whose id was never written down."""

    run_id: str | None = None
    offset: int = 0
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def load(cls, run_dir: Path) -> Position:
        """The stored position; the beginning if there is none, it is damaged, or the journal does not reach it."""
        try:
            stored = read_json(run_dir / POSITION)
            position = cls(stored["run_id"], stored["offset"], stored["key"])
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        texts = isinstance(position.key, str) and isinstance(position.run_id, str | None)
        if not texts or type(position.offset) is not int or position.offset < 0:
            return cls()
        # After a power cut the journal may be shorter than what was delivered of it. To send a row again is harmless.
        if not _ends_a_row(run_dir / JOURNAL, position.offset):
            position.offset = 0
        return position

    def save(self, run_dir: Path) -> None:
        """Write atomically: a reader sees the old position or this one."""
        write_json(run_dir / POSITION, asdict(self))


def delivered(run_dir: Path) -> bool:
    """Whether MLflow has every finished row of this run's journal."""
    journal = run_dir / JOURNAL
    return not journal.exists() or Position.load(run_dir).offset == finished_size(journal)


def tracking_uri(environment: Mapping[str, str] = os.environ, folder: Path | None = None) -> str:
    """MLFLOW_TRACKING_URI where it is set, else an SQLite file in `folder` (default: the working folder)."""
    return environment.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder or Path.cwd()).resolve() / 'mlflow.db'}"


def _ends_a_row(journal: Path, offset: int) -> bool:
    if offset == 0:
        return True
    try:
        with journal.open("rb") as file:
            file.seek(offset - 1)
            return file.read(1) == b"\n"
    except (OSError, ValueError):
        return False


def require_run(run_dir: Path) -> Path:
    """`run_dir`, resolved, if it is a run's folder. Raises ConfigError with the near match among its neighbours."""
    if (run_dir / JOURNAL).is_file():
        return run_dir.resolve()
    runs = [path.parent.name for path in run_dir.absolute().parent.glob(f"*/{JOURNAL}")]
    what = f"has no {JOURNAL}" if run_dir.is_dir() else "no such folder"
    hint = near_match(run_dir.name, runs) or "start one with: harness train --recipe fp8_hybrid"
    raise ConfigError(Problem(f"not a run: {what}", str(run_dir), fix=hint))
