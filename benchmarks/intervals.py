"""The few interval estimates that the studies here publish, from closed forms and bisection alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from harness.report.intervals import CONFIDENCE, t_quantile


@dataclass(frozen=True, slots=True)
class Interval:
    """Two-sided 95% t interval of a mean; sd is the sample's, all in the unit of the values."""

    n: int
    mean: float
    sd: float
    low: float
    high: float


def t_interval(values: Sequence[float]) -> Interval:
    """mean +- t * sd / sqrt(n), t of n - 1 degrees of freedom (Student, 1908). Raises ValueError under two values."""
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval needs at least 2 values, not {n}")
    middle, sd = mean(values), stdev(values)
    half = t_quantile(n - 1) * sd / math.sqrt(n)
    return Interval(n, middle, sd, middle - half, middle + half)


def samples_needed(sd: float, half_width: float) -> int:
    """The fewest samples, at least 2, whose t interval is no wider than +- half_width if their sd is `sd`."""
    n = 2
    while t_quantile(n - 1) * sd / math.sqrt(n) > half_width:
        n += 1
    return n


def binomial_upper(hits: int, trials: int) -> float:
    """One-sided 95% upper bound of a probability after `hits` in `trials` (Clopper and Pearson, 1934).

    Without a hit it is 1 - 0.05^(1 / trials), about 3 / trials.
    """
    if hits >= trials:
        return 1.0
    return _solve(lambda p: (1 - CONFIDENCE) - _at_most(hits, trials, p), 0.0, 1.0)


def _at_most(hits: int, trials: int, p: float) -> float:
    """P(X <= hits), X binomial; in logarithms, since the coefficients overflow."""
    if p <= 0.0 or p >= 1.0:
        return float(p <= 0.0)
    logs = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(p)
        + (trials - k) * math.log1p(-p)
        for k in range(hits + 1)
    )
    return math.fsum(map(math.exp, logs))


def _solve(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function crosses zero, by bisection."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
