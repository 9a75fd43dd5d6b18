"""Whether a file without a header has ids of the dtype that `data.dtype` says, judged by how its bytes are spread.

Ids that are read with another width train without an error, on numbers that mean nothing. The bytes show the width:

- Frequent ids are small. So the upper bytes of wide ids are zero or nearly so, and their lower bytes are not.
- Bytes at even and at odd places are spread alike if ids have one byte, and differ if they have two: lower and upper.

A file that is read with the wrong width is usually found by one of two measures:

- entropy in bits: how many values a byte (or a half of a number) really takes;
- total variation distance: how far two distributions are apart, 0 to 1. Two samples of one distribution are not quite
  at 0; `_noise` says how far chance alone takes them.

SAMPLES places of the file are looked at, at multiples of 8 bytes. Few bytes say little: a file is refused only where
chance does not explain what was found.

| declared | refused as | by |
|---|---|---|
| any | whole numbers of float32 or float64 | `_whole_floats` |
| any | int64, uint32, either byte order | `_wide` |
| uint8 | uint16, either byte order | `_pairs_in_bytes` |
| uint16 | uint8, big-endian uint16; float32 | `_bytes_in_pairs`; `_floats` |
| uint32 | uint16 | `_pairs_in_fours` |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SAMPLES, SAMPLE_BYTES = 16, 1 << 13
CELL = 8
"""Bytes of the widest id."""

# With fewer than these, chance explains anything.
_LEAST_BYTES, _LEAST_PAIRS, _LEAST_IN_PART = 128, 128, 256
_MOST_UPPER = 0x3F  # upper half of the largest id of four bytes: corpus.LARGEST
# From here on eight bytes are a small negative number: padding (-1, -100).
_NEGATIVE = (1 << 64) - (1 << 16)
_BINS = 16
Numbers = npt.NDArray[Any]


class Other(NamedTuple):
    """Why a file is not of a dtype.

    why, fix: as in a Problem.
    looks_like: what the file does not look like; empty: ids of the declared dtype.
    """

    why: str
    fix: str
    looks_like: str = ""


def other_width(path: Path, size: int, dtype: str) -> Other | None:
    """Why the file at `path`, of `size` bytes, is not of `dtype`; None if nothing speaks against it. Raises OSError."""
    data = _sampled(path, size)
    if len(data) < _LEAST_BYTES:
        return None
    found = _whole_floats(data, path) or _wide(data, dtype, path)
    if found is None and dtype == "uint8":
        found = _pairs_in_bytes(data, path)
    elif found is None and dtype == "uint16":
        found = _bytes_in_pairs(data, path) or _floats(data)
    elif found is None:
        found = _pairs_in_fours(data)
    return found


def _sampled(path: Path, size: int) -> npt.NDArray[np.uint8]:
    if size <= SAMPLES * SAMPLE_BYTES:
        return np.fromfile(path, np.uint8, size // CELL * CELL)

    # A whole number of cells: an id of any width must not be cut at the start of a sample.
    step = (size - SAMPLE_BYTES) // (SAMPLES - 1) // CELL * CELL
    samples: list[npt.NDArray[np.uint8]] = []
    for number in range(SAMPLES):
        offset = number * step
        samples.append(np.fromfile(path, np.uint8, SAMPLE_BYTES, offset=offset))
    return np.concatenate(samples)


def _whole_floats(data: npt.NDArray[np.uint8], path: Path) -> Other | None:
    """Ids that were written as floats. Ids of any other width are no whole numbers if they are read as floats."""
    for dtype, name in (("<f4", "float32"), ("<f8", "float64")):
        # Signals and overflows are floats, too.
        with np.errstate(all="ignore"):
            numbers = data.view(dtype)
            is_id = (numbers >= 0) & (numbers < _MOST_UPPER << 16) & (numbers == np.floor(numbers))
        if is_id.all() and len(np.unique(numbers)) > 2:
            why = f"all are whole numbers if they are read as {name}"
            return Other(why, _rewritten(path, dtype))
    return None


def _wide(data: npt.NDArray[np.uint8], dtype: str, path: Path) -> Other | None:
    """Ids of eight or four bytes, in either byte order."""
    for order, name in (("<", ""), (">", "big-endian ")):
        numbers = data.view(f"{order}u8")
        negative = numbers >= _NEGATIVE
        ids = numbers[~negative]
        # Four zeros in every eight bytes; of ids of four bytes every second one would be 0.
        if 2 * len(ids) <= len(numbers):
            continue
        if ids.max() < 1 << 32 and len(np.unique(ids)) > 1:
            why = f"four of every eight bytes are 0, as of {name}int64 ids"
            return Other(why, _rewritten(path, f"{order}i8"))

    # Declared as four bytes: only the byte order can be wrong.
    if dtype == "uint32":
        if _upper_is_small(data, ">"):
            why = "its upper halves come last, as of big-endian uint32 ids"
            return Other(why, _rewritten(path, ">u4"))
        return None

    # Declared as one or two bytes: ids of four would show as pairs of a number and a 0.
    if _upper_is_small(data, "<"):
        why = "every second number is 0 or nearly so, as the upper halves of uint32 ids are"
        return Other(why, "set data.dtype=uint32")
    if _upper_is_small(data, ">"):
        why = "every second number is 0 or nearly so, as of big-endian uint32 ids"
        return Other(why, _rewritten(path, ">u4"))
    return None


def _rewritten(path: Path, dtype: str) -> str:
    """A command that writes the file as uint32 ids; of a folder's files, all into one new folder."""
    folder = path.parent / "uint32"
    made = folder / path.name
    command = f"import numpy; numpy.fromfile('{path}', '{dtype}').astype('<u4').tofile('{made}')"
    then = f"then data.path={folder} data.dtype=uint32"
    return f"mkdir -p '{folder}' && python -c \"{command}\"; {then}"


