"""What the journal keeps of a step, under the public metric names."""

from __future__ import annotations

import math

from harness.core.facts import SlotStats, StepFacts
from harness.core.state import Incidents

_SLOT_METRICS = ("amax", "scale", "saturation", "clipped", "underflow", "sqnr_db")


def step_metrics(facts: StepFacts, incidents: Incidents, with_slots: bool) -> dict[str, float]:
    """One metrics row. `with_slots`: per-slot FP8 statistics too. What was not measured in this step is left out."""
    metrics = {
        "train/loss": facts.loss,
        "train/lr": facts.lr,
        "train/grad_norm": facts.grad_norm,
        "train/loss_scale": facts.loss_scale,
        "train/step_applied": float(facts.applied),
        "train/tokens_per_second": facts.tokens / facts.seconds if facts.seconds > 0 else math.nan,
        "guard/skipped": float(incidents.skips),
        "guard/demoted_layers": float(len(facts.demoted)),
        "guard/rollbacks": float(incidents.rollbacks),
        "guard/attempt": float(incidents.attempt),
    }
    measured = {
        "train/param_norm": facts.param_norm,
        "train/grad_zeros": facts.grad_zeros,
        "train/grad_near_limit": facts.grad_near_limit,
    }
    metrics |= {name: value for name, value in measured.items() if not math.isnan(value)}
    if with_slots and facts.slots is not None:
        metrics |= slot_metrics(facts.slots)
    return metrics


def slot_metrics(slots: SlotStats) -> dict[str, float]:
    """`fp8_<statistic>/<slot>` for every slot and statistic that was measured."""
    return {
        f"fp8_{statistic}/{name}": value
        for statistic in _SLOT_METRICS
        for name, value in zip(slots.names, getattr(slots, statistic).tolist(), strict=True)
        if not math.isnan(value)
    }
