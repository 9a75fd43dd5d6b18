"""What a resume has to know: rows that already stand in the journal for steps that are executed again.

After a kill -9 the run starts again at its last checkpoint and repeats a few steps. A repeated row must not stand in
the journal twice, and one that comes out different must not go unnoticed: a resume promises the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Seen:
    """Whether a metrics row already stands (`same`), or stands with other values (`mismatch`: the first of them)."""

    same: bool = False
    mismatch: dict[str, Any] | None = None
    report: bool = False


@dataclass
class Replay:
    """Rows by identity: (attempt, step, sorted metric names) or (attempt, step, event code)."""

    _metrics: dict[tuple[int, int, tuple[str, ...]], list[Metrics]] = field(default_factory=lambda: defaultdict(list))
    _events: dict[tuple[int, int, str], int] = field(default_factory=lambda: defaultdict(int))
    _reported: bool = False

    @classmethod
    def index(cls, rows: Iterable[Mapping[str, Any]], resume_step: int) -> Replay:
        """Index the rows of steps from `resume_step` on."""
        replay = cls()
        for row in rows:
            if row.get("step", -1) < resume_step:
                continue
            if row["kind"] == "metrics":
                values = row["metrics"]
                replay._metrics[row["attempt"], row["step"], tuple(sorted(values))].append(values)
            elif row["kind"] == "event":
                replay._events[row["attempt"], row["step"], row["code"]] += 1
        return replay

    def metrics(self, attempt: int, step: int, values: Metrics) -> Seen:
        """Compare with the rows of this identity and cross off the one that is bit-equal, times and rates aside."""
        standing = self._metrics.get((attempt, step, tuple(sorted(values))))
        if not standing:
            return Seen()
        for place, old in enumerate(standing):
            if _first_difference(old, values) is None:
                del standing[place]
                return Seen(same=True)
        name = _first_difference(standing[-1], values)
        assert name is not None
        report, self._reported = not self._reported, True
        return Seen(mismatch={"metric": name, "before": standing[-1][name], "now": values[name]}, report=report)

    def event(self, attempt: int, step: int, code: str) -> bool:
        """True if this event already stands; each standing one is crossed off once."""
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
