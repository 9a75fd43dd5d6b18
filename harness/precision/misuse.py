"""Refuses wrong uses of `harness.Precision` in a training loop before they do harm.

Three parts. `optimizer_problems` and `step_problems` check the arguments of a call. `Turn` refuses two threads that
work with one model at once. `OpenWindow` follows a window from its first forward to its step, and refuses what would
train something else in between: an optimizer that steps by itself, gradients that were changed, gradients that were
not zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import Parameter, signature
from threading import Lock, get_ident
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from harness.core.errors import MisuseError, Problem
from harness.core.sharded import local_of

OwnsAny = Callable[[Iterable[nn.Parameter]], bool]
OfShards = Callable[[str, Optimizer], list[Problem]]
T = TypeVar("T")
_Mark = tuple[int, int]


def misuse(call: str, what: str, why: str = "", fix: str = "") -> MisuseError:
    """The error for one wrong use of `call`."""
    return MisuseError(Problem(what, call, why, fix))


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[nn.Parameter]:
    """The parameters of all groups, each once, even if several groups hold it."""
    found: dict[int, nn.Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found[id(parameter)] = parameter
    return iter(found.values())


def optimizer_problems(
    call: str,
    optimizers: Sequence[object],
    max_grad_norm: float | None,
    owns_any: OwnsAny,
    of_shards: OfShards | None = None,
) -> list[Problem]:
    """What is wrong with these arguments of `call`, at any time.

    owns_any: whether any of some parameters belongs to the model.
    of_shards: what is wrong with an optimizer of a model that is sharded; None: it is not.
    """
    problems: list[Problem] = []
    # A loss may have weights of its own, with an optimizer of their own beside the model's.
    real = [each for each in optimizers if isinstance(each, Optimizer)]
    holds_the_model = owns_any(parameters_of(real))
    if max_grad_norm is not None and not max_grad_norm > 0:
        what = f"max_grad_norm is {max_grad_norm}"
        problems.append(Problem(what, call, fix="over 0, or None for no clipping"))
    if not optimizers:
        problems.append(Problem("no optimizer", call, fix="give the model's optimizer"))

    for each in optimizers:
        name = type(each).__name__
        if not isinstance(each, Optimizer):
            what = f"{name} is no torch.optim.Optimizer"
            problems.append(Problem(what, call, fix="give the optimizer itself"))
            continue
        # One problem for each optimizer: a sharded model explains all that follows from it.
        if flat := flat_problems(call, parameters_of([each])):
            problems += flat
            continue
        if of_shards is not None:
            problems += of_shards(call, each)
            continue
        if not holds_the_model:
            what = f"{name} holds no parameter of the prepared model"
            fix = "build the optimizer from the parameters of this model"
            problems.append(Problem(what, call, fix=fix))
        if _needs_closure(type(each)):
            why = "it computes the loss several times a step"
            fix = "take an optimizer that needs no closure"
            problems.append(Problem(f"{name} cannot be gated", call, why, fix))
    return problems


@cache
def _needs_closure(kind: type[Optimizer]) -> bool:
    """Whether a step of this class cannot be called without an argument: LBFGS, and what is written like it."""
    if issubclass(kind, LBFGS):
        return True
    _, *arguments = signature(kind.step).parameters.values()
    for each in arguments:
        is_named = each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if is_named and each.default is Parameter.empty:
            return True
    return False


def sharded_problems(call: str, parameters: Iterable[nn.Parameter]) -> list[Problem]:
    """Why a model that is sharded before `prepare` cannot be prepared; empty if it is whole."""
    parameters = list(parameters)
    problems = flat_problems(call, parameters)
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        what = "the model is sharded by fully_shard (FSDP2) already"
        why = "the plan and the FP8 layers are made for whole weights"
        fix = "prepare the whole model first, then fully_shard it, then make the optimizer"
        problems.append(Problem(what, call, why, fix))
    return problems


def flat_problems(call: str, parameters: Iterable[nn.Parameter]) -> list[Problem]:
    """Why a model that FSDP1 has sharded cannot be trained in a loop of one's own; empty if it has not."""
    if not any(isinstance(parameter, FlatParameter) for parameter in parameters):
        return []
    what = "the model is sharded by FullyShardedDataParallel (FSDP1)"
    why = "norms, scales and snapshots would be of this rank's rows alone"
    fix = "fully_shard (FSDP2), after prepare(); or DistributedDataParallel"
    return [Problem(what, call, why, fix)]


