"""Reduces long series to few points without losing an extreme: the minimum and maximum of each group of steps.

A page cannot hold 10,000 steps of hundreds of slots, and a screen cannot show them. A mean or every n-th point would
lose a spike of a single step, which is what people look for. So steps are divided into groups, and each group keeps its
smallest and its largest value. NaN and infinite values have no place on an axis, so they are kept apart, and the page
marks their steps.

Many series of one length are packed: a value becomes 16 bits on a logarithmic scale from the smallest to the largest
value of its series. Over a range of 2^40 the error is under 0.03%.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NONE, ZERO, FIRST, LAST = 0, 1, 2, 65535
"""Codes of a packed value: NONE: no value; ZERO: 0 or less; FIRST and LAST: smallest and largest value over 0."""
NOT_A_NUMBER, INFINITE = 1, 2
"""Bits of a group's mark: some value in it was NaN, some was infinite."""


def extremes(values: Floats, most: int) -> Ints:
    """Places of at most `most` finite values, ascending: of each group the smallest and the largest.

    values: [n]. The first and the last finite value are among them, as long as `most` is 4 or more.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= most:
        return finite

    # Groups of equal length; the last one is filled up with its own last value. Each gives two points, and two are for
    # the ends of the series.
    groups = max(1, (most - 2) // 2)
    each = -(-len(finite) // groups)
    padding = -len(finite) % each
    places = np.pad(finite, (0, padding), mode="edge").reshape(-1, each)
    grouped = values[places]
    rows = np.arange(len(places))
    smallest = places[rows, grouped.argmin(axis=1)]
    largest = places[rows, grouped.argmax(axis=1)]
    return np.unique(np.concatenate([finite[:1], smallest, largest, finite[-1:]]))


def not_finite(values: Floats, most: int) -> Ints:
    """Places of at most `most` values that are NaN or infinite, ascending, spread over all of them."""
    places = np.flatnonzero(~np.isfinite(values))
    each = max(1, -(-len(places) // most))
    return places[::each]


@dataclass(frozen=True, slots=True)
class Groups:
    """How `count` steps are divided into at most `most` groups: `each` neighbours in one."""

    count: int
    each: int

    @classmethod
    def of(cls, count: int, most: int) -> Groups:
        """The groups of `count` steps."""
        return cls(count, max(1, -(-count // most)))

    def __len__(self) -> int:
        return -(-self.count // self.each)

    def of_place(self, place: int) -> int:
        """The group of the step at `place`."""
        return place // self.each


class Bounds:
    """Smallest and largest value of each group, of many series at once.

    low, high: float64 [series, groups]; NaN where a group has no finite value.
    marks: uint8 [series, groups]; the bits NOT_A_NUMBER and INFINITE.
    """

    def __init__(self, series: int, groups: int) -> None:
        self.low = np.full((series, groups), np.nan)
        self.high = np.full((series, groups), np.nan)
        self.marks = np.zeros((series, groups), np.uint8)

    def add(self, group: int, rows: Ints, values: npt.NDArray[np.floating]) -> None:
        """Add steps of one group. values: [steps, len(rows)], of the series `rows`."""
        # fmin and fmax below ignore NaN, so infinite values are made NaN. Most blocks are finite and need no copy.
        if not np.isfinite(values).all():
            is_nan, is_infinite = np.isnan(values), np.isinf(values)
            marks = np.where(is_nan.any(axis=0), NOT_A_NUMBER, 0)
            marks |= np.where(is_infinite.any(axis=0), INFINITE, 0)
            self.marks[rows, group] |= marks.astype(np.uint8)
            values = np.where(is_infinite, np.nan, values)
        self.low[rows, group] = np.fmin(self.low[rows, group], np.fmin.reduce(values, axis=0))
        self.high[rows, group] = np.fmax(self.high[rows, group], np.fmax.reduce(values, axis=0))


@dataclass(frozen=True, slots=True)
class Packed:
    """Series as text: `codes[i]` is base64 of little-endian uint16 [groups].

    low[i], high[i]: binary logarithms of the smallest and the largest value over 0 of series i; both 0 if it has none.
    A code from FIRST to LAST stands for 2^(low + (code - FIRST) / (LAST - FIRST) * (high - low)).
    """

    codes: list[str]
    low: list[float]
    high: list[float]


def pack(values: Floats) -> Packed:
    """Pack float64 [series, groups]; NaN stands for no value."""
    positive = values > 0
    logs = np.full(values.shape, np.nan)
    np.log2(values, out=logs, where=positive)

    # The range of each series. A series without a value over 0 needs none.
    low = np.fmin.reduce(logs, axis=1, initial=np.nan)
    high = np.fmax.reduce(logs, axis=1, initial=np.nan)
    empty = np.isnan(low)
    low[empty] = high[empty] = 0.0

    # Codes per unit of the logarithm. A series of equal values has no span: all of them get FIRST.
    span = high - low
    steps = np.divide(LAST - FIRST, span, out=np.zeros_like(span), where=span > 0)
    codes = np.full(values.shape, NONE, np.uint16)
    codes[~np.isnan(values)] = ZERO
    scaled = FIRST + np.rint((logs - low[:, None]) * steps[:, None])
    codes[positive] = scaled[positive].astype(np.uint16)
    return Packed([as_text(row) for row in codes.astype("<u2")], rounded(low), rounded(high))


def unpack(packed: Packed) -> Floats:
    """The values that `pack` packed, as the page reads them; NaN where there is none."""
    rows: list[Floats] = []
    for text, low, high in zip(packed.codes, packed.low, packed.high, strict=True):
        codes = np.frombuffer(base64.b64decode(text), "<u2").astype(np.float64)
        values = np.exp2(low + (codes - FIRST) / (LAST - FIRST) * (high - low))
        values[codes == ZERO] = 0.0
        values[codes == NONE] = np.nan
        rows.append(values)
    return np.array(rows)


def as_text(row: npt.NDArray[np.generic]) -> str:
    """The bytes of an array as base64."""
    return base64.b64encode(row.tobytes()).decode()


def rounded(values: Floats, digits: int = 7) -> list[float]:
    """The values, rounded to `digits` significant digits."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
