"""How much `harness doctor` measures, as its options say. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from harness.core.errors import ConfigError, Problem

MINUTES = 2.0
"""Minutes of turns of --speed, unless the user says."""
_MOST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of a device --card checks; None: the device's default.

    share: of the free memory that patterns are written over, up to 0.9.
    seconds: of the soak; 0: none.
    """

    share: float | None = None
    seconds: float | None = None


def check_effort(effort: Effort, minutes: float = MINUTES) -> None:
    """Raise ConfigError for a share or a time that cannot be meant. minutes: of --speed."""
    problems: list[Problem] = []
    if effort.share is not None and not 0 < effort.share <= _MOST_SHARE:
        what = f"{effort.share:g} is not a share of the free memory"
        fix = f"a number over 0 and up to {_MOST_SHARE}"
        problems.append(Problem(what, "--memory-share", fix=fix))
    if effort.seconds is not None and not 0 <= effort.seconds < inf:
        what = f"{effort.seconds:g} is not a time"
        problems.append(Problem(what, "--soak", fix="seconds, 0 for no soak"))
    if not 0 < minutes < inf:
        what = f"{minutes:g} is not a time"
        problems.append(Problem(what, "--minutes", fix="minutes over 0"))
    if problems:
        raise ConfigError(problems)
