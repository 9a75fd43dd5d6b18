"""Finds where the first NaN or Inf of a step comes from, with hooks on every module. Used only in replays.

*Forward.* The origin is the first module, in the order of execution, that was given finite tensors and returned one
that is not. A module's children return before it does, so the innermost module is named, and a parent only for what it
computes itself.

*Backward.* The origin is the first operation of autograd that was given finite gradients and returned one that is not.
The module named is the one whose forward recorded that operation. Hooks on tensors are not enough. They see the sum
over all uses of a tensor, so they cannot tell two layers with one input apart, and they miss in-place changes.

*Which module an operation belongs to.* Autograd numbers operations in the order in which forward records them. Those
recorded between a module's entry and its exit, and not inside of one of its children, are its own (`GraphWatch.claim`).

*Which line of the program.* In forward, a function mode watches calls of torch's functions (`locate`). In backward,
anomaly mode has recorded where forward called the operation.

Hooks see eager code only: turn compiled code off around them. They read the device at every call, which is slow.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

# pyright: standard
# Strict typing would be wasted here: torch types hooks, operations of autograd and function modes only in part.


LOSS = "<loss>"
"""Stands for a module: everything computed from the model's output."""

# Operations that may lie between a parameter and the operation that uses it: casts and views.
_IN_BETWEEN = (
    "ToCopy",
    "T",
    "View",
    "UnsafeView",
    "Reshape",
    "Transpose",
    "Permute",
    "Alias",
    "Clone",
    "Expand",
)
_PASSED = {f"{name}Backward{number}" for name in _IN_BETWEEN for number in (0, 1)}

