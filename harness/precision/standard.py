"""torch's standard loop on a prepared model: `loss.backward(); optimizer.step(); optimizer.zero_grad()`.

Three things stand in for the calls that such a loop does not make. Hooks on the model enter the precision's context for
whatever module of it is called from outside, and hand its outputs out in float32, where losses are computed. (They are
there from `prepare` on, since they notice copies and threads in any loop, and enter contexts in `evaluating()` too.)
`torch.autograd.backward`, which `Tensor.backward` calls, is watched: a loss whose graph holds a parameter of a prepared
model goes through `Precision.backward`. `WrappedOptimizer.step` is `Precision.step`.

Under an fp16 loss scale the gradient of every leaf that the loss reaches is divided by the scale (a power of two by
default, so exactly) before it is accumulated and before any hook of the user's runs: clipping, logging, hooks and
penalties on weights see true gradients. Whether the scaled ones were finite is noted at that place, since clipping by
value would hide it.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from threading import get_ident, local
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from harness.core.errors import MisuseError, Problem
from harness.precision.layers import widened
from harness.precision.loss_scale import LossScale
from harness.precision.misuse import Live, misuse

if TYPE_CHECKING:
    from harness.precision.api import Precision, StepOutcome
    from harness.precision.prepared import Prepared


# What torch says of a graph that was to be one.
_NO_FULL_GRAPH = (
    "a prepared model enters its precision before its forward, outside of the graph: leave out fullgraph=True, or"
    " compile block by block, `for block in model.blocks: block.compile(fullgraph=True)`"
)


class WrappedOptimizer(Optimizer):
    """An optimizer, or several as one, whose `step` is `Precision.step`; made by `Precision.wrap`.

    Parameter groups, state, defaults and hooks are those of the optimizers within, so that schedulers made from either
    work. Several have one `step`, one verdict and one norm; their state dicts lie in a list under "optimizers".

    max_grad_norm: clip to this global L2 norm, None does not clip; tokens: of a window over all ranks, for the speed in
    the telemetry; both may be changed between steps. outcome: of the last step, None before the first.
    """

    def __init__(
        self,
        precision: Precision,
        optimizers: Sequence[Optimizer],
        max_grad_norm: float | None,
        tokens: int,
    ):
        # Not Optimizer.__init__: whatever it would make is the inner optimizers'.
        self.optimizers, self.max_grad_norm, self.tokens = list(optimizers), max_grad_norm, tokens
        self.outcome: StepOutcome | None = None
        self._precision = precision

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gate, unscale, clip, apply, roll: `Precision.step`. closure: called once before that, with gradients on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.outcome = self._precision.step(self.optimizers, self.max_grad_norm, self.tokens)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of every optimizer within."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner groups themselves, one optimizer after the other."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner state itself."""
        return (
            self.optimizers[0].state
            if len(self.optimizers) == 1
            else ChainMap(*(o.state for o in self.optimizers))
        )

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The first one's."""
        return self.optimizers[0].defaults

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's own, so that checkpoints of a loop without us fit."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].state_dict()
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Any) -> None:
        """What `state_dict` gave. Raises MisuseError where it is of another number of optimizers."""
        parts = [state_dict] if len(self.optimizers) == 1 else state_dict.get("optimizers", ())
        if len(parts) != len(self.optimizers) or "optimizers" in parts[0]:
            what = f"the state is not of {len(self.optimizers)} optimizers"
            raise misuse(
                "load_state_dict()", what, fix="load what state_dict() of the same wrap() gave"
            )
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            optimizer.load_state_dict(part)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the inner optimizer. Raises MisuseError where there are several."""
        if len(self.optimizers) > 1:
            raise misuse(
                "add_param_group()",
                f"it stands for {len(self.optimizers)}",
                fix="add it to one of them",
            )
        self.optimizers[0].add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # The one thing that GradScaler.step asks an optimizer before it steps.
        why = "the loss scale of fp16 is the precision's own, and the loss would be scaled twice"
        raise misuse(
            "step()",
            "a GradScaler steps the wrapped optimizer",
            why,
            "loss.backward(); optimizer.step()",
        )

    def __getattr__(self, name: str) -> Any:
        # Hooks that are registered with it, and settings of the optimizer's own (train() and eval() of some).
        if name == "optimizers":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.optimizers[0], name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"WrappedOptimizer({', '.join(map(repr, self.optimizers))})"


def unwrapped(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """One or several optimizers, those within wrapped ones in their place."""
    given = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    return [
        one
        for each in given
        for one in (each.optimizers if isinstance(each, WrappedOptimizer) else [each])
    ]


def wrap_problems(optimizers: Sequence[object]) -> list[Problem]:
    """Optimizers that stand for others: ours, accelerate's, Lightning's."""
    problems: list[Problem] = []
    for each in optimizers:
        if isinstance(each, WrappedOptimizer):
            problems.append(
                Problem("the optimizer is wrapped already", "wrap()", fix="wrap it once")
            )
        elif isinstance(getattr(each, "optimizer", None), Optimizer):
            fix = "wrap torch's optimizer first, and give the result to the other library"
            problems.append(
                Problem(f"{type(each).__name__} holds another optimizer", "wrap()", fix=fix)
            )
    return problems


class TrueGradients:
    """Divides the gradients of leaves by the loss scale while `active`. found: float32 0-d, 1.0 where one of the window
    was not finite before that.
    """

    def __init__(self, loss_scale: LossScale, device: torch.device) -> None:
        self._loss_scale = loss_scale
        self.active = False
        self.found = torch.zeros((), dtype=torch.float32, device=device)
        self._inverse = torch.ones((), dtype=torch.float32, device=device)
        self._hook = self._unscale

    def watch(self, leaves: Iterable[Tensor]) -> None:
        """Before each backward: hooks of the user's come after ours, also those that were there before."""
        for leaf in leaves:
            hooks: Any = leaf._backward_hooks
            if not leaf.requires_grad or (hooks and next(iter(hooks.values())) is self._hook):
                continue
            before = dict(hooks or {})
            if hooks is not None:
                hooks.clear()
            leaf.register_hook(self._hook)
            if before:
                assert leaf._backward_hooks is not None
                leaf._backward_hooks.update(
                    {key: hook for key, hook in before.items() if hook is not self._hook}
                )
        self._inverse = self._loss_scale.value.reciprocal()

    def forget(self) -> None:
        """The window is over."""
        self.found = torch.zeros_like(self.found)

    def _unscale(self, grad: Tensor) -> Tensor | None:
        if not self.active or self._loss_scale.retired or grad.is_sparse:
            return None
        if torch.is_grad_enabled():  # a graph of the gradients is wanted
            return grad * self._inverse.to(grad.device)
        unscaled = grad.detach().to(self.found.device, torch.float32, copy=True)
        torch._amp_foreach_non_finite_check_and_unscale_([unscaled], self.found, self._inverse)
        return unscaled.to(grad.device, grad.dtype)


