"""Read small files that somebody else may have written: regular files only, bounded in size, depth and numbers."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_DEPTH = 64
"""Lists and mappings inside each other. Much deeper ones end in Python's recursion limit, wherever they are used."""
MAX_JSON = 1 << 20
"""Bytes of a JSON file, where its reader names no other limit."""
MAX_LARGE = 256 << 20
"""The same for files with a line for every layer, every parameter or every file of the text."""

# The state of some random generators is one number of 128 bits.
_STATE_BITS = 256


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file, links followed. Raises OSError; ValueError for anything else, or if it is too large.

    Opening a pipe waits for a writer, for ever; a device may never end.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")
    data = b""
    if status.st_size <= limit:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)  # one more: the size of what the kernel makes up is told as 0
    if max(len(data), status.st_size) > limit:
        raise ValueError(f"is larger than {limit} bytes")
    return data


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """What a JSON file holds. Raises OSError, and ValueError as `read_bounded` and `parse_json` do."""
    return parse_json(read_bounded(path, limit))


def read_mapping(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """The mapping in a JSON file that only advises; empty if there is none, or it cannot be read."""
    try:
        content = read_json(path, limit)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def parse_json(data: bytes) -> Any:
    """JSON without duplicate keys, NaN and infinities, and within the bounds of `check_plain`. Raises ValueError."""
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep") from error
    check_plain(value, _STATE_BITS, finite=True)
    return value


def check_plain(value: Any, bits: int = 64, finite: bool = False) -> None:
    """Raises ValueError if lists and mappings are nested too deeply, or a whole number has more than `bits` bits.

    finite: refuse floats that are not, too. Endless numbers cost quadratic time and cannot be printed.
    """
    pending: list[tuple[Any, int]] = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, dict | list):
            if depth == MAX_DEPTH:
                raise ValueError(f"is nested more than {MAX_DEPTH} deep")
            children: Sequence[Any] = [*item, *item.values()] if isinstance(item, dict) else item
            pending += [(child, depth + 1) for child in children]
        elif isinstance(item, int) and item.bit_length() > bits:
            raise ValueError(f"has a whole number of {item.bit_length()} bits, more than {bits}")
        elif finite and isinstance(item, float) and not math.isfinite(item):
            raise ValueError("has a number that is too large")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"has the key {twice!r} twice"[:200])
    return made


def _no_number(name: str) -> float:
    raise ValueError(f"has {name}, which is no JSON number")