_TORCH = str(Path(torch.__file__).parent)
_REPLAY = str(Path(__file__).parent)
# Parts of the names of functions whose result may hold NaN or inf by intent: uninitialised memory, or a constant.
_ALLOCATE = ("empty", "full")
# The worst result of `badness`.
_WORST = 2
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n\s*(?P<text>[^\n]*)'
)


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A gradient that is not finite although everything that it was computed from is.

    module: whose forward recorded the operation.
    operation: autograd's name for it.
    what: which gradient, in words.
    tensor: the gradient.
    parameters: those whose gradient it is.
    where: the line of forward, if it was recorded.
    replaces: whether it replaces an earlier report that named only where a bad gradient arrived, not its cause.
    """

    module: str
    operation: str
    what: str
    tensor: Tensor
    parameters: tuple[str, ...] = ()
    where: str = ""
    replaces: bool = False


class GraphWatch:
    """Hooks on the operations of one micro-batch's graph.

    parameters: names by id.
    report: called for every finding.
    """

    def __init__(self, parameters: Mapping[int, str], report: Callable[[Spoiled], None]) -> None:
        self._parameters = parameters
        self._report = report
        self._counter = torch.zeros((), requires_grad=True, device="cpu")
        # The graph returns the same Python object for an operation only as long as somebody holds it.
        self._hooked: set[Any] = set()
        # Operations reached from a module's outputs that were recorded before its call. A parent will claim them.
        self._unclaimed: list[Any] = []
        self._handles: list[Any] = []
        # Whether a bad gradient was reported at the place where it arrived, without a cause.
        self._arrived = False
        # Whether a cause was reported. Nothing is reported after it.
        self._caused = False

    def next_number(self) -> int:
        """The number of the operation that is recorded next, read from an operation recorded for this purpose."""
        with torch.enable_grad():
            return number_of((self._counter + 0).grad_fn)

    def forget(self) -> None:
        """Drop the graph and every hook on it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._unclaimed.clear()
        self._arrived = False
        self._caused = False

    def claim(self, outputs: Iterable[Tensor], module: str, first: int) -> None:
        """Assign operations to `module`: those behind `outputs`, from number `first` on, that no child has claimed.

        Children return first, so they have claimed their own operations by now.
        """
        waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        waiting += self._unclaimed
        self._unclaimed = []
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in self._hooked or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                # Where a leaf accumulates its gradient: it belongs to the module that has the parameter.
                owner = self._parameters.get(id(variable), "").rpartition(".")[0]
                self._hook(node, owner)
            elif number_of(node) < first:
                # Recorded before this module began: a parent's.
                self._unclaimed.append(node)
            else:
                self._hook(node, module)
                waiting += [after for after, _ in node.next_functions]

    def arrives_from_loss(self, outputs: Sequence[Tensor]) -> None:
        """Watch the gradients of `outputs`, the whole model's: they come from outside of it, from the loss."""
        for tensor in outputs:
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(self._from_loss))

    def _from_loss(self, gradient: Tensor) -> None:
        if not _finite(gradient) and not self._caused:
            self._caused = True
            self._report(Spoiled(LOSS, "", "gradient of the model's output", gradient))

    def _hook(self, node: Any, module: str) -> None:
        """Judge `node`, an operation of `module`, when backward runs it."""
        self._hooked.add(node)

        def ran(
            grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]
        ) -> None:
            if not self._caused:
                self._judge(node, module, grad_inputs, grad_outputs)

        self._handles.append(node.register_hook(ran))

    def _judge(
        self,
        node: Any,
        module: str,
        produced: tuple[Tensor | None, ...],
        given: tuple[Tensor | None, ...],
    ) -> None:
        """Report an operation that made bad gradients of good ones, or the first that was given bad ones."""
        for gradient in given:
            if gradient is not None and not _finite(gradient):
                self._judge_arrival(node, module, gradient)
                return

        bad: list[int] = []
        for place, gradient in enumerate(produced):
            if gradient is not None and not _finite(gradient):
                bad.append(place)
        if not bad:
            return
        self._caused = True

        # Which gradient to show. That of an activation comes first: it spoils every layer before this one. That of a
        # parameter spoils one weight.
        parameters = [self._parameter_behind(node, place) for place in bad]
        if "" in parameters:
            what = "gradient of its input"
            tensor = produced[bad[parameters.index("")]]
        else:
            what = "gradient of a parameter"
            tensor = produced[bad[0]]
        assert tensor is not None
        names = tuple(name for name in parameters if name)
        where = recorded(node)
        self._report(Spoiled(module, node.name(), what, tensor, names, where, self._arrived))

    def _judge_arrival(self, node: Any, module: str, gradient: Tensor) -> None:
        """Report a bad gradient that no operation made: a hook changed it, or a sum over several uses overflowed.

        Only the first one, and only until a cause is found.
        """
        if self._arrived:
            return
        self._arrived = True
        parameter = self._parameters.get(id(getattr(node, "variable", None)), "")
        if parameter:
            what = "gradient of a parameter, as it arrived"
            names = (parameter,)
        else:
            what = "gradient of its output, as it arrived"
            names = ()
        self._report(Spoiled(module, node.name(), what, gradient, names, recorded(node)))

    def _parameter_behind(self, node: Any, place: int) -> str:
        """The parameter whose gradient this is, through casts and views; empty for that of an activation."""
        after = None
        if place < len(node.next_functions):
            after = node.next_functions[place][0]
        while after is not None:
            variable = getattr(after, "variable", None)
            if variable is not None:
                return self._parameters.get(id(variable), "")
            if after.name() not in _PASSED or not after.next_functions:
                return ""
            after = after.next_functions[0][0]
        return ""


def number_of(node: Any) -> int:
    """The place of an operation in the order in which forward recorded them."""
    return int(node._sequence_nr())


def _finite(gradient: Tensor) -> bool:
    # isfinite takes strided tensors only.
    if gradient.layout != torch.strided:
        return True
    return bool(torch.isfinite(gradient).all())


class FirstBad(TorchFunctionMode):
    """Watches calls of torch's functions while `inside` is set.

    badness: of a value, as `origin.badness`.
    operation, where: name and source line of the call that was given finite values and returned a NaN or inf. If there
        is none: of the first call that returned -inf, which may be a mask.
    """

    def __init__(self, badness: Callable[[Any], int]) -> None:
        super().__init__()
        self.inside = False
        self.operation = ""
        self.where = ""
        self._badness = badness
        # The badness of the call that was found.
        self._found = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        allocates = any(word in name for word in _ALLOCATE)
        watching = self.inside and self._found < _WORST and not allocates
        # The inputs are looked at before the call, which may work in place.
        clean = watching and not self._badness((args, kwargs))
        result = func(*args, **kwargs)
        if clean:
            badness = self._badness(result)
            if badness > self._found:
                self._found = badness
                self.operation = resolve_name(func) or name
                self.where = calling_line()
        return result


