"""Between `backward` and `step` gradients are not the caller's: what changes them, or steps by itself, is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from api_support import adamw, batch, forward_backward, mlp, prepared, recipe, snapshot, train_step
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
def test_changing_scaled_gradients_is_refused_and_nothing_is_lost(
    change: Callable[[nn.Module], None],
) -> None:
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
    assert (
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
        > 0
    )
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
    with pytest.raises(
        MisuseError, match=r"AdamW.step\(\) was called directly[\s\S]*precision.step\(optimizer\)"
    ):
        scaler.step(optimizer) if by_scaler else optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def autograd_alone(precision: Precision, model: nn.Module) -> None:
    """What Lightning's automatic optimization and accelerate's backward do."""
    x, y = batch(0)
    with precision.context():
        loss = nn.functional.mse_loss(model(x).float(), y)
    loss.backward()


def no_context_at_all(_: Precision, model: nn.Module) -> None:
    """What Hugging Face's Trainer does."""
    x, y = batch(0)
    nn.functional.mse_loss(model(x).float(), y).backward()


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp8_dynamic", "fp16_scaler", "bf16", "fp32"])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("train", "told"),
    [
        (
            autograd_alone,
            r"directly, after a loss.backward\(\) of its own[\s\S]*precision.backward\(loss\)",
        ),
        (
            no_context_at_all,
            r"no forward was in context\(\)[\s\S]*plain precision, against the plan",
        ),
    ],
    ids=["autograd alone", "no context"],
)
def test_the_standard_loop_is_refused_and_changes_nothing(
    name: str, later: bool, train: Callable[[Precision, nn.Module], None], told: str
) -> None:
    """It would train in FP8 with scales that never roll, in fp16 without a scale, or not in the plan's precision."""
    precision, model = prepared(recipe(name))
    optimizer = adamw(model)
    if later:
        train_step(precision, model, optimizer, 0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    train(precision, model)
    with pytest.raises(MisuseError, match=told):
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_gradients_that_were_applied_are_not_applied_again() -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    forward_backward(precision, model, 0)
    precision.step(optimizer)
    with pytest.raises(MisuseError, match="called directly"):
        optimizer.step()


def test_other_models_and_steps_without_gradients_are_left_alone() -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    other = mlp()
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    forward_backward(precision, model, 0)
    other(torch.randn(4, 16)).sum().backward()
    others.step()
    assert precision.step(optimizer).was_applied
    optimizer.zero_grad()
    optimizer.step()  # as some do once, before a scheduler


def test_a_precision_that_is_gone_is_not_in_the_way() -> None:
    model = mlp()
    abandoned = Precision(recipe("bf16"))
    abandoned.prepare(model)
    forward_backward(abandoned, model, 0)
    model.zero_grad()
    precision = Precision(recipe("bf16"))
    precision.prepare(model)
    assert train_step(precision, model, adamw(model), 1).was_applied
