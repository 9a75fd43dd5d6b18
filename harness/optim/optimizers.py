"""Optimizers for the gated update: fused, with a learning rate and step counters that live on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from harness.core.config import TrainConfig
from harness.core.errors import ConfigError, Problem
from harness.core.update import materialise

MOMENTS = {"adamw": 2, "sgd": 1}
"""fp32 values of state for each parameter, by `train.optimizer`."""


def build_optimizer(model: nn.Module, train: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """Fused AdamW, or fused SGD with momentum `train.betas[0]`, over the trainable parameters of `model`.

    Weight decay goes to parameters with at least two dimensions; a tied parameter appears once. Every group has
    `params`, `param_names` (as `model.named_parameters()`) and `lr`, one shared 0-d fp32 tensor on `device`. State is
    made at once, as zeros. Raises ConfigError if nothing is trainable.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not named:
        raise ConfigError(
            Problem(
                "the model has no trainable parameter",
                type(model).__name__,
                fix="return a module with parameters that require gradients from model.target",
            )
        )
    lr = torch.tensor(train.lr, dtype=torch.float32, device=device)
    groups: list[dict[str, Any]] = []
    for decay, members in (
        (train.weight_decay, [pair for pair in named if pair[1].ndim >= 2]),
        (0.0, [pair for pair in named if pair[1].ndim < 2]),
    ):
        if members:
            groups.append(
                {
                    "params": [param for _, param in members],
                    "param_names": [name for name, _ in members],
                    "weight_decay": decay,
                }
            )
    optimizer: torch.optim.Optimizer
    if train.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=train.betas, fused=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=train.betas[0], fused=True)
    for group in optimizer.param_groups:
        group["lr"] = lr
    materialise(optimizer)
    return optimizer
