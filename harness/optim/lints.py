"""A lint of the optimizer's settings."""

from __future__ import annotations

from harness.core.config import TrainConfig
from harness.core.findings import Finding

_FP16_SMALLEST_NORMAL = 2.0**-14
# The square of less than this is 0 in float32.
_FP32_ROOT = 1e-19
# These divide by the root of a second moment.
_ADAPTIVE = ("adam", "lamb", "rmsprop")


def epsilon_finding(train: TrainConfig, loss_scale: float | None) -> Finding | None:
    """A warning if Adam's eps is under what gradients are made of; None if it is not, or if the optimizer has none.

    loss_scale: the first one of an fp16 run; None for other precisions.

    Under fp16 the threshold is the smallest normal value divided by the loss scale. An unscaled gradient below it is
    mostly rounding. An eps below it lets such a gradient make an update of full size.
    """
    given = train.optimizer_args.get("eps")
    adaptive = any(name in train.optimizer.lower() for name in _ADAPTIVE)
    if not adaptive or not isinstance(given, int | float):
        return None
    smallest, what = _FP32_ROOT, "float32 squares of gradients below 1e-19 are 0"
    if loss_scale is not None:
        smallest = _FP16_SMALLEST_NORMAL / loss_scale
        what = f"gradients below {smallest:.2g}, fp16's smallest normal value over the loss scale, are mostly rounding"
    if given >= smallest:
        return None
    return Finding(
        "optimizer.eps",
        "warning",
        "train.optimizer_args.eps",
        f"{given:g} is under {smallest:.2g}",
        f"{what}: with so small an eps they make updates of full size",
        f"set {max(smallest, 1e-8):.2g} or more",
    )
