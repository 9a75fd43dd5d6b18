"""torch's own training loop on a prepared model: `loss.backward(); optimizer.step(); optimizer.zero_grad()`.

Such a loop does not call `precision.context()`, `backward()` and `step()`. Three things do it instead:

1. Hooks on the model. When a module of it is called from outside, they enter the precision's context, and return the
   outputs in float32, in which losses are computed. The hooks are there from `prepare` on, whatever the loop: they
   also notice copies and threads, and enter contexts in `evaluating()`.
2. A replacement of `torch.autograd.backward`, which `Tensor.backward` calls. If the graph of a loss holds a parameter
   of a prepared model, the call goes through `Precision.backward`.
3. `WrappedOptimizer.step`, which is `Precision.step`.

True gradients under fp16. The loss is multiplied by the loss scale, so gradients come out scaled. `TrueGradients`
divides the gradient of every leaf that the loss reaches by the scale. It does so before the gradient is accumulated and
before any hook of the user runs, so clipping, logging, hooks and weight penalties see true gradients. The scale is a
power of two by default, so the division is exact. Whether the scaled gradients were finite is noted at the same place,
because clipping by value would hide it later.
"""

from __future__ import annotations

import sys
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from threading import get_ident, local
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from harness.core.errors import MisuseError, Problem
from harness.precision.layers import widened
from harness.precision.loss_scale import LossScale
from harness.precision.misuse import Live, makes_state_alone, misuse

if TYPE_CHECKING:
    from harness.precision.api import Precision, StepOutcome
    from harness.precision.prepared import Prepared


# torch shows this reason where somebody asks for one graph over the whole model.
_NO_FULL_GRAPH = (
    "a prepared model enters its precision before its forward, outside of the graph: leave out fullgraph=True, or"
    " compile block by block, `for block in model.blocks: block.compile(fullgraph=True)`"
)


class WrappedOptimizer(Optimizer):
    """An optimizer, or several as one, whose `step` is `Precision.step`. Made by `Precision.wrap`.

    Parameter groups, state, defaults and hooks are those of the inner optimizers, so schedulers may be made from
    either. Several optimizers have one `step`, one verdict and one norm. Their state dicts lie in a list under
    "optimizers".

    max_grad_norm: clip to this global L2 norm; None does not clip. May be changed between steps.
    tokens: of a window over all ranks, for the speed in the telemetry. May be changed between steps.
    outcome: of the last step, None before the first.
    """

    def __init__(
        self,
        precision: Precision,
        optimizers: Sequence[Optimizer],
        max_grad_norm: float | None,
        tokens: int,
    ):
        # Optimizer.__init__ is not called: everything that it would make belongs to the inner optimizers.
        self.optimizers = list(optimizers)
        self.max_grad_norm = max_grad_norm
        self.tokens = tokens
        self.outcome: StepOutcome | None = None
        self._precision = precision

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gate, unscale, clip, apply, roll the scales: `Precision.step`. closure: called once before, with gradients
        on.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # No window is open, and the step would change no weight: a checkpoint library makes the optimizer's state so.
        begun = self._precision.prepared.window.begun
        if not begun and all(makes_state_alone(each) for each in self.optimizers):
            for each in self.optimizers:
                each.step()
            return loss
        self.outcome = self._precision.step(self.optimizers, self.max_grad_norm, self.tokens)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of every inner optimizer."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner groups themselves, one optimizer after the other."""
        groups: list[dict[str, Any]] = []
        for optimizer in self.optimizers:
            groups += optimizer.param_groups
        return groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner state itself."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].state
        return ChainMap(*(optimizer.state for optimizer in self.optimizers))

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The defaults of the first one."""
        return self.optimizers[0].defaults

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's own, so that it fits checkpoints of the same loop without this wrapper."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].state_dict()
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore what `state_dict` gave. Raises MisuseError if it is of another number of optimizers."""
        count = len(self.optimizers)
        parts = [state_dict] if count == 1 else state_dict.get("optimizers", ())
        if len(parts) != count or "optimizers" in parts[0]:
            what = f"the state is not of {count} optimizers"
            fix = "load what state_dict() of the same wrap() gave"
            raise misuse("load_state_dict()", what, fix=fix)
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            optimizer.load_state_dict(part)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer. Raises MisuseError if there are several."""
        if len(self.optimizers) > 1:
            what = f"it stands for {len(self.optimizers)}"
            raise misuse("add_param_group()", what, fix="add it to one of them")
        self.optimizers[0].add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step asks an optimizer for this before it steps, and for nothing else.
        what = "a GradScaler steps the wrapped optimizer"
        why = "the loss scale of fp16 is the precision's own, and the loss would be scaled twice"
        raise misuse("step()", what, why, "loss.backward(); optimizer.step()")

    def __getattr__(self, name: str) -> Any:
        # Hooks registered with the inner optimizer, and its own methods, such as train() and eval() of some.
        if name == "optimizers":  # copy and pickle ask for attributes before __init__ has run
            raise AttributeError(name)
        return getattr(self.optimizers[0], name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"WrappedOptimizer({', '.join(map(repr, self.optimizers))})"


def unwrapped(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """One or several optimizers as a list, with the inner ones in place of a wrapped one."""
    given = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    inner: list[Optimizer] = []
    for each in given:
        if isinstance(each, WrappedOptimizer):
            inner += each.optimizers
        else:
            inner.append(each)
    return inner


def wrap_problems(optimizers: Sequence[object]) -> list[Problem]:
    """A problem for each optimizer that already wraps another: this project's, accelerate's or Lightning's."""
    problems: list[Problem] = []
    for each in optimizers:
        if isinstance(each, WrappedOptimizer):
            what = "the optimizer is wrapped already"
            problems.append(Problem(what, "wrap()", fix="wrap it once"))
        elif isinstance(getattr(each, "optimizer", None), Optimizer):
            what = f"{type(each).__name__} holds another optimizer"
            fix = "wrap torch's optimizer first, and give the result to the other library"
            problems.append(Problem(what, "wrap()", fix=fix))
    return problems