def step_problems(optimizers: Sequence[object], backwards: int) -> list[Problem]:
    """What is wrong with calling `step` now. backwards: how many there were since the last step."""
    problems: list[Problem] = []
    if not backwards:
        why = "a second step() on the same gradients would apply them twice"
        fix = "call backward() first; with several optimizers: step([first, second]), or one wrap([first, second])"
        problems.append(Problem("no backward() since the last step", "step()", why, fix))

    # What is no optimizer at all is reported by `optimizer_problems`.
    real = [each for each in optimizers if isinstance(each, Optimizer)]
    gradients: list[torch.Tensor] = []
    narrow: list[torch.dtype] = []
    for parameter in parameters_of(real):
        if parameter.grad is None:
            continue
        gradients.append(parameter.grad)
        if parameter.dtype in (torch.bfloat16, torch.float16):
            narrow.append(parameter.dtype)
    # prepare() refuses them where they train from the start, but not what is unfrozen or added later.
    if narrow:
        what = f"{len(narrow)} of the parameters that train are {narrow[0]}"
        why = "weights in less than float32 lose small updates"
        fix = "call .float() on what will be unfrozen before prepare(), and on adapters before they are added"
        problems.append(Problem(what, "step()", why, fix))
    if any(grad.is_sparse for grad in gradients):
        what = "a gradient is sparse, and cannot be gated"
        fix = "nn.Embedding(..., sparse=False), with an optimizer for dense gradients"
        problems.append(Problem(what, "step()", fix=fix))
    if backwards and real and not gradients:
        fix = "call zero_grad() after step(), not between backward() and step()"
        problems.append(Problem("no parameter has a gradient", "step()", fix=fix))
    return problems


@torch.no_grad()
def makes_state_alone(optimizer: Optimizer) -> bool:
    """Whether a step of `optimizer` would do nothing but make its state.

    So does torch.distributed.checkpoint.state_dict before it loads: a first step at rate 0, with gradients of zero.
    """
    rates = [group.get("lr", 1) for group in optimizer.param_groups]
    if optimizer.state or any(rate != 0 for rate in rates):
        return False
    for parameter in parameters_of([optimizer]):
        if parameter.grad is not None and local_of(parameter.grad).any():
            return False
    return True


class Turn:
    """Lets one thread at a time work with a prepared model.

    Context, scales and window are one state for all threads. A thread that has its turn may take it again. Threads that
    come one after the other are fine.
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
        """Around the work of this thread. Raises MisuseError if another thread is working."""
        here = get_ident()
        again = self._holder.get("thread") == here
        # setdefault is atomic: of two threads that come at once, one gets the other's number.
        if self._holder.setdefault("thread", here) != here:
            raise self.refusal(call)
        try:
            yield
        finally:
            # Only the outermost `hold` of a thread ends its turn.
            if not again:
                del self._holder["thread"]

    def check(self, call: str) -> None:
        """Raises MisuseError if another thread works with the model now."""
        if self.elsewhere:
            raise self.refusal(call)

    @staticmethod
    def refusal(call: str) -> MisuseError:
        """The error for the thread that came second."""
        what = "another thread is in a forward, backward, step or evaluation of the same prepared model"
        why = "autocast belongs to a thread, scales and window to the model: one of them would compute something else"
        fix = (
            "let one thread work at a time (a threading.Lock around what each of them does), or give each thread a copy"
            " of the model, made before prepare(), with a Precision of its own"
        )
        return misuse(call, what, why, fix)


class Live(Generic[T]):
    """A WeakSet that one thread may read while another adds to it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._members: WeakSet[Any] = WeakSet()

    def add(self, member: T) -> None:
        """Add `member`. It leaves by itself when nobody else holds it."""
        with self._lock:
            self._members.add(member)

    def discard(self, member: T) -> None:
        """Remove `member` if it is here."""
        with self._lock:
            self._members.discard(member)

    def now(self) -> list[T]:
        """The members at this moment."""
        with self._lock:
            return list(self._members)


def changed_gradients(call: str, count: int) -> MisuseError:
    """The error for gradients under a loss scale that are not as the last `backward` left them."""
    what = f"{count} gradients were changed after backward()"
    why = "they carry the loss scale: clipped or divided now, they would be wrong by that factor"
    fix = "clip with step(optimizer, max_grad_norm=...), and leave gradients alone"
    return misuse(call, what, why, fix)


