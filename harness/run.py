"""A run: the pieces that `build` put together and the loop drives. Pure composition, no decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.core.config import RunConfig
from harness.core.facts import StepFacts
from harness.core.protocols import Batches, Engine, PrecisionBackend
from harness.stop import StopRequest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.checkpoint.recovery import Recovery
    from harness.core.forward_clock import ForwardClock
    from harness.core.state import Incidents, TrainState
    from harness.guard import Guard
    from harness.precision.compiling import EagerWatch
    from harness.telemetry import Telemetry


class Loss(Protocol):
    """The task's loss: mean over the batch, 0-d, nats per token. vocab_size: None if the model does not tell."""

    vocab_size: int | None

    def loss(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor: ...


class Flight(Protocol):
    """Keeps what a later re-run of a bad step needs."""

    def keep(self, facts: StepFacts, samples: Sequence[int], codes: Sequence[str], incidents: Incidents) -> bool:
        """Whether the step begins a streak of bad ones. Raises OSError."""
        ...


@dataclass
class Run:
    """Everything `train_step` and the loop touch.

    stats_every: steps between samples of underflow and SQNR.
    watch: None unless something was compiled. flight: None but on rank 0. replay_told: the user has seen how to find
    out what made a step bad.
    """

    config: RunConfig
    folder: Path
    engine: Engine
    precision: PrecisionBackend
    task: Loss
    data: Batches
    state: TrainState
    guard: Guard
    telemetry: Telemetry
    recovery: Recovery
    stop: StopRequest
    forward_clock: ForwardClock
    stats_every: int = 10
    watch: EagerWatch | None = None
    flight: Flight | None = None
    replay_told: bool = False
