"""What a training loop can get wrong between `backward` and the next step, noticed before it does harm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock, get_ident
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from harness.core.errors import MisuseError, Problem

OwnsAny = Callable[[Iterable[nn.Parameter]], bool]
T = TypeVar("T")


def misuse(call: str, what: str, why: str = "", fix: str = "") -> MisuseError:
    """The error for one wrong use of `call`."""
    return MisuseError(Problem(what, call, why, fix))


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[nn.Parameter]:
    """Each once, whatever the number of groups that hold it."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return iter(
        {id(parameter): parameter for group in groups for parameter in group["params"]}.values()
    )


def optimizer_problems(
    call: str, optimizers: Sequence[object], max_grad_norm: float | None, owns_any: OwnsAny
) -> list[Problem]:
    """What `call` has against these optimizers, whenever it comes."""
    problems: list[Problem] = []
    if max_grad_norm is not None and not max_grad_norm > 0:
        problems.append(
            Problem(
                f"max_grad_norm is {max_grad_norm}", call, fix="over 0, or None for no clipping"
            )
        )
    if not optimizers:
        problems.append(Problem("no optimizer", call, fix="give the model's optimizer"))
    for each in optimizers:
        name = type(each).__name__
        if not isinstance(each, Optimizer):
            problems.append(
                Problem(
                    f"{name} is no torch.optim.Optimizer", call, fix="give the optimizer itself"
                )
            )
            continue
        if not owns_any(parameters_of([each])):
            fix = "build the optimizer from the parameters of this model"
            problems.append(
                Problem(f"{name} holds no parameter of the prepared model", call, fix=fix)
            )
        if isinstance(each, LBFGS):
            why, fix = (
                "it wants to compute the loss several times a step",
                "take one that wants no closure",
            )
            problems.append(Problem("LBFGS cannot be gated", call, why, fix))
    return problems


def step_problems(optimizers: Sequence[object], backwards: int) -> list[Problem]:
    """What is wrong with `step` at this moment. backwards: since the last step."""
    problems: list[Problem] = []
    if not backwards:
        why = "a second step() on the same gradients would apply them twice"
        fix = "call backward() first; with several optimizers: step([first, second]), or one wrap([first, second])"
        problems.append(Problem("no backward() since the last step", "step()", why, fix))
    real = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]
    if any(
        parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters_of(real)
    ):
        fix = "nn.Embedding(..., sparse=False), with an optimizer for dense gradients"
        problems.append(Problem("a gradient is sparse, and cannot be gated", "step()", fix=fix))
    if backwards and real and all(parameter.grad is None for parameter in parameters_of(real)):
        fix = "call zero_grad() after step(), not between backward() and step()"
        problems.append(Problem("no parameter has a gradient", "step()", fix=fix))
    return problems


class Turn:
    """One thread at a time works with a prepared model: context, scales and window have one state for all threads.

    A thread may take its turn again within it. Threads that come one after the other are right.
    """

    def __init__(self) -> None:
        self._holder: dict[str, int] = {}

    @property
    def elsewhere(self) -> bool:
        """Whether another thread works with the model now."""
        here = get_ident()
        return self._holder.get("thread", here) != here

    @contextmanager
    def hold(self, call: str) -> Iterator[None]:
        """Around the work of this thread. Raises MisuseError where another thread is at it."""
        here = get_ident()
        again = self._holder.get("thread") == here
        # setdefault is atomic: of two threads that come at once, one gets the other's number.
        if self._holder.setdefault("thread", here) != here:
            raise self.refusal(call)
        try:
            yield
        finally:
            if not again:
                del self._holder["thread"]

    def check(self, call: str) -> None:
        """Raises MisuseError where another thread works with the model now."""
        if self.elsewhere:
            raise self.refusal(call)

    @staticmethod
    def refusal(call: str) -> MisuseError:
        """The error of the thread that came second."""
        what = "another thread is in a forward, backward, step or evaluation of the same prepared model"
        why = "autocast belongs to a thread, scales and window to the model: one of both would compute something else"
        fix = (
            "one thread at a time (a threading.Lock around what each of them does), or a copy for each thread,"
            " made before prepare(), with a Precision of its own"
        )
        return misuse(call, what, why, fix)


