"""A small model, its data, and one window through `harness.Precision`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness import Precision
from harness.precision.api import StepOutcome
from harness.precision.recipe import Recipe, load_recipe

# Limits that every healthy tensor is over: layers leave FP8 as soon as the fallback may act.
EAGER = {"saturation_weight": 1e-6, "hits": 1, "window": 2, "dwell_steps": 1, "warmup_steps": 1}


def recipe(name: str = "fp8_hybrid", **sections: Mapping[str, Any]) -> Recipe:
    """A shipped recipe that converts small layers too, with some keys of some sections replaced."""
    base = load_recipe(name).model_dump()
    base["layers"]["min_features"] = 16
    for section, keys in sections.items():
        base[section].update(keys)
    return Recipe.model_validate(base)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def batch(step: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a learnable task, a function of the step."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, 16, generator=generator)
    return x, x.roll(1, dims=1)


def prepared(policy: Recipe, seed: int = 0) -> tuple[Precision, nn.Sequential]:
    precision = Precision(policy)
    return precision, precision.prepare(mlp(seed))


def adamw(model: nn.Module, fused: bool = True, lr: float = 1e-2) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=fused)


def forward_backward(
    precision: Precision, model: nn.Module, step: int, micro_batches: int = 1, poison: float = 0.0
) -> float:
    """One window; `poison` is added to the loss as a constant, so that no gradient feels it. The mean loss."""
    total = 0.0
    x, y = batch(step)
    for inputs, targets in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        with precision.context():
            loss = nn.functional.mse_loss(model(inputs).float(), targets) / micro_batches + poison
        precision.backward(loss)
        total += loss.item()
    return total


def train_step(
    precision: Precision,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    step: int,
    max_grad_norm: float | None = None,
    poison: float = 0.0,
) -> StepOutcome:
    forward_backward(precision, model, step, poison=poison)
    outcome = precision.step(optimizers, max_grad_norm)
    model.zero_grad()
    return outcome


def scaled() -> tuple[Precision, nn.Sequential]:
    """Under fp16, at a scale that does not overflow."""
    return prepared(recipe("fp16_scaler", loss_scale={"init": 1024.0, "growth_interval": 3}))


def standard_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    micro_batches: int = 1,
    poison: float = 0.0,
) -> float:
    """Nothing in it is of the harness."""
    total = 0.0
    x, y = batch(step)
    for inputs, targets in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        loss = nn.functional.mse_loss(model(inputs), targets) / micro_batches + poison
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def snapshot(precision: Precision, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Everything a skipped step must leave alone, and a resume must restore, as a deep copy."""
    state = optimizer.state_dict()
    # Asking torch for a parameter's state makes an empty one.
    state["state"] = {key: value for key, value in state["state"].items() if value}
    return copy.deepcopy(
        {"model": model.state_dict(), "optimizer": state, **precision.state_dict()}
    )


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Paths at which two nested structures differ in any bit (NaN equals NaN)."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same = left.shape == right.shape and torch.equal(
            left.nan_to_num(-7.5), right.nan_to_num(-7.5)
        )
        return [] if same else [path]
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        found = [f"{path}/{key}" for key in left.keys() ^ right.keys()]
        return found + [
            item
            for key in left.keys() & right.keys()
            for item in differences(left[key], right[key], f"{path}/{key}")
        ]
    return [] if left == right else [path]
