"""Sorts FP8 slots by trouble, the worst first, in the same way for every report. Torch-free, and pure.

A slot is compared with the limits of the recipe's fallback (`core.config.FallbackConfig`), beyond which a layer leaves
FP8. Its score says how far its worst figure is beyond its limit, in factors of two; 6.02 dB are one factor. A score
under 0 means that every figure is within its limit. The order is:

1. slots with an amax that was not finite,
2. slots of a layer that runs, or ran, in BF16,
3. all others, the highest score first; those without a figure come last.

Slots of one rank keep the order in which they were given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from harness.core.config import FallbackConfig
from harness.core.errors import number_of
from harness.core.facts import ROLES

DECIBELS = 20 * math.log10(2)
"""A factor of two in amplitude, in dB."""


@dataclass(frozen=True, slots=True)
class SlotFigures:
    """A slot's worst figures over some steps; NaN stands for one that was not measured.

    name: `<layer>.<role>`.
    nonfinite: number of steps with an amax that was NaN or infinite.
    demoted: whether its layer runs, or ran, in BF16.
    saturation: largest amax * scale / fp8_max.
    clipped: largest share of values over the format's largest.
    underflow: largest share of non-zero values flushed to zero.
    sqnr_db, even_db, centred_db: least SQNR in dB: of the tensor, per element, without each channel's mean.
    """

    name: str
    nonfinite: int = 0
    demoted: bool = False
    saturation: float = math.nan
    clipped: float = math.nan
    underflow: float = math.nan
    sqnr_db: float = math.nan
    even_db: float = math.nan
    centred_db: float = math.nan


@dataclass(frozen=True, slots=True)
class Trouble:
    """A slot's place in the order, and why.

    rank: 0: amax not finite; 1: layer in BF16; 2: any other.
    score: factors of two by which the worst figure is beyond its limit; minus infinity if none was measured.
    why: in words; empty if every figure is within its limit.
    """

    slot: SlotFigures
    rank: int
    score: float
    why: str


def order(slots: Iterable[SlotFigures], limits: FallbackConfig | None = None) -> list[Trouble]:
    """The slots with their trouble, the worst first. limits: of the recipe; None: the defaults."""
    used = limits or FallbackConfig()
    judged = [_judge(slot, used) for slot in slots]
    return sorted(judged, key=lambda each: (each.rank, -each.score))


def _judge(slot: SlotFigures, limits: FallbackConfig) -> Trouble:
    score, figure = _worst_figure(slot, limits)
    reasons: list[str] = []
    if slot.nonfinite:
        reasons.append(f"amax not finite in {number_of(slot.nonfinite, 'step')}")
    if slot.demoted:
        reasons.append("layer in BF16")
    if score > 0:
        reasons.append(figure)

    # Not finite comes before demoted, and that before all others.
    rank = 2
    if slot.demoted:
        rank = 1
    if slot.nonfinite:
        rank = 0
    return Trouble(slot, rank, score, "; ".join(reasons))


def _worst_figure(slot: SlotFigures, limits: FallbackConfig) -> tuple[float, str]:
    """(factors of two beyond its limit, the figure in words) of the figure that is furthest beyond."""
    role = slot.name.rpartition(".")[2]
    # A file of another program may have other names: its slots are judged as inputs.
    if role not in ROLES:
        role = ROLES[0]

    # Ratios and shares are bad over their limit.
    worst, text = -math.inf, ""
    underflow = limits.underflow_grad_output if role == "grad_output" else limits.underflow
    over = (
        ("saturation", slot.saturation, getattr(limits, f"saturation_{role}")),
        ("clipped", slot.clipped, limits.clipped),
        ("underflow", slot.underflow, underflow),
    )
    for name, value, limit in over:
        # 0 has no logarithm and is far within the limit. NaN was not measured.
        if not value > 0:
            continue
        beyond = math.log2(value / limit)
        if beyond > worst:
            worst, text = beyond, f"{name} {value:.3g} (limit {limit:g})"

    # SQNR is bad under its limit. A comparison with NaN is false, so NaN is skipped here too.
    under = (
        ("sqnr_db", slot.sqnr_db, limits.sqnr_db),
        ("even_db", slot.even_db, getattr(limits, f"even_db_{role}")),
        ("centred_db", slot.centred_db, limits.centred_db),
    )
    for name, value, limit in under:
        beyond = (limit - value) / DECIBELS
        if beyond > worst:
            worst, text = beyond, f"{name} {value:.3g} (limit {limit:g})"
    return worst, text