def calling_line() -> str:
    """The line of the program that is running now."""
    frames: list[str] = []
    for frame in traceback.extract_stack():
        place = f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        frames.append(f"{place}\n    {frame.line}")
    return _innermost(frames)


def recorded(node: Any) -> str:
    """The line of forward that recorded an operation of autograd, if anomaly mode was on then."""
    return _innermost(node.metadata.get("traceback_", ()))


def _innermost(frames: Iterable[str]) -> str:
    """The innermost frame outside of torch and harness.replay, as `file:line, in function: source`."""
    found = ""
    for frame in frames:
        match = _FRAME.search(frame)
        if match and not match["file"].startswith((_TORCH, _REPLAY, "<")):
            found = f"{match['file']}:{match['line']}, in {match['name']}: {match['text']}"
    return found


MAX_ROWS = 16
"""Rows of a tensor that a finding lists at most."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where finite values became non-finite.

    module: qualified name; empty for the model itself, LOSS for what comes after it.
    kind: the module's class.
    direction: "forward" or "backward".
    tensor: which one, such as "output" or "gradient of its input".
    shape, dtype, elements: of that tensor.
    nan, inf: how many of its elements.
    rows: indices along its first dimension that have any, at most MAX_ROWS.
    operation: autograd's name in backward; torch's in forward, once located.
    parameters: forward: parameters of the module that are not finite themselves, which is the cause; backward: those
        whose gradient the tensor is.
    into: where the module has children: the first module that was given the value.
    micro_batch: which forward of the model, from 1.
    call: which call of this module in it, from 1.
    doubtful: nothing but -inf, as in a mask, and no well step to compare with.
    where: the line of the program that computed it, if asked for.
    """

    module: str
    kind: str
    direction: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    nan: int
    inf: int
    elements: int
    rows: tuple[int, ...]
    operation: str = ""
    parameters: tuple[str, ...] = ()
    into: str = ""
    micro_batch: int = 1
    call: int = 1
    doubtful: bool = False
    where: str = ""


@dataclass
class MicroBatch:
    """Findings in one forward and backward of the model. lost: the model's own output was not finite."""

    forward: Finding | None = None
    backward: Finding | None = None
    lost: bool = False


