"""The journal: an append-only JSONL file, and the record of a run. Torch-free.

Why there is one record. A run's figures are wanted in many places: MLflow, the report, `harness inspect`, `explain`,
`replay`. Each of these can be away or full or broken while the run trains, and none of them may stop it. So the trainer
writes to one place that is always there, its own disk. Everything else is derived from that file later, and again
whenever it is lost:

    train_step -> Journal -> journal.jsonl -> shipper -> MLflow
                                           -> RunHistory -> report.html, inspect, explain, replay
                                           -> ExistingRows -> a resume that writes no row twice

What makes a file fit to be the record:

- One row is one line of strict JSON, written by one `os.write` on an O_APPEND descriptor. A kill -9 loses no finished
  row, and tears at most the last one. The next start cuts the torn row off.
- Rows are never changed. A rollback raises `attempt` and writes the steps again; readers decide which attempt counts.
- A reader's progress is a byte offset (`Position`). The shipper can be killed and started again, anywhere.
- A disk that fails costs rows and not the run: rows wait in memory, and a row that is lost is counted.
- A reader trusts nothing in it. A line that is no row is skipped, and set aside before a later row is delivered.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.core.errors import ConfigError, Problem, near_match, number_of, some
from harness.core.files import RUNS, read_json, write_json
from harness.tracking.existing import ExistingRows


class RowClock:
    """Seconds since 1970 that never go back: MLflow orders a metric's history by time, not by step.

    The machine's clock may be set, by NTP or by hand, in mid-run. Rows then keep the time that they would have had.
    Time in which the machine sleeps counts.

    not_before: time of the last row of an earlier process. If the machine's clock is behind it, rows go on from there.
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
MAX_ROW = 16 << 20
"""Largest row in bytes. A step's FP8 statistics take 100 bytes each, 18 of them a layer."""
TAIL = 64 * 1024
"""Bytes read at once when the last newline is looked for."""

# Strict JSON has no NaN or infinity: they are written as these strings.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NON_FINITE_ENDS = (b'NaN"', b'Infinity"')

# Fields that readers rely on, by kind of row, with their types.
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "metrics": {"step": int, "attempt": int, "metrics": dict},
    "event": {"step": int, "attempt": int, "code": str},
    "end": {"status": str},
    "artifact": {"path": str},
    "checkpoint": {"step": int, "state": str},
}
_FIELDS_IF_SAVED: Mapping[str, type] = {"path": str, "metrics": dict, "attempt": int}
_MAPPINGS = ("tags", "params", "data", "where")
# The year 9999, in seconds since 1970. A later time cannot become a date.
_LAST_TIME = 253_370_764_800
# `kind` is every row's first key.
METRICS_LINE = b'{"kind": "metrics"'
_HEAD = re.compile(
    rb'\{"kind": "metrics", "step": (\d{1,18}), "attempt": (\d{1,18}), "time": (\d{1,12}(?:\.\d{1,20})?), "metrics": \{'
)