class Standard:
    """Hooks on one prepared model, and from `begin` on, which the first `Precision.wrap` calls, its standard loop.

    begun: every call of the model is a context; before that, calls in `Precision.evaluating()` are. gradients: under an
    fp16 loss scale, once begun. passed_over: the module whose next call is no forward, but a whole step of
    another library's. A pickle of the model leaves its hooks idle; a deep copy (an EMA) enters the same precision's
    context.
    """

    def __init__(self, precision: Precision, ready: Prepared) -> None:
        self._precision, self._ready = precision, ready
        self.begun = False
        self.gradients: TrueGradients | None = None
        self.passed_over: nn.Module | None = None
        self._entered: AbstractContextManager[Any] | None = None
        self._entrance: nn.Module | None = None
        self._depth = 0
        self._thread = 0
        self._autocast: WeakKeyDictionary[nn.Module, tuple[bool, torch.dtype]] = WeakKeyDictionary()
        own = [
            module
            for module in ready.model.modules()
            if next(module.parameters(), None) is not None
        ]
        self._own = WeakSet(own)
        for module in own:
            _drop_hooks_of_originals(module)
        self._hooks = _hook_all(own, self.enter, self.leave)

    def begin(self) -> None:
        """The standard loop, from now on."""
        for other in [each for each in _standards.now() if each._ready.model is self._ready.model]:
            other._retire()  # of a Precision that the model had before
        scale = self._ready.loss_scale
        self.gradients = None if scale is None else TrueGradients(scale, self._ready.device)
        self.begun = True
        _watch_backward()
        _standards.add(self)

    def _retire(self) -> None:
        for module in self._own:
            for hooks in _hooks_of(module):
                hooks.pop(self._hooks, None)
        _standards.discard(self)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before a module of the model is called. Inside of a context, whoever entered it, nothing happens.

        A compiled graph ends here where a context has to be entered, and begins anew with the model's forward.
        """
        if not torch.compiler.is_compiling():
            self._enter(module)
        elif not self._precision.busy:
            self._enter_compiled(module)

    @torch.compiler.disable(reason=_NO_FULL_GRAPH)
    def _enter_compiled(self, module: nn.Module) -> None:
        self._enter(module)

    def _enter(self, module: nn.Module) -> None:
        if module not in self._own and torch.is_grad_enabled():
            self._ready.window.copies.add(module)
        if self._precision.turn.elsewhere and not _in_autograd():
            raise self._precision.turn.refusal(f"{type(module).__name__}()")
        if not self.begun and not self._precision.is_evaluating:
            return
        if module is self.passed_over and not self._precision.busy:
            self.passed_over = None
        elif module is self._entrance:
            self._depth += 1  # it calls itself
        elif not self._precision.busy:
            entered = self._precision.context()
            entered.__enter__()
            self._entered, self._entrance, self._depth, self._thread = (
                entered,
                module,
                1,
                get_ident(),
            )
            self._autocast[module] = self._autocast_now()
        elif self._precision.in_backward and self._entrance is None and module in self._autocast:
            if self._autocast[module] == self._autocast_now():
                return
            # A checkpoint around this call computes it again, in the autocast of outside the context.
            enabled, dtype = self._autocast[module]
            entered = torch.autocast(self._ready.device.type, dtype=dtype, enabled=enabled)
            entered.__enter__()
            self._entered, self._entrance, self._depth, self._thread = (
                entered,
                module,
                1,
                get_ident(),
            )

    def _autocast_now(self) -> tuple[bool, torch.dtype]:
        kind = self._ready.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        """After the call, also one that failed: what comes out is in float32."""
        if not torch.compiler.is_compiling():
            return self._leave(module, result)
        return self._leave_compiled(module, result) if module is self._entrance else None

    @torch.compiler.disable(reason=_NO_FULL_GRAPH)
    def _leave_compiled(self, module: nn.Module, result: Any) -> Any:
        return self._leave(module, result)

    def _leave(self, module: nn.Module, result: Any) -> Any:
        if module is not self._entrance or self._thread != get_ident():
            return None
        self._depth -= 1
        if self._depth or self._entered is None:
            return None
        entered, self._entered, self._entrance = self._entered, None, None
        entered.__exit__(None, None, None)
        return widened(result)

    @contextmanager
    def true_gradients(self, loss: Tensor) -> Iterator[None]:
        """Around the backward of the scaled `loss`: gradients of every leaf that it reaches come out unscaled."""
        if self.gradients is None:
            yield
            return
        # Reentrant checkpoints hide the model's own from the graph.
        self.gradients.watch([*self._ready.model.parameters(), *_leaves([loss])])
        self.gradients.active = True
        try:
            yield
        finally:
            self.gradients.active = False

    def reached_by(self, losses: Sequence[Any]) -> bool:
        """Whether the graph of one of `losses` holds a parameter of the model."""
        others: list[Any] = []
        for leaf in _leaves(losses):
            if id(leaf) in self._ready.owned:
                return True
            others.append(leaf)
        return self._ready.owns_any(others)

    def backward(self, losses: Sequence[Any], grad_tensors: Any, **options: Any) -> None:
        """`torch.autograd.backward` of losses that reach the model."""
        if len(losses) != 1 or not isinstance(losses[0], Tensor) or grad_tensors is not None:
            what = (
                "gradients are given"
                if grad_tensors is not None
                else f"{len(losses)} losses at once"
            )
            why = "the gate and the loss scale are those of one loss"
            raise misuse(
                "backward()", what, why, "add up to one loss, weighted, and call its backward()"
            )
        self._precision.backward(losses[0], **options)

    @property
    def in_backward(self) -> bool:
        """A backward of the precision's own is on its way."""
        return self._precision.in_backward

    def __deepcopy__(self, memo: dict[int, Any]) -> Standard:
        return self

    def __reduce__(self) -> Any:
        return _Idle, ()