@dataclass
class Origin:
    """What `watch` saw.

    micro_batches: in order.
    usual: places that had non-finite values, to pass as `known` when another step is watched.
    gradients: by parameter, (L2 norm, largest magnitude, non-finite elements) of the accumulated gradient as it was
        in the last micro-batch, still scaled.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    usual: set[str] = field(default_factory=set)
    gradients: dict[str, tuple[float, float, int]] = field(default_factory=dict)

    @property
    def first(self) -> Finding | None:
        """The first finding, in the order of execution.

        A doubtful one (perhaps a mask of -inf) counts if it reached the model's output, or if there is no other.
        """
        for seen in self.micro_batches:
            if seen.forward is not None and (seen.lost or not seen.forward.doubtful):
                return seen.forward
            if seen.backward is not None:
                return seen.backward
        for seen in self.micro_batches:
            if seen.forward is not None:
                return seen.forward
        return None


@contextmanager
def watch(
    model: nn.Module, known: Collection[str] | None = None, lines: bool = False
) -> Iterator[Origin]:
    """Watch every forward and backward of `model` inside of the block.

    known: `Origin.usual` of a step that went well. Where it had NaN or inf, as in a mask, they are intended.
    lines: also find the line of the program behind a finding in backward. Slow. For one in forward, see `locate`.
    """
    watcher = _Watcher(model, None if known is None else frozenset(known))
    # Anomaly mode records the stack of every operation; its own search for NaN is off.
    records_lines = nullcontext()
    if lines:
        records_lines = torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        with records_lines:
            yield watcher.origin
    finally:
        watcher.remove()


@contextmanager
def locate(model: nn.Module, finding: Finding) -> Iterator[FirstBad]:
    """Find the operation and the line behind a `finding` in forward while the block runs its step once more."""

    def worst_in(value: Any) -> int:
        return max((badness(tensor) for _, tensor in tensors(value)), default=0)

    mode = FirstBad(worst_in)
    guilty = model.get_submodule(finding.module)
    # The modules that are running now, the innermost last.
    running: list[nn.Module] = []

    def enter(module: nn.Module, *_: Any) -> None:
        running.append(module)
        mode.inside = module is guilty  # not inside of its children: their outputs were finite

    def leave(*_: Any) -> None:
        running.pop()
        mode.inside = bool(running) and running[-1] is guilty

    handles: list[Any] = []
    for module in guilty.modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    try:
        with mode:
            yield mode
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Call:
    """A module's forward that has begun.

    first: number of the next operation of autograd at that time.
    clean: its inputs were finite, but for what is known.
    number: which call of the module in this micro-batch, from 1.
    """

    module: nn.Module
    first: int
    clean: bool
    number: int


class _Watcher:
    """The hooks of `watch` on one model.

    known: places that may be non-finite; None: there is no well step to compare with.
    """

    def __init__(self, model: nn.Module, known: frozenset[str] | None) -> None:
        self.origin = Origin()
        self._model = model
        self._known = known or frozenset[str]()
        self._compared = known is not None
        self._names = {module: name for name, module in model.named_modules()}
        named = model.named_parameters()
        self._parameters = {id(parameter): name for name, parameter in named}
        self._graph = GraphWatch(self._parameters, self._on_backward)
        # The forwards that have begun, the innermost last, and how often each module was called in this micro-batch.
        self._stack: list[_Call] = []
        self._calls: dict[nn.Module, int] = {}
        # The first module of this micro-batch that was given a bad value.
        self._received = ""
        self._handles: list[Any] = []
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(self._accumulated)
                )

    def remove(self) -> None:
        """Take all hooks off the model."""
        self._graph.forget()
        for handle in self._handles:
            handle.remove()

    @property
    def _now(self) -> MicroBatch:
        """The present micro-batch."""
        if not self.origin.micro_batches:
            self.origin.micro_batches.append(MicroBatch())
        return self.origin.micro_batches[-1]

    def _enter(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """A forward begins. That of the whole model begins a micro-batch."""
        if module is self._model:
            self.origin.micro_batches.append(MicroBatch())
            self._graph.forget()
            self._stack.clear()
            self._calls.clear()
            self._received = ""
        self._calls[module] = self._calls.get(module, 0) + 1
        clean = not self._unknown_bad(module, "input", (args, kwargs))
        if not clean and not self._received:
            self._received = self._names[module]
        self._stack.append(_Call(module, self._graph.next_number(), clean, self._calls[module]))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward ends: is it the first one that made a bad output from good inputs?"""
        while self._stack and self._stack[-1].module is not module:
            self._stack.pop()  # a recomputation that was cut short never left them
        if not self._stack:
            return
        call = self._stack.pop()

        spoiled = self._unknown_bad(module, "output", output)
        if call.clean and spoiled and self._now.forward is None:
            self._now.forward = self._forward_finding(module, call, *spoiled[0])
        self._now.lost = self._now.lost or (module is self._model and bool(spoiled))

        # For backward: which operations are this module's, and where the model ends.
        found = [tensor for _, tensor in tensors(output)]
        self._graph.claim(found, self._names[module], call.first)
        if module is self._model:
            self._graph.arrives_from_loss(found)

    def _unknown_bad(self, module: nn.Module, place: str, value: Any) -> list[tuple[str, Tensor]]:
        """Tensors in `value` with a NaN or Inf that a well step does not have in this place, each with its path.

        All places with a NaN or Inf are added to `Origin.usual`, for the next step that is watched.
        """
        new: list[tuple[str, Tensor]] = []
        for path, tensor in tensors(value, place):
            nan, inf = count_bad(tensor)
            keys: set[str] = set()
            if nan:
                keys.add(f"{self._names[module]}:{path}:nan")
            if inf:
                keys.add(f"{self._names[module]}:{path}:inf")
            self.origin.usual |= keys
            if keys - self._known:
                new.append((path, tensor))
        return new

    def _forward_finding(
        self, module: nn.Module, call: _Call, path: str, tensor: Tensor
    ) -> Finding:
        # Parameters that are not finite themselves are the cause.
        bad_parameters: list[str] = []
        for parameter in module.parameters(recurse=False):
            name = self._parameters.get(id(parameter))
            if name is not None and any(count_bad(parameter)):
                bad_parameters.append(name)

        # A module with children may have made the value itself, between two of them. `into` then says where: it is the
        # first module that received the value.
        has_children = next(module.children(), None) is not None
        into = self._received if has_children else ""
        doubtful = not self._compared and badness(tensor) < _WORST
        return self._finding(
            self._names[module],
            "forward",
            path,
            tensor,
            parameters=tuple(bad_parameters),
            into=into,
            call=call.number,
            doubtful=doubtful,
        )

    def _on_backward(self, spoiled: Spoiled) -> None:
        """Note the first finding in backward; a cause replaces a place of arrival."""
        if self._now.lost:  # backward of a bad output is bad everywhere
            return
        if self._now.backward is not None and not spoiled.replaces:
            return
        self._now.backward = self._finding(
            spoiled.module,
            "backward",
            spoiled.what,
            spoiled.tensor,
            operation=spoiled.operation,
            parameters=spoiled.parameters,
            where=spoiled.where,
        )

    def _finding(
        self, name: str, direction: str, what: str, tensor: Tensor, **rest: Any
    ) -> Finding:
        nan, inf = count_bad(tensor)
        # LOSS stands for no module, and has no class.
        kind = ""
        for module, each in self._names.items():
            if each == name:
                kind = type(module).__name__
                break
        return Finding(
            module=name,
            kind=kind,
            direction=direction,
            tensor=what,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            nan=nan,
            inf=inf,
            elements=tensor.numel(),
            rows=bad_rows(tensor),
            micro_batch=len(self.origin.micro_batches),
            **rest,
        )

    def _accumulated(self, parameter: Tensor) -> None:
        """Record the size of a parameter's gradient as accumulated so far."""
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            return
        values = gradient.detach().double()
        norm = float(torch.linalg.vector_norm(values))
        largest = float(values.abs().max()) if values.numel() else 0.0
        entry = (norm, largest, sum(count_bad(gradient)))
        self.origin.gradients[self._parameters[id(parameter)]] = entry


