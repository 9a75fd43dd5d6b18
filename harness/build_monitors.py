"""The guard's half of the composition root: the monitors that watch a run."""

from __future__ import annotations

from collections.abc import Callable

from harness.core.config import RunConfig
from harness.core.facts import ROLES
from harness.core.protocols import Batches, Monitor, PrecisionBackend
from harness.monitors.clipping import ClippingMonitor
from harness.monitors.data import DataMonitor
from harness.monitors.fp8 import Fp8Monitor
from harness.monitors.fp8_frozen import Fp8FrozenMonitor
from harness.monitors.fp8_storm import Fp8StormMonitor
from harness.monitors.gradients import GradientMonitor
from harness.monitors.loss import LossMonitor
from harness.monitors.parameters import ParameterMonitor
from harness.monitors.plateau import PlateauMonitor
from harness.monitors.ranks import RanksMonitor
from harness.monitors.scaler import ScalerMonitor
from harness.monitors.underflow import UnderflowMonitor
from harness.precision.backends.autocast import AutocastBackend
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
        GradientMonitor(guard.max_consecutive_skips, guard.skip_growth, guard.clip_growth, guard.spike_window),
        UnderflowMonitor(guard.underflow_rise, guard.overflow_share),
        ClippingMonitor(config.train.max_grad_norm, config.train.warmup_steps, guard.clipping_share),
        ParameterMonitor(guard.parameter_growth),
        LossMonitor(guard.spike_window, guard.spike_sigma, guard.spike_steps),
        # Only where there is a scale: to a run that comes from fp16 and has none, its being 1 would be a collapse.
        *([ScalerMonitor()] if isinstance(backend, AutocastBackend) and backend.scales_loss else []),
        DataMonitor(data, vocab_size, config.data.bad),
        RanksMonitor(),
        PlateauMonitor(),
    ]
    if backend.layers:
        layers = [pad_numbers(layer) for layer in backend.layers]
        policy = recipe.fallback.policy()
        saturation = [getattr(policy, f"saturation_{role}") for role in ROLES]
        storms = Fp8StormMonitor(saturation, policy.underflow, warmup_steps=policy.warmup_steps)
        monitors += [Fp8Monitor(), storms, FallbackController(policy, layers)]
        if recipe.fp8.scaling == "delayed":
            monitors.append(Fp8FrozenMonitor(recipe.fp8.amax_history_len, recipe.fp8.margin))
    elif refuge is not None and recipe.fallback.enabled:
        monitors.append(WholeRunFallback(recipe.fallback.failed_steps, refuge()))
    return monitors