def encode(row: Mapping[str, Any]) -> bytes:
    """One line, newline included. NumPy's numbers become Python's; any other unknown type becomes text."""
    try:
        text = json.dumps(row, allow_nan=False, default=_plain)
    except ValueError:
        # Rare: a number that is not finite. Only then is the row walked through in Python.
        def spelt_out(value: Any) -> Any:
            return _spell_out(_plain(value))

        text = json.dumps(_spell_out(row), allow_nan=False, default=spelt_out)
    return text.encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The row in `line`. None if it is no complete JSON object, or no row that readers can rely on.

    A line over MAX_ROW is not parsed.
    """
    if len(line) > MAX_ROW:
        return None
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            return None
        if any(end in line for end in _NON_FINITE_ENDS):
            row = _parse_non_finite(row)
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def read_rows(
    path: Path, end: int | None = None, metrics: bool = True, since: int = 0
) -> Iterator[dict[str, Any]]:
    """Rows of a journal in order, up to byte `end`.

    metrics: whether to read metrics rows, which are nearly all of a file.
    since: of metrics rows before this step, give only kind, step, attempt and time.

    A torn last line, lines that a dying disk damaged, and lines over MAX_ROW are skipped.
    """
    with path.open("rb") as lines:
        while end is None or lines.tell() < end:
            line = lines.readline(MAX_ROW)
            if not line:
                return
            row = None
            if line.startswith(METRICS_LINE):
                if not metrics:
                    continue
                # A resume reads a long journal for its last few steps: parsing all figures would take minutes.
                row = _head(line, since) if since else None
            if row is None:
                row = decode(line)
            if row is not None:
                yield row


def _head(line: bytes, since: int) -> dict[str, Any] | None:
    """The head of a metrics row of a step before `since`, as `Journal` writes it; None for any other line."""
    found = _HEAD.match(line)
    if found is None or int(found[1]) >= since or not line.endswith(b"}\n"):
        return None
    seconds = float(found[3])
    if seconds >= _LAST_TIME:
        return None
    return {"kind": "metrics", "step": int(found[1]), "attempt": int(found[2]), "time": seconds}


def _is_row(row: Mapping[str, Any]) -> bool:
    """Whether readers can rely on the row: another program may have written it."""
    kind = row.get("kind")
    if not isinstance(kind, str):
        return False

    # What any row may have: step, attempt and time.
    for name in ("step", "attempt"):
        if name in row and not _is_count(row[name]):
            return False
    seconds = row.get("time", 0.0)
    if not isinstance(seconds, float | int) or not 0 <= seconds < _LAST_TIME:
        return False

    # What a row of this kind must have.
    fields = _FIELDS.get(kind, {})
    if kind == "checkpoint" and row.get("state") == "saved":
        fields = {**fields, **_FIELDS_IF_SAVED}
    for name, of in fields.items():
        if not isinstance(row.get(name), of):
            return False
    if kind in ("run", "tags"):
        for name in _MAPPINGS:
            if not isinstance(row.get(name, {}), dict):
                return False
    return "metrics" not in fields or _are_figures(row["metrics"].values())


def _are_figures(values: Collection[Any]) -> bool:
    """Whether all values are numbers: floats, or integers of 64 bits."""
    # Nearly every row has floats alone, and this is the fastest way to see it.
    if set(map(type, values)) <= {float}:
        return True
    least = -(1 << 63)
    return all(isinstance(value, float) or _is_count(value, least) for value in values)


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and least <= value < 1 << 63


def rows_after(
    journal: Path, offset: int, end: int | None = None
) -> tuple[list[tuple[dict[str, Any], int]], int, list[bytes]]:
    """Finished rows from byte `offset` on, for delivery: about CHUNK bytes of them, or those up to `end`.

    Returns (rows, each with the offset behind it; the offset behind all lines read; lines that are no rows).
    """
    if not journal.exists():
        return [], offset, []
    with journal.open("rb") as file:
        file.seek(offset)
        data = file.read(CHUNK if end is None else end - offset)
        if end is None and len(data) == CHUNK:
            data += file.readline()  # a row that begins in this chunk is read to its end

    # What follows the last newline is a row that is being written.
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
    """Add lines that are no rows to the file SET_ASIDE, each only once; returns how many lines the file has."""
    path = run_dir / SET_ASIDE
    earlier = path.read_bytes().splitlines() if path.exists() else []
    there = set(earlier)
    new = [line for line in lines if line not in there]
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in new)
    return len(earlier) + len(new)


def finished_size(path: Path) -> int:
    """Bytes of a journal up to its last newline. What follows is a row that was never finished."""
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


def _spell_out(value: Any) -> Any:
    """The value with strings in place of numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _spell_out(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_out(item) for item in value]
    return value


