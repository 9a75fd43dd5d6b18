"""The learning rate: its schedule, one that is too high, and where a resume moves it.

Schedules count applied updates, so that skipped steps do not advance them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import overload

import torch
from torch import Tensor, nn

from harness.core.config import TrainConfig

HIGH = 0.5
# Whose updates move every element by about the learning rate.
_ADAMW = ("adamw", "adamw8bit", "adamw_fp8")


@torch.no_grad()
def too_high(model: nn.Module, train: TrainConfig) -> str:
    """What is wrong with `train.lr` for these initial weights; empty if nothing is.

    AdamW moves every element by about the learning rate, so a matrix whose elements' RMS is `r` is made anew within
    r / lr steps. Over `HIGH` times the median RMS of the matrices is ten times what the shipped configs have, and three
    times under what broke them. SGD's steps have the gradient's size, of which nothing is known here; nor is of others.
    """
    if train.optimizer not in _ADAMW:
        return ""
    matrices: list[torch.Tensor] = [
        param for param in model.parameters() if param.requires_grad and param.ndim >= 2
    ]
    norms = torch.stack(torch._foreach_norm(matrices)).tolist() if matrices else []
    sizes = [
        norm / param.numel() ** 0.5 for norm, param in zip(norms, matrices, strict=True) if norm > 0
    ]
    usual = median(sizes) if sizes else 0.0
    if not train.lr > HIGH * usual > 0:
        return ""
    return (
        f"train.lr {train.lr:g} is {train.lr / usual:.2g} times the usual weight's size ({usual:.2g}): every AdamW "
        f"update replaces a good part of each matrix. Usual is a tenth of it and less: try train.lr={usual / 20:.1g}"
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to `lr`, then by `kind` from `lr` to `lr * min_lr_ratio` at `total_steps`, constant after that.

    Update n (counted from 0, applied updates only) gets lr * (n + 1) / warmup_steps during warm-up, then lr * f(p),
    where p runs from 0 at the first update of the decay to 1 at `total_steps`, and r = min_lr_ratio:

    - cosine: f = r + (1 - r) * (1 + cos(pi * p)) / 2, from the end of the warm-up (Loshchilov & Hutter, SGDR,
      arXiv 1608.03983, without restarts)
    - linear: f = 1 - (1 - r) * p, from the end of the warm-up
    - wsd: the same line, from `decay_share * total_steps` before the end; 1 until then (warm-up, stable, decay: Hu et
      al., MiniCPM, arXiv 2404.06395; a linear decay as in Haegele et al., arXiv 2405.18392). More `total_steps` change
      nothing before the decay.
    - constant: f = 1
    """

    lr: float
    warmup_steps: int
    total_steps: int
    min_lr_ratio: float
    kind: str = "cosine"
    decay_share: float = 0.2

    @classmethod
    def of(cls, train: TrainConfig) -> Schedule:
        """The schedule of a run."""
        return cls(
            train.lr,
            train.warmup_steps,
            train.steps,
            train.min_lr_ratio,
            train.schedule,
            train.decay_share,
        )

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
        start = self.warmup_steps
        if self.kind == "wsd":
            start = max(start, self.total_steps - round(self.decay_share * self.total_steps))
        progress = ((n - start) / max(1, self.total_steps - start)).clamp(0.0, 1.0)
        if self.kind == "cosine":
            after = self.min_lr_ratio + (1.0 - self.min_lr_ratio) * 0.5 * (
                1.0 + torch.cos(math.pi * progress)
            )
        elif self.kind == "constant":
            after = torch.ones_like(progress)
        else:
            after = 1.0 - (1.0 - self.min_lr_ratio) * progress
        warmup = (n + 1.0) / max(1, self.warmup_steps)
        return (self.lr * torch.where(n < self.warmup_steps, warmup, after)).float()


JUMP = 1.5


@dataclass(frozen=True, slots=True)
class Jump:
    """The last update's learning rate and the next one's, which a changed schedule has moved apart."""

    last: float
    next: float
    text: str


def lr_jump(
    before: TrainConfig, now: TrainConfig, applied: int, factor: float = 1.0
) -> Jump | None:
    """What becomes of the learning rate where a run of `before` goes on as `now` after `applied` updates.

    factor: rollbacks' on the rate. None if the next update has neither over JUMP times the last one's nor under 1 /
    JUMP of it, or what it would have had anyway.
    """
    if not applied:
        return None
    old, new = Schedule.of(before), Schedule.of(now)
    last, expected, following = (
        old(applied - 1) * factor,
        old(applied) * factor,
        new(applied) * factor,
    )
    if following == expected or last / JUMP <= following <= last * JUMP:
        return None
    keys = ("lr", "steps", "schedule", "warmup_steps", "min_lr_ratio", "decay_share")
    changed = [
        f"train.{key} {a} -> {b}"
        for key in keys
        if (a := getattr(before, key)) != (b := getattr(now, key))
    ]
    times = f"{following / last:.3g} times it" if last else "from none"
    text = (
        f"the learning rate goes from {last:.3g} to {following:.3g} at the next update, {times}: "
    )
    text += ", ".join(changed)
    return Jump(last, following, text)
