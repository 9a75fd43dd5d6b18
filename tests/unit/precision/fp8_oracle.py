"""An independent oracle of FP8 and of Transformer Engine's scale update: tables and loops, no torch arithmetic."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np


def decode(code: int, fmt: str) -> float:
    """Value of an 8-bit code, from the formats' definition (OCP FP8, arXiv 2209.05433)."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if fmt == "e4m3" else (5, 2, 15)
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if fmt == "e4m3" and (code & 0x7F) == 0x7F:
        return math.nan
    if fmt == "e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


GRID = {
    fmt: sorted({v for c in range(128) if math.isfinite(v := decode(c, fmt))})
    for fmt in ("e4m3", "e5m2")
}


def round_to_fp8(value: float, fmt: str) -> float:
    """Nearest FP8 value, ties to the even code, saturating; NaN stays NaN."""
    if math.isnan(value):
        return value
    grid = GRID[fmt]
    magnitude = abs(value)
    if magnitude >= grid[-1]:
        return math.copysign(grid[-1], value)
    above = bisect_left(grid, magnitude)
    if grid[above] == magnitude:
        return math.copysign(magnitude, value)
    low, high = grid[above - 1], grid[above]
    middle = (low + high) / 2  # exact: both have few bits
    # Codes of positive values are consecutive, so an even index is an even mantissa.
    up = magnitude > middle or (magnitude == middle and above % 2 == 0)
    return math.copysign(high if up else low, value)


def quantize(values: np.ndarray, scale: float, fmt: str) -> np.ndarray:
    """Element by element: float32 product, then one rounding to FP8."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values.astype(np.float32) * np.float32(scale)
    return np.array(
        [round_to_fp8(float(v), fmt) for v in scaled.ravel()], dtype=np.float64
    ).reshape(values.shape)


def update(
    history: list[list[float]], scale: list[float], fp8_max: list[float], margin: int, algo: str
) -> tuple[list[list[float]], list[float]]:
    """Transformer Engine's delayed-scaling update, slot by slot, in plain Python over float32 scalars.

    Its maximum is C's fmaxf from 0: a NaN loses against any number.
    """
    rows = len(history)
    new_history = [list(row) for row in history]
    new_scale = list(scale)
    for slot in range(len(scale)):
        last = np.float32(history[0][slot])
        if last == 0:
            continue
        column = [np.float32(history[row][slot]) for row in range(rows)]
        reference = (
            last if algo == "most_recent" else max([np.float32(0), *(v for v in column if v == v)])
        )
        rolled = [np.float32(0), *column[2:], last]
        for row in range(rows):
            new_history[row][slot] = float(rolled[row])
        if np.isfinite(reference) and reference > 0:
            with np.errstate(over="ignore"):
                fresh = np.float32(fp8_max[slot] * 2.0**-margin) / reference
            new_scale[slot] = float(min(fresh, np.finfo(np.float32).max))
    return new_history, new_scale