def _parse_non_finite(value: Any) -> Any:
    """The inverse of `_spell_out`."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: _parse_non_finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_parse_non_finite(item) for item in value]
    return value


@dataclass
class Position:
    """How far MLflow has the journal; kept in `shipper.json`.

    run_id: MLflow's id of the run; None until it exists.
    offset: bytes of the journal that are delivered.
    key: a tag of the MLflow run. It finds a run that was created just before a kill, whose id was never written down.
    experiment_id: MLflow's id of the experiment, for links.
    store: address, without secrets, of the store that has these bytes.
    folder: where the run's folder was at its last start.
    """

    run_id: str | None = None
    offset: int = 0
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    experiment_id: str | None = None
    store: str | None = None
    folder: str | None = None

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
                stored.get("folder"),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

        # The file may be damaged: use it only if every field has its type.
        ids = (position.run_id, position.experiment_id, position.store, position.folder)
        are_texts = all(isinstance(each, str | None) for each in ids)
        are_texts = are_texts and isinstance(position.key, str)
        if not are_texts or type(position.offset) is not int or position.offset < 0:
            return cls()

        # After a power cut the journal may be shorter than what was delivered of it. Sending a row again is harmless.
        if not _ends_a_row(run_dir / JOURNAL, position.offset):
            position.offset = 0
        return position

    def save(self, run_dir: Path) -> None:
        """Write atomically: a reader sees the old position or this one."""
        write_json(run_dir / POSITION, asdict(self))


def run_page(run_dir: Path) -> str:
    """Path of the run's page on an MLflow server, to append to its address; empty before the first delivery.

    workflowType opens the page for training. Without it, a browser opens MLflow's page for GenAI.
    """
    position = Position.load(run_dir)
    if position.run_id is None or position.experiment_id is None:
        return ""
    return f"/#/experiments/{position.experiment_id}/runs/{position.run_id}?workflowType=machine_learning"


def delivered(run_dir: Path) -> bool:
    """Whether MLflow has every finished row of this run's journal."""
    journal = run_dir / JOURNAL
    if not journal.exists():
        return True
    return Position.load(run_dir).offset == finished_size(journal)


def tracking_uri(environment: Mapping[str, str] = os.environ, folder: Path | None = None) -> str:
    """MLFLOW_TRACKING_URI where it is set, else an SQLite file in `folder` (default: the working folder)."""
    given = environment.get("MLFLOW_TRACKING_URI")
    if given:
        return given
    here = (folder or Path.cwd()).resolve()
    return f"sqlite:///{here / 'mlflow.db'}"


def misplaced(environment: Mapping[str, str] = os.environ, folder: Path | None = None) -> str:
    """Why the SQLite file of `tracking_uri` would not be at the path that it names; empty if it would be.

    In such an address a ? begins settings, and a % begins the number of a character. Versions of the library differ in
    how they read them.
    """
    if environment.get("MLFLOW_TRACKING_URI"):
        return ""
    here = str((folder or Path.cwd()).resolve())
    found = [each for each in "?%" if each in here]
    if not found:
        return ""
    signs = " and a ".join(found)
    return f"its path has a {signs}, which means something else in the address of a database"


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
        what = f"a folder of {number_of(len(inside), 'run')}, not a run"
        fix = f"name one of them: {some(inside, 3)}"
        raise ConfigError(Problem(what, str(run_dir), fix=fix))

    # Perhaps it is a name that `harness runs` lists, or was misspelt.
    what = f"has no {JOURNAL}" if run_dir.is_dir() else "no such folder"
    listed = run_dir.parent / RUNS / run_dir.name
    runs = [path.name for path in runs_in(run_dir.absolute().parent)]
    hint = near_match(run_dir.name, runs) or "start one with: harness train --recipe fp8_hybrid"
    if (listed / JOURNAL).is_file():
        hint = f"give its folder: {listed}"
    raise ConfigError(Problem(f"not a run: {what}", str(run_dir), fix=hint))


