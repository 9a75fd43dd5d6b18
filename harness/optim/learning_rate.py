"""A learning rate that cannot be meant: known before the first step, hard to tell afterwards."""

from __future__ import annotations

from statistics import median

import torch
from torch import nn

from harness.core.config import TrainConfig

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