class Live(Generic[T]):
    """A WeakSet that may be read in one thread while another adds to it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._members: WeakSet[Any] = WeakSet()

    def add(self, member: T) -> None:
        """Until nobody else holds it."""
        with self._lock:
            self._members.add(member)

    def discard(self, member: T) -> None:
        """If it is a member."""
        with self._lock:
            self._members.discard(member)

    def now(self) -> list[T]:
        """The members of this moment."""
        with self._lock:
            return list(self._members)


class OpenWindow:
    """The time from a window's first `context` to its `step`; from its first `backward` on gradients are not the
    caller's.

    Raises MisuseError where an optimizer that holds parameters of the model, with gradients, steps by itself, whenever
    that is: scales would never roll, the gate would not be asked, and under fp16 it would apply scaled gradients, or
    ones that nobody scaled. scaled: under a loss scale also where somebody changed gradients, told by their addresses
    and version counters, which no work on the device is needed for. copies: deep copies of the model, or of its parts,
    that computed with gradients under its scales; an optimizer of theirs is refused as well.
    """

    def __init__(self, owns_any: OwnsAny) -> None:
        self.begun = False
        self.backwards = 0
        self.copies: Live[nn.Module] = Live()
        self._stepping = False
        self._applied: list[tuple[nn.Parameter, tuple[int, int] | None]] = []
        self._stepped: list[Optimizer] = []
        self._owns_any = owns_any
        self._marks: dict[nn.Parameter, tuple[int, int] | None] = {}
        _watch_optimizers()
        _windows.add(self)

    def backward_done(self, parameters: Iterable[nn.Parameter], scaled: bool) -> None:
        """One more micro-batch is in the gradients of `parameters`."""
        self.backwards += 1
        self._marks = {parameter: _mark(parameter) for parameter in parameters} if scaled else {}

    def check_gradients(self, call: str) -> None:
        """Raises MisuseError if gradients are not as the last `backward` left them."""
        if changed := [
            p for p, mark in self._marks.items() if p.grad is not None and _mark(p) != mark
        ]:
            what = f"{len(changed)} gradients were changed after backward()"
            why = "they carry the loss scale: clipped or divided now, they would be wrong by that factor"
            raise misuse(
                call,
                what,
                why,
                "clip with step(optimizer, max_grad_norm=...), and leave gradients alone",
            )

    def check_zeroed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before a window's first backward: raises MisuseError if a gradient is as the last step left it.

        parameters: the model's.
        """
        applied, self._applied = self._applied, []
        if any(
            parameter.grad is not None and _mark(parameter) == mark for parameter, mark in applied
        ):
            what, fix = "gradients were not zeroed after the last step()", "optimizer.zero_grad()"
            why = "those of two windows would be added, and the former were divided in place"
            held = {id(parameter) for parameter in parameters_of(self._stepped)}
            if any(
                parameter.requires_grad and id(parameter) not in held for parameter in parameters
            ):
                what += ", which was of a part of the model"
                fix = (
                    "for networks that are trained in turn (a GAN) one Precision each (docs/guide/api.md);"
                    " else zero_grad() of every optimizer before each window"
                )
            raise misuse("backward()", what, why, fix)

    def stepped(self, optimizers: Iterable[Optimizer]) -> None:
        """The gradients of their parameters were applied, or skipped. One of each optimizer stands for all of its."""
        self._stepped = list(optimizers)
        held = (
            (p for p in parameters_of([optimizer]) if p.grad is not None)
            for optimizer in self._stepped
        )
        self._applied = [
            (one, _mark(one)) for one in (next(each, None) for each in held) if one is not None
        ]

    def step_begins(self) -> None:
        """The optimizers may step now."""
        self._stepping = True

    def close(self) -> None:
        """The window ended, or was dropped."""
        self.begun, self.backwards, self._stepping, self._marks = False, 0, False, {}

    def lets(self, optimizer: Optimizer) -> bool:
        """Whether it is this window's own step that `optimizer` takes now."""
        return self._stepping and self._owns_any(parameters_of([optimizer]))

    def refuse(self, optimizer: Optimizer) -> None:
        """Raises MisuseError if `optimizer` may not step now."""
        if self._stepping:
            return
        with_gradients = [p for p in parameters_of([optimizer]) if p.grad is not None]
        if not self._owns_any(with_gradients):
            self._refuse_of_copies(optimizer, with_gradients)
            return
        what = f"{type(optimizer).__name__}.step() was called directly"
        why = "the gate, the loss scale and the FP8 scales belong to the step"
        fix = "call precision.step(optimizer) in its place; no GradScaler is needed"
        if not self.backwards:
            what += (
                ", after a loss.backward() of its own"
                if self.begun
                else ", and no forward was in context()"
            )
            fix = "precision.backward(loss) in place of loss.backward(), and precision.step(optimizer) in place of this"
        if not self.begun:
            why = "outside of context() the model computes in plain precision, against the plan"
            fix = f"with precision.context(): loss = ...; then {fix}"
        fix = f"optimizer = precision.wrap(optimizer), before schedulers and the loop, makes this loop right; or {fix}"
        raise misuse("step()", what, why, fix)

    def _refuse_of_copies(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        copied = {id(parameter) for copy in self.copies.now() for parameter in copy.parameters()}
        if copied.isdisjoint(id(parameter) for parameter in parameters):
            return
        what = f"{type(optimizer).__name__}.step() was called on a deep copy of the prepared model"
        why = "a copy computes with the original's FP8 scales, which it does not set; in fp16 nothing scales its loss"
        fix = "copy the model before prepare(), and give each copy that is trained a Precision of its own"
        raise misuse("step()", what, why, fix)


_windows: Live[OpenWindow] = Live()


@cache
def _watch_optimizers() -> None:
    """Once a process: torch calls every hook before every step of every optimizer."""

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        windows = _windows.now()
        # One that was left open by a Precision that is gone must not stand in the way of the next.
        if not any(window.lets(optimizer) for window in windows):
            for window in windows:
                window.refuse(optimizer)

    register_optimizer_step_pre_hook(before_step)


def _mark(parameter: nn.Parameter) -> tuple[int, int] | None:
    grad = parameter.grad
    return None if grad is None else (grad.data_ptr(), grad._version)