class Journal:
    """Writer of one run's `journal.jsonl`; implements `core.protocols.Tracker`.

    attempt: part of every row; a rollback raises it.
    resume_step: first step that is executed again. Rows that the journal has already for it and for later steps are not
        written twice (see `ExistingRows`).
    existing_attempt: highest attempt in the journal of a resume.
    patience: bytes of rows that may wait in memory.

    Errors of the disk are never raised into training. Rows wait in memory and are written in order once the disk works
    again, followed by an event `journal.late`, or `journal.dropped` if some rows had no room in memory.
    """

    patience = 64 << 20

    def __init__(self, path: Path, attempt: int = 1, resume_step: int | None = None) -> None:
        self.path = path
        self.attempt = attempt
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        # Rows lost, those of them that an event has reported, and rows that were written late since the last event.
        self._lost = 0
        self._reported = 0
        self._late = 0
        self._failed_syncs = 0
        # Size of the file before a row of which only a part was written.
        self._torn: int | None = None

        # O_NOFOLLOW: somebody else's link in the folder must not lead the rows elsewhere. The row that a kill tore is
        # cut off.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, flags, 0o644)
            finished = finished_size(path)
            if finished != os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, finished)
        except OSError as error:
            what = f"the journal cannot be opened: {error}"
            fix = "check that the run folder is writable"
            raise ConfigError(Problem(what, str(path), fix=fix)) from error

        # A resume repeats steps: their rows are not written twice.
        self._existing = ExistingRows()
        if resume_step is not None:
            rows = read_rows(path, since=resume_step - 1)
            self._existing = ExistingRows.index(rows, resume_step)
        self.existing_attempt = self._existing.attempt
        self._now = RowClock(self._existing.latest)

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
        compared = self._existing.metrics(self.attempt, int(step), values)
        if compared.same:
            return
        if compared.mismatch is None:
            self._write(row)
            return

        # The resume did not give the same bits. The row says so; one event reports the first of them.
        self._write(row | {"replay": "differs"})
        if compared.report:
            self.event(step, "resume.mismatch", **compared.mismatch)

    def event(self, step: int, code: str, **fields: Any) -> None:
        """One row for something that happened at `step`. `code` is a stable name such as `precision.demote`."""
        if self._existing.event(self.attempt, int(step), code):
            return
        head = {
            "kind": "event",
            "step": int(step),
            "attempt": self.attempt,
            "time": self._now(),
            "code": code,
        }
        # The head comes first, and no field replaces a part of it.
        self._write({**head, **fields, **head})

    def tell(self, step: int, code: str, text: str, **fields: Any) -> None:
        """One event with a text. A screen would print it; a journal has none."""
        self.event(step, code, text=text, **fields)

    def note(self, kind: str, **fields: Any) -> None:
        """One row of another kind:

        run: tags, params, data; at each start and resume.
        artifact: path, relative to the run folder.
        checkpoint: step, state (saved | good | rolled back | deleted); if saved, path and metrics too.
        end: status; the last row of a process.
        """
        head = {"kind": kind, "attempt": self.attempt, "time": self._now()}
        self._write({**head, **fields, **head})

    @property
    def dropped(self) -> int:
        """Rows that are not on disk: those that had no room in memory, and those that still wait there."""
        return self._lost + len(self._waiting)

    def flush(self) -> None:
        """Bring everything logged so far to the disk (fsync). A disk that fails is reported like a lost row."""
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

        # Rows keep their order: this one waits while an earlier one does.
        written = not self._waiting and self._append(line)
        if not written:
            self._keep(line)
        elif self._late or self._lost > self._reported or self._failed_syncs:
            self._report_trouble(row.get("step", 0))

    def _keep(self, line: bytes) -> None:
        """Keep a row in memory until the disk works again; lost if there is no room."""
        if self._waiting_bytes + len(line) > self.patience:
            self._lost += 1
            return
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        self._late += 1

    def _report_trouble(self, step: int) -> None:
        """The disk works again: one event on what it cost. If that fails too, the next row tries again."""
        lost = self._lost - self._reported
        dropped = bool(lost or self._failed_syncs)
        event = {
            "kind": "event",
            "step": step,
            "attempt": self.attempt,
            "time": self._now(),
            "code": "journal.dropped" if dropped else "journal.late",
            "rows": lost,
            "total": self._lost,
            "late": self._late,
            "failed_syncs": self._failed_syncs,
        }
        if self._append(encode(event)):
            self._reported = self._lost
            self._late = 0
            self._failed_syncs = 0

    def _catch_up(self) -> None:
        """Write the rows that wait, in order, as far as the disk takes them."""
        while self._waiting and self._append(self._waiting[0]):
            self._waiting_bytes -= len(self._waiting.popleft())

    def _append(self, line: bytes) -> bool:
        """Write one row; False if the disk does not take all of it."""
        try:
            self._cut_torn_row()
            end = os.fstat(self._fd).st_size
            if os.write(self._fd, line) == len(line):
                return True
            # The disk became full in mid-row. If the part cannot be cut off now, the next row tries that first.
            self._torn = end
            self._cut_torn_row()
        except OSError:
            pass
        return False

    def _cut_torn_row(self) -> None:
        """Cut off the part of a row that was written, so that the next row starts on a line of its own."""
        if self._torn is not None:
            os.ftruncate(self._fd, self._torn)
            self._torn = None
