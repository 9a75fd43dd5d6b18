"""Models with one bad place each, as a user's `model.target`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.models.gpt import GPT, build

SIZES = {"dim": 64, "layers": 2, "heads": 2, "ffn": 176, "tied": True}
POISON = 7
"""A byte that no text has."""


class Marked(GPT):
    """A GPT whose `marks` module sees the token ids: hidden states of samples with the byte POISON can be spoiled."""

    marks: nn.Module

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        hit = (inputs == POISON).any(dim=1)[:, None, None]
        handle = self.blocks[1].register_forward_pre_hook(
            lambda _, args: (self.marks(args[0], hit), *args[1:])
        )
        try:
            return super().forward(inputs, targets)
        finally:
            handle.remove()


class Forward(nn.Module):
    """Divides by zero where a sample is marked."""

    def forward(self, x: Tensor, hit: Tensor) -> Tensor:
        return x / (~hit).float()


class Backward(nn.Module):
    """The square root's gradient at zero: forward is as it should be, backward gives 0 * inf where marked."""

    def forward(self, x: Tensor, hit: Tensor) -> Tensor:
        zero = torch.where(hit, x - x, torch.ones_like(x))
        return x + (zero.sqrt() - 1.0) * 0.0


class Large(nn.Module):
    """A product that passes 65504, fp16's largest value, where marked; bf16 and fp32 hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, hit: Tensor) -> Tensor:
        loud = self.up(torch.where(hit, x.sign() * 60000.0, torch.zeros_like(x)))
        return x + loud * 1e-9


def _marked(marks: nn.Module) -> GPT:
    model = build(**SIZES)  # pyright: ignore[reportArgumentType]
    model.__class__ = Marked
    model.marks = marks
    return model


def forward() -> GPT:
    """Bad in forward, in any precision."""
    return _marked(Forward())


def backward() -> GPT:
    """Bad in backward only, in any precision."""
    return _marked(Backward())


def large() -> GPT:
    """Bad in fp16 only."""
    model = _marked(Large())
    nn.init.constant_(model.get_parameter("marks.up.weight"), 0.5)
    return model


class Moody(GPT):
    """Its eighth training forward is NaN: something that no checkpoint holds."""

    forwards = 0

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        loss = super().forward(inputs, targets)
        self.forwards += torch.is_grad_enabled()
        return loss * float("nan") if self.forwards == 8 and torch.is_grad_enabled() else loss


def moody() -> GPT:
    """Not a function of weights and samples."""
    model = build(**SIZES)  # pyright: ignore[reportArgumentType]
    model.__class__ = Moody
    return model
