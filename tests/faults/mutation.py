"""A mutation: one protection is removed from the source, and a test must fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOMS = ("harness", "launch")


@dataclass(frozen=True)
class Mutation:
    """A protection, how to remove it, and the test that must fail without it.

    row: the row of tests/faults/matrix.py.
    protection: what is removed.
    old: text that occurs exactly once in ROOMS. The file is not named, so that code can be moved.
    new: the text that replaces it.
    test: arguments for pytest.
    """

    row: int
    protection: str
    old: str
    new: str
    test: str


def texts(root: Path) -> dict[Path, str]:
    """The text of every file of ROOMS in the tree `root`."""
    found: dict[Path, str] = {}
    for path in (each for room in ROOMS for each in sorted((root / room).rglob("*"))):
        if path.is_file() and "__pycache__" not in path.parts:
            found[path] = path.read_text(encoding="utf-8")
    return found


def places(sources: dict[Path, str], old: str) -> list[Path]:
    """The files that contain `old`, one entry for each occurrence."""
    return [path for path, text in sources.items() for _ in range(text.count(old))]