class TrueGradients:
    """Divides the gradients of leaves by the loss scale.

    active: whether it divides now; on during a backward of the precision's own.
    found: float32 0-d, 1.0 if a gradient of the window was not finite before the division.
    """

    def __init__(self, loss_scale: LossScale, device: torch.device) -> None:
        self._loss_scale = loss_scale
        self.active = False
        self.found = torch.zeros((), dtype=torch.float32, device=device)
        self._inverse = torch.ones((), dtype=torch.float32, device=device)
        self._hook = self._unscale

    def watch(self, leaves: Iterable[Tensor]) -> None:
        """Put the hook on every leaf, before each backward.

        It comes before all hooks of the user, also before those that are there already.
        """
        for leaf in leaves:
            hooks: Any = leaf._backward_hooks
            if not leaf.requires_grad:
                continue
            if hooks and next(iter(hooks.values())) is self._hook:
                continue

            # Hooks run in the order of this dict: take out those that are there, and add them again after ours.
            before = dict(hooks or {})
            if hooks is not None:
                hooks.clear()
            leaf.register_hook(self._hook)
            if before:
                assert leaf._backward_hooks is not None
                for key, hook in before.items():
                    if hook is not self._hook:
                        leaf._backward_hooks[key] = hook
        self._inverse = self._loss_scale.value.reciprocal()

    def forget(self) -> None:
        """The window is over."""
        self.found = torch.zeros_like(self.found)

    def _unscale(self, grad: Tensor) -> Tensor | None:
        if not self.active or self._loss_scale.retired or grad.is_sparse:
            return None
        unscaled = grad.detach().to(self.found.device, torch.float32, copy=True)
        torch._amp_foreach_non_finite_check_and_unscale_([unscaled], self.found, self._inverse)
        # With create_graph the division has to be part of the graph of the gradients.
        if torch.is_grad_enabled():
            return grad * self._inverse.to(grad.device)
        return unscaled.to(grad.device, grad.dtype)


