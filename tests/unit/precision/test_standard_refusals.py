"""`precision.wrap(optimizer)`: what it refuses, whose loss is whose, evaluation, and a guard."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from api_support import (
    adamw,
    batch,
    differences,
    mlp,
    prepared,
    recipe,
    scaled,
    snapshot,
    standard_step,
    train_step,
)
from torch import nn
from torch.optim.lr_scheduler import StepLR

from harness import Guard, Precision
from harness.core.errors import MisuseError
from harness.precision.standard import WrappedOptimizer

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")


# Whose loss it is


def test_models_that_are_not_prepared_train_beside_it() -> None:
    precision, model = scaled()
    wrapped = precision.wrap(adamw(model))
    other, alone = mlp(5), mlp(5)
    theirs, oracle = adamw(other), adamw(alone)
    for step in range(3):
        standard_step(model, wrapped, step)
        standard_step(other, theirs, step)
        standard_step(alone, oracle, step)
    assert differences(other.state_dict(), alone.state_dict()) == []


def test_a_loss_of_two_prepared_models_needs_to_be_told_whose_it_is() -> None:
    first, generator = prepared(recipe(), seed=1)
    second, critic = scaled()
    wrapped = first.wrap(adamw(generator)), second.wrap(adamw(critic))
    for step in range(3):
        x, y = batch(step)
        with pytest.raises(
            MisuseError, match=r"reaches 2 prepared models[\s\S]*requires_grad_\(False\)"
        ):
            nn.functional.mse_loss(critic(generator(x)), y).backward()
        critic.requires_grad_(False)
        nn.functional.mse_loss(critic(generator(x)), y).backward()
        wrapped[0].step()
        wrapped[0].zero_grad()
        critic.requires_grad_(True)
        standard_step(critic, wrapped[1], step)
    assert all(each.outcome is not None and each.outcome.was_applied for each in wrapped)


def test_fp8_layers_of_another_precision_are_refused() -> None:
    """A cell that is run again, or a part that was prepared alone: they would compute in BF16 from now on."""
    precision, model = prepared(recipe())
    around = nn.Sequential(model, nn.Linear(16, 16))
    for anew in (model, copy.deepcopy(model), around):
        with pytest.raises(
            MisuseError,
            match=r"prepare\(\)[\s\S]*2 FP8 layers of another Precision, such as (0\.)?0",
        ):
            Precision(recipe()).prepare(anew)
    standard_step(model, precision.wrap(adamw(model)), 0)


def test_a_model_that_is_prepared_anew_is_the_new_ones() -> None:
    """A cell that is run again, say."""
    model = mlp()
    both = [Precision(recipe("fp16_scaler")) for _ in range(2)]
    for precision in both:
        precision.prepare(model)
        standard_step(model, precision.wrap(adamw(model)), 0)
    assert [precision.prepared.state.step for precision in both] == [1, 1]


@pytest.mark.parametrize("policy", ["fp8_hybrid", "fp16_scaler"])
def test_a_deep_copy_that_is_trained_is_refused(policy: str) -> None:
    """Its FP8 scales would be the original's, which nothing of it sets, and nothing would scale its loss."""
    precision, model = prepared(recipe(policy))
    wrapped = precision.wrap(adamw(model))
    standard_step(model, wrapped, 0)
    twin = copy.deepcopy(model)
    theirs, before = adamw(twin), copy.deepcopy(twin.state_dict())
    with pytest.raises(MisuseError, match=r"AdamW\.step\(\)[\s\S]*deep copy of the prepared model"):
        standard_step(twin, theirs, 1)
    assert differences(twin.state_dict(), before) == []
    for step in (1, 2):  # beside a teacher whose forward forgot no_grad the original trains on
        twin(batch(step)[0])
        standard_step(model, wrapped, step)
        assert wrapped.outcome is not None
        assert wrapped.outcome.was_applied


# Misuse


