"""Models whose gradient or loss spikes in training forwards [first, last), as a user's `model.target`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.models.gpt import GPT, build


class Spiking(nn.Module):
    """A GPT. gradient, loss: the factors of each in a spike; one does not move the other."""

    def __init__(self, first: int, last: int, gradient: float, loss: float) -> None:
        super().__init__()
        self.gpt: GPT = build(dim=64, layers=2, heads=2, ffn=176, tied=True)
        self.first, self.last, self.gradient, self.loss, self.forwards = (
            first,
            last,
            gradient,
            loss,
            0,
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.gpt(inputs, targets)
        if not torch.is_grad_enabled():
            return loss
        self.forwards += 1
        if not self.first <= self.forwards < self.last:
            return loss
        return (
            loss
            + loss.detach() * (self.loss - 1.0)
            + (loss - loss.detach()) * (self.gradient - 1.0)
        )


def gradient(first: int, last: int, times: float) -> Spiking:
    """The gradient is `times` what it should be, the loss is right."""
    return Spiking(first, last, times, 1.0)


def loss(first: int, last: int, times: float) -> Spiking:
    """The loss is `times` what it should be, the gradient is right."""
    return Spiking(first, last, 1.0, times)
