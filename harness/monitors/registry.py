"""The list of all monitors, those that watch a given run, and their state in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.errors import CheckpointError, Problem, some
from harness.core.protocols import Meta, Monitor, TensorDict
from harness.monitors.base import MonitorContext
from harness.monitors.clipping import ClippingMonitor
from harness.monitors.data import DataMonitor
from harness.monitors.fallback import FallbackController, WholeRunFallback
from harness.monitors.fp8 import Fp8Monitor
from harness.monitors.fp8_frozen import Fp8FrozenMonitor
from harness.monitors.fp8_storm import Fp8StormMonitor
from harness.monitors.gradients import GradientMonitor
from harness.monitors.loss import FirstLossMonitor, LossMonitor, PlateauMonitor
from harness.monitors.parameters import ParameterMonitor
from harness.monitors.ranks import RanksMonitor
from harness.monitors.rise import LearningRateMonitor, LossRiseMonitor
from harness.monitors.scale_moves import ScaleMoves
from harness.monitors.scaler import ScalerMonitor
from harness.monitors.underflow import UnderflowMonitor

MONITORS = (
    GradientMonitor,
    UnderflowMonitor,
    ClippingMonitor,
    ParameterMonitor,
    LossMonitor,
    LossRiseMonitor,
    FirstLossMonitor,
    LearningRateMonitor,
    ScalerMonitor,
    ScaleMoves,
    DataMonitor,
    RanksMonitor,
    PlateauMonitor,
    Fp8Monitor,
    Fp8StormMonitor,
    FallbackController,
    Fp8FrozenMonitor,
    WholeRunFallback,
)
"""In the order in which they judge a step. A monitor's `key` never changes: it names its state in every checkpoint."""

NAMED_IN_TEXT = 5


def build_monitors(context: MonitorContext) -> list[Monitor]:
    """Every monitor that this run needs, in order; none if the guard is off. Collective."""
    if not context.guard.enabled:
        return []
    monitors: list[Monitor] = []
    for monitor in MONITORS:
        # None: it has nothing to watch here, such as FP8 slots in a run without FP8.
        built = monitor.build(context)
        if built is not None:
            monitors.append(built)
    return monitors


@dataclass
class MonitorsPart:
    """The monitors' state as one part of the TrainState, so that they are armed at once after a resume."""

    monitors: Sequence[Monitor]

    def state_dict(self) -> tuple[TensorDict, Meta]:
        """No tensors; the meta has each monitor's state under its key."""
        return {}, {monitor.key: monitor.state_dict() for monitor in self.monitors}

    def load_state_dict(self, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Restore every monitor that the checkpoint has. Raises CheckpointError for a key that no monitor has.

        State of a monitor that does not watch this run is ignored (the run has no FP8 layers, or no loss scale). A
        monitor that did not watch the run before starts without a past.
        """
        # A caller may have given monitors that are not in the list.
        keys = {monitor.key for monitor in (*MONITORS, *self.monitors)}
        unknown = sorted(meta.keys() - keys)
        if unknown:
            named = some(unknown, NAMED_IN_TEXT)
            what = f"state of monitors that this version does not have: {named}"
            where = "the checkpoint's part monitors"
            why = "without these monitors the run would be watched less than before, and nobody would know"
            fix = "resume with the version that wrote it"
            raise CheckpointError(Problem(what, where, why, fix))
        for monitor in self.monitors:
            if monitor.key in meta:
                monitor.load_state_dict(meta[monitor.key])
