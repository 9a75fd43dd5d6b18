"""An optimizer of the user's own: momentum, with a rate that falls by its own count of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Slowing(torch.optim.Optimizer):
    """SGD with momentum whose rate is divided by the root of the steps that it has counted."""

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, momentum: float = 0.9
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                past: Tensor = state.setdefault("past", torch.zeros_like(param))
                past.mul_(group["momentum"]).add_(param.grad)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    past, alpha=group["lr"] / self.steps**0.5
                )
