"""te.checkpoint and torch.utils.checkpoint in whatever order losses go backward: as without either, or refused.

Both compute a forward again in backward, and must do so with the scales of the first time: under `roll: micro_batch`
they may have moved meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from threading import get_ident
from typing import Any

import pytest
import torch
from te_cpu_support import MLP, Trainer, disagreements, inputs, moved, plain, trained
from te_fused_support import Window
from test_te_scenarios import SAMPLED, Checkpointed, context_then_no_grad, evaluated_between
from torch import Tensor, nn

from harness.core.errors import MisuseError
from harness.precision.backends import te_library

te: Any = import_module("transformer_engine.pytorch")
TE = "transformer_engine"


def losses(trainer: Trainer, number: int, count: int) -> list[Tensor]:
    """Of so many forwards, each of another size: a scale that is not its own gives other bits."""
    return [trainer.loss(3.0**each * inputs(5 * number + each), 1 / count) for each in range(count)]


def backward(trainer: Trainer, *some: Tensor) -> None:
    for loss in some:
        trainer.precision.backward(loss)


def none_dropped(trainer: Trainer, number: int) -> None:
    for each in range(3):
        backward(trainer, trainer.loss(3.0**each * inputs(5 * number + each), 1 / 3))


def dropped_first(trainer: Trainer, number: int) -> None:
    """A loss that no backward follows comes before the others of its step."""
    trainer.loss(7 * inputs(200 + number))
    none_dropped(trainer, number)


def dropped_between(trainer: Trainer, number: int) -> None:
    for each in range(3):
        backward(trainer, trainer.loss(3.0**each * inputs(5 * number + each), 1 / 3))
        trainer.loss(7 * inputs(200 + each))


def dropped_last(trainer: Trainer, number: int) -> None:
    plain(trainer, number)
    trainer.loss(7 * inputs(200 + number))


def last_first(trainer: Trainer, number: int) -> None:
    """Three forwards, then their backwards from the last to the first."""
    backward(trainer, *reversed(losses(trainer, number, 3)))


def interleaved(trainer: Trainer, number: int) -> None:
    """As pipelines do: one forward, one backward, with one more forward under way."""
    waiting = losses(trainer, number, 1)
    for each in range(1, 4):
        waiting.append(trainer.loss(3.0**each * inputs(5 * number + each)))
        backward(trainer, waiting.pop(0))
    backward(trainer, *waiting)


def overtaken(trainer: Trainer, number: int) -> None:
    """A forward whose backward comes after those of later ones."""
    first, second = losses(trainer, number, 2)
    backward(trainer, first)
    backward(trainer, trainer.loss(9 * inputs(5 * number + 3)))
    backward(trainer, second)


def failed(trainer: Trainer, number: int) -> None:
    for each in range(2):
        with pytest.raises(RuntimeError, match="same size"):
            trainer.loss(7 * inputs(number), wrong=True)
        backward(trainer, trainer.loss(3.0**each * inputs(2 * number + each)))


def two_of_one_context(trainer: Trainer, number: int) -> None:
    """Two forwards and their losses in one context, each with a backward, another forward between."""
    with trainer.precision.context():
        first, second = (
            trainer.model(3.0**each * inputs(5 * number + each)).float().square().mean()
            for each in (0, 1)
        )
    backward(trainer, first)
    third = trainer.loss(9 * inputs(5 * number + 2))
    backward(trainer, second, third)


def of_two_times(trainer: Trainer, number: int) -> None:
    """One loss of two forwards, between which scales moved."""
    first, second = losses(trainer, number, 2)
    backward(trainer, second)
    backward(trainer, first + trainer.loss(9 * inputs(5 * number + 3)))


ORDERS: tuple[Window, ...] = (
    plain,
    dropped_first,
    dropped_between,
    dropped_last,
    last_first,
    interleaved,
    overtaken,
    failed,
    two_of_one_context,
    of_two_times,
    evaluated_between,
    context_then_no_grad,
)


@pytest.mark.every_version
@pytest.mark.parametrize("roll", ["step", "micro_batch"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("window", ORDERS)
def test_te_checkpoint_changes_nothing_whatever_the_order(
    window: Window, reentrant: bool, roll: str
) -> None:
    if window is context_then_no_grad and te_library.load().version < "2.20":
        pytest.skip(
            "before 2.20 te.checkpoint looks the same without gradients, and what runs in it is recorded"
        )
    straight = trained(TE, window, fp8={"roll": roll})
    again = trained(TE, window, lambda: Checkpointed(True, reentrant), fp8={"roll": roll})
    assert all(moved(straight))
    assert disagreements(straight, again) == []


class Nested(MLP):
    """te.checkpoint within te.checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.again: Callable[..., Any] = partial(te.checkpoint, use_reentrant=reentrant)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(self.a, x))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if torch.is_grad_enabled() else x
        return self.b(self.again(self.inner, x))


