"""A run in one line, read from its folder: how it stands, and no more than that takes. Torch-free.

A folder of runs has anything in it: runs that train, runs that ended, half-copied ones, and folders of other programs.
So nothing here raises for what a folder holds; its state says what is wrong with it.

The journal is passed over once. Metrics rows are nearly all of it, and only the last ones are parsed.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from harness.core.errors import clipped, shown
from harness.core.facts import as_it_ran, jsonable
from harness.core.files import read_mapping
from harness.report.explain import catalogue
from harness.tracking.existing import LOSS, VAL_LOSS
from harness.tracking.history import SWITCHED, read_plan
from harness.tracking.journal import JOURNAL, MAX_ROW, METRICS_LINE, decode


class State(StrEnum):
    """How a folder stands.

    running: a process holds its lock.
    done, halted: as planned; by the guard.
    stopped: asked to stop after a save; the same command resumes it.
    crashed: ended by an error, or killed.
    broken: a run without a readable journal.
    foreign: files, and none of a run's.
    empty: no files, but for those of a start that was refused.
    """

    RUNNING = "running"
    DONE = "done"
    HALTED = "halted"
    STOPPED = "stopped"
    CRASHED = "crashed"
    BROKEN = "broken"
    FOREIGN = "foreign"
    EMPTY = "empty"


class Severity(StrEnum):
    """Of an event.

    error: its step does not count as healthy, or the run was rolled back, halted or failed.
    warning: any other code that says that something may be wrong.
    info: the rest, such as a resume.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


_BY_STATUS = {
    "done": State.DONE,
    "halted": State.HALTED,
    "stopped": State.STOPPED,
    "failed": State.CRASHED,
}
_ENDED = (State.DONE, State.HALTED, State.STOPPED)
# Any of these makes a folder one of a run.
_OF_A_RUN = (JOURNAL, "config.yaml", "plan.json", "checkpoints", "outcome.json")
# A start that was refused before its run began leaves these.
_OF_A_REFUSAL = frozenset({"lock", "data"})
_DEMOTED = "guard/demoted_layers"

_ENDS = ("run.failed", "guard.halt", "guard.rollback")
# Codes of the runbook that say that something went as planned: no reason to look.
_AS_PLANNED = ("profile.written", "fp8.picked", "precision.promote", "scaler.calibration")
_MAX_REASON = 300
_CANDIDATES = 4
# Rows of a journal that are not parsed here.
_NOT_NEEDED = (b'{"kind": "tags"', b'{"kind": "checkpoint"', b'{"kind": "artifact"')


@dataclass(frozen=True, slots=True)
class Overview:
    """One folder of a folder of runs. None: not known.

    path: of the folder.
    state: how it stands.
    reason: why it is in that state, where there is more to say.
    step, steps: the last step with figures, and how many there will be.
    recipe: as the config names it.
    train_loss, val_loss: the last ones, in the unit of the run's data.
    layers: number of modules that run in each precision now.
    events: number of events of each Severity.
    worst: the code that matters most; empty if there is none.
    latest: time of the last row, or of the folder's last change, in seconds since 1970.
    size: bytes on disk.
    """

    path: Path
    state: State
    reason: str = ""
    step: int | None = None
    steps: int | None = None
    recipe: str = ""
    train_loss: float | None = None
    val_loss: float | None = None
    layers: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    worst: str = ""
    latest: float = 0.0
    size: int = 0

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def age(self) -> float:
        """Seconds since `latest`."""
        return max(0.0, time.time() - self.latest)

    @property
    def share(self) -> dict[str, float]:
        """Share of the modules that run in each precision, 0 to 1, the largest first."""
        total = sum(self.layers.values())
        counts = sorted(self.layers.items(), key=lambda each: (-each[1], each[0]))
        return {precision: count / total for precision, count in counts}

    def as_json(self) -> dict[str, Any]:
        """What `harness runs --json` prints of it. Losses that are not finite are texts."""
        return {
            "name": self.name,
            "path": str(self.path),
            "state": self.state,
            "reason": self.reason,
            "step": self.step,
            "steps": self.steps,
            "recipe": self.recipe,
            "train_loss": None if self.train_loss is None else jsonable(self.train_loss),
            "val_loss": None if self.val_loss is None else jsonable(self.val_loss),
            "layers": dict(self.layers),
            "share": self.share,
            "events": dict(self.events),
            "worst": self.worst,
            "age_seconds": self.age,
            "bytes": self.size,
        }


