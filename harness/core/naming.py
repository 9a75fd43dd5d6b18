"""Names that files and tracker share."""

from __future__ import annotations


def step_name(step: int) -> str:
    """`step-00000123`: of a checkpoint, of a flight record; names sort as the steps do."""
    return f"step-{step:08d}"