def in_a_thread(run: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run, *args).result()


@pytest.mark.every_version
@pytest.mark.parametrize("reentrant", [False, True])
def test_one_te_checkpoint_within_another_changes_nothing(reentrant: bool) -> None:
    assert disagreements(trained(TE), trained(TE, make=lambda: Nested(reentrant))) == []


@pytest.mark.every_version
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("make", "window"),
    [
        (partial(Checkpointed, True), plain),
        (partial(Checkpointed, True), dropped_between),
        (partial(Checkpointed, True), interleaved),
        (partial(Checkpointed, False), plain),
        (Nested, plain),
    ],
)
def test_backward_in_a_thread_of_its_own_as_on_a_card_changes_nothing(
    make: Callable[[bool], nn.Module],
    window: Window,
    reentrant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    straight = trained(TE, window)
    threads: set[int] = set()
    real = Tensor.backward

    def run(loss: Tensor) -> None:
        threads.add(get_ident())
        real(loss)

    monkeypatch.setattr(Tensor, "backward", lambda loss: in_a_thread(run, loss))
    assert disagreements(straight, trained(TE, window, lambda: make(reentrant))) == []
    assert threads
    assert get_ident() not in threads


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("window", [dropped_first, dropped_between])
def test_torch_checkpoint_beside_a_dropped_loss_changes_nothing(
    window: Window, reentrant: bool
) -> None:
    """But for sampled figures, which count what is computed again; a reentrant one records no loss that is dropped."""
    logs = [trained(TE, none_dropped if reentrant else window)]
    logs.append(trained(TE, window, lambda: Checkpointed(False, reentrant)))
    for entry in (entry for log in logs for entry in log):
        for name in SAMPLED:
            del entry[name]
    assert disagreements(*logs) == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "window", [last_first, interleaved, overtaken, two_of_one_context, of_two_times]
)
def test_torch_checkpoint_is_refused_where_scales_have_moved_since(
    window: Window, reentrant: bool
) -> None:
    trainer = Trainer(TE, lambda: Checkpointed(False, reentrant))
    with pytest.raises(
        MisuseError, match=r"(?s)layer a: torch\.utils\.checkpoint.*scales that have moved since"
    ):
        window(trainer, 0)


@pytest.mark.every_version
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("roll", ["step", "micro_batch"])
def test_te_checkpoint_refuses_a_loss_of_an_earlier_step(roll: str, reentrant: bool) -> None:
    trainer = Trainer(TE, lambda: Checkpointed(True, reentrant), {"fp8": {"roll": roll}})
    late = trainer.loss(inputs(1))
    plain(trainer, 0)
    trainer.step()
    trainer.loss(7 * inputs(2))
    with pytest.raises(MisuseError, match=r"layer a: te\.checkpoint has no scales of the forward"):
        trainer.precision.backward(late)


@pytest.mark.every_version
@pytest.mark.parametrize("reentrant", [False, True])
def test_te_checkpoint_of_a_model_in_eval_changes_nothing_or_is_refused(reentrant: bool) -> None:
    trainers = [Trainer(TE, make) for make in (MLP, lambda: Checkpointed(True, reentrant))]
    straight, again = trainers
    for trainer in trainers:
        trainer.model.eval()
    plain(straight, 0)
    if te_library.load().version < "2.20":
        with pytest.raises(
            MisuseError, match=r"layer a: te\.checkpoint has no scales of the forward"
        ):
            plain(again, 0)
        return
    plain(again, 0)
    for trainer in trainers:
        trainer.step()
    assert disagreements(straight.log, again.log) == []


@pytest.mark.every_version
@pytest.mark.parametrize("reentrant", [False, True])
def test_te_checkpoint_refuses_a_forward_in_a_thread_beside_the_training(reentrant: bool) -> None:
    """Autograd numbers the nodes of each thread for itself: such a number may be of any time."""
    trainer = Trainer(TE, lambda: Checkpointed(True, reentrant))
    plain(trainer, 0)
    number = torch.autograd._get_sequence_nr()

    def forward() -> Tensor:
        leaf = torch.ones(1, requires_grad=True)
        while torch.autograd._get_sequence_nr() < number:
            leaf.clone()
        return trainer.loss(inputs(5))

    loss = in_a_thread(forward)
    with pytest.raises(MisuseError, match=r"te\.checkpoint has no scales of the forward"):
        trainer.precision.backward(loss)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_te_checkpoint_within_another_is_refused_once_scales_moved(reentrant: bool) -> None:
    trainer = Trainer(TE, lambda: Nested(reentrant))
    with pytest.raises(
        MisuseError,
        match=r"(?s)layer a: .*te\.checkpoint within either.*scales that have moved since",
    ):
        last_first(trainer, 0)
