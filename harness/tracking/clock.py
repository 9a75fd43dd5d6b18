"""The time of a row: the wall clock's, read once, and from then on a clock that nobody can set."""

from __future__ import annotations

import time


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
