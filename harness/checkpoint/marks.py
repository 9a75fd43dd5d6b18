"""Which checkpoints are good, on disk: `good.json`, a list of steps.

Kept apart from the checkpoints, which are never changed once committed. A file that cannot be read is taken for an
empty list: goodness is earned again within a few steps.
"""

from __future__ import annotations

from pathlib import Path

from harness.core.files import read_json, write_json

_FILE = "good.json"
_KEPT = 64


def read_marks(root: Path) -> list[int]:
    """Steps marked good, oldest first; checkpoints deleted since may be among them."""
    try:
        good = read_json(root / _FILE)["good"]
        return sorted({step for step in good if type(step) is int and step >= 0})
    except (OSError, ValueError, TypeError, KeyError):
        return []


def add_mark(root: Path, step: int) -> None:
    """Mark `step` good. Raises OSError."""
    write_json(root / _FILE, {"good": sorted({*read_marks(root), step})[-_KEPT:]})


def forget_after(root: Path, step: int) -> None:
    """Take the marks of steps after `step` away: other checkpoints may get those numbers. Raises OSError."""
    marked = read_marks(root)
    if any(good > step for good in marked):
        write_json(root / _FILE, {"good": [good for good in marked if good <= step]})
