"""The journal: an append-only JSONL file that is the truth about a run.

One row is one line of strict JSON, written by one `os.write` on an O_APPEND descriptor, so that a kill -9 loses no
finished row and tears at most the last. MLflow, the report and `harness inspect` are all derived from it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.core.errors import ConfigError, Problem, near_match, some
from harness.core.files import read_json, write_json
from harness.tracking.standing import StandingRows


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


JOURNAL = "journal.jsonl"
POSITION = "shipper.json"
SET_ASIDE = "journal.damaged"
CHUNK = 256 * 1024
"""Bytes of a journal that are delivered at once."""
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SPELLED = (b'NaN"', b'Infinity"')
TAIL = 64 * 1024
_HEADS: Mapping[str, Mapping[str, type]] = {
    "metrics": {"step": int, "attempt": int, "metrics": dict},
    "event": {"step": int, "attempt": int, "code": str},
    "end": {"status": str},
    "artifact": {"path": str},
    "checkpoint": {"step": int, "state": str},
}
_SAVED: Mapping[str, type] = {"path": str, "metrics": dict, "attempt": int}
_MAPPINGS = ("tags", "params", "data", "where")
MAX_ROW = 16 << 20
"""Bytes of a row. A step's FP8 statistics take a hundred bytes each, 18 for a layer."""
# Seconds since 1970, in the year 9999: what no date can be made of is no time.
_LAST_TIME = 253_370_764_800
# `kind` is every row's first key.
_METRICS_LINE = b'{"kind": "metrics"'
_HEAD = re.compile(
    rb'\{"kind": "metrics", "step": (\d{1,18}), "attempt": (\d{1,18}), "time": (\d{1,12}(?:\.\d{1,20})?), "metrics": \{'
)


def encode(row: Mapping[str, Any]) -> bytes:
    """One line, newline included. Numbers of numpy kind become Python's; anything else unknown becomes text."""
    try:
        text = json.dumps(row, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(
            _spelled(row), allow_nan=False, default=lambda value: _spelled(_plain(value))
        )
    return text.encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The row in `line`, or None where it is no complete JSON object, or none that its readers can rely on; one over
    MAX_ROW is not parsed.
    """
    if len(line) > MAX_ROW:
        return None
    try:
        row = json.loads(line)
        spelled = any(name in line for name in _SPELLED)
        row = (_restored(row) if spelled else row) if isinstance(row, dict) else {}
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def read_rows(
    path: Path, end: int | None = None, metrics: bool = True, since: int = 0
) -> Iterator[dict[str, Any]]:
    """Rows of a journal in order, up to byte `end`. metrics: else their rows, nearly all of a file, are left unread.
    since: of metrics rows of earlier steps only kind, step, attempt and time are read, and given.

    A torn last line, lines damaged by a dying disk and lines over MAX_ROW are passed over.
    """
    with path.open("rb") as lines:
        while (end is None or lines.tell() < end) and (line := lines.readline(MAX_ROW)):
            if not line.startswith(_METRICS_LINE):
                row = decode(line)
            elif not metrics:
                continue
            else:
                row = (_head(line, since) if since else None) or decode(line)
            if row is not None:
                yield row


def _head(line: bytes, since: int) -> dict[str, Any] | None:
    """The head of a metrics row of a step before `since`, as this writer puts it; None for any other line."""
    found = _HEAD.match(line)
    if found is None or int(found[1]) >= since or not line.endswith(b"}\n"):
        return None
    seconds = float(found[3])
    if seconds >= _LAST_TIME:
        return None
    return {"kind": "metrics", "step": int(found[1]), "attempt": int(found[2]), "time": seconds}


def _is_row(row: Mapping[str, Any]) -> bool:
    """Whether readers can rely on the row's head; what some other program wrote is passed over."""
    kind = row.get("kind")
    if not isinstance(kind, str) or not all(
        _is_count(row[name]) for name in ("step", "attempt") if name in row
    ):
        return False
    head = _HEADS.get(kind, {})
    if kind == "checkpoint" and row.get("state") == "saved":
        head = {**head, **_SAVED}
    metrics = row.get("metrics")
    metrics = metrics if "metrics" in head and isinstance(metrics, dict) else {}
    return (
        isinstance(row.get("time", 0.0), float | int)
        and 0 <= row.get("time", 0.0) < _LAST_TIME
        and all(isinstance(row.get(name), of) for name, of in head.items())
        and (
            kind not in ("run", "tags")
            or all(isinstance(row.get(name, {}), dict) for name in _MAPPINGS)
        )
        and (
            set(map(type, metrics.values())) <= {float}
            or all(
                isinstance(value, float) or _is_count(value, -(1 << 63))
                for value in metrics.values()
            )
        )
    )


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and least <= value < 1 << 63


def rows_after(
    journal: Path, offset: int, end: int | None = None
) -> tuple[list[tuple[dict[str, Any], int]], int, list[bytes]]:
    """Finished rows from byte `offset` on, about CHUNK bytes of them or those up to `end`, for delivery.

    Returns (rows, each with the offset behind it; the offset behind all lines read; lines that are no rows).
    """
    if not journal.exists():
        return [], offset, []
    with journal.open("rb") as file:
        file.seek(offset)
        data = file.read(CHUNK if end is None else end - offset)
        if end is None and len(data) == CHUNK:
            data += file.readline()
    rows: list[tuple[dict[str, Any], int]] = []
    strange: list[bytes] = []
    for line in data.split(b"\n")[:-1]:
        offset += len(line) + 1
        row = decode(line)
        if row is not None and "time" in row:
            rows.append((row, offset))
        else:
            strange.append(line)
    return rows, offset, strange


def set_aside(run_dir: Path, lines: Sequence[bytes]) -> int:
    """Keep lines that are no rows in the file SET_ASIDE, each once however often they are given; how many it has."""
    path = run_dir / SET_ASIDE
    earlier = path.read_bytes().splitlines() if path.exists() else []
    there = set(earlier)
    new = [line for line in lines if line not in there]
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in new)
    return len(earlier) + len(new)


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


