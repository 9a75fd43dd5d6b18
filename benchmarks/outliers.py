"""Three faults that bf16 does not notice and FP8 cannot hold, each in one Linear of the shipped GPT.

They are functions for `model.target`. With `on: false` the model starts from the same weights and computes the same
function. A run in bf16 or fp32 has the same bits with and without the fault, so the whole loss of FP8 beside bf16 comes
from the fault's tensor in FP8.

Windows are counted in training forwards, so give the run train.micro_batch == train.global_batch on one rank. The count
is a buffer: it is saved, resumed and rolled back with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.models.gpt import GPT, build

GAPS = (17, 19)
"""Windows from one gradient storm to the next: 17 or 18, just over what an amax history of 16 remembers."""
_TABLE = 1 << 16


def growing(layer: str, per_window: float, on: bool = True, **sizes: Any) -> GPT:
    """One input channel of `layer` grows, as SwiGLU's outliers do late in long runs; its weights stay zero.

    It starts at 1 and doubles `per_window` times a window, up to 2^60. A scale follows such slow growth without
    saturating, but everything else in the tensor sinks below FP8's smallest value.

    layer: a Linear by its name in the GPT. sizes: those of `harness.models.gpt.build`.
    """
    model = counting(sizes)

    def value() -> Tensor:
        return torch.exp2((model.get_buffer("window").float() * per_window).clamp(max=60.0))

    _replace_channels(_linear(model, layer), 1, value if on else None)
    return model


def hot(layer: str, channels: int, value: float, on: bool = True, **sizes: Any) -> GPT:
    """The first `channels` input channels of `layer` are `value` from the first window on; their weights stay zero."""
    model = counting(sizes)
    _replace_channels(_linear(model, layer), channels, (lambda: value) if on else None)
    return model


def storm(layer: str, factor: float, on: bool = True, **sizes: Any) -> GPT:
    """Every 17 or 18 windows the gradient that enters `layer` from above is `factor` times as large.

    The gradients of its weight and of its input are divided by `factor` again. For a power of two that loses no bit in
    bf16 or fp32. In FP8 a scale of ordinary gradients clips the storm. While the amax history remembers the storm,
    ordinary gradients are flushed to zero.
    """
    model = counting(sizes)
    linear = _linear(model, layer)
    low, high = GAPS
    gaps = torch.randint(low, high, (_TABLE // low,), generator=torch.Generator().manual_seed(0))
    stormy = torch.zeros(_TABLE, dtype=torch.bool)
    stormy[gaps.cumsum(0)[gaps.cumsum(0) < _TABLE]] = True
    model.register_buffer("stormy", stormy, persistent=False)

    def current() -> Tensor:
        return torch.where(
            model.get_buffer("stormy")[model.get_buffer("window") % _TABLE], factor, 1.0
        )

    if on:
        linear.register_forward_pre_hook(
            lambda _, given: (ScaleGradient.apply(given[0], 1 / current()),)
        )
        linear.register_forward_hook(lambda _, __, output: ScaleGradient.apply(output, current()))
        linear.weight.register_hook(lambda gradient: gradient / current())
    return model


def counting(sizes: Mapping[str, Any]) -> GPT:
    """A GPT whose buffer `window` (int64 0-d) is 1 in the first training forward."""
    model = build(**sizes)
    model.register_buffer("window", torch.zeros((), dtype=torch.int64))

    def count(*_: object) -> None:
        if torch.is_grad_enabled():
            model.get_buffer("window").add_(1)

    model.register_forward_pre_hook(count)
    return model


def _linear(model: GPT, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{name} is a {type(module).__name__}, not a Linear")
    return module


def _replace_channels(
    linear: nn.Linear, channels: int, value: Callable[[], Tensor | float] | None
) -> None:
    """Zero the weights of the first input channels and freeze them, so that any `value` there is harmless."""
    with torch.no_grad():
        linear.weight[:, :channels] = 0.0

    def freeze(gradient: Tensor) -> Tensor:
        frozen = gradient.clone()
        frozen[:, :channels] = 0.0  # a product with 0 would keep an infinity as NaN
        return frozen

    linear.weight.register_hook(freeze)
    if value is None:
        return

    def replace(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        replaced = given[0].clone()
        replaced[..., :channels] = value()
        return (replaced,)

    linear.register_forward_pre_hook(replace)


class ScaleGradient(torch.autograd.Function):
    """The identity; its gradient is multiplied by `factor`, float32 0-d."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.factor.to(gradient.dtype), None
