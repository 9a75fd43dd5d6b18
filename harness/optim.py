"""Optimizers for the gated update, and their learning rate.

Fused, with a learning rate and step counters that live on the device. The schedule counts applied updates, so that
skipped steps do not advance it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any, overload

import torch
from torch import Tensor, nn

from harness.core.config import TrainConfig
from harness.core.errors import ConfigError, Problem
from harness.core.update import init_optimizer_state

HIGH = 0.5


@torch.no_grad()
def too_high(model: nn.Module, train: TrainConfig) -> str:
    """What is wrong with `train.lr` for these initial weights; empty if nothing is.

    AdamW moves every element by about the learning rate, so a matrix whose elements' RMS is `r` is made anew within
    r / lr steps. Over `HIGH` times the median RMS of the matrices is ten times what the shipped configs have, and three
    times under what broke them. SGD's steps have the gradient's size, of which nothing is known here.
    """
    if train.optimizer != "adamw":
        return ""
    matrices: list[torch.Tensor] = [param for param in model.parameters() if param.requires_grad and param.ndim >= 2]
    norms = torch.stack(torch._foreach_norm(matrices)).tolist() if matrices else []
    sizes = [norm / param.numel() ** 0.5 for norm, param in zip(norms, matrices, strict=True) if norm > 0]
    usual = median(sizes) if sizes else 0.0
    if not train.lr > HIGH * usual > 0:
        return ""
    return (
        f"train.lr {train.lr:g} is {train.lr / usual:.2g} times the usual weight's size ({usual:.2g}): every AdamW "
        f"update replaces a good part of each matrix. Usual is a tenth of it and less: try train.lr={usual / 20:.1g}"
    )


@dataclass(frozen=True, slots=True)
class WarmupCosine:
    """Linear warm-up to `lr`, then a cosine to `lr * min_lr_ratio` at `total_steps`, constant after that.

    Update n (counted from 0, applied updates only) gets lr * (n + 1) / warmup_steps during warm-up, then
    lr * (r + (1 - r) * (1 + cos(pi * p)) / 2) with r = min_lr_ratio, p = (n - warmup) / (total - warmup)
    (Loshchilov & Hutter, SGDR, arXiv 1608.03983, without restarts).
    """

    lr: float
    warmup_steps: int
    total_steps: int
    min_lr_ratio: float

    @overload
    def __call__(self, applied: Tensor) -> Tensor: ...
    @overload
    def __call__(self, applied: int) -> float: ...
    def __call__(self, applied: Tensor | int) -> Tensor | float:
        """The learning rate of the update after `applied` updates.

        A 0-d tensor gives a 0-d fp32 tensor on its device, without a host read; an int gives the float with the same
        bits as the tensor version has on the CPU. Computed in fp64, rounded once.
        """
        if not isinstance(applied, Tensor):
            return float(self(torch.tensor(applied)))
        n = applied.double()
        progress = ((n - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)).clamp(0.0, 1.0)
        cosine = self.min_lr_ratio + (1.0 - self.min_lr_ratio) * 0.5 * (1.0 + torch.cos(math.pi * progress))
        warmup = (n + 1.0) / max(1, self.warmup_steps)
        return (self.lr * torch.where(n < self.warmup_steps, warmup, cosine)).float()


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
    init_optimizer_state(optimizer)
    return optimizer
