"""The order of FP8 slots by trouble, the worst first. Pure functions of a slot's newest figures; torch-free.

What counts, from the worst to the least:

1. a figure that is not finite
2. the layer is in BF16
3. saturation, share of clipped values, underflow or SQNR beyond the limit at which a layer may leave FP8
4. all others, by how near the nearest of these figures is to its limit

The limits are the defaults of a recipe's section `fallback`. A run may have others; for an order they need not be its
own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from harness.core.config import FallbackConfig
from harness.core.facts import ROLES

_DEFAULTS = FallbackConfig()
_SATURATION = {
    "input": _DEFAULTS.saturation_input,
    "weight": _DEFAULTS.saturation_weight,
    "grad_output": _DEFAULTS.saturation_grad_output,
}
_UNDERFLOW = {
    "input": _DEFAULTS.underflow,
    "weight": _DEFAULTS.underflow,
    "grad_output": _DEFAULTS.underflow_grad_output,
}
# Decibels of a factor of two in amplitude.
_OCTAVE_DB = 6.02
_ALWAYS_FINITE = ("amax", "scale", "saturation")


class SlotNow(NamedTuple):
    """One slot.

    name: `<layer>.<role>`.
    figures: newest values by their field in `core.facts.SlotStats`; one that was not measured is NaN or left out.
    in_bf16: its layer is in BF16 now.
    """

    name: str
    figures: Mapping[str, float]
    in_bf16: bool = False


def order(slots: Iterable[SlotNow]) -> list[SlotNow]:
    """The slots, the most troubled first; those alike stay in their order."""
    return sorted(slots, key=_key)


def trouble(slot: SlotNow) -> str:
    """What troubles the slot, in a word or two; empty if nothing does."""
    if not _is_finite(slot):
        return "not finite"
    if slot.in_bf16:
        return "in BF16"
    beyond = [name for name, share in _shares(slot).items() if share > 1]
    return beyond[0] if beyond else ""


def _key(slot: SlotNow) -> tuple[int, float]:
    """Sorts ascending: the class of the trouble, then the worst share of a limit first."""
    shares = _shares(slot)
    worst = max(shares.values(), default=0.0)
    if not _is_finite(slot):
        return 0, -worst
    if slot.in_bf16:
        return 1, -worst
    for place, share in enumerate(shares.values()):
        if share > 1:
            return 2 + place, -share
    return 2 + len(shares), -worst


def _shares(slot: SlotNow) -> dict[str, float]:
    """Trouble -> share of its limit, over 1 if it is beyond. The worst kind comes first."""
    _, _, role = slot.name.rpartition(".")
    if role not in ROLES:
        role = ROLES[0]
    values = {name: slot.figures.get(name, math.nan) for name in ("clipped", "underflow")}
    saturation = slot.figures.get("saturation", math.nan)
    sqnr_db = slot.figures.get("sqnr_db", math.nan)
    shares = {
        "saturated": saturation / _SATURATION[role],
        "clipped": values["clipped"] / _DEFAULTS.clipped,
        "underflow": values["underflow"] / _UNDERFLOW[role],
        "low SQNR": _share_of_decibels(sqnr_db, _DEFAULTS.sqnr_db),
    }
    # What was not measured is no trouble.
    return {name: 0.0 if math.isnan(share) else share for name, share in shares.items()}


def _share_of_decibels(value: float, limit: float) -> float:
    """1 at the limit, and twice as much for every 6 dB under it."""
    # Bounded: 2 to the power of thousands is no float.
    octaves = (limit - value) / _OCTAVE_DB
    if math.isnan(octaves):
        return math.nan
    return 2.0 ** max(-100.0, min(100.0, octaves))


def _is_finite(slot: SlotNow) -> bool:
    return not any(math.isinf(slot.figures.get(name, 0.0)) for name in _ALWAYS_FINITE)
