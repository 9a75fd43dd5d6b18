"""Ends a window without a training loop: `core.update.update` for an engine whose rung keeps no FP8 state."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.core.facts import Limits
from harness.core.protocols import NO_LIMITS, Engine
from harness.core.update import update
from harness.precision.backends.autocast import AutocastBackend


def finish(
    engine: Engine,
    limits: Limits = NO_LIMITS,
    measure: bool = False,
    loss: float = 1.0,
    **own: float | Tensor,
) -> dict[str, Tensor]:
    """Update with the gradients that the engine has. Returns the figures of the step.

    own: further figures of this rank, as `update` takes them.
    """
    backend = AutocastBackend("fp32", engine.device)
    return update(engine, backend, {"loss": torch.tensor(loss), **own}, limits, measure)[0]
