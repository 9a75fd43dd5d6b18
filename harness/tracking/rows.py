"""Rows of the journal as bytes and back: strict JSON, floats in full precision, non-finite ones as strings."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
TAIL = 64 * 1024
_HEADS: Mapping[str, Mapping[str, type]] = {
    "metrics": {"step": int, "attempt": int, "metrics": dict},
    "event": {"step": int, "attempt": int, "code": str},
    "end": {"status": str},
}
MAX_ROW = 64 << 20
"""Bytes of a row. A step's FP8 statistics take a hundred bytes each, 18 for a layer."""
# `kind` is every row's first key.
_METRICS_LINE = b'{"kind": "metrics"'


def encode(row: Mapping[str, Any]) -> bytes:
    """One line, newline included. Numbers of numpy kind become Python's; anything else unknown becomes text."""
    try:
        text = json.dumps(row, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_spelled(row), allow_nan=False, default=lambda value: _spelled(_plain(value)))
    return text.encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The row in `line`, or None where it is no complete JSON object, or none that its readers can rely on."""
    try:
        row = json.loads(line)
        row = _restored(row) if isinstance(row, dict) else {}
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def read_rows(path: Path, end: int | None = None, metrics: bool = True) -> Iterator[dict[str, Any]]:
    """Rows of a journal in order, up to byte `end`. metrics: else their rows, nearly all of a file, are left unread.

    A torn last line, lines damaged by a dying disk and lines over MAX_ROW are passed over.
    """
    with path.open("rb") as lines:
        while (end is None or lines.tell() < end) and (line := lines.readline(MAX_ROW)):
            if (metrics or not line.startswith(_METRICS_LINE)) and (row := decode(line)) is not None:
                yield row


def _is_row(row: Mapping[str, Any]) -> bool:
    """Whether readers can rely on the row's head; what some other program wrote is passed over."""
    kind = row.get("kind")
    if not isinstance(kind, str) or not all(isinstance(row[name], int) for name in ("step", "attempt") if name in row):
        return False
    head = _HEADS.get(kind, {})
    values = row["metrics"].values() if kind == "metrics" and isinstance(row.get("metrics"), dict) else ()
    return (
        isinstance(row.get("time", 0.0), float | int)
        and all(isinstance(row.get(name), of) for name, of in head.items())
        and all(isinstance(value, float | int) for value in values)
    )


def finished_size(path: Path) -> int:
    """Bytes of a journal up to its last newline: what follows is a row that was never finished."""
    with path.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        while at > 0:
            start = max(0, at - TAIL)
            file.seek(start)
            newline = file.read(at - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            at = start
    return 0


def _plain(value: Any) -> Any:
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _spelled(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