@dataclass
class Position:
    """run_id: MLflow's, None until it exists. offset: journal bytes delivered. key: finds a run created just before a
    kill, whose id was never written down. experiment_id: MLflow's, for links. store: the address of the store that has
    so much, without secrets."""

    run_id: str | None = None
    offset: int = 0
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    experiment_id: str | None = None
    store: str | None = None

    @classmethod
    def load(cls, run_dir: Path) -> Position:
        """The stored position; the beginning if there is none, it is damaged, or the journal does not reach it."""
        try:
            stored = read_json(run_dir / POSITION)
            position = cls(
                stored["run_id"],
                stored["offset"],
                stored["key"],
                stored["experiment_id"],
                stored["store"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        ids = (position.run_id, position.experiment_id, position.store)
        texts = isinstance(position.key, str) and all(isinstance(each, str | None) for each in ids)
        if not texts or type(position.offset) is not int or position.offset < 0:
            return cls()
        # After a power cut the journal may be shorter than what was delivered of it. To send a row again is harmless.
        if not _ends_a_row(run_dir / JOURNAL, position.offset):
            position.offset = 0
        return position

    def save(self, run_dir: Path) -> None:
        """Write atomically: a reader sees the old position or this one."""
        write_json(run_dir / POSITION, asdict(self))


def run_page(run_dir: Path) -> str:
    """Where the run is in MLflow's pages, behind the server's address; empty while it is nowhere.

    The page opens for training and not for GenAI, which a browser does that was never told otherwise.
    """
    position = Position.load(run_dir)
    if position.run_id is None or position.experiment_id is None:
        return ""
    return f"/#/experiments/{position.experiment_id}/runs/{position.run_id}?workflowType=machine_learning"


def delivered(run_dir: Path) -> bool:
    """Whether MLflow has every finished row of this run's journal."""
    journal = run_dir / JOURNAL
    return not journal.exists() or Position.load(run_dir).offset == finished_size(journal)


def tracking_uri(environment: Mapping[str, str] = os.environ, folder: Path | None = None) -> str:
    """MLFLOW_TRACKING_URI where it is set, else an SQLite file in `folder` (default: the working folder)."""
    return (
        environment.get("MLFLOW_TRACKING_URI")
        or f"sqlite:///{(folder or Path.cwd()).resolve() / 'mlflow.db'}"
    )


def misplaced(environment: Mapping[str, str] = os.environ, folder: Path | None = None) -> str:
    """Why the SQLite file of `tracking_uri` would not be where it says, empty if it will be.

    In such an address a ? begins settings and a % a character's number, whatever the library's version makes of them.
    """
    here = str((folder or Path.cwd()).resolve())
    found = (
        [] if environment.get("MLFLOW_TRACKING_URI") else [each for each in "?%" if each in here]
    )
    if not found:
        return ""
    return f"its path has a {' and a '.join(found)}, which means something else in the address of a database"


def _ends_a_row(journal: Path, offset: int) -> bool:
    if offset == 0:
        return True
    try:
        with journal.open("rb") as file:
            file.seek(offset - 1)
            return file.read(1) == b"\n"
    except (OSError, ValueError):
        return False


def runs_in(folder: Path) -> list[Path]:
    """The runs' folders that lie directly in `folder`, by name."""
    return sorted(path.parent for path in folder.glob(f"*/{JOURNAL}"))


def require_run(run_dir: Path) -> Path:
    """`run_dir`, resolved, if it is a run's folder. Raises ConfigError with the near match among its neighbours."""
    if (run_dir / JOURNAL).is_file():
        return run_dir.resolve()
    if inside := runs_in(run_dir):
        fix = f"name one of them: {some(inside, 3)}"
        raise ConfigError(
            Problem(f"a folder of {len(inside)} runs, not a run", str(run_dir), fix=fix)
        )
    runs = [path.name for path in runs_in(run_dir.absolute().parent)]
    what = f"has no {JOURNAL}" if run_dir.is_dir() else "no such folder"
    hint = near_match(run_dir.name, runs) or "start one with: harness train --recipe fp8_hybrid"
    raise ConfigError(Problem(f"not a run: {what}", str(run_dir), fix=hint))


class Journal:
    """Writer of one run's `journal.jsonl`; implements `core.protocols.Tracker`.

    attempt: raised by a rollback, part of every row. resume_step: first step that is executed again; rows that
    already stand for it and later are not written twice (see `StandingRows`). Errors of the disk are never raised into
    training: rows wait in memory, `patience` bytes of them at most, and are written in order once that works again,
    followed by an event `journal.late`, or `journal.dropped` where some had no place. Times of rows never go back, even
    if the machine's clock does.
    """

    patience = 64 << 20

    def __init__(self, path: Path, attempt: int = 1, resume_step: int | None = None) -> None:
        self.path = path
        self.attempt = attempt
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._lost = self._late = self._told = 0
        self._failed_syncs = 0
        self._torn: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
            finished = finished_size(path)
            if finished != os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, finished)
        except OSError as error:
            raise ConfigError(
                Problem(
                    f"the journal cannot be opened: {error}",
                    str(path),
                    fix="check that the run folder is writable",
                )
            ) from error
        self._standing = StandingRows()
        if resume_step is not None:
            self._standing = StandingRows.index(read_rows(path, since=resume_step - 1), resume_step)
        self.standing_attempt = self._standing.attempt
        self._now = RowClock(self._standing.latest)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of `metrics` for `step`; values keep full precision, NaN and infinities included."""
        values = {name: float(value) for name, value in metrics.items()}
        row = {
            "kind": "metrics",
            "step": int(step),
            "attempt": self.attempt,
            "time": self._now(),
            "metrics": values,
        }
        seen = self._standing.metrics(self.attempt, int(step), values)
        if seen.same:
            return
        if seen.mismatch is None:
            self._write(row)
            return
        self._write(row | {"replay": "differs"})
        if seen.report:
            self.event(step, "resume.mismatch", **seen.mismatch)

    def event(self, step: int, code: str, **fields: Any) -> None:
        """One row for something that happened at `step`. `code` is a stable name such as `precision.demote`."""
        if self._standing.event(self.attempt, int(step), code):
            return
        head = {
            "kind": "event",
            "step": int(step),
            "attempt": self.attempt,
            "time": self._now(),
            "code": code,
        }
        self._write(head | {name: value for name, value in fields.items() if name not in head})

    def tell(self, step: int, code: str, text: str, **fields: Any) -> None:
        """An event; a journal has no screen."""
        self.event(step, code, text=text, **fields)

    def note(self, kind: str, **fields: Any) -> None:
        """One row of another kind.

        "run": tags, params, data; at each start and resume. "artifact": path, relative to the run folder.
        "checkpoint": step, state ("saved" | "good" | "rolled back" | "deleted") and, if saved, path and metrics.
        "end": status; the last row of a process.
        """
        head = {"kind": kind, "attempt": self.attempt, "time": self._now()}
        self._write(head | {name: value for name, value in fields.items() if name not in head})

    @property
    def dropped(self) -> int:
        """Rows that the disk has refused: those that had no place in memory, and those that still wait there."""
        return self._lost + len(self._waiting)

    def flush(self) -> None:
        """Everything logged so far is on disk (fsync). A disk that fails is not raised but reported like a lost row."""
        self._catch_up()
        try:
            os.fsync(self._fd)
        except OSError:
            self._failed_syncs += 1

    def close(self) -> None:
        """Flush and close; safe to call twice. Rows logged afterwards are dropped."""
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        line = encode(row)
        self._catch_up()
        if self._waiting or not self._append(line):
            if self._waiting_bytes + len(line) > self.patience:
                self._lost += 1
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._late += 1
        elif self._late or self._lost > self._told or self._failed_syncs:
            lost = self._lost - self._told
            trouble = {
                "code": "journal.dropped" if lost or self._failed_syncs else "journal.late",
                "rows": lost,
                "total": self._lost,
                "late": self._late,
                "failed_syncs": self._failed_syncs,
            }
            head = {
                "kind": "event",
                "step": row.get("step", 0),
                "attempt": self.attempt,
                "time": self._now(),
            }
            if self._append(encode(head | trouble)):
                self._told, self._late, self._failed_syncs = self._lost, 0, 0

    def _catch_up(self) -> None:
        """Write what waits, in order, as far as the disk takes it."""
        while self._waiting and self._append(self._waiting[0]):
            self._waiting_bytes -= len(self._waiting.popleft())

    def _append(self, line: bytes) -> bool:
        try:
            self._take_back()
            end = os.fstat(self._fd).st_size
            if os.write(self._fd, line) == len(line):
                return True
            # A disk that fills up in mid-row. If it does not even let go of the torn half, the next row tries first.
            self._torn = end
            self._take_back()
        except OSError:
            pass
        return False

    def _take_back(self) -> None:
        """Cut off what stands of a row that did not get down whole, so that the next one starts on its own line."""
        if self._torn is not None:
            os.ftruncate(self._fd, self._torn)
            self._torn = None
