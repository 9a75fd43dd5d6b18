"""A second derivative through an FP8 layer is an error, not a wrong number."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from harness.core.errors import MisuseError, Problem


def once_differentiable(
    backward: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Decorate the backward of an autograd Function that cannot be differentiated itself. `ctx.layer` is its layer.

    torch's decorator of this name refuses a second derivative only where the gradient that comes in requires one. That
    of a critic's summed output does not: its gradient penalty would lack the part of the last layer's weight, and
    nobody would notice. Here every gradient that is computed with create_graph refuses it.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        for each in found:
            if each is not None:
                each.requires_grad_()
        # With the weight, or `torch.autograd.grad` of weights would not come by here.
        return _Refusing.apply(len(found), *found, ctx.layer.weight, *grads)

    return refusing


class _Refusing(torch.autograd.Function):
    """Gives the first `count` of its arguments; its backward is the second derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: Any) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else each.view_as(each) for each in given[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        what = "a gradient of an FP8 layer is differentiated again, as by a gradient penalty"
        why = "its backward cannot be differentiated: the terms through this layer would be missing"
        fix = "the recipe bf16, or the names of these layers in the recipe's layers.exclude"
        raise MisuseError(Problem(what, "backward()", why, fix))
