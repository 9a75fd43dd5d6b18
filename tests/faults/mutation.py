"""One protection taken away, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """row: of tests/faults/matrix.py. protection: what is taken away. test: pytest arguments."""

    row: int
    protection: str
    file: str
    old: str
    new: str
    test: str
