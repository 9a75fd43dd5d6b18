"""Models whose gradients leave fp16's range at one of its ends, as a user's `model.target`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.models.gpt import GPT, build


class Fading(nn.Module):
    """A GPT whose gradient is multiplied by `factor` once more in each training forward from `first` on."""

    def __init__(self, first: int, factor: float) -> None:
        super().__init__()
        self.gpt: GPT = build(dim=64, layers=1, heads=2, ffn=176, tied=True)
        self.first, self.factor, self.forwards = first, factor, 0

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.gpt(inputs, targets)
        if not torch.is_grad_enabled():
            return loss
        self.forwards += 1
        times = self.factor ** max(0, self.forwards - self.first + 1)
        return loss.detach() + (loss - loss.detach()) * times


class Loud(nn.Module):
    """A GPT with one more matrix, in fp16, whose gradient is 0.75 everywhere from training forward `first` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.gpt: GPT = build(dim=64, layers=1, heads=2, ffn=176, tied=True)
        self.flat = nn.Parameter(torch.zeros(64, 64))
        self.first, self.forwards = first, 0

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.gpt(inputs, targets)
        extra = self.flat.half().float().sum() * (0.75 if self.forwards + 1 >= self.first else 1e-3)
        self.forwards += torch.is_grad_enabled()
        return loss + extra - extra.detach()


def fading(first: int, factor: float) -> Fading:
    """Gradients that fp16 flushes to zero, a few more in every step."""
    return Fading(first, factor)


def loud(first: int) -> Loud:
    """Gradients that the next doubling of the loss scale would push over fp16's largest value."""
    return Loud(first)
