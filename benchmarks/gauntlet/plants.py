"""Faults of a model, as hooks on the shipped GPT. Each function returns the GPT; with `on: false` it is healthy.

Two clocks are used. A fault that stays is a function of the GPT's buffer `window`, the number of training forwards that
its weights have seen: a rollback or a restart sets it back. A fault that comes once counts the forwards of the process,
so that it does not come again after a rollback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from benchmarks.outliers import ScaleGradient, counting
from harness.models.gpt import GPT

SIZES: dict[str, Any] = {"dim": 64, "layers": 1, "heads": 2, "ffn": 176}
"""Of the GPT that every loop trains: 83k parameters."""
RARE = ord("~")
"""A byte that the text does not have."""


def healthy(on: bool = True, **over: Any) -> GPT:
    """No fault. over: arguments of `harness.models.gpt.build` that are others when `on`."""
    return counting({**SIZES, **(over if on else {})})


def jump(layer: str, at: int, bits: int, on: bool = True) -> GPT:
    """From window `at` on, the input of `layer` is 2^bits times as large, and its output is divided by as much."""
    model = healthy()

    def factor() -> Tensor:
        return torch.exp2(bits * (_window(model) >= at).float())

    if on:
        linear = model.get_submodule(layer)
        linear.register_forward_pre_hook(lambda _, given: (given[0] * factor(),))
        linear.register_forward_hook(lambda *given: given[-1] / factor())
    return model


def offset(layer: str, size: float, on: bool = True) -> GPT:
    """`size` is added to the input of `layer`, and what that does to the output is removed in float32."""
    model = healthy()
    if on:
        linear = model.get_submodule(layer)
        weight = model.get_parameter(f"{layer}.weight")
        linear.register_forward_pre_hook(lambda _, given: (given[0] + size,))
        linear.register_forward_hook(
            lambda _, __, output: output.float() - size * weight.float().sum(1)
        )
    return model


def infinite_once(layer: str, at: int, on: bool = True) -> GPT:
    """In forward `at` of the process one value of the input of `layer` is infinite."""
    model = healthy()
    now = _once(model, at)

    def spoil(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not now():
            return given
        spoiled = given[0].clone()
        spoiled[0, 0, 0] = torch.inf
        return (spoiled,)

    if on:
        model.get_submodule(layer).register_forward_pre_hook(spoil)
    return model


def half_nan_once(at: int, on: bool = True) -> GPT:
    """In forward `at` of the process the gradient of half of the samples is NaN, as from one of two ranks."""
    model = healthy()
    now = _once(model, at)

    def spoil(gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        spoiled[: len(spoiled) // 2] = torch.nan
        return spoiled

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        if now() and output.requires_grad:
            output.register_hook(spoil)

    if on:
        model.lm_head.register_forward_hook(watch)
    return model


def bit_flip(parameter: str, at: int, on: bool = True) -> GPT:
    """Before forward `at` of the process the highest bit of the exponent of one weight flips."""
    model = healthy()
    now = _once(model, at)
    weight = model.get_parameter(parameter)

    def flip(*_: Any) -> None:
        if now():
            with torch.no_grad():
                bits = weight[:1, :1].clone().view(torch.int32) ^ (1 << 30)
                weight[:1, :1].copy_(bits.view(torch.float32))

    if on:
        model.register_forward_pre_hook(flip)
    return model


def dead(layer: str, at: int, on: bool = True) -> GPT:
    """From window `at` on the input of `layer` is zero."""
    model = healthy()
    if on:
        model.get_submodule(layer).register_forward_pre_hook(
            lambda _, given: (given[0] * (_window(model) < at),)
        )
    return model


def drifting_logits(every: int, on: bool = True) -> GPT:
    """The same number is added to all logits of a row, in their own dtype. It starts at 1 and doubles in `every`
    windows: the softmax does not see it, and a z-loss would hold it back.
    """
    model = healthy()
    if on:
        model.lm_head.register_forward_hook(
            lambda *given: given[-1] + _doubling(model, every).to(given[-1].dtype)
        )
    return model


def exp_and_log(every: int, on: bool = True) -> GPT:
    """A loss of one's own, log(sum(exp(logits))) - logit, over the logits of `drifting_logits`."""
    model = drifting_logits(every, on)

    class Unsafe(nn.Module):
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            rows = logits.float().flatten(0, -2)
            chosen = rows.gather(1, targets.flatten()[:, None]).squeeze(1)
            return (rows.exp().sum(1).log() - chosen).mean()

    if on:
        model.loss = Unsafe()  # pyright: ignore[reportAttributeAccessIssue]
    return model


def growing_attention(every: int, on: bool = True) -> GPT:
    """Queries and keys double in `every` windows, which a qk-norm would not let through."""
    model = healthy()
    inner = 2 * SIZES["dim"]

    def grow(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        factor = _doubling(model, every).to(output.dtype)
        return torch.cat([output[..., :inner] * factor, output[..., inner:]], dim=-1)

    if on:
        model.get_submodule("blocks.0.attn.qkv").register_forward_hook(grow)
    return model


def no_epsilon(on: bool = True) -> GPT:
    """Every RMSNorm has an epsilon of 1e-12, and the embedding of a byte that comes late is zero."""
    model = healthy(on, norm_eps=1e-12)
    with torch.no_grad():
        model.embed.weight[RARE] = 0.0
    return model


def large_init(factor: float, on: bool = True) -> GPT:
    """The initial weights of every Linear are `factor` times as large."""
    model = healthy()
    if on:
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.weight.mul_(factor)
    return model


def faint_gradient(layer: str, factor: float, on: bool = True) -> GPT:
    """The gradient that enters `layer` from above is `factor` times as large. The gradients of its weight and of its
    input are divided by `factor` again. 1 / factor has to be finite in fp16.
    """
    model = healthy()
    if on:
        linear = model.get_submodule(layer)
        times = torch.tensor(factor)
        linear.register_forward_pre_hook(
            lambda _, given: (ScaleGradient.apply(given[0], 1 / times),)
        )
        linear.register_forward_hook(lambda _, __, output: ScaleGradient.apply(output, times))
        model.get_parameter(f"{layer}.weight").register_hook(lambda gradient: gradient / times)
    return model


def rate_spike(at: int, updates: int, factor: float, on: bool = True) -> GPT:
    """From call `at` of the process's optimizer on, the learning rate of some updates is `factor` times as large.

    It is planted behind the schedule, in the optimizer itself: a schedule's own figures do not show it.
    """
    model = healthy()
    calls = 0

    def scale(optimizer: torch.optim.Optimizer, by: float) -> None:
        seen: list[Tensor] = []
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] *= by
            elif not any(group["lr"] is each for each in seen):
                seen.append(group["lr"])
                group["lr"].mul_(by)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal calls
        calls += 1
        if at <= calls < at + updates:
            scale(optimizer, factor)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if at <= calls < at + updates:
            scale(optimizer, 1 / factor)

    if on:
        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)
    return model


def _window(model: GPT) -> Tensor:
    """The training forward, counted from 1, that the model is in or has last been in."""
    return model.get_buffer("window")


def _doubling(model: GPT, every: int) -> Tensor:
    return torch.exp2(_window(model).float() / every)


def _once(model: GPT, at: int) -> Callable[[], bool]:
    """Whether this is training forward `at` of the process."""
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += torch.is_grad_enabled()

    model.register_forward_pre_hook(count)
    return lambda: forwards == at and torch.is_grad_enabled()
