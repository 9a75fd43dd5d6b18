"""What a loop that is not ours can get wrong with `harness.Guard`: refused by name, before it does harm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from api_support import adamw, forward_backward, prepared, recipe
from own_loop_support import Keeper, Loop, OwnRate
from torch import nn

from harness import Guard
from harness.core.errors import ConfigError, MisuseError


def twice(loop: Loop) -> None:
    loop.step()
    loop.guard.end_step()


def never(loop: Loop) -> None:
    for step in range(3):
        forward_backward(loop.precision, loop.model, step)
        loop.precision.step(loop.optimizer)
        loop.optimizer.zero_grad()


def saved_unjudged(loop: Loop) -> None:
    loop.step()
    forward_backward(loop.precision, loop.model, 1)
    loop.precision.step(loop.optimizer)
    loop.precision.state_dict()


def second_guard(loop: Loop) -> None:
    Guard.for_precision(loop.precision, loop.optimizer)


def too_late(_: Loop) -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    forward_backward(precision, model, 0)
    precision.step(optimizer)
    Guard.for_precision(precision, optimizer)


def kept_without_state(_: Loop) -> None:
    precision, model = prepared(recipe())
    Guard.for_precision(precision, adamw(model), keep=[object()])


def kept_with_a_secret(_: Loop) -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> object:
            return {"what": object()}

    precision, model = prepared(recipe())
    Guard.for_precision(precision, adamw(model), keep=[Odd()])


def unknown_optimizer(loop: Loop) -> None:
    other = torch.optim.SGD(loop.model.parameters(), lr=1e-2, momentum=0.9)
    forward_backward(loop.precision, loop.model, 0)
    loop.precision.step([loop.optimizer, other])


def no_clipping_at_all(_: Loop) -> None:
    precision, model = prepared(recipe())
    Guard.for_precision(precision, adamw(model), max_grad_norm=-1.0)


def rate_that_cannot_be_lowered(_: Loop) -> None:
    precision, model = prepared(recipe())
    Guard.for_precision(precision, OwnRate(model.parameters()), rollback_lr_factor=0.5)


def gradients_gone(loop: Loop) -> None:
    forward_backward(loop.precision, loop.model, 0)
    loop.optimizer.zero_grad()  # an error was caught, and the window goes on
    forward_backward(loop.precision, loop.model, 1)


def not_zeroed(loop: Loop) -> None:
    for step in range(2):
        forward_backward(loop.precision, loop.model, step)
        loop.precision.step(loop.optimizer)
        loop.guard.end_step()


def kept_by_pairs(_: Loop) -> None:
    precision, model = prepared(recipe())
    Guard.for_precision(precision, adamw(model), keep=[Keeper({(0, 1): 2})])


def state_in_parts(_: Loop) -> None:
    class Scattered(torch.optim.SGD):
        """As ZeroRedundancyOptimizer, whose state is on other ranks."""

        def state_dict(self) -> dict[str, object]:
            raise RuntimeError("Optimizer state has not been consolidated on this rank.")

    precision, model = prepared(recipe())
    Guard.for_precision(precision, Scattered(model.parameters(), lr=1e-2))


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (unknown_optimizer, "step(): SGD is not known to the guard"),
        (no_clipping_at_all, "max_grad_norm is -1.0"),
        (rate_that_cannot_be_lowered, "OwnRate has no learning rate that could be lowered"),
        (not_zeroed, "gradients were not zeroed after the last step()"),
        (gradients_gone, "the gradients of 1 backward() since the last step are gone"),
        (kept_by_pairs, "Keeper keeps the key (0, 1) at its top, which is not copied"),
        (twice, "no step since the last call"),
        (never, "the guard has not judged the last step"),
        (saved_unjudged, "call guard.end_step() first"),
        (second_guard, "has a guard already"),
        (too_late, "has trained already"),
        (kept_without_state, "object lacks state_dict or load_state_dict"),
        (state_in_parts, "Scattered gives no state: Optimizer state has not been consolidated"),
        (kept_with_a_secret, "keeps a object at _extra_state.what, which is not copied"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_misuse_is_refused_by_name(use: Callable[[Loop], None], told: str) -> None:
    with pytest.raises(MisuseError) as raised:
        use(Loop())
    assert told in str(raised.value)
    assert "fix:" in str(raised.value)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_either_way_of_zeroing_is_seen(to_none: bool, fused: bool) -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model, fused=fused)
    for step in range(3):
        forward_backward(precision, model, step)
        precision.step(optimizer)
        optimizer.zero_grad(set_to_none=to_none)


def test_settings_are_checked_as_those_of_a_run() -> None:
    precision, model = prepared(recipe())
    with pytest.raises(ConfigError) as raised:
        Guard.for_precision(precision, adamw(model), max_rollback=2, spike_sigma=-1)
    assert 'unknown key "max_rollback"' in str(raised.value)
    assert "spike_sigma" in str(raised.value)
    for steps in (
        -1,
        2.5,
        "many",
    ):  # a snapshot that nothing healthy follows would be as good as any
        with pytest.raises(ConfigError, match="healthy_steps"):
            Guard.for_precision(precision, adamw(model), healthy_steps=steps)  # type: ignore[arg-type]
