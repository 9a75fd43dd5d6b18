"""Learning rate from the number of applied updates, so that skipped steps do not advance it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor


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
