"""A run: the pieces that `build` put together and the loop drives. Pure composition, no decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.core.config import RunConfig
from harness.core.facts import StepFacts
from harness.core.protocols import Batches, Engine, Monitor, PrecisionBackend, Tracker
from harness.monitors.responder import Responder
from harness.stop import StopRequest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.checkpoint.recovery import Recovery
    from harness.core.collectives import ForwardClock, RankComparison
    from harness.core.state import Incidents, TrainState
    from harness.precision.compiling import EagerWatch
    from harness.tracking.console import Console


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

    comparison: of the ranks' weights; None on one rank. stats_every: steps between samples of underflow and SQNR.
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
    monitors: Sequence[Monitor]
    responder: Responder
    tracker: Tracker
    recovery: Recovery
    screen: Console
    stop: StopRequest
    forward_clock: ForwardClock
    comparison: RankComparison | None = None
    stats_every: int = 10
    watch: EagerWatch | None = None
    flight: Flight | None = None
    replay_told: bool = False
