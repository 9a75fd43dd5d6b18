"""Models that train in several threads: apart they are right, and two threads on one model are refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import Precision
from harness.core.errors import MisuseError
from harness.precision.standard import WrappedOptimizer

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")

_PATIENCE = 300.0


def steps(precision: Precision, model: nn.Module, wrapped: WrappedOptimizer) -> dict[str, Any]:
    for step in range(4):
        standard_step(model, wrapped, step, micro_batches=2)
    return snapshot(precision, model, wrapped)


def made(name: str) -> tuple[Precision, nn.Sequential, WrappedOptimizer]:
    precision, model = scaled() if name == "fp16_scaler" else prepared(recipe(name))
    return precision, model, precision.wrap(adamw(model))


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What `call` gives, or raises, in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(_PATIENCE)


def during(part: str, model: nn.Module, call: Callable[[], Any]) -> list[Any]:
    """From now on the first forward or backward of `model`'s last layer waits until another thread made `call`; a list
    that takes what came of it."""
    found: list[Any] = []

    def once(*_: Any) -> None:
        if not found:
            found.append(None)
            try:
                found[0] = in_a_thread(call)
            except MisuseError as error:
                found[0] = error

    last = list(model.children())[-1]
    if part == "forward":
        last.register_forward_hook(once)
    else:
        last.register_full_backward_hook(once)
    return found


@pytest.mark.parametrize("name", ["fp16_scaler", "fp8_hybrid", "fp8_dynamic", "bf16"])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_model_trains_while_another_thread_is_in_a_forward_or_backward(
    name: str, part: str
) -> None:
    alone = steps(*made(name))
    precision, model, wrapped = made(name)
    other, slow, theirs = made("bf16")
    found = during(part, slow, lambda: steps(precision, model, wrapped))
    standard_step(slow, theirs, 0)
    assert differences(alone, found[0]) == []
    assert wrapped.outcome is not None
    assert wrapped.outcome.was_applied
    assert other.prepared.state.step == 1


@pytest.mark.parametrize("name", ["fp16_scaler", "fp8_hybrid"])
def test_a_hook_trains_another_model_within_a_backward(name: str) -> None:
    """Nested in the same thread; the checkpoint computes backward within backward, too."""
    alone = steps(*made(name))
    precision, model, wrapped = made(name)
    _, outer, theirs = made("bf16")
    found: list[Any] = []

    def trains(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            found.append(steps(precision, model, wrapped))

    next(outer.parameters()).register_hook(trains)
    x, y = batch(0)
    hidden: Any = checkpoint(outer[0], x.requires_grad_(), use_reentrant=True)
    nn.functional.mse_loss(outer[2](outer[1](hidden)), y).backward()
    theirs.step()
    assert differences(alone, found[0]) == []


@pytest.mark.slow
def test_checkpoints_in_checkpoints_go_on_in_other_threads() -> None:
    """From the sixtieth on autograd computes them in threads of its own: as it always does on a GPU."""

    def run(deep: bool) -> dict[str, Any]:
        precision, model, wrapped = made("fp16_scaler")

        def nested(depth: int, x: torch.Tensor) -> Any:
            if depth == 0:
                return model[1](model[0](x))
            return checkpoint(lambda value: nested(depth - 1, value), x, use_reentrant=True)

        for step in range(2):
            x, y = batch(step)
            nn.functional.mse_loss(
                model[2](nested(70 if deep else 1, x.requires_grad_())), y
            ).backward()
            wrapped.step()
            wrapped.zero_grad()
        return snapshot(precision, model, wrapped)

    assert differences(run(deep=False), run(deep=True)) == []


def test_a_window_whose_parts_run_in_different_threads() -> None:
    precision, model, wrapped = made("fp16_scaler")
    alone = steps(*made("fp16_scaler"))
    for step in range(4):
        for x, y in zip(*(each.chunk(2) for each in batch(step)), strict=True):
            loss = in_a_thread(lambda x=x, y=y: nn.functional.mse_loss(model(x), y) / 2)
            in_a_thread(loss.backward)
        in_a_thread(wrapped.step)
        wrapped.zero_grad()
    assert differences(alone, snapshot(precision, model, wrapped)) == []


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_one_model_in_two_threads_at_once_is_refused(part: str, wrap: bool) -> None:
    """The second gets the error, and the first goes on as if it had been alone."""

    def run(call: Callable[[Precision, nn.Module], Any] | None) -> tuple[dict[str, Any], list[Any]]:
        precision, model = prepared(recipe())
        optimizer = adamw(model)
        wrapped = precision.wrap(optimizer) if wrap else None
        found = during(part, model, lambda: call and call(precision, model))
        if wrapped is not None:
            standard_step(model, wrapped, 0)
        else:
            with precision.context():
                loss = nn.functional.mse_loss(model(batch(0)[0]).float(), batch(0)[1])
            precision.backward(loss)
            precision.step(optimizer)
        return snapshot(precision, model, optimizer), found

    @torch.no_grad()
    def without_gradients(model: nn.Module) -> None:
        model(batch(1)[0])

    def evaluates(precision: Precision, model: nn.Module) -> None:
        with precision.evaluating():
            model(batch(1)[0])

    def enters(precision: Precision, model: nn.Module) -> None:
        with precision.context():
            model(batch(1)[0])

    calls: list[Callable[[Precision, nn.Module], Any]] = [
        lambda precision, model: model(batch(1)[0]),
        lambda precision, model: model.get_submodule("2")(torch.randn(4, 32)),
        lambda precision, model: without_gradients(model),
        evaluates,
        enters,
        lambda precision, model: precision.step(adamw(model)),
        lambda precision, model: precision.state_dict(),
    ]
    alone, _ = run(None)
    for call in calls:
        left, found = run(call)
        assert isinstance(found[0], MisuseError)
        assert "another thread is in a forward, backward" in str(found[0])
        assert differences(alone, left) == []


def test_a_backward_within_a_backward_of_the_same_model_is_refused() -> None:
    precision, model, _ = made("fp16_scaler")
    other = model(batch(1)[0]).mean()
    list(model.parameters())[-1].register_hook(lambda grad: other.backward())
    with pytest.raises(MisuseError, match=r"by a hook within the backward\(\) of the same model"):
        model(batch(0)[0]).mean().backward()
    precision.drop_window()


def test_a_reentrant_checkpoint_around_the_whole_model_is_refused() -> None:
    _, model, _ = made("fp16_scaler")
    out: Any = checkpoint(model, batch(0)[0].requires_grad_(), use_reentrant=True)
    with pytest.raises(
        MisuseError, match=r"around all of the prepared model[\s\S]*use_reentrant=False"
    ):
        out.mean().backward()


def test_a_loss_that_is_said_to_be_one_models_stays_that_models() -> None:
    """Of two models that it reaches, one of them in a loop that makes every call by hand."""
    first, generator = scaled()
    second, critic = prepared(recipe("bf16"))
    second.wrap(adamw(critic))
    with first.context():
        loss = critic(generator(batch(0)[0])).float().mean()
    first.backward(loss)
    assert (first.prepared.window.backwards, second.prepared.window.backwards) == (1, 0)


def test_models_are_prepared_while_others_step() -> None:
    """Lists of what is prepared are read in every backward and step, and written by every prepare."""
    _, model, wrapped = made("bf16")
    done = threading.Event()

    def prepares() -> None:
        kept = []
        while not done.is_set():
            precision = Precision(recipe("bf16"))
            other = precision.prepare(mlp(1))
            kept.append((precision, other, precision.wrap(adamw(other))))

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(prepares)
        try:
            for step in range(20):
                standard_step(model, wrapped, step)
        finally:
            done.set()
        busy.result(_PATIENCE)


def test_gradients_of_autograd_grad_are_not_stepped_with() -> None:
    _, model, wrapped = made("fp16_scaler")
    parameters = list(model.parameters())
    for parameter, grad in zip(
        parameters, torch.autograd.grad(model(batch(0)[0]).mean(), parameters), strict=True
    ):
        parameter.grad = grad
    with pytest.raises(MisuseError, match=r"no backward\(\) since the last step"):
        wrapped.step()
