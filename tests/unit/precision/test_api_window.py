"""Between `backward` and `step` gradients are not the caller's: what changes them, or steps by itself, is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from api_support import adamw, forward_backward, mlp, prepared, recipe, snapshot, train_step
from torch import nn

from harness import Precision
from harness.core.errors import MisuseError


def clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def divide(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(65536.0)


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 65536.0


def plain_backward(model: nn.Module) -> None:
    model(torch.randn(4, 16)).sum().backward()


@pytest.mark.parametrize("change", [clip_norm, clip_value, divide, replace, plain_backward])
def test_changing_scaled_gradients_is_refused_and_nothing_is_lost(change: Callable[[nn.Module], None]) -> None:
    precision, model = prepared(recipe("fp16_scaler"))
    optimizer = adamw(model)
    train_step(precision, model, optimizer, 0)
    before = snapshot(precision, model, optimizer)["model"]
    forward_backward(precision, model, 1)
    change(model)
    with pytest.raises(MisuseError, match=r"4 gradients were changed[\s\S]*max_grad_norm"):
        precision.step(optimizer)
    with pytest.raises(MisuseError, match="gradients were changed"):
        forward_backward(precision, model, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    precision.load_state_dict(precision_state(precision))
    model.zero_grad()
    assert train_step(precision, model, optimizer, 2).was_applied


def precision_state(precision: Precision) -> dict[str, dict[str, object]]:
    """A window left open can still be dropped by going back to a state; here that of a twin that took one step."""
    twin, model = prepared(precision.recipe)
    train_step(twin, model, adamw(model), 0)
    return twin.state_dict()


@pytest.mark.parametrize("name", ["fp8_hybrid", "bf16", "fp32"])
def test_without_a_loss_scale_gradients_may_be_changed(name: str) -> None:
    precision, model = prepared(recipe(name))
    optimizer = adamw(model)
    forward_backward(precision, model, 0)
    clip_norm(model)
    assert precision.step(optimizer).grad_norm.item() == pytest.approx(1e-3, rel=1e-3)


def test_reading_and_accumulating_are_no_change() -> None:
    precision, model = prepared(recipe("fp16_scaler"))
    optimizer = adamw(model)
    forward_backward(precision, model, 0, micro_batches=4)
    assert nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item() > 0
    assert precision.step(optimizer).was_applied


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
@pytest.mark.parametrize("by_scaler", [False, True])
def test_an_optimizer_that_steps_by_itself_is_refused(name: str, by_scaler: bool) -> None:
    precision, model = prepared(recipe(name))
    optimizer = adamw(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    forward_backward(precision, model, 0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(MisuseError, match=r"AdamW.step\(\) was called directly[\s\S]*precision.step\(optimizer\)"):
        scaler.step(optimizer) if by_scaler else optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_other_models_and_closed_windows_are_left_alone() -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    other = mlp()
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    forward_backward(precision, model, 0)
    other(torch.randn(4, 16)).sum().backward()
    others.step()
    assert precision.step(optimizer).was_applied
    optimizer.step()


def test_a_precision_that_is_gone_is_not_in_the_way() -> None:
    model = mlp()
    abandoned = Precision(recipe("bf16"))
    abandoned.prepare(model)
    forward_backward(abandoned, model, 0)
    model.zero_grad()
    precision = Precision(recipe("bf16"))
    precision.prepare(model)
    assert train_step(precision, model, adamw(model), 1).was_applied