def _upper_is_small(data: npt.NDArray[np.uint8], order: str) -> bool:
    """Whether the upper halves of four-byte numbers of this byte order are those of ids, and the lower ones are ids."""
    halves = data.view(f"{order}u2")
    lower = halves[::2]
    upper = halves[1::2]
    if order == ">":
        lower, upper = upper, lower
    ids = upper != 0xFFFF  # others are small negative numbers: padding
    if 2 * ids.sum() <= len(ids):
        return False
    lower = lower[ids]
    upper = upper[ids]

    # All ids under 65,536: the clearest case. Nothing but zeros says nothing.
    if not upper.any():
        return bool(lower.any())

    # Larger ids: upper halves stay within a vocabulary, and lower halves must range much further than they do.
    most = max(int(upper.max()), 1)
    if most > _MOST_UPPER or lower.max() <= 4 * most:
        return False
    return most <= 3 or bool(np.median(upper) <= 1)


def _pairs_in_bytes(data: npt.NDArray[np.uint8], path: Path) -> Other | None:
    """Ids of two bytes, declared as ids of one. Text passes: it has no NUL."""
    pairs = data.reshape(-1, 2)
    first = pairs[:, 0]
    second = pairs[:, 1]
    if _is_upper(first, second):
        name, fix = "uint16", "set data.dtype=uint16"
    elif _is_upper(second, first):
        name, fix = "big-endian uint16", _rewritten(path, ">u2")
    else:
        return None
    why = f"its bytes come in pairs, of which one is small, as those of {name} ids"
    fix += ". If they are bytes all the same: docs/guide/data.md, bytes in pairs"
    return Other(why, fix)


def _is_upper(lower: Numbers, upper: Numbers) -> bool:
    """Whether `upper` are the upper bytes of two-byte ids, and `lower` the lower ones.

    Not so for sound and other numbers of 16 bits: they are negative half of the time, 0xF0 to 0xFF in their upper byte.
    Not so for pairs of small numbers (notes and lengths): lower bytes of ids take all values.
    """
    if not lower.any() or upper.all():
        return False
    if not upper.any():
        return True

    # Sound.
    if (upper >= 0xF0).mean() > (upper < 0x10).mean() / 100:
        return False

    # Pairs of small numbers. A vocabulary under 1,024 ids may leave some bins empty: then a wide range is enough.
    lows = np.histogram(lower, _BINS, (0, 256))[0] / len(lower)
    highs = np.histogram(upper, _BINS, (0, 256))[0] / len(upper)
    if upper.max() <= 3:
        if lower.max() < 0xC0:
            return False
    elif not lows.all():
        return False

    # It must hold all over the file: a program or a table has it in some parts only.
    lower_parts = np.array_split(lower, SAMPLES)
    upper_parts = np.array_split(upper, SAMPLES)
    for part, other in zip(lower_parts, upper_parts, strict=True):
        if len(part) >= _LEAST_IN_PART and part.mean() < other.mean():
            return False
    return _apart(lows, highs) > 0.1 + 2 * _noise(lows, highs, len(lower))


