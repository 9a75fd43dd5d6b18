"""The journal: an append-only JSONL file that is the truth about a run.

One row is one line of strict JSON, written by one `os.write` on an O_APPEND descriptor, so that a kill -9 loses no
finished row and tears at most the last. MLflow, the report and `harness inspect` are all derived from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.core.errors import ConfigError, Problem
from harness.tracking.clock import RowClock
from harness.tracking.replay import Replay
from harness.tracking.rows import encode, finished_size, read_rows


class Journal:
    """Writer of one run's `journal.jsonl`; implements `core.protocols.Tracker`.

    attempt: raised by a rollback, part of every row. resume_step: first step that is executed again; rows that
    already stand for it and later are not written twice (see `replay`). dropped: rows lost to disk errors so far;
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
        self._replay = Replay.index(read_rows(path), resume_step) if resume_step is not None else Replay()
        self._now = RowClock(self._replay.latest)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of `metrics` for `step`; values keep full precision, NaN and infinities included."""
        values = {name: float(value) for name, value in metrics.items()}
        row = {"kind": "metrics", "step": int(step), "attempt": self.attempt, "time": self._now(), "metrics": values}
        seen = self._replay.metrics(self.attempt, int(step), values)
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
        if self._replay.event(self.attempt, int(step), code):
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
