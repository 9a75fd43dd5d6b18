"""Copies of a prepared model, whenever they were made, and what `Precision.evaluating()` is around."""

from __future__ import annotations

import copy
import pickle
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
    standard_step,
    train_step,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness import Precision
from harness.core.errors import MisuseError

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")


# Copies


def whole(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def of_a_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(copy.deepcopy(model))


def of_a_part(model: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16), copy.deepcopy(model.get_submodule("0")), nn.Linear(32, 16)
    )


def of_an_average(model: nn.Module) -> nn.Module:
    return AveragedModel(model)


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler", "bf16"])
@pytest.mark.parametrize("make", [whole, of_a_copy, of_a_part, of_an_average])
@pytest.mark.parametrize("wrap", [True, False])
def test_a_copy_made_after_prepare_is_not_trained(
    name: str, make: Callable[[nn.Module], nn.Module], wrap: bool
) -> None:
    """Between `prepare` and `wrap`, too: it would train in plain fp32."""
    precision, model = prepared(recipe(name))
    twin = make(model)
    optimizer = adamw(model)
    if wrap:
        standard_step(model, precision.wrap(optimizer), 0)
    else:
        train_step(precision, model, optimizer, 0)
    before = copy.deepcopy(twin.state_dict())
    with pytest.raises(MisuseError, match=r"AdamW\.step\(\)[\s\S]*deep copy of the prepared model"):
        standard_step(twin, adamw(twin), 1)
    assert differences(twin.state_dict(), before) == []


def test_a_shallow_copy_has_the_models_own_parameters() -> None:
    _, model = prepared(recipe())
    twin = copy.copy(model)
    with pytest.raises(MisuseError, match=r"AdamW\.step\(\) was called directly"):
        standard_step(twin, adamw(twin), 0)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_precision_is_not_copied_and_neither_is_what_it_wrapped(
    again: Callable[[Any], Any],
) -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    wrapped = precision.wrap(optimizer)
    for each in (precision, wrapped, (model, wrapped)):
        with pytest.raises(MisuseError, match=r"is copied or pickled[\s\S]*state_dict\(\)"):
            again(each)
    assert not again(Precision(recipe())).is_prepared
    standard_step(model, wrapped, 0)


@pytest.mark.parametrize("name", ["fp16_scaler", "bf16"])
def test_a_copy_that_is_prepared_itself_trains(name: str) -> None:
    """As a model that was built anew; an FP8 one is refused at `prepare`."""

    def trained(model: nn.Module) -> dict[str, Any]:
        precision = Precision(recipe(name))
        optimizer = precision.wrap(adamw(precision.prepare(model)))
        for step in range(3):
            standard_step(model, optimizer, step)
        return {**model.state_dict(), **precision.state_dict()["tensors"]}

    original, model = prepared(recipe(name))
    assert differences(trained(mlp()), trained(copy.deepcopy(model))) == []
    assert not original.prepared.window.begun


@pytest.mark.parametrize("name", ["fp8_hybrid", "bf16"])
def test_an_average_that_was_made_before_wrap_is_evaluated_as_the_model(name: str) -> None:
    precision, model = prepared(recipe(name))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.0))
    wrapped = precision.wrap(adamw(model))
    for step in range(3):
        standard_step(model, wrapped, step)
        average.update_parameters(model)
    with precision.evaluating():
        ours, theirs = model(batch(5)[0]), average(batch(5)[0])
    assert torch.equal(ours, theirs)
    plain = copy.deepcopy(mlp())
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(ours, plain(batch(5)[0])), "in the plan's precision"


# Evaluation


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp8_dynamic", "bf16", "fp16_scaler", "fp32"])
@pytest.mark.parametrize("wrap", [True, False])
def test_code_of_the_users_own_computes_as_outside(name: str, wrap: bool) -> None:
    """A teacher, labels and a metric in evaluating() are what they are outside; outputs are as in training."""
    precision, model = scaled() if name == "fp16_scaler" else prepared(recipe(name))
    wrapped = precision.wrap(adamw(model)) if wrap else None
    teacher, x = mlp(7), batch(3)[0]

    def metric(out: Tensor) -> Tensor:
        return (out @ out.T).softmax(-1).diagonal().sum() + nn.functional.cross_entropy(
            out, teacher(x).argmax(-1)
        )

    with torch.no_grad():
        labels = teacher(x)
    # Before the first step FP8 layers have no scales, and evaluate in BF16.
    if wrapped is not None:
        standard_step(model, wrapped, 0)
        out = model(x)
    else:
        train_step(precision, model, adamw(model), 0)
        with precision.context():
            out = model(x)
    out = out.detach().float()
    precision.drop_window()
    with precision.evaluating():
        assert not torch.is_autocast_enabled("cpu")
        assert torch.equal(teacher(x), labels)
        logits = model(x)
        assert logits.dtype == torch.float32
        assert torch.equal(logits, out)
        assert torch.equal(model.get_submodule("0")(x), model.get_submodule("0")(x))
        inside = metric(logits)
    with torch.no_grad():
        assert torch.equal(inside, metric(out))


def test_what_does_not_belong_into_an_evaluation_is_refused() -> None:
    precision, model = prepared(recipe())
    wrapped = precision.wrap(adamw(model))
    loss = model(batch(0)[0]).mean()
    with precision.evaluating():
        for call in (loss.backward, lambda: precision.backward(loss), wrapped.step):
            with pytest.raises(MisuseError, match=r"called inside evaluating\(\)"):
                call()
        with precision.context():  # an evaluation's own context is one
            assert model(batch(0)[0]).dtype == torch.bfloat16
        with precision.evaluating():
            model(batch(0)[0])
        assert not model.training
    assert model.training
    loss.backward()
    wrapped.step()


def test_an_error_in_an_evaluation_leaves_it() -> None:
    precision, model = prepared(recipe())
    wrapped = precision.wrap(adamw(model))
    with pytest.raises(RuntimeError, match="shapes"), precision.evaluating():
        model(torch.randn(4, 5))
    assert model.training
    standard_step(model, wrapped, 0)
    assert wrapped.outcome is not None
    assert wrapped.outcome.was_applied
