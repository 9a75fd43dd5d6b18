"""The time that a run took, and its checkpoints, from the times of its journal's rows. Torch-free.

A process begins with its "run" row, and the time between two processes is nobody's. The time of a step is that from the
row before to its own, so it has the saves and validations in between. Of figures only the heads of rows are read: a
long journal takes seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.files import step_name
from harness.report.overview import size_on_disk
from harness.tracking.history import RunHistory, machine_of
from harness.tracking.journal import JOURNAL, read_rows

_NO_FIGURES = 1 << 62
"""Later than any step. Of metrics rows before it only the heads are read, which is fast."""


@dataclass
class Checkpoint:
    """One save.

    step: of the run. attempt: that saved it. time: in seconds since 1970.
    seconds: that the save took; None: not recorded.
    good: whether enough healthy steps followed. deleted: whether it was removed to make room.
    size: bytes on disk now; 0 if it is not there.
    """

    step: int
    attempt: int
    time: float
    seconds: float | None = None
    good: bool = False
    deleted: bool = False
    size: int = 0


@dataclass
class Spent:
    """What a run took.

    processes: number of starts and resumes.
    seconds: from the begin to the last row of each process, added up.
    by_machine: these by (ranks, card) of the process; a resume may change both. Ranks are a text of the journal.
    thrown_away: of these, in steps that a rollback discarded.
    checkpoints: in the order of the saves.
    """

    processes: int = 0
    seconds: float = 0.0
    by_machine: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    thrown_away: float = 0.0
    checkpoints: list[Checkpoint] = field(default_factory=list)


def read_spent(history: RunHistory) -> Spent:
    """What the run in `history` took. Raises OSError if its journal cannot be read any more."""
    spent = Spent()
    newest: dict[int, Checkpoint] = {}
    last: float | None = None
    machine = machine_of({})
    for row in read_rows(history.run_dir / JOURNAL, since=_NO_FIGURES):
        # Only the row with which a process begins says where it runs.
        if row["kind"] == "run" and row.get("where"):
            spent.processes += 1
            last = None
            if row.get("tags"):
                machine = machine_of(row["tags"])
        now = row.get("time")
        if now is None:
            continue
        # Time passes between two rows of one process. A clock that was set back counts as no time.
        passed = 0.0 if last is None else max(0.0, now - last)
        last = now
        spent.seconds += passed
        spent.by_machine[machine] += passed
        if row["kind"] == "metrics" and history.replaced(row["attempt"], row["step"]):
            spent.thrown_away += passed
        if row["kind"] == "checkpoint":
            _note(spent, newest, row)

    # Sizes are of what is on disk now.
    folder = history.run_dir / "checkpoints"
    for step, each in newest.items():
        if not each.deleted:
            each.size = _size(folder / step_name(step))
    return spent


def _note(spent: Spent, newest: dict[int, Checkpoint], row: Mapping[str, Any]) -> None:
    """Take a checkpoint's row. newest: the last save of each step, which later rows are of."""
    step, state = row["step"], row["state"]
    if state == "saved":
        seconds = row.get("seconds")
        taken = float(seconds) if isinstance(seconds, int | float) else None
        saved = Checkpoint(step, row["attempt"], float(row.get("time", 0.0)), taken)
        spent.checkpoints.append(saved)
        newest[step] = saved
    elif step in newest:
        newest[step].good = newest[step].good or state == "good"
        newest[step].deleted = newest[step].deleted or state == "deleted"


def _size(folder: Path) -> int:
    return size_on_disk(folder) if folder.is_dir() else 0
