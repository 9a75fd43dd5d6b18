"""What a monitor may ask of a run before it begins. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.core.config import RunConfig
from harness.core.protocols import Batches
from harness.monitors.evidence import FallbackConfig


@dataclass(frozen=True, slots=True)
class MonitorContext:
    """The run, as its monitors are built for it.

    fallback: the recipe's. vocab_size: tokens are in [0, vocab_size); None: unknown. layers: FP8 layers, padded names,
    in the order of the plan. amax_history: updates that delayed scales look back on, None if scales are not delayed;
    margin: their powers of two of headroom. scales_loss: there is an fp16 loss scale. refuge: what a run with a loss
    scale of ours may fall to ("bf16" | "fp32"; collective), None if there is nothing.
    """

    config: RunConfig
    fallback: FallbackConfig
    data: Batches
    vocab_size: int | None = None
    layers: tuple[str, ...] = ()
    amax_history: int | None = None
    margin: int = 0
    scales_loss: bool = False
    refuge: Callable[[], str] | None = None