class _Idle:
    """The hooks of a model that was pickled."""

    def enter(self, module: nn.Module, args: Any) -> None:
        """Nothing."""

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """Nothing."""


_standards: Live[Standard] = Live()


class _Calls(local):
    """own: the next `torch.autograd.backward` of this thread is a Precision's own."""

    own = False


_calls = _Calls()


@contextmanager
def own_backward() -> Iterator[None]:
    """Around the one `loss.backward()` of a `Precision.backward`."""
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
    """Call `enter` before and `leave` after every call of the modules, also one that failed. Returns the hooks' key.

    torch gives every registration a key of its own, and torch.compile compiles a block again where the keys of its
    modules' hooks differ. Under one key blocks of one kind share their compiled code.
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
    """What a deep copy brought along of the model that it was made of, now that it is prepared itself."""
    for key, hook in list(module._forward_pre_hooks.items()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Standard) and module not in owner._own:
            for hooks in _hooks_of(module):
                del hooks[key]


def _leaves(roots: Iterable[Any]) -> Iterator[Any]:
    """The leaf tensors that gradients of `roots` are accumulated in, each once; nearest branches first."""
    left = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
    seen = set(left)
    while left:
        node: Any = left.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)


@cache
def _watch_backward() -> None:
    """Once a process. Losses that reach no wrapped model are left alone."""
    original = torch.autograd.backward

    @wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if _calls.own:
            _calls.own = False
            return original(tensors, grad_tensors, *args, **kwargs)
        # Reentrant checkpoints compute backward within backward; on a GPU in a thread of autograd's.
        nested, standards = _in_autograd(), _standards.now()
        if not standards or (
            nested and grad_tensors is not None and all(each.in_backward for each in standards)
        ):
            return original(tensors, grad_tensors, *args, **kwargs)
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        reached = [each for each in standards if each.reached_by(losses)]
        within = nested and any(each.in_backward for each in reached)
        if not reached or (within and grad_tensors is not None):
            return original(losses, grad_tensors, *args, **kwargs)
        if within:
            what = "called by a hook within the backward() of the same model"
            why = "both are of one window, and the loss scale would be divided out of one gradient twice"
            raise misuse(
                "backward()",
                what,
                why,
                "add it to the loss before, or call it once that backward() is over",
            )
        if nested and grad_tensors is not None:
            what = "a reentrant checkpoint is around all of the prepared model"
            why = "the loss does not show that it reaches the model, so nothing scales it or counts it for the window"
            raise misuse(
                "backward()",
                what,
                why,
                "checkpoint(..., use_reentrant=False), or checkpoint its blocks",
            )
        if len(reached) > 1:
            what = f"the loss reaches {len(reached)} prepared models"
            why = "whose window it belongs to, and whose loss scale it needs, is not to be seen"
            fix = (
                "requires_grad_(False) on what does not train now (a GAN's discriminator in the generator's step),"
                " or precision.backward(loss) of the one that does"
            )
            raise MisuseError(Problem(what, "backward()", why, fix))
        options = (
            dict(
                zip(
                    ("retain_graph", "create_graph", "grad_variables", "inputs"), args, strict=False
                )
            )
            | kwargs
        )
        given = options.pop("grad_variables", None)
        return reached[0].backward(losses, grad_tensors if given is None else given, **options)

    torch.autograd.backward = backward