def test_what_cannot_be_wrapped_is_named_at_once() -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    wrapped = precision.wrap(optimizer)

    class Holder(torch.optim.SGD):
        optimizer: torch.optim.Optimizer

    holder = Holder(model.parameters(), lr=0.1)
    holder.optimizer = optimizer
    wrong = [torch.optim.LBFGS(model.parameters()), "adam", wrapped, holder]
    with pytest.raises(MisuseError) as caught:
        precision.wrap(wrong, max_grad_norm=0.0)  # pyright: ignore[reportArgumentType]
    text = str(caught.value)
    for expected in (
        "LBFGS",
        "str is no torch",
        "wrapped already",
        "Holder holds",
    ):
        assert expected in text
    with pytest.raises(MisuseError, match="max_grad_norm is -1"):
        precision.wrap(optimizer, max_grad_norm=-1.0)
    with pytest.raises(MisuseError, match="no optimizer"):
        precision.wrap([])
    with pytest.raises(MisuseError, match="AdamW holds no parameter of the prepared model"):
        precision.wrap(adamw(mlp()))
    with pytest.raises(MisuseError, match="no model was prepared"):
        Precision(recipe()).wrap(optimizer)


def two_losses(model: nn.Module, wrapped: WrappedOptimizer) -> None:
    loss = model(batch(0)[0]).mean()
    torch.autograd.backward([loss, loss.square()])


def given_gradient(model: nn.Module, wrapped: WrappedOptimizer) -> None:
    out = model(batch(0)[0])
    out.backward(torch.ones_like(out))


def a_scaler(model: nn.Module, wrapped: WrappedOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0)[0]).mean()).backward()
    scaler.step(wrapped)


def the_inner_one(model: nn.Module, wrapped: WrappedOptimizer) -> None:
    model(batch(0)[0]).mean().backward()
    wrapped.optimizers[0].step()


def twice(model: nn.Module, wrapped: WrappedOptimizer) -> None:
    model(batch(0)[0]).mean().backward()
    wrapped.step()
    wrapped.step()


def not_zeroed(model: nn.Module, wrapped: WrappedOptimizer) -> None:
    for _ in range(2):
        model(batch(0)[0]).mean().backward()
        wrapped.step()


def zeroed_in_between(model: nn.Module, wrapped: WrappedOptimizer) -> None:
    for _ in range(2):
        model(batch(0)[0]).mean().backward()
        wrapped.zero_grad()


def zeroed_in_place_in_between(model: nn.Module, wrapped: WrappedOptimizer) -> None:
    for _ in range(2):
        model(batch(0)[0]).mean().backward()
        wrapped.zero_grad(set_to_none=False)


def in_eval_mode(model: nn.Module, wrapped: WrappedOptimizer) -> None:
    model(batch(0)[0])
    model.eval()
    model(batch(0)[0])


def no_forward(model: nn.Module, wrapped: WrappedOptimizer) -> None:
    next(model.parameters()).square().sum().backward()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (two_losses, "2 losses at once"),
        (given_gradient, "gradients are given"),
        (a_scaler, "a GradScaler steps"),
        (the_inner_one, r"AdamW.step\(\) was called directly[\s\S]*precision.wrap"),
        (twice, r"no backward\(\) since the last step[\s\S]*wrap\(\[first, second\]\)"),
        (not_zeroed, "not zeroed after the last"),
        (zeroed_in_between, "are gone"),
        (zeroed_in_place_in_between, "are gone"),
        (in_eval_mode, r"eval\(\) mode, and gradients are on[\s\S]*evaluating\(\)"),
        (no_forward, r"no forward in context\(\)[\s\S]*call the prepared model itself"),
    ],
)
@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler"])
def test_what_would_go_wrong_is_refused(
    name: str, wrong: Callable[[nn.Module, WrappedOptimizer], None], told: str
) -> None:
    precision, model = prepared(recipe(name))
    with pytest.raises(MisuseError, match=told):
        wrong(model, precision.wrap(adamw(model)))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", ["fp8_hybrid", "fp8_dynamic"])
def test_a_gradient_penalty_through_fp8_layers_is_refused_by_name(name: str, last: bool) -> None:
    """last: only the last layer is in FP8. The gradient that comes into it is constant, which torch lets pass."""
    layers = {"exclude": ["0"]} if last else {}
    precision, model = prepared(recipe(name, layers=layers))
    wrapped = precision.wrap(adamw(model))
    x = batch(0)[0].requires_grad_()
    grad = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    penalty = (grad.norm(dim=1) - 1).square().mean()
    with pytest.raises(MisuseError, match=r"a gradient penalty[\s\S]*layers\.exclude"):
        torch.autograd.grad(penalty + model(x).mean(), list(model.parameters()), retain_graph=True)
    with pytest.raises(MisuseError, match=r"a gradient penalty[\s\S]*layers\.exclude"):
        penalty.backward()
    precision.drop_window()
    wrapped.zero_grad()
    x.grad = None
    torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(x).sum().backward()
    wrapped.step()
    assert wrapped.outcome is not None
    assert wrapped.outcome.was_applied, "a gradient that is not differentiated again does no harm"


