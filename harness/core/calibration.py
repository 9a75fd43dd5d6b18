"""When a skipped fp16 step is the loss scaler finding its range, and when it is trouble. Torch-free."""

from __future__ import annotations

import math

CALIBRATION_FLOOR = 1024.0
"""Below this a falling loss scale is no longer a scaler finding its range: it has halved six times from the usual
65536, so the gradients themselves are at fault."""


def is_calibration(loss: float, loss_scale: float, last_skipped_at: float | None) -> bool:
    """Whether a skipped step is a loss scaler lowering its scale.

    loss: of the step, nats. loss_scale: in use at it. last_skipped_at: the scale of the skipped step right before it,
    None if that one was applied. Lowering the scale cannot cure a loss that is itself not finite: forward never sees
    the scale.
    """
    falling = last_skipped_at is None or loss_scale < last_skipped_at
    return loss_scale >= CALIBRATION_FLOOR and falling and math.isfinite(loss)
