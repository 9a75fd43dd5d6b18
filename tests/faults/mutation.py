"""One protection taken away, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOMS = ("harness", "launch")


@dataclass(frozen=True)
class Mutation:
    """row: of tests/faults/matrix.py. protection: what is taken away. old: text that is in exactly one place of ROOMS,
    whichever file that is, so that code can be moved. test: pytest arguments.
    """

    row: int
    protection: str
    old: str
    new: str
    test: str


def texts(root: Path) -> dict[Path, str]:
    """Every text file of ROOMS in the tree `root`."""
    found: dict[Path, str] = {}
    for path in (each for room in ROOMS for each in sorted((root / room).rglob("*"))):
        if path.is_file() and "__pycache__" not in path.parts:
            found[path] = path.read_text(encoding="utf-8")
    return found


def places(sources: dict[Path, str], old: str) -> list[Path]:
    """The files that hold `old`, each as often as it does."""
    return [path for path, text in sources.items() for _ in range(text.count(old))]