@pytest.mark.parametrize("name", ["fp8_hybrid", "bf16"])
def test_what_is_unfrozen_in_bfloat16_is_not_trained(name: str) -> None:
    """Gradual unfreezing of a trunk that was loaded in bfloat16: at small rates no weight of it would move."""
    model = mlp()
    model[0].to(torch.bfloat16).requires_grad_(False)
    precision = Precision(recipe(name))
    precision.prepare(model)
    wrapped = precision.wrap(torch.optim.SGD(model[2].parameters(), lr=0.1))
    standard_step(model, wrapped, 0)
    model[0].requires_grad_(True)
    wrapped.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(MisuseError, match=r"2 of the parameters that train are torch.bfloat16"):
        standard_step(model, wrapped, 1)


# Evaluation


@pytest.mark.parametrize("wrap", [True, False])
def test_an_evaluation_leaves_no_trace(wrap: bool) -> None:
    precision, model = prepared(recipe())
    model.insert(1, nn.Dropout(0.5))
    model[1].eval()
    optimizer = adamw(model)
    wrapped = precision.wrap(optimizer) if wrap else None
    model[1].train(False)
    before = precision.state_dict()
    for _ in range(2):
        with precision.evaluating():
            assert not model.training
            out = model(batch(3)[0])
            assert not out.requires_grad
        assert [module.training for module in model] == [True, False, True, True], "as they were"
    assert differences(before, precision.state_dict()) == []
    if wrapped is not None:
        standard_step(model, wrapped, 0)
    else:
        train_step(precision, model, optimizer, 0)
    stats = precision.stats()
    assert stats is not None
    assert stats.amax[0] == batch(0)[0].to(torch.bfloat16).abs().max().item(), (
        "of the training's batch alone"
    )


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp8_dynamic", "bf16"])
@pytest.mark.parametrize("wrap", [True, False])
def test_an_evaluation_with_gradients_on_leaves_no_trace(name: str, wrap: bool) -> None:
    """Everybody forgets no_grad once. A model that is in eval mode for good trains all the same."""

    def run(evaluate: bool, training: bool) -> dict[str, Any]:
        precision, model = prepared(recipe(name))
        optimizer = adamw(model)
        wrapped = precision.wrap(optimizer) if wrap else None
        for step in range(4):
            model.eval()
            if evaluate and wrapped is not None:
                model(100 * batch(9)[0])
            elif evaluate:
                with precision.context():
                    model(100 * batch(9)[0])
            model.train(training)
            if wrapped is not None:
                standard_step(model, wrapped, step)
            else:
                train_step(precision, model, optimizer, step)
        return snapshot(precision, model, optimizer)

    plain = run(evaluate=False, training=True)
    assert differences(plain, run(evaluate=True, training=True)) == []
    assert differences(plain, run(evaluate=False, training=False)) == []


def test_a_guard_takes_the_wrapped_optimizer() -> None:
    """A NaN is skipped; three in a row go back to a snapshot, and the loop goes on."""
    precision, model = prepared(recipe())
    wrapped = precision.wrap(adamw(model), max_grad_norm=1.0)
    scheduler = StepLR(wrapped, 3, 0.9)
    guard = Guard.for_precision(
        precision,
        wrapped,
        keep=[scheduler],
        max_consecutive_skips=2,
        snapshot_every=4,
        healthy_steps=2,
        streams=True,
    )
    actions = []
    for forward in range(16):
        assert guard.window == forward, (
            "what it calls a window is the loop's batch, after a rollback too"
        )
        standard_step(model, wrapped, forward, poison=math.nan if forward in (5, 9, 10) else 0.0)
        scheduler.step()
        actions.append(type(guard.end_step()).__name__)
    assert guard.state.ledger.skips == 3
    assert actions.count("Rollback") == 1
    assert guard.step < 16
    assert scheduler.last_epoch == guard.step
    assert guard.window == 16


def test_one_of_two_optimizers_was_not_zeroed() -> None:
    precision, model = prepared(recipe())
    first, second = (torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 2))
    wrapped = precision.wrap([first, second])
    model(batch(0)[0]).mean().backward()
    wrapped.step()
    first.zero_grad()
    with pytest.raises(MisuseError, match="gradients were not zeroed after the last"):
        model(batch(1)[0]).mean().backward()
