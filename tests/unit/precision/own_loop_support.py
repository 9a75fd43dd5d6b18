"""A loop that is not ours, and what it may bring along."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from api_support import adamw, forward_backward, prepared, recipe, snapshot
from torch.optim.lr_scheduler import LRScheduler, StepLR

from harness import Guard
from harness.precision.recipe import Recipe

SETTINGS: dict[str, Any] = {"max_consecutive_skips": 2, "snapshot_every": 4, "healthy_steps": 2}


class Loop:
    """A loop of somebody else's: model, optimizer, scheduler, guard. poison: added to the losses of these forwards."""

    def __init__(
        self,
        policy: Recipe | None = None,
        poison: tuple[int, ...] = (),
        lr: float = 1e-2,
        schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        keep: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        self.precision, self.model = prepared(policy or recipe())
        self.optimizer = adamw(self.model, lr=lr)
        self.scheduler = (
            schedule(self.optimizer) if schedule else StepLR(self.optimizer, 3, gamma=0.9)
        )
        kept = [self.scheduler, *keep]
        self.guard = Guard.for_precision(
            self.precision, self.optimizer, keep=kept, **SETTINGS | settings
        )
        self.poison, self.forwards = poison, 0
        self.windows: list[int] = []

    def step(self) -> Any:
        window = self.guard.window
        self.windows.append(window)
        bad = self.forwards in self.poison
        self.forwards += 1
        forward_backward(self.precision, self.model, window, poison=math.nan if bad else 0.0)
        self.precision.step(self.optimizer, max_grad_norm=1.0)
        self.optimizer.zero_grad()
        self.scheduler.step()
        return self.guard.end_step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def everything(self) -> dict[str, Any]:
        return {
            **snapshot(self.precision, self.model, self.optimizer),
            "scheduler": self.scheduler.state_dict(),
        }


class Keeper:
    """Something of the loop's own, with the state that a test gives it."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


class OwnRate(torch.optim.Optimizer):
    """It finds its rate by itself, as some do that are given none."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-1e-2)
