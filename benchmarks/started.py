"""A run that a benchmark trains step by step, built as `harness train` builds one."""

from __future__ import annotations

import io
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from harness.build import build_data, build_plan, build_run, join_worker, open_store, open_telemetry
from harness.core.config import RunConfig
from harness.core.state import RunLedger
from harness.precision.plan import Plan
from harness.precision.recipe import Recipe
from harness.run import Run
from harness.tracking.console import Console


class Started(NamedTuple):
    """A run before its first step, with its plan and its model."""

    run: Run
    plan: Plan
    model: nn.Module


def start_run(
    stack: ExitStack,
    config: RunConfig,
    recipe: Recipe,
    folder: Path,
    device: torch.device,
    launcher: str = "python",
) -> Started:
    """Build the run of `config` in `folder`, which must be there; `stack` closes it.

    Weights are initialised on `device`. launcher: as for `build.join_worker`. Raises ConfigError and MachineError as a
    start of `harness train`.
    """
    worker = join_worker(config, launcher)
    data = build_data(config, folder, worker)
    with torch.device(device):
        plan, model = build_plan(config, recipe, worker, data=data)
    screen, store = Console(config.train.steps, stream=io.StringIO()), open_store(folder, worker)
    telemetry = stack.enter_context(open_telemetry(config, folder, worker, screen))
    run = build_run(
        config, recipe, folder, worker, plan, model, data, telemetry, RunLedger(), store
    )
    stack.callback(run.stop.uninstall)
    return Started(run, plan, model)
