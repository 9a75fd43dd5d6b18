"""The guard's half of the composition root: the monitors that watch a run."""

from __future__ import annotations

from collections.abc import Callable

from harness.core.config import RunConfig
from harness.core.protocols import Batches, Monitor, PrecisionBackend
from harness.monitors.fp8 import Fp8Monitor
from harness.monitors.gradients import GradientMonitor
from harness.monitors.loss import LossMonitor
from harness.monitors.scaler import ScalerMonitor
from harness.precision.fallback import FallbackController
from harness.precision.plan import pad_numbers
from harness.precision.recipe import Recipe
from harness.precision.whole_run import WholeRunFallback


def build_monitors(
    config: RunConfig,
    recipe: Recipe,
    backend: PrecisionBackend,
    data: Batches,
    vocab_size: int | None,
    refuge: Callable[[], str] | None,
) -> list[Monitor]:
    """Every monitor of the run, none if the guard is off.

    refuge: what the whole run may fall to ("bf16" | "fp32"; collective); None if it has no loss scale of ours.
    """
    guard = config.guard
    if not guard.enabled:
        return []
    monitors: list[Monitor] = [
        GradientMonitor(guard.max_consecutive_skips),
        LossMonitor(guard.spike_window, guard.spike_sigma, guard.spike_steps),
        ScalerMonitor(),
    ]
    if backend.layers:
        layers = [pad_numbers(layer) for layer in backend.layers]
        monitors += [Fp8Monitor(), FallbackController(recipe.fallback.policy(), layers)]
    elif refuge is not None and recipe.fallback.enabled:
        monitors.append(WholeRunFallback(recipe.fallback.failed_steps, refuge()))
    return monitors