def _bytes_in_pairs(data: npt.NDArray[np.uint8], path: Path) -> Other | None:
    """Ids of one byte, or big-endian ones, declared as ids of two.

    The upper bytes of uint16 ids take fewer values than the lower ones, since frequent ids are small. Of one-byte ids
    both are spread alike, and not uniformly; of big-endian ids the order is reversed.
    """
    pairs = data.reshape(-1, 2)
    if _is_upper(pairs[:, 1], pairs[:, 0]):
        why = "its first bytes are small and its second ones are not, as of big-endian ids"
        return Other(why, _rewritten(path, ">u2"))
    if len(pairs) < _LEAST_PAIRS:
        return None

    # 8 bits are uniform bytes, such as compressed ones. A short sample of uniform bytes shows fewer.
    lower = np.bincount(pairs[:, 0], minlength=256) / len(pairs)
    upper = np.bincount(pairs[:, 1], minlength=256) / len(pairs)
    most = min(7.8, np.log2(len(pairs)) - 3)
    if _alike(lower, upper, len(pairs), most):
        why = "its first and its second bytes are spread alike, as ids of one byte are"
        return Other(why, "set data.dtype=uint8")
    if _bits(upper) > 1.5 * _bits(lower) + 0.5:
        why = "its second bytes take more values than its first ones, as big-endian ids do"
        return Other(why, _rewritten(path, ">u2"))
    return None


def _pairs_in_fours(data: npt.NDArray[np.uint8]) -> Other | None:
    """Ids of two bytes, declared as ids of four. The upper halves of ids of four are not spread as the lower ones."""
    halves = data.view("<u2")
    if halves.max() > _MOST_UPPER:  # `corpus` refuses these: ids larger than any vocabulary
        return None
    count = len(halves) // 2
    lower = np.bincount(halves[::2], minlength=_MOST_UPPER + 1) / count
    upper = np.bincount(halves[1::2], minlength=_MOST_UPPER + 1) / count
    if _alike(lower, upper, len(halves) // 2, np.inf):
        why = "its upper and its lower halves are spread alike, as ids of two bytes are"
        return Other(why, "set data.dtype=uint16")
    return None


def _floats(data: npt.NDArray[np.uint8]) -> Other | None:
    """Numbers of float32: the upper halves have magnitudes from 2^-14 to 2^16, the lower ones any value."""
    halves = data.view("<u2")
    lower = halves[::2]
    upper = halves[1::2]

    # An upper half is the sign, the 8 bits of the exponent (bias 127), and 7 of the mantissa.
    exponents = upper & 0x7F80
    inside = ((exponents >= 113 << 7) & (exponents < 143 << 7)).mean()
    spread, _ = np.histogram(lower, _BINS, (0, 1 << 16))
    if inside > 0.98 and spread.min() > len(lower) / 64:
        why = (
            "every second number is as the upper half of a float32 is, and the others are anything"
        )
        fix = "token ids are whole numbers; for anything else: data.target (docs/guide/datasets.md)"
        return Other(why, fix, "token ids")
    return None


def _alike(lower: Numbers, upper: Numbers, count: int, most: float) -> bool:
    """Whether two distributions are the same, as far as `count` draws of each show. most: bits of entropy from which
    on they are uniform, which says nothing about the width."""
    if not 0.3 < _bits(lower) < most or _bits(upper) < _bits(lower) / 2:
        return False
    return _apart(lower, upper) < 0.02 + 2 * _noise(lower, upper, count)


def _apart(first: Numbers, second: Numbers) -> float:
    """Total variation distance of two distributions, 0 to 1."""
    return float(np.abs(first - second).sum()) / 2


def _noise(first: Numbers, second: Numbers, count: int) -> float:
    """The mean of `_apart` for two samples of `count` draws each from one distribution: sum of sqrt(p / (pi n))."""
    return float(np.sqrt((first + second) / 2 / np.pi / count).sum())


def _bits(shares: Numbers) -> float:
    """Shannon entropy of a distribution."""
    some = shares[shares > 0]
    return float(-(some * np.log2(some)).sum())