@dataclass
class Totals:
    """What one line needs of a journal.

    rows: how many rows of any kind.
    metrics: values of the last row with a training loss; step: of that row.
    val_loss: the last one.
    params: of all "run" rows; later ones replace earlier ones.
    counted: what the speed counts: tokens, or samples.
    status: of the "end" row, if no process began after it.
    latest: time of the newest row that was parsed, in seconds since 1970.
    lowered: precision that the whole run went to; empty if it did not.
    codes: number of events of each code.
    """

    rows: int = 0
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    val_loss: float | None = None
    params: dict[str, Any] = field(default_factory=dict)
    counted: str = "tokens"
    status: str = ""
    latest: float = 0.0
    lowered: str = ""
    codes: Counter[str] = field(default_factory=Counter)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row, in the order of the journal."""
        self.latest = max(self.latest, float(row.get("time", 0.0)))
        if row["kind"] == "metrics":
            if LOSS in row["metrics"]:
                self.step, self.metrics = row["step"], row["metrics"]
            if VAL_LOSS in row["metrics"]:
                self.val_loss = float(row["metrics"][VAL_LOSS])
        # A new process has taken the run up again: it has not ended.
        elif row["kind"] == "run":
            self.params |= row.get("params", {})
            counted = row.get("data", {}).get("counted", self.counted)
            self.counted = shown(clipped(str(counted), _MAX_REASON))
            self.status = ""
        elif row["kind"] == "end":
            self.status = row["status"]
        elif row["kind"] == "event":
            self.codes[row["code"]] += 1
            lowered = row.get("lowered")
            if row["code"] == SWITCHED and isinstance(lowered, str) and lowered:
                self.lowered = lowered

    @property
    def steps(self) -> int | None:
        """How many steps there will be; None if it is not known."""
        value = self.params.get("train.steps", self.params.get("steps"))
        return value if type(value) is int and 0 <= value < 1 << 63 else None


def overview(folder: Path, locked: bool) -> Overview:
    """How the run in `folder` stands. locked: whether a process is writing it."""
    try:
        changed = folder.stat().st_mtime
        there = [name for name in _OF_A_RUN if os.path.lexists(folder / name)]
        names = {each.name for each in folder.iterdir()}
        is_empty = not names or ("lock" in names and names <= _OF_A_REFUSAL)
    except OSError as error:
        return Overview(folder, State.BROKEN, f"cannot be read: {error.strerror}")
    size = size_on_disk(folder)
    if not there and not locked:
        state = State.EMPTY if is_empty else State.FOREIGN
        return Overview(folder, state, latest=changed, size=size)

    # A journal that cannot be read still leaves what the other files say.
    outcome = read_mapping(folder / "outcome.json")
    journal, trouble = Totals(), ""
    try:
        journal = _read_journal(folder / JOURNAL)
        # A run that was killed in its first second has an empty journal, and nothing of it is lost.
        begun = (folder / JOURNAL).stat().st_size > 0 or "outcome.json" in there
        if not journal.rows and begun:
            trouble = f"{JOURNAL} has no row that can be read"
    except (OSError, ValueError) as error:
        trouble = f"{JOURNAL}: {getattr(error, 'strerror', None) or error}"
    state, reason = state_of(outcome, "outcome.json" in there, journal, trouble, locked)
    plan = read_plan(folder / "plan.json")
    return Overview(
        path=folder,
        state=state,
        # One line: an error's text may have several.
        reason=shown(clipped(" ".join(reason.split()), _MAX_REASON)),
        step=journal.step,
        steps=journal.steps,
        recipe=shown(str(journal.params.get("recipe") or plan.get("recipe", ""))),
        train_loss=journal.metrics.get(LOSS),
        val_loss=journal.val_loss,
        layers=layers_in(plan, journal, ended=state in _ENDED),
        events=_by_severity(journal.codes),
        worst=_worst(journal.codes),
        latest=journal.latest or changed,
        size=size,
    )


def state_of(
    outcome: Mapping[str, Any], has_outcome: bool, journal: Totals, trouble: str, locked: bool
) -> tuple[State, str]:
    """(state, why) of a folder that has files of a run.

    outcome: empty if outcome.json cannot be read; has_outcome: whether it is there.
    trouble: why the journal cannot be read.
    """
    if locked:
        return State.RUNNING, trouble
    if trouble:
        return State.BROKEN, trouble
    # A full disk may have refused outcome.json: the journal's last row has the status as well.
    status = outcome.get("status") or journal.status
    if not status and has_outcome:
        return State.BROKEN, "outcome.json cannot be read"
    if not status:
        return State.CRASHED, "killed: it wrote no outcome"
    if not isinstance(status, str) or status not in _BY_STATUS:
        source = "outcome.json" if outcome.get("status") else JOURNAL
        return State.BROKEN, f"{source}: no such status: {status}"
    state = _BY_STATUS[status]
    reason = str(outcome.get("reason") or "")
    if state == State.STOPPED:
        reason = f"{reason}; the same command resumes it".removeprefix("; ")
    return state, reason


def _read_journal(path: Path) -> Totals:
    """One pass over a journal. Raises OSError, and ValueError if it is no regular file.

    A torn last line, and lines that are no rows, are skipped.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("is not a regular file")
    found = Totals()
    # The newest lines of each kind; a few, as the newest one may be damaged.
    trained: deque[bytes] = deque(maxlen=_CANDIDATES)
    validated: deque[bytes] = deque(maxlen=_CANDIDATES)
    with path.open("rb") as lines:
        while line := lines.readline(MAX_ROW):
            if line.startswith(_NOT_NEEDED):
                found.rows += line.endswith(b"\n")
            elif not line.startswith(METRICS_LINE):
                row = decode(line)
                if row is not None:
                    found.rows += 1
                    found.add(row)
            elif line.endswith(b"\n"):  # else it is being written
                found.rows += 1
                if b'"train/loss"' in line:
                    trained.append(line)
                if b'"val/loss"' in line:
                    validated.append(line)

    for lines_of in (trained, validated):
        # The newest line that can be read counts.
        for line in reversed(lines_of):
            row = decode(line)
            if row is not None:
                found.add(row)
                break
    return found