class OpenWindow:
    """What happens between a window's first `context` and its `step`.

    Between the first `backward` and the step, the gradients belong to the window, not to the caller.

    An optimizer that holds parameters of the model with gradients must not step by itself at any time. The scales would
    not roll, the gate would not be asked, and under fp16 scaled gradients would be applied. `refuse` raises
    MisuseError.

    Under an fp16 loss scale, gradients must also stay as `backward` left them. Their addresses and version counters
    show a change, and reading those needs no work on the device. Those of a DTensor do not: see `LoopShards`.

    begun: a forward in `context` has begun the window.
    backwards: how many there were in this window.
    copies: deep copies of the model or of its parts that computed with gradients under its scales. An optimizer of a
        copy is refused as well.

    A loss may reach leaves that are not the model's: weights of its own, or a module before the model. In calls by hand
    their gradients carry the loss scale too. In torch's own loop they are true, but not finite where fp16 overflowed.
    An optimizer of such leaves belongs in the same `step` or `wrap` as the model's. One that is not there may use
    gradients that are true and finite.
    """

    def __init__(self, owns_any: OwnsAny) -> None:
        self.begun = False
        self.backwards = 0
        self.copies: Live[nn.Module] = Live()
        self._owns_any = owns_any
        # Whether this window's own step is running.
        self._stepping = False
        # The optimizers of the last step, and one parameter of each with the mark that its gradient had.
        self._stepped: list[Optimizer] = []
        self._applied: list[tuple[nn.Parameter, _Mark | None]] = []
        # How the last `backward` left one gradient; None where it left none: FSDP2 keeps those of micro-batches that it
        # does not exchange.
        self._left: tuple[nn.Parameter, _Mark | None] | None = None
        # How the last `backward` left every gradient, under a loss scale.
        self._marks: dict[nn.Parameter, _Mark | None] = {}
        # The same of leaves outside of the model, also after the window, and whether the gradient is scaled. An address
        # may be used again, so the gradient itself is held, weakly.
        self._others: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        _watch_optimizers()
        _windows.add(self)

    def backward_done(self, parameters: Iterable[nn.Parameter], scaled: bool) -> None:
        """One more micro-batch is in the gradients of `parameters`. scaled: they carry a loss scale."""
        parameters = list(parameters)
        self.backwards += 1
        self._left = None
        for parameter in parameters:
            # A sparse gradient has no address; `step` refuses it.
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self._left = parameter, _mark(parameter)
                break
        self._marks = {}
        if scaled:
            self._marks = {parameter: _mark(parameter) for parameter in parameters}

    def gradients_are_gone(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the gradients of this window's backwards were zeroed. The host reads them only where they changed."""
        if self._left is None:
            return False
        left, mark = self._left
        if _mark(left) == mark:
            return False
        gradients = [each.grad for each in parameters if each.grad is not None]
        return not any(bool(local_of(grad).any()) for grad in gradients)

    def reached_others(self, leaves: Iterable[torch.Tensor], scaled: bool) -> None:
        """A backward under a loss scale accumulated gradients in these leaves, which are not the model's.

        scaled: the gradients carry the scale.
        """
        for leaf in leaves:
            if leaf.grad is not None:
                self._others[leaf] = (ref(leaf.grad), leaf.grad._version, scaled)

    def check_gradients(self, call: str) -> None:
        """Raises MisuseError if gradients are not as the last `backward` left them."""
        changed = 0
        for parameter, mark in self._marks.items():
            if parameter.grad is not None and _mark(parameter) != mark:
                changed += 1
        if changed:
            raise changed_gradients(call, changed)

    def check_zeroed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before a window's first backward: raises MisuseError if a gradient is as the last step left it.

        parameters: the model's.
        """
        applied, self._applied = self._applied, []
        kept = False
        for parameter, mark in applied:
            same = parameter.grad is not None and _mark(parameter) == mark
            # What zeroes a DTensor in place leaves the versions of its rows as they were. Only then the host reads it.
            if same and isinstance(parameter.grad, DTensor):
                same = bool(local_of(parameter.grad).any())
            kept |= same
        if not kept:
            return

        what = "gradients were not zeroed after the last step()"
        why = "the gradients of two windows would be added, and the step has already divided the first ones"
        fix = "optimizer.zero_grad()"
        # A step of some of the parameters is how networks are trained in turn, which needs another fix.
        held = {id(parameter) for parameter in parameters_of(self._stepped)}
        trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
        if not trained <= held:
            what += ", which was of a part of the model"
            fix = (
                "for networks that are trained in turn (a GAN) one Precision each (docs/guide/api.md);"
                " else zero_grad() of every optimizer before each window"
            )
        raise misuse("backward()", what, why, fix)

    def stepped(self, optimizers: Iterable[Optimizer]) -> None:
        """The gradients of these optimizers were applied, or skipped."""
        self._stepped = list(optimizers)
        # zero_grad() of an optimizer zeroes all of its gradients, so one gradient of each shows whether it was called.
        self._applied = []
        for optimizer in self._stepped:
            for parameter in parameters_of([optimizer]):
                self._others.pop(parameter, None)
            # A gradient without rows on this rank has the same mark in every window.
            found = [p for p in parameters_of([optimizer]) if _has_gradient(p)]
            # DTensors first: beside them, zeroing in place leaves the version of a plain gradient as it was.
            found.sort(key=lambda parameter: not isinstance(parameter, DTensor))
            self._applied += [(parameter, _mark(parameter)) for parameter in found[:1]]

    def step_begins(self) -> None:
        """The optimizers may step now."""
        self._stepping = True

    def close(self) -> None:
        """The window ended, or was dropped."""
        self.begun = False
        self.backwards = 0
        self._stepping = False
        self._marks = {}

    def lets(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` now takes this window's own step."""
        return self._stepping and self._owns_any(parameters_of([optimizer]))

    def refuse(self, optimizer: Optimizer) -> None:
        """Raises MisuseError if `optimizer` may not step now."""
        if self._stepping or (not self.begun and makes_state_alone(optimizer)):
            return
        # A step without gradients does nothing: of a part that does not train in this window, for example.
        with_gradients = [p for p in parameters_of([optimizer]) if p.grad is not None]
        if not self._owns_any(with_gradients):
            self._refuse_of_copies(optimizer, with_gradients)
            self._refuse_of_others(optimizer, with_gradients)
            return

        # The fix depends on how far the loop used the interface: up to backward(), up to context(), or not at all.
        what = f"{type(optimizer).__name__}.step() was called directly"
        why = "the gate, the loss scale and the FP8 scales belong to the step"
        fix = "call precision.step(optimizer) in its place; no GradScaler is needed"
        if not self.backwards:
            if self.begun:
                what += ", after a loss.backward() of its own"
            else:
                what += ", and no forward was in context()"
            fix = "precision.backward(loss) in place of loss.backward(), and precision.step(optimizer) in place of this"
        if not self.begun:
            why = "outside of context() the model computes in plain precision, against the plan"
            fix = f"with precision.context(): loss = ...; then {fix}"
        fix = f"optimizer = precision.wrap(optimizer), before schedulers and the loop, makes this loop right; or {fix}"
        raise misuse("step()", what, why, fix)

    def _refuse_of_copies(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        copied: set[int] = set()
        for copy in self.copies.now():
            copied.update(map(id, copy.parameters()))
        if copied.isdisjoint(map(id, parameters)):
            return
        what = f"{type(optimizer).__name__}.step() was called on a deep copy of the prepared model"
        why = "a copy uses the original's FP8 scales and does not update them; in fp16 nothing scales its loss"
        fix = "copy the model before prepare(), and give each copy that is trained a Precision of its own"
        raise misuse("step()", what, why, fix)

    def _refuse_of_others(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        scaled = 0
        true: list[torch.Tensor] = []
        for parameter in parameters:
            held: tuple[ReferenceType[torch.Tensor], int, bool] | None = self._others.get(parameter)
            if held is None or parameter.grad is None or held[0]() is not parameter.grad:
                continue
            _, version, is_scaled = held
            if not is_scaled:
                true.append(parameter.grad)
            elif parameter.grad._version == version:
                scaled += 1

        name = type(optimizer).__name__
        if scaled:
            what = f"{name}.step() was called directly, on {scaled} parameters beside the model"
            why = "precision.backward(loss) reached them, so their gradients carry the loss scale"
            fix = (
                "precision.step([first, second]) for both optimizers; or precision.wrap(...) of the model's, before the"
                " loop: gradients are then true"
            )
            raise misuse("step()", what, why, fix)

        # The host waits for these: such an optimizer is of few parameters, and only under fp16.
        if any(not bool(grad.isfinite().all()) for grad in true):
            what = f"{name} is not wrapped, and gradients of its parameters, which are beside the model, are not finite"
            why = "fp16 overflowed, as it may at any time; the model skips that update, and these would become NaN"
            fix = "precision.wrap([first, second]), with the model's optimizer, skips it for both"
            raise misuse("step()", what, why, fix)


_windows: Live[OpenWindow] = Live()


@cache
def _watch_optimizers() -> None:
    """Watch every step of every optimizer; registered once in a process."""

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        windows = _windows.now()
        # A window that allows the step overrules the others: one may have been left open by a Precision that is gone.
        if not any(window.lets(optimizer) for window in windows):
            for window in windows:
                window.refuse(optimizer)

    register_optimizer_step_pre_hook(before_step)


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and local_of(parameter.grad).numel() > 0


def _mark(parameter: nn.Parameter) -> _Mark | None:
    """Changes whenever the gradient is replaced or written in place; None without a gradient."""
    if parameter.grad is None:
        return None
    grad = local_of(parameter.grad)
    return grad.data_ptr(), grad._version
