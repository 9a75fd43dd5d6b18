"""Models that break on purpose, as a user's `model.target`. They count training forwards, so faults can pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from harness.models.gpt import GPT, build

SIZES = {"dim": 64, "layers": 2, "heads": 2, "ffn": 176, "tied": True}


class Faulty(nn.Module):
    """A GPT whose loss is NaN in training forwards [first, last)."""

    def __init__(self, first: float, last: float) -> None:
        super().__init__()
        self.gpt: GPT = build(**SIZES)  # pyright: ignore[reportArgumentType]
        self.first, self.last, self.forwards = first, last, 0

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.gpt(inputs, targets)
        if not torch.is_grad_enabled():
            return loss
        self.forwards += 1
        return loss * math.nan if self.first <= self.forwards - 1 < self.last else loss


def nan_between(first: int, last: int) -> Faulty:
    """NaN for a while: a fault that passes."""
    return Faulty(first, last)


def nan_from(first: int) -> Faulty:
    """NaN for ever: a fault that does not."""
    return Faulty(first, math.inf)


class Poisoned(nn.Module):
    """A GPT that cannot digest the byte 7: its loss is NaN for any batch that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt: GPT = build(**SIZES)  # pyright: ignore[reportArgumentType]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.gpt(inputs, targets)
        return loss * math.nan if bool((inputs == 7).any()) else loss


def poisoned() -> Poisoned:
    """Bad data, as the model sees it."""
    return Poisoned()


class GrowingOutlier(Faulty):
    """In forwards [first, last) one hidden unit of block 0's MLP grows fourfold, and its outgoing weight shrinks so.

    The function stays the same (fp32 and bf16 do not notice); two FP8 tensors outgrow their scales: the weight of
    `gate_up` and the input of `down`.
    """

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.forwards += 1
            if self.first <= self.forwards - 1 < self.last:
                mlp = self.gpt.get_submodule("blocks.0.mlp")
                gate_up, down = (
                    mlp.get_parameter("gate_up.weight"),
                    mlp.get_parameter("down.weight"),
                )
                with torch.no_grad():
                    gate_up[176 + 5] *= 4.0
                    down[:, 5] *= 0.25
        return self.gpt(inputs, targets)


def growing_outlier(first: int, last: int) -> GrowingOutlier:
    """A tensor that nears its format's limits, for a while."""
    return GrowingOutlier(first, last)


class Loud(Faulty):
    """In forwards [first, last) a matrix product inside the model passes 65504, fp16's largest value; bf16 holds it."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.gpt(inputs, targets)
        if not torch.is_grad_enabled():
            return loss
        self.forwards += 1
        if not self.first <= self.forwards - 1 < self.last:
            return loss
        large = torch.full((16, 16), 300.0, device=loss.device)
        loss = loss + 0.0 * (large @ large).sum()
        return loss * math.nan if self.nan_first <= self.forwards - 1 < self.nan_first + 5 else loss

    nan_first = math.inf


def loud_from(first: int, nan_first: float = math.inf) -> Loud:
    """Activations that outgrow fp16; five NaN losses from `nan_first` on, in any precision."""
    model = Loud(first, math.inf)
    model.nan_first = nan_first
    return model


class Orderless(nn.Module):
    """A GPT whose forward has an operation of which torch knows no deterministic kind, on a CPU either."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt: GPT = build(**SIZES)  # pyright: ignore[reportArgumentType]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.gpt(inputs, targets)
        return loss + torch.zeros(4).put_(torch.tensor([1]), torch.tensor([0.0])).sum()
