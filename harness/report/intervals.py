"""95% intervals of a difference of means, by Student's t, from closed forms and bisection alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev, variance

CONFIDENCE = 0.95
_MOST, _HALVINGS = 1000.0, 60
Interval = tuple[float, float]


def t_quantile(degrees: int) -> float:
    """The t that |T| stays under with probability 0.95, to 1e-9. degrees: of freedom, 1 or more."""
    low, high = 0.0, _MOST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if t_coverage(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_coverage(t: float, degrees: int) -> float:
    """P(|T| < t) for Student's t with whole degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def of_paired(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Of the mean of b[i] - a[i]: values with the same place belong together. At least two pairs (Student, 1908)."""
    gaps = [other - one for one, other in zip(a, b, strict=True)]
    half = t_quantile(len(gaps) - 1) * stdev(gaps) / math.sqrt(len(gaps))
    return mean(gaps) - half, mean(gaps) + half


def of_independent(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Of mean(b) - mean(a), whose variances may differ (Welch, 1947). At least two values on each side.

    Degrees of freedom are rounded down, which makes the interval wider.
    """
    shares = variance(a) / len(a), variance(b) / len(b)
    gap, total = mean(b) - mean(a), sum(shares)
    if not total:
        return gap, gap
    below = shares[0] ** 2 / (len(a) - 1) + shares[1] ** 2 / (len(b) - 1)
    degrees = max(1, math.floor(total**2 / below))
    half = t_quantile(degrees) * math.sqrt(total)
    return gap - half, gap + half
