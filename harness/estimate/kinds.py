"""A predicted step by the kinds of work of a profile (`harness.profiling.kinds`), to be read beside a measured one."""

from __future__ import annotations

from harness.estimate.prediction import Prediction
from harness.estimate.recorder import FP8_CASTS
from harness.estimate.roofline import OPTIMIZER, Op, device_seconds, seconds_of, step_seconds
from harness.estimate.trace import USUAL
from harness.profiling import kinds


def by_kind(predicted: Prediction) -> dict[str, float]:
    """Seconds of a usual step by kind. What the host needs longer than the card is gaps. Communication is left out."""
    rates = predicted.calibration.rates
    ops = predicted.trace.steps[USUAL]
    half = "fp16" if predicted.trace.rung.precision == "fp16" else "bf16"
    seconds: dict[str, float] = {}
    for op in ops:
        kind = _kind(op, half)
        seconds[kind] = seconds.get(kind, 0.0) + seconds_of(op, rates)

    idle = step_seconds(ops, rates) - device_seconds(ops, rates)
    if idle > 0:
        seconds[kinds.GAPS] = idle
    return seconds


def _kind(op: Op, half: str) -> str:
    """The kind of one operation. half: the 16-bit precision of the rung."""
    if op.purpose == OPTIMIZER:
        return kinds.OPTIMIZER
    if op.purpose == FP8_CASTS:
        return kinds.CASTS
    precision = half if op.unit == "half" else op.unit
    return kinds.kind_of_op(op.name, precision=precision) or kinds.OTHER