def tensors(
    value: Any, path: str = "", *, whole_numbers: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors in nested tuples, lists, mappings and dataclasses, each with its path.

    whole_numbers: tensors of whole numbers and of truth values as well.
    """
    if isinstance(value, Tensor):
        taken = whole_numbers or value.is_floating_point() or value.is_complex()
        if taken and value.layout == torch.strided:
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{path}.{key}", whole_numbers=whole_numbers)
    elif isinstance(value, list | tuple):
        alone = len(value) == 1
        for number, item in enumerate(value):
            place = path if alone else f"{path}.{number}"
            yield from tensors(item, place, whole_numbers=whole_numbers)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            item = getattr(value, each.name)
            yield from tensors(item, f"{path}.{each.name}", whole_numbers=whole_numbers)


def count_bad(tensor: Tensor) -> tuple[int, int]:
    """How many elements are NaN, and how many are infinite."""
    values = _plain(tensor)
    if bool(torch.isfinite(values).all()):
        return 0, 0
    return int(torch.isnan(values).sum()), int(torch.isinf(values).sum())


def badness(tensor: Tensor) -> int:
    """0: finite. 1: nothing worse than -inf, which may be a mask. 2: NaN or inf."""
    nan, inf = count_bad(tensor)
    if nan:
        return 2
    if not inf:
        return 0
    return 2 if bool((_plain(tensor) == math.inf).any()) else 1


def bad_rows(tensor: Tensor) -> tuple[int, ...]:
    """Indices along the first dimension with a non-finite element, at most MAX_ROWS; none for a 0-d tensor."""
    values = _plain(tensor)
    if values.ndim == 0 or values.numel() == 0:
        return ()
    bad = ~torch.isfinite(values).reshape(values.shape[0], -1).all(dim=1)
    return tuple(bad.nonzero()[:MAX_ROWS, 0].tolist())


def _plain(tensor: Tensor) -> Tensor:
    """The values without their graph, in float32 if they are FP8, which has no isfinite."""
    values = tensor.detach()
    return values.float() if values.dtype.itemsize == 1 else values
