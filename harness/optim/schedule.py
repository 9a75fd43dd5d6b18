"""The learning rate: its schedule, a warning where it is too high, and how far a resume moves it.

Schedules count applied updates, so skipped steps do not advance them. The rate is computed on the device from the
counter of applied updates that is there: the host learns only a step later whether an update was applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.core.collectives import gather_over_ranks
from harness.core.config import TrainConfig
from harness.core.sharded import local_of

HIGH = 0.5
"""`too_high` warns of a rate above this share of the median RMS of the matrices."""
# Optimizers whose updates move every element by about the learning rate.
_ADAMW = ("adamw", "adamw8bit", "adamw_fp8")


@torch.no_grad()
def too_high(model: nn.Module, train: TrainConfig) -> str:
    """What is wrong with `train.lr` for these initial weights; empty if nothing is.

    AdamW moves every element by about the learning rate. So a matrix whose elements have an RMS of `r` is replaced
    within r / lr steps. The limit is `HIGH` times the median RMS of the matrices: ten times what the shipped configs
    have, and a third of what broke them. Nothing is said of other optimizers: SGD's steps have the gradient's size, and
    the step sizes of the rest are not known here either.

    model: whole, or sharded over ranks. If it is sharded: collective.
    """
    if train.optimizer not in _ADAMW:
        return ""
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices: list[Tensor] = [param for param in trained if param.ndim >= 2]
    if not matrices:
        return ""

    # One read by the host for all norms, of one matrix after the other: they may be computed only now, and there may be
    # no memory for all. An all-zero matrix (a zero-initialised part) has no size to compare with.
    each = [torch.linalg.vector_norm(local_of(param.detach())) for param in matrices]
    norms = torch.stack(each)
    if any(isinstance(param, DTensor) for param in matrices):
        norms = gather_over_ranks(norms.double().square()).sum(dim=0).sqrt()
    sizes: list[float] = []
    for norm, param in zip(norms.tolist(), matrices, strict=True):
        if norm > 0:
            sizes.append(norm / param.numel() ** 0.5)
    usual = median(sizes) if sizes else 0.0
    if not train.lr > HIGH * usual > 0:
        return ""
    return (
        f"train.lr {train.lr:g} is {train.lr / usual:.2g} times the median RMS of the matrices ({usual:.2g}): every "
        "AdamW update replaces a good part of each matrix. Usual rates are under a tenth of that RMS: "
        f"try train.lr={usual / 20:.1g}"
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
            return float(self(torch.tensor(applied, device="cpu")))
        n = applied.double()

        # How far the decay is, from 0 to 1.
        start = self.warmup_steps
        if self.kind == "wsd":
            decay_steps = round(self.decay_share * self.total_steps)
            start = max(start, self.total_steps - decay_steps)
        progress = ((n - start) / max(1, self.total_steps - start)).clamp(0.0, 1.0)

        # The factor after the warm-up.
        if self.kind == "cosine":
            wave = 1.0 + torch.cos(math.pi * progress)
            after = self.min_lr_ratio + (1.0 - self.min_lr_ratio) * 0.5 * wave
        elif self.kind == "constant":
            after = torch.ones_like(progress)
        else:
            after = 1.0 - (1.0 - self.min_lr_ratio) * progress

        # Which of both applies, without reading `n` on the host.
        warmup = (n + 1.0) / max(1, self.warmup_steps)
        return (self.lr * torch.where(n < self.warmup_steps, warmup, after)).float()


JUMP = 1.5
"""A change of the learning rate by more than this factor is reported, see `lr_jump`."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A jump of the learning rate after a change of the schedule.

    last: the rate of the last update.
    next: the rate of the next one.
    text: the jump and its causes in words.
    """

    last: float
    next: float
    text: str


def lr_jump(
    before: TrainConfig, now: TrainConfig, applied: int, factor: float = 1.0
) -> Jump | None:
    """How the learning rate changes where a run of `before` goes on as `now` after `applied` updates.

    factor: by which rollbacks have changed the rate.

    None if the change of the config does not change the next rate, or if that is within a factor of JUMP of the last
    one's.
    """
    if not applied:
        return None
    old, new = Schedule.of(before), Schedule.of(now)
    last = old(applied - 1) * factor
    expected = old(applied) * factor
    following = new(applied) * factor
    if following == expected or last / JUMP <= following <= last * JUMP:
        return None

    # The keys that moved it, for the message.
    keys = ("lr", "steps", "schedule", "warmup_steps", "min_lr_ratio", "decay_share")
    changed: list[str] = []
    for key in keys:
        was, is_now = getattr(before, key), getattr(now, key)
        if was != is_now:
            changed.append(f"train.{key} {was} -> {is_now}")
    times = f"{following / last:.3g} times it" if last else "from none"
    text = f"the learning rate goes from {last:.3g} to {following:.3g} at the next update"
    text += f", {times}: {', '.join(changed)}"
    return Jump(last, following, text)
