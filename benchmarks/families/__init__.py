"""Healthy and harmful families of training courses, as data: one place that the guard's tests and studies share.

A course is a loss and a gradient norm for every window. `families.yaml` lists the families, `shapes` has the functions
that make them, `course` feeds one to the guard's rules. Families of tensors, for the fallback, are
`benchmarks.held_out.FAMILIES` and `benchmarks.evidence`.

    from benchmarks.families import load_families
    from benchmarks.families.course import drive
    course = drive(load_families()[0].formula(), 1000)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks.families import shapes
from benchmarks.families.shapes import Formula
from harness.core.schema import Strict, read_yaml, validate

FILE = Path(__file__).with_name("families.yaml")


class Family(Strict):
    """One family.

    shape, given: a function of `shapes` and its arguments
    key: a word of the message that ends a harmful one
    limit: why a harmful one is let through
    """

    name: str
    kind: Literal["healthy", "harmful"]
    shape: str
    given: dict[str, Any] = Field(default_factory=dict[str, Any])
    key: str = ""
    limit: str = ""

    def formula(self) -> Formula:
        """The course: (updates applied so far, window) to (loss, norm)."""
        shape: Any = getattr(shapes, self.shape)
        return shape(**self.given)

    @property
    def steps(self) -> int:
        """Steps that a study drives it."""
        return 1000 if self.kind == "healthy" else 2500


class _File(Strict):
    families: list[Family]


def load_families() -> list[Family]:
    """All, in the file's order. Raises ConfigError if the file does not read."""
    return validate(_File, read_yaml(FILE), str(FILE)).families
