"""A made-up trace of a clean run."""

from __future__ import annotations

import numpy as np

from benchmarks.traces import FIELDS, Trace

LAYERS = ("blocks.00.attn.qkv", "blocks.00.mlp.down", "blocks.01.attn.qkv", "blocks.01.mlp.down")
SLOTS = tuple(f"{layer}.{role}" for layer in LAYERS for role in ("input", "weight", "grad_output"))
CADENCE = 10


def clean_trace(steps: int = 100) -> Trace:
    """Healthy everywhere; amax numbers the steps from 1. Underflow, clipped and SQNR are there every CADENCE steps."""
    healthy = dict(zip(FIELDS, (0.0, 1.0, 1.0, 0.0, 0.0, 31.0, 30.0), strict=True))
    values = np.array([np.full((steps, len(SLOTS)), healthy[field]) for field in FIELDS], dtype=np.float32)
    values[FIELDS.index("amax")] = np.arange(1, steps + 1)[:, None]
    unsampled = (np.arange(steps) + 1) % CADENCE != 0
    values[FIELDS.index("clipped") :, unsampled] = np.nan
    return Trace(SLOTS, values)


def with_values(trace: Trace, field: str, slot: str, steps: slice, value: float) -> Trace:
    """A copy with `value` at `steps` (from 0)."""
    values = trace.values.copy()
    values[FIELDS.index(field), steps, trace.slots.index(slot)] = value
    return Trace(trace.slots, values)
