"""Which charts a run's dashboard has, and in which order: that of the curves in report.html. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from harness.core.facts import ROLES


class Section(NamedTuple):
    """Charts that belong together. name: heading; figures: metrics, one chart each."""

    name: str
    figures: tuple[str, ...]


def _of_role(role: str) -> Section:
    figures = ("saturation_max", "amax_max", "sqnr_db_min")
    return Section(f"fp8/{role}", tuple(f"fp8/{role}/{figure}" for figure in figures))


SECTIONS = (
    Section("loss", ("train/loss", "val/loss")),
    Section("train", ("train/lr", "train/grad_norm")),
    Section("loss scale", ("train/loss_scale",)),
    *map(_of_role, ROLES),
    Section("guard", ("guard/demoted_layers", "guard/skipped", "guard/rollbacks")),
    Section("speed", ("train/tokens_per_second",)),
)
"""In order."""

LOG_AXIS = tuple(f"fp8/{role}/amax_max" for role in ROLES)
"""Charts whose values span powers of two."""