class Standard:
    """The hooks on one prepared model. From `begin` on, they make torch's own loop right.

    `Precision.wrap` calls `begin` the first time. A pickle of the model leaves its hooks without effect. A deep copy
    (an EMA) enters the context of the same precision.

    begun: every call of the model is a context. Before that, only calls in `Precision.evaluating()` are.
    gradients: divides gradients by the loss scale; once begun, under an fp16 loss scale.
    skipped: the hooks skip the next call of this module. Lightning runs a whole step inside `DDP.forward`.
    """

    def __init__(self, precision: Precision, ready: Prepared) -> None:
        self._precision = precision
        self._ready = ready
        self.begun = False
        self.gradients: TrueGradients | None = None
        self.skipped: nn.Module | None = None

        # The open context: what was entered, by the call of which module, how deep it calls itself, in which thread,
        # and the frame of that call; None where it is compiled.
        self._entered: AbstractContextManager[Any] | None = None
        self._entrance: nn.Module | None = None
        self._depth = 0
        self._thread = 0
        self._frame: FrameType | None = None
        # The autocast that each entrance computed in, for checkpoints that compute it again.
        self._autocast: WeakKeyDictionary[nn.Module, tuple[bool, torch.dtype]] = WeakKeyDictionary()

        # A module without parameters computes the same in any context.
        own: list[nn.Module] = []
        for module in ready.model.modules():
            first = next(module.parameters(), None)
            if first is not None:
                own.append(module)
        self._own = WeakSet(own)
        for module in own:
            _drop_hooks_of_originals(module)
        self._hooks = _hook_all(own, self.enter, self.leave)

    def begin(self) -> None:
        """Make torch's own loop right from now on."""
        # Hooks of a Precision that the model had before would enter a second context.
        for other in _standards.now():
            if other._ready.model is self._ready.model:
                other._retire()

        # Under a loss scale the user's loop must see true gradients: it may clip or log them.
        scale = self._ready.loss_scale
        self.gradients = None
        if scale is not None:
            self.gradients = TrueGradients(scale, self._ready.device)
        self.begun = True
        _watch_backward()
        _standards.add(self)

    def _retire(self) -> None:
        for module in self._own:
            for hooks in _hooks_of(module):
                hooks.pop(self._hooks, None)
        _standards.discard(self)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Runs before a module of the model is called. Inside of a context it enters no other, except for activations
        that are computed again.

        A compiled graph ends here if a context has to be entered. A new one begins with the model's forward.
        """
        if not torch.compiler.is_compiling():
            self._enter(module, sys._getframe(1))
        elif not self._precision.busy:
            self._enter_compiled(module)

    @torch.compiler.disable(reason=_NO_FULL_GRAPH)
    def _enter_compiled(self, module: nn.Module) -> None:
        self._enter(module, None)

    def _enter(self, module: nn.Module, frame: FrameType | None) -> None:
        # A deep copy carries these hooks along. With gradients on it may be trained, and then its optimizer is refused.
        if module not in self._own and torch.is_grad_enabled():
            self._ready.window.copies.add(module)
        # Another thread works with the model. The context is its own, so this call would run without autocast.
        if self._precision.turn.elsewhere and not _in_autograd():
            raise self._precision.turn.refusal(f"{type(module).__name__}()")
        if not self.begun and not self._precision.is_evaluating:
            return

        if module is self._entrance:
            self.leave_interrupted()
        # Four cases: a call to skip, a call within the module's own call, one from outside, and one that activation
        # checkpointing runs again.
        busy = self._precision.busy
        if module is self.skipped and not busy:
            self.skipped = None
        elif module is self._entrance:
            # The module calls itself. Only its outermost call leaves the context.
            self._depth += 1
        elif not busy:
            self._ready.find_shards(f"{type(module).__name__}()", in_forward=True)
            self._open(module, self._precision.context(), frame)
            self._autocast[module] = self._autocast_now()
        elif self._precision.in_backward and self._entrance is None and module in self._autocast:
            # Activation checkpointing runs this forward again in backward. The context is closed by then, so the same
            # autocast is entered again.
            enabled, dtype = self._autocast[module]
            if (enabled, dtype) != self._autocast_now():
                kind = self._ready.device.type
                again = torch.autocast(kind, dtype=dtype, enabled=enabled)
                self._open(module, again, frame)

    def _open(
        self, module: nn.Module, context: AbstractContextManager[Any], frame: FrameType | None
    ) -> None:
        """Enter `context`, which the end of this call of `module` leaves. frame: of that call."""
        context.__enter__()
        self._entered = context
        self._entrance = module
        self._depth = 1
        self._thread = get_ident()
        self._frame = frame

    def leave_interrupted(self) -> None:
        """Leave a context whose call is over. torch skips hooks after a Ctrl-C, as in a notebook that goes on."""
        if self._entered is None or self._frame is None or self._thread != get_ident():
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        if frame is None:
            self._close()

    def _close(self) -> None:
        # Forget the context before it is left: whatever its exit raises, it must not be left twice.
        entered = self._entered
        self._entered = self._entrance = self._frame = None
        if entered is not None:
            entered.__exit__(None, None, None)

    def _autocast_now(self) -> tuple[bool, torch.dtype]:
        kind = self._ready.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Runs after the call, also after one that failed. Returns the outputs in float32."""
        if not torch.compiler.is_compiling():
            return self._leave(module, result)
        # A graph ends at the call below: only where a context has to be left.
        if module is not self._entrance:
            return None
        return self._leave_compiled(module, result)

    def looks_at(self, module: nn.Module) -> bool:
        """Whether these hooks look at the tensors of `module`'s call that runs now. A fused module asks it."""
        return module is self._entrance

    @torch.compiler.disable(reason=_NO_FULL_GRAPH)
    def _leave_compiled(self, module: nn.Module, result: Any) -> Any:
        return self._leave(module, result)

    def _leave(self, module: nn.Module, result: Any) -> Any:
        if module is not self._entrance or self._thread != get_ident():
            return None
        self._depth -= 1
        if self._depth or self._entered is None:
            return None

        self._close()
        # Losses are computed in float32, as outside of any autocast.
        return widened(result)

    @contextmanager
    def true_gradients(self, reached: Iterable[Tensor]) -> Iterator[None]:
        """Around the backward of a scaled loss: the gradients come out unscaled. reached: the leaves of its graph."""
        if self.gradients is None:
            yield
            return
        # The model's parameters are added by hand: a reentrant checkpoint hides them from the graph.
        self.gradients.watch([*self._own_leaves(), *reached])
        self.gradients.active = True
        try:
            yield
        finally:
            self.gradients.active = False

    def beside(self, reached: Iterable[Tensor]) -> list[Tensor]:
        """Those of the leaves in `reached` that are not the model's."""
        own = {id(leaf) for leaf in self._own_leaves()}
        return [leaf for leaf in reached if id(leaf) not in own]

    def _own_leaves(self) -> list[nn.Parameter]:
        shards = self._ready.shards
        gathered = [] if shards is None else shards.gathered
        return [*self._ready.parameters(), *gathered]

    def reached_by(self, losses: Sequence[Any]) -> bool:
        """Whether the graph of one of `losses` holds a parameter of the model."""
        others: list[Any] = []
        for leaf in leaves_of(losses):
            if id(leaf) in self._ready.owned:
                return True
            others.append(leaf)
        return self._ready.owns_any(others)

    def backward(self, losses: Sequence[Any], grad_tensors: Any, **options: Any) -> None:
        """`torch.autograd.backward` of losses that reach the model."""
        if len(losses) != 1 or not isinstance(losses[0], Tensor) or grad_tensors is not None:
            what = f"{len(losses)} losses at once"
            if grad_tensors is not None:
                what = "gradients are given"
            why = "the gate and the loss scale are those of one loss"
            fix = "add up to one loss, weighted, and call its backward()"
            raise misuse("backward()", what, why, fix)
        self._precision.backward(losses[0], **options)

    @property
    def in_backward(self) -> bool:
        """Whether a backward of the precision's own is running."""
        return self._precision.in_backward

    def __deepcopy__(self, memo: dict[int, Any]) -> Standard:
        return self

    def __reduce__(self) -> Any:
        return _Idle, ()


