"""Which charts a run's dashboard has, and in which order: that of the pictures in report.html. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from harness.core.facts import ROLES


class Section(NamedTuple):
    """Charts that belong together.

    name: heading.
    figures: metrics, one chart each.
    pictures: names of the report's pictures of the same; empty: the report has none.
    """

    name: str
    figures: tuple[str, ...]
    pictures: tuple[str, ...] = ()


def _of_role(role: str) -> Section:
    figures = ("saturation_max", "amax_max", "sqnr_db_min")
    keys = tuple(f"fp8/{role}/{figure}" for figure in figures)
    return Section(f"fp8/{role}", keys, ("fp8_saturation", "fp8_fan", "fp8_exponents"))


SECTIONS = (
    Section("loss", ("train/loss", "val/loss"), ("loss",)),
    *map(_of_role, ROLES),
    Section("loss scale", ("train/loss_scale",), ("loss_scale",)),
    Section("train", ("train/grad_norm", "train/lr", "train/tokens_per_second")),
    Section("guard", ("guard/demoted_layers", "guard/skipped", "guard/rollbacks")),
)
"""In order. What is watched without a picture comes last."""

LOG_AXIS = tuple(f"fp8/{role}/amax_max" for role in ROLES)
"""Charts whose values span powers of two."""
