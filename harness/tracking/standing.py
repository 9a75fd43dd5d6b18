"""Rows that already stand in a journal for steps that a resume executes again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Metrics = dict[str, float]
_NOT_OF_THE_STEP = ("run.", "checkpoint.", "flight.", "report.", "journal.")


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
    last: int = 0
    twice: set[int] = field(default_factory=set)
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
            standing.attempt = max(standing.attempt, row.get("attempt", 0))
            standing.last = max(standing.last, row.get("step", 0))
            # The step before too: a run that had done its last one is validated once more.
            if row.get("step", -1) < resume_step - 1:
                continue
            if row["kind"] == "metrics" and "restored" not in row:
                values = row["metrics"]
                known = standing._metrics[row["attempt"], row["step"], tuple(sorted(values))]
                if any(_first_difference(old, values) is None for old in known):
                    standing.twice |= {row["step"]} if any(not _of_the_process(name) for name in values) else set()
                else:
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
        if not _of_the_process(name) and repr(old[name]) != repr(new[name]):
            return name
    return None


_OF_THE_PROCESS = ("train/tokens_per_second", "train/mfu", "train/peak_memory_gib")


def _of_the_process(name: str) -> bool:
    """Whether it says how fast or large the process was, which is another each time."""
    return name.startswith("time/") or name in _OF_THE_PROCESS