class _Idle:
    """Stands for the hooks of a model that was pickled. They do nothing."""

    def enter(self, module: nn.Module, args: Any) -> None:
        """Does nothing."""

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """Does nothing."""


_standards: Live[Standard] = Live()


class _Calls(local):
    """own: the next `torch.autograd.backward` of this thread comes from a Precision, and is not redirected."""

    own = False


_calls = _Calls()


@contextmanager
def own_backward() -> Iterator[None]:
    """Around the one `loss.backward()` that `Precision.backward` makes."""
    _calls.own = True
    try:
        yield
    finally:
        _calls.own = False


def _in_autograd() -> bool:
    """Whether autograd calls this, on whatever thread: from a hook, or to compute a forward again."""
    return torch._C._current_graph_task_id() >= 0


def _hook_all(
    modules: Iterable[nn.Module], enter: Callable[..., None], leave: Callable[..., Any]
) -> int:
    """Call `enter` before and `leave` after every call of the modules, also after one that failed. Returns the hooks'
    key.

    torch gives every registration a key of its own. torch.compile compiles a block again if the keys of its modules'
    hooks differ. Under one common key, blocks of one kind share their compiled code.
    """
    key = RemovableHandle(OrderedDict()).id
    for module in modules:
        module._forward_pre_hooks[key] = enter
        module._forward_hooks[key] = leave
        module._forward_hooks_always_called[key] = True
    return key


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called


