"""The loop of `harness train`, as shipped: guard, journal and snapshots in memory, with a recipe."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
import yaml
from torch import nn

from benchmarks.started import start_run
from harness.core.config import RunConfig
from harness.measure.contender import Contender
from harness.precision.recipe import load_recipe
from harness.run import Run


class Shipped:
    """A run that trains when it is its turn. As in `harness train`, a step is judged while the next one runs."""

    def __init__(self, run: Run, model: nn.Module, rung: str) -> None:
        self.data = run.data
        self.model = model
        self.contender = Contender(run, rung)

    def losses(self, count: int) -> list[float]:
        found: list[float] = []
        for _ in range(count):
            self.contender.steps(1)
            assert self.contender.last is not None
            found.append(self.contender.last.loss)
        return found

    def seconds(self, count: int) -> float:
        """As of every racer. Raises RuntimeError if the last update was skipped, or if FP8 computed nothing."""
        taken = self.contender.steps(count)
        self.contender.last_step()
        return taken


def start(config: RunConfig, device: torch.device, stack: ExitStack, folder: Path) -> Shipped:
    """A run, built as `harness train` builds one; `stack` closes it. folder: empty, becomes its run folder."""
    started = start_run(stack, config, load_recipe(config.recipe), folder, device)
    return Shipped(started.run, started.model, started.plan.resolved)


def config_lines(config: RunConfig) -> int:
    """Lines of the YAML file that a user writes: the keys that differ from the defaults."""
    return len(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)).splitlines())
