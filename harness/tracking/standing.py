"""Rows that stand in a journal for steps that a resume executes again. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.errors import some
from harness.core.files import read_mapping

LOSS = "train/loss"
"""What every step has figures of."""
_MOST_SPANS = 8
_DIGITS = 18
Metrics = dict[str, float]
_NOT_OF_THE_STEP = ("run.", "checkpoint.", "flight.", "report.", "journal.")


def first_step(folder: Path) -> int:
    """The first step of the run in `folder`, which may have begun from a checkpoint of another; 0: of a loop that is
    not ours, and begins where it likes.
    """
    if not (folder / "config.yaml").exists():
        return 0
    began = str(read_mapping(folder / "started_from.json").get("path")).rpartition("step-")[2]
    return int(began) + 1 if began.isdecimal() and len(began) < _DIGITS else 1


def spans(steps: Iterable[int]) -> str:
    """`31-75, 80`: steps in order, neighbours joined."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return some([f"{a}-{b}" if a < b else str(a) for a, b in found], _MOST_SPANS)


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
    of all, 0 if there is none. attempt, last: the highest attempt and step of all, likewise. twice: steps of rows that
    stand there twice, to the last bit. Rows that were brought back from MLflow are no evidence of bits.
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
    def index(cls, rows: Iterable[Mapping[str, Any]], resume_step: int) -> StandingRows:
        """Index the rows of steps from `resume_step` on."""
        standing = cls()
        for row in rows:
            standing.latest = max(standing.latest, row.get("time", 0.0))
            standing.attempt = max(standing.attempt, row.get("attempt", 0))
            # The step before too: a run that had done its last one is validated once more.
            if row.get("step", -1) < resume_step - 1:
                continue
            if row["kind"] == "metrics":
                values = row["metrics"]
                known = standing._metrics[row["attempt"], row["step"], tuple(sorted(values))]
                if not any(_first_difference(old, values) is None for old in known):
                    known.append(values)
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
        return Seen(
            mismatch={"metric": name, "before": standing[-1][name], "now": values[name]},
            report=report,
        )

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
        if not _of_the_process(name) and repr(old[name]) != repr(new[name]):
            return name
    return None


_OF_THE_PROCESS = ("train/tokens_per_second", "train/mfu", "train/peak_memory_gib")


def _of_the_process(name: str) -> bool:
    """Whether it says how fast or large the process was, which is another each time."""
    return name.startswith("time/") or name in _OF_THE_PROCESS
