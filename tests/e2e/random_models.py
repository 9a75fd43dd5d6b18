"""Models that do not repeat, or that keep a state which is easily missed, as a user's `model.target`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from harness.models.gpt import GPT, build

SIZES = {"dim": 64, "layers": 2, "heads": 2, "ffn": 176, "tied": True}


def os_noise(like: Tensor) -> Tensor:
    """Noise from the operating system, which no seed repeats; [1]."""
    number = int.from_bytes(os.urandom(4))
    return torch.tensor([number * 1e-12], dtype=like.dtype)


class Noise(nn.Module):
    """Adds noise in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + os_noise(x)


class NoiseInFp16(nn.Module):
    """Adds noise in forward while the model computes in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        in_fp16 = torch.get_autocast_dtype(x.device.type) == torch.float16
        return x + os_noise(x) if in_fp16 else x


class _NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * (1 + os_noise(grads[0]))


class NoiseBehind(nn.Module):
    """Adds noise to the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return _NoisyGradient.apply(x)  # pyright: ignore[reportReturnType]


class Unwritten(nn.Module):
    """Adds a value of memory that nothing has written, as a kernel with such a fault does.

    Which memory comes is up to the allocator. Here it always has other contents, unless torch fills it.
    """

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.empty(4)
        if not torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            memory.numpy()[:] = list(os.urandom(4))
        return x + memory[-1].nan_to_num(0.0, 0.0, 0.0) * 1e-4


class Kept(nn.Module):
    """Dropout, and buffers that no checkpoint has, which change in each forward and count in the next.

    `later` is made in the first forward.
    """

    calls: Tensor
    later: Tensor | None
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("later", None, persistent=False)
        self.register_buffer("mean", torch.zeros(64))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.later = self.calls.clone() if self.later is None else self.later + 1
                self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        calls = self.calls if self.later is None else self.calls + self.later
        return self.dropout(x) * (1 + 1e-3 * calls) + 1e-3 * self.mean


class Wrapped(nn.Module):
    """A GPT whose first block is followed by a module named `extra`."""

    def __init__(self, extra: nn.Module) -> None:
        super().__init__()
        self.gpt: GPT = build(**SIZES)  # pyright: ignore[reportArgumentType]
        self.gpt.blocks[0] = _Followed(self.gpt.blocks[0], extra)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.gpt(inputs, targets)


class _Followed(nn.Module):
    def __init__(self, block: nn.Module, extra: nn.Module) -> None:
        super().__init__()
        self.block, self.extra = block, extra

    def forward(self, *args: Any) -> Tensor:
        return self.extra(self.block(*args))


def noise() -> Wrapped:
    return Wrapped(Noise())


def noise_behind() -> Wrapped:
    return Wrapped(NoiseBehind())


def noise_in_fp16() -> Wrapped:
    return Wrapped(NoiseInFp16())


def unwritten() -> Wrapped:
    return Wrapped(Unwritten())


def kept() -> Wrapped:
    return Wrapped(Kept())


def noise_of_rank_1() -> Wrapped:
    return Wrapped(Noise() if os.environ.get("RANK") == "1" else nn.Identity())
