"""The end of a window without a loop: `core.update.update` for an engine whose rung keeps no FP8 state."""

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
    """The figures of the step, of gradients that are there. own: as `update`'s, but for `loss`."""
    backend = AutocastBackend("fp32", engine.device)
    return update(engine, backend, {"loss": torch.tensor(loss), **own}, limits, measure)[0]