def layers_in(plan: Mapping[str, Any], journal: Totals, ended: bool) -> dict[str, int]:
    """Number of modules in each precision, from the plan and what was moved since."""
    # What a run that ended really ran in is in its plan.
    effective = plan.get("effective_layers")
    if ended and isinstance(effective, dict) and effective:
        return dict(Counter(map(str, effective.values())))
    counts: Counter[str] = Counter()
    for layer in plan.get("layers", ()):
        counts[as_it_ran(layer["precision"], journal.lowered, False, False)] += 1

    # Which layers are in BF16 does not matter here, only how many.
    demoted = journal.metrics.get(_DEMOTED, 0.0)
    if math.isfinite(demoted) and not journal.lowered:
        moved = min(max(0, int(demoted)), counts["fp8"])
        counts["fp8"] -= moved
        counts["bf16"] += moved
    return {precision: count for precision, count in counts.items() if count}


@cache
def severities() -> dict[str, Severity]:
    """Code -> its severity, for every code that is more than information."""
    found: dict[str, Severity] = {}
    for code, healthy, _ in catalogue().ranking:
        if code in _AS_PLANNED:
            continue
        found[code] = Severity.ERROR if healthy == "no" else Severity.WARNING
    return found | dict.fromkeys(_ENDS, Severity.ERROR)


def _by_severity(codes: Mapping[str, int]) -> dict[str, int]:
    known = severities()
    counts = {str(severity): 0 for severity in Severity}
    for code, count in codes.items():
        counts[known.get(code, Severity.INFO)] += count
    return counts


def _worst(codes: Iterable[str]) -> str:
    """The code that matters most. What the guard did about others comes after them."""
    given = list(codes)
    ranked = [*catalogue().ranked(given), *(code for code in _ENDS if code in given)]
    known = severities()
    order = list(Severity)
    return min(ranked, key=lambda code: order.index(known.get(code, Severity.INFO)), default="")


def size_on_disk(folder: Path) -> int:
    """Bytes that the files below `folder` take on the disk. Links are not followed; a hard link counts once."""
    total = 0
    seen: set[tuple[int, int]] = set()
    for entry in _entries(folder):
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:  # deleted since
            continue
        if status.st_nlink > 1:
            identity = (status.st_dev, status.st_ino)
            if identity in seen:
                continue
            seen.add(identity)
        # In units of 512 bytes, whatever the file system's own unit is.
        total += status.st_blocks * 512
    return total


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Every file below `folder`; folders that cannot be read are left out."""
    pending = [str(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        yield entry
        except OSError:
            continue
