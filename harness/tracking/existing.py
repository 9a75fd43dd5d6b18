"""Rows that a journal has already when a resume executes their steps again. Torch-free.

After a kill -9 a run starts again at its last checkpoint and repeats a few steps. Their rows are in the journal
already. A repeated row must not be written twice. A row that comes out different must be noticed, because a resume
promises the same bits.

So a resumed journal looks up each row before it writes it. A metrics row is known by (attempt, step, sorted metric
names), an event by (attempt, step, code). An existing row is crossed off when it is met again, so that two equal events
of one step stay two. Events about the process or its disk are never repetitions: a run that fails twice at one step has
failed twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.errors import some
from harness.core.files import read_mapping

LOSS = "train/loss"
"""The metric that every step has."""
VAL_LOSS = "val/loss"
_MOST_SPANS = 8
_DIGITS = 18
Metrics = dict[str, float]
# Events about the process or its disk, by the beginning of their code.
_OF_THE_PROCESS = ("run.", "checkpoint.", "flight.", "report.", "journal.")
# Metrics of how fast or large the process was, which differ each time; so do all that begin with time/.
_SPEEDS = ("train/tokens_per_second", "train/mfu", "train/peak_memory_gib")


def is_speed(name: str) -> bool:
    """Whether a metric says how fast or large the process was: it differs even between runs of the same bits."""
    return name.startswith("time/") or name in _SPEEDS


def first_step(folder: Path) -> int:
    """The first step of the run in `folder`; a run may begin from a checkpoint of another.

    0 for a loop of the user's own, which numbers its steps as it likes.
    """
    if not (folder / "config.yaml").exists():
        return 0
    # A checkpoint's folder is called step-<N>. The file may be damaged: a number has a bounded length.
    source = str(read_mapping(folder / "started_from.json").get("path"))
    number = source.rpartition("step-")[2]
    if number.isdecimal() and len(number) < _DIGITS:
        return int(number) + 1
    return 1


def spans(steps: Iterable[int]) -> str:
    """`31-75, 80`: steps in order, neighbours joined."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    texts: list[str] = []
    for first, last in found:
        text = f"{first}-{last}" if first < last else str(first)
        texts.append(text)
    return some(texts, _MOST_SPANS)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A metrics row, compared with the existing rows of its identity.

    same: the journal has this row, to the last bit.
    mismatch: the journal has this row with other values; names the first metric that differs.
    report: whether this is the first mismatch of the process.
    """

    same: bool = False
    mismatch: dict[str, Any] | None = None
    report: bool = False


@dataclass
class ExistingRows:
    """The rows of a journal from the step of a resume on.

    latest: time of the journal's last row; 0 if it has none.
    attempt: the journal's highest attempt; 0 if it has none.
    """

    latest: float = 0.0
    attempt: int = 0
    _metrics: dict[tuple[int, int, tuple[str, ...]], list[Metrics]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _events: dict[tuple[int, int, str], int] = field(default_factory=lambda: defaultdict(int))
    _reported: bool = False
    _differs: bool = False

    @classmethod
    def index(cls, rows: Iterable[Mapping[str, Any]], resume_step: int) -> ExistingRows:
        """Index the rows of steps from `resume_step` on."""
        existing = cls()
        for row in rows:
            existing.latest = max(existing.latest, row.get("time", 0.0))
            existing.attempt = max(existing.attempt, row.get("attempt", 0))
            # The step before too: a run that had done its last one is validated once more.
            if row.get("step", -1) < resume_step - 1:
                continue
            if row["kind"] == "metrics":
                existing._add(row)
            elif row["kind"] == "event":
                existing._events[row["attempt"], row["step"], row["code"]] += 1
        return existing

    def _add(self, row: Mapping[str, Any]) -> None:
        """Index a metrics row, unless an equal one is there."""
        values = row["metrics"]
        earlier = self._metrics[row["attempt"], row["step"], tuple(sorted(values))]
        for old in earlier:
            if _first_difference(old, values) is None:
                return
        earlier.append(values)

    def metrics(self, attempt: int, step: int, values: Metrics) -> Comparison:
        """Compare with the existing rows of this identity, and cross off the one that is equal.

        Equal means to the last bit; times and rates are not compared.
        """
        identity = (attempt, step, tuple(sorted(values)))
        existing = self._metrics.get(identity)
        if not existing:
            return Comparison()

        for place, old in enumerate(existing):
            if _first_difference(old, values) is None:
                del existing[place]
                self._differs = False
                return Comparison(same=True)

        # None is equal: compare with the last one that was written.
        last = existing[-1]
        name = _first_difference(last, values)
        assert name is not None
        report = not self._reported
        self._differs = self._reported = True
        mismatch = {"metric": name, "before": last[name], "now": values[name]}
        return Comparison(mismatch=mismatch, report=report)

    def event(self, attempt: int, step: int, code: str) -> bool:
        """Whether the journal has this event already; each existing one is crossed off once.

        False while the last metrics row differed from the existing one: what follows from other figures is another
        event.
        """
        if self._differs or code.startswith(_OF_THE_PROCESS):
            return False
        identity = (attempt, step, code)
        if not self._events.get(identity):
            return False
        self._events[identity] -= 1
        return True


def _first_difference(old: Metrics, new: Metrics) -> str | None:
    """The first metric by name whose value differs; None if the rows are equal."""
    for name in sorted(new):
        if is_speed(name):
            continue
        # repr is another for every two different floats, 0.0 and -0.0 too, and the same for every NaN.
        if repr(old[name]) != repr(new[name]):
            return name
    return None
