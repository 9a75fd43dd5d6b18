"""Repeated timings in three numbers, and when two of them are a tie. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """The middle of some times, in their unit. low, high: the quartiles, between which half of them lie."""

    low: float
    median: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    """Quartiles of at least one value; of a single one they are itself."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, statistics.median(values), high)


def as_fast(mine: Spread, fastest: Spread) -> bool:
    """Whether each median lies within the other's middle half.

    Both are asked: one slow turn of the fastest would otherwise make all others as fast as it.
    """
    return mine.low <= fastest.median and mine.median <= fastest.high
