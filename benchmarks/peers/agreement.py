"""Decides whether two loops trained the same thing. A loop that trained another is an error and gets no figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.peers.loops import PLAIN

# Largest relative difference between a loss and that of plain PyTorch, by precision. The first losses come from the
# same weights and samples, so only the forward rounds. Later ones drift apart, as updates round differently too.
FIRST = {"bf16": 1e-3, "fp8": 3e-3}
LATER = {"bf16": 5e-3, "fp8": 1e-2}


def worst(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference of the losses in any step. Only for turns that agree, which have no NaN."""
    return max(abs(mine - other) / other for mine, other in zip(losses, reference, strict=True))


def disagreement(precision: str, turn: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """How a turn differs from that of plain PyTorch; empty if both trained the same thing.

    precision: that of the turn's loop, "bf16" or "fp8". turn, reference: results of `take_turn`.
    """
    for key in ("tokens", "samples", "parameters"):
        if turn[key] != reference[key]:
            return f"it trains other {key} than {PLAIN}: {turn[key]}, not {reference[key]}"
    pairs = zip(turn["losses"], reference["losses"], strict=True)
    for step, (mine, other) in enumerate(pairs):
        limits = FIRST if step == 0 else LATER
        allowed = limits[precision]
        # `not <=` and not `>`: a NaN is beyond every limit.
        if not abs(mine - other) <= allowed * other:
            return (
                f"it trains something else: loss {mine:.5f} at step {step + 1}, {PLAIN} has {other:.5f}, "
                f"and {precision} explains {allowed:.1%}"
            )
    return ""
