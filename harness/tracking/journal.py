"""The journal: an append-only JSONL file that is the truth about a run.

One row is one line of strict JSON, written by one `os.write` on an O_APPEND descriptor, so that a kill -9 loses no
finished row and tears at most the last. MLflow, the report and `harness inspect` are all derived from it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.core.errors import ConfigError, Problem
from harness.tracking.rows import RowClock, encode, finished_size, read_rows

Metrics = dict[str, float]
_NOT_OF_THE_STEP = ("run.", "checkpoint.", "flight.", "report.", "journal.")


class Journal:
    """Writer of one run's `journal.jsonl`; implements `core.protocols.Tracker`.

    attempt: raised by a rollback, part of every row. resume_step: first step that is executed again; rows that
    already stand for it and later are not written twice (see `StandingRows`). dropped: rows lost to disk errors so far;
    those are never raised into training, and a `journal.dropped` event follows once writing works again. Times
    of rows never go back, even if the machine's clock does.
    """

    def __init__(self, path: Path, attempt: int = 1, resume_step: int | None = None) -> None:
        self.path = path
        self.attempt = attempt
        self.dropped = 0
        self._lost = 0
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
                    f"the journal cannot be opened: {error}", str(path), fix="check that the run folder is writable"
                )
            ) from error
        self._standing = StandingRows.index(read_rows(path), resume_step) if resume_step is not None else StandingRows()
        self._now = RowClock(self._standing.latest)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of `metrics` for `step`; values keep full precision, NaN and infinities included."""
        values = {name: float(value) for name, value in metrics.items()}
        row = {"kind": "metrics", "step": int(step), "attempt": self.attempt, "time": self._now(), "metrics": values}
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
        head = {"kind": "event", "step": int(step), "attempt": self.attempt, "time": self._now(), "code": code}
        self._write(head | {name: value for name, value in fields.items() if name not in head})

    def note(self, kind: str, **fields: Any) -> None:
        """One row of another kind.

        "run": tags, params, data; at each start and resume. "artifact": path, relative to the run folder.
        "checkpoint": step, state ("saved" | "good" | "rolled back" | "deleted") and, if saved, path and metrics.
        "end": status; the last row of a process.
        """
        head = {"kind": kind, "attempt": self.attempt, "time": self._now()}
        self._write(head | {name: value for name, value in fields.items() if name not in head})

    def flush(self) -> None:
        """Everything logged so far is on disk (fsync). A disk that fails is not raised but reported like a lost row."""
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        if not self._append(row):
            self.dropped += 1
            self._lost += 1
        elif self._lost or self._failed_syncs:
            trouble = {
                "code": "journal.dropped",
                "rows": self._lost,
                "total": self.dropped,
                "failed_syncs": self._failed_syncs,
            }
            head = {"kind": "event", "step": row.get("step", 0), "attempt": self.attempt, "time": self._now()}
            if self._append(head | trouble):
                self._lost = self._failed_syncs = 0

    def _append(self, row: Mapping[str, Any]) -> bool:
        line = encode(row)
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


@dataclass(frozen=True, slots=True)
class Seen:
    """Whether a metrics row already stands (`same`), or stands with other values (`mismatch`: the first of them)."""

    same: bool = False
    mismatch: dict[str, Any] | None = None
    report: bool = False


@dataclass
class StandingRows:
    """What a resume has to know: rows that already stand in the journal for steps that are executed again.

    After a kill -9 the run starts again at its last checkpoint and repeats a few steps. A repeated row must not stand
    in the journal twice, and one that comes out different must not go unnoticed: a resume promises the same bits. What
    happened to the process or its disk is no repetition: a run that fails twice at one step has failed twice.

    Rows by identity: (attempt, step, sorted metric names) or (attempt, step, event code). latest: time of the last row
    of all, 0 if there is none.
    """

    latest: float = 0.0
    _metrics: dict[tuple[int, int, tuple[str, ...]], list[Metrics]] = field(default_factory=lambda: defaultdict(list))
    _events: dict[tuple[int, int, str], int] = field(default_factory=lambda: defaultdict(int))
    _reported: bool = False
    _differs: bool = False

    @classmethod
    def index(cls, rows: Iterable[Mapping[str, Any]], resume_step: int) -> StandingRows:
        """Index the rows of steps from `resume_step` on."""
        standing = cls()
        for row in rows:
            standing.latest = max(standing.latest, row.get("time", 0.0))
            # The step before too: a run that had done its last one is validated once more.
            if row.get("step", -1) < resume_step - 1:
                continue
            if row["kind"] == "metrics":
                values = row["metrics"]
                standing._metrics[row["attempt"], row["step"], tuple(sorted(values))].append(values)
            elif row["kind"] == "event":
                standing._events[row["attempt"], row["step"], row["code"]] += 1
        return standing

    def metrics(self, attempt: int, step: int, values: Metrics) -> Seen:
        """Compare with the rows of this identity and cross off the one that is bit-equal, times and rates aside."""
        standing = self._metrics.get((attempt, step, tuple(sorted(values))))
        if not standing:
            return Seen()
        for place, old in enumerate(standing):
            if _first_difference(old, values) is None:
                del standing[place]
                self._differs = False
                return Seen(same=True)
        name = _first_difference(standing[-1], values)
        assert name is not None
        self._differs = True
        report, self._reported = not self._reported, True
        return Seen(mismatch={"metric": name, "before": standing[-1][name], "now": values[name]}, report=report)

    def event(self, attempt: int, step: int, code: str) -> bool:
        """True if this event already stands; each standing one is crossed off once.

        Never where the figures of the step, as far as they are known, are others than those that stand.
        """
        if self._differs or code.startswith(_NOT_OF_THE_STEP):
            return False
        identity = (attempt, step, code)
        if not self._events.get(identity):
            return False
        self._events[identity] -= 1
        return True


def _first_difference(old: Metrics, new: Metrics) -> str | None:
    # repr tells every two floats apart, 0.0 and -0.0 too, but not one NaN from another.
    for name in sorted(new):
        if not _timing(name) and repr(old[name]) != repr(new[name]):
            return name
    return None


def _timing(name: str) -> bool:
    return name.startswith("time/") or name == "train/tokens_per_second"