def _drop_hooks_of_originals(module: nn.Module) -> None:
    """Remove the hooks that a deep copy brought along from its original, now that the copy is prepared itself."""
    for key, hook in list(module._forward_pre_hooks.items()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Standard) and module not in owner._own:
            for hooks in _hooks_of(module):
                del hooks[key]


def leaves_of(roots: Iterable[Any]) -> Iterator[Any]:
    """The leaf tensors that the gradients of `roots` are accumulated in, each once."""
    left: list[Any] = []
    for root in roots:
        node = getattr(root, "grad_fn", None)
        if node is not None:
            left.append(node)

    seen = set(left)
    while left:
        node = left.pop()
        # Only the nodes that accumulate gradients have a `variable`.
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)


@cache
def _watch_backward() -> None:
    """Replace `torch.autograd.backward`, once in a process. Losses that reach no wrapped model are left alone."""
    original = torch.autograd.backward

    @wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if _calls.own:
            _calls.own = False
            return original(tensors, grad_tensors, *args, **kwargs)

        # Reentrant checkpoints call backward within backward, on a GPU in a thread of autograd's. If every
        # wrapped model is in its own backward, this call is the inner part of one that was redirected already.
        nested = _in_autograd()
        standards = _standards.now()
        recomputed = nested and grad_tensors is not None
        all_inside = all(each.in_backward for each in standards)
        if not standards or (recomputed and all_inside):
            return original(tensors, grad_tensors, *args, **kwargs)

        # Whose loss is it?
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        reached = [each for each in standards if each.reached_by(losses)]
        within = nested and any(each.in_backward for each in reached)
        if not reached or (within and recomputed):
            return original(losses, grad_tensors, *args, **kwargs)
        _check_backward(reached, within, recomputed)

        # torch's other arguments may come by position; grad_variables is its old name of grad_tensors.
        names = ("retain_graph", "create_graph", "grad_variables", "inputs")
        options = dict(zip(names, args, strict=False)) | kwargs
        given = options.pop("grad_variables", None)
        gradients = grad_tensors if given is None else given
        return reached[0].backward(losses, gradients, **options)

    torch.autograd.backward = backward


def _check_backward(reached: Sequence[Standard], within: bool, recomputed: bool) -> None:
    """Raises MisuseError if a backward cannot be that of one window.

    reached: the models that its losses reach.
    within: it is called in the backward of one of them.
    recomputed: a reentrant checkpoint calls it, in the backward of something else.
    """
    if within:
        what = "called by a hook within the backward() of the same model"
        why = (
            "both are of one window, and the loss scale would be divided out of one gradient twice"
        )
        fix = "add it to the loss before, or call it once that backward() is over"
        raise misuse("backward()", what, why, fix)
    if recomputed:
        what = "a reentrant checkpoint is around all of the prepared model"
        why = "the loss does not show that it reaches the model, so nothing scales it or counts it for the window"
        fix = "checkpoint(..., use_reentrant=False), or checkpoint its blocks"
        raise misuse("backward()", what, why, fix)
    if len(reached) > 1:
        what = f"the loss reaches {len(reached)} prepared models"
        why = "nothing shows whose window it belongs to, and whose loss scale it needs"
        fix = (
            "requires_grad_(False) on what does not train now (a GAN's discriminator in the generator's step),"
            " or precision.backward(loss) of the one that does"
        )
        raise MisuseError(Problem(what, "backward()", why, fix))
