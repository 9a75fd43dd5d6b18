"""Where the first NaN or Inf of a step comes from: hooks on every module, used only when a step is replayed.

Forward: the first module in the order of execution that was given finite tensors and returned one that is not. A
module's children return before it does, so the innermost one is named, and a parent only for what it computes itself.
Backward: the first operation of autograd that was given finite gradients and returned one that is not, and the module
in whose forward that operation was recorded. Operations, not hooks on tensors: these see the sum over all uses of a
tensor, so that two layers with one input could not be told apart, and miss what is modified in place.

Operations of autograd are numbered in the order in which forward records them, so those recorded between a module's
entry and its exit, and not inside of one of its children, are its own. In forward, calls of torch's functions are
watched; either way the line of the program that called the operation is named.

Hooks see eager code only: turn compiled code off around them. They read the device at every call.
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
# Strict typing would be wasted here: torch types operations of autograd, and what it hands to a function mode, in part.


LOSS = "<loss>"
"""In place of a module: what was computed from the model's output."""

# Between a parameter and the operation that uses it: casts and views.
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
_OURS = str(Path(__file__).parent)
# What these return is memory as it was, or a constant of the program's.
_ALLOCATE = ("empty", "full")
_WORST = 2
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n\s*(?P<text>[^\n]*)'
)


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A gradient that is not finite while all that it was computed from is.

    module: whose forward recorded the operation. what: in words. parameters: those whose gradient it is. where: the
    line of forward, if it was recorded. replaces: it is a cause, while what was told before was only where a gradient
    arrived.
    """

    module: str
    operation: str
    what: str
    tensor: Tensor
    parameters: tuple[str, ...] = ()
    where: str = ""
    replaces: bool = False


class GraphWatch:
    """Hooks on the operations of one micro-batch's graph. parameters: names by id."""

    def __init__(self, parameters: Mapping[int, str], tell: Callable[[Spoiled], None]) -> None:
        self._parameters, self._tell = parameters, tell
        self._counter = torch.zeros((), requires_grad=True)
        # The graph hands out one Python object per operation as long as somebody holds it.
        self._hooked: set[Any] = set()
        self._unclaimed: list[Any] = []
        self._handles: list[Any] = []
        self._arrived = self._caused = False

    def next_number(self) -> int:
        """The number of the operation that is recorded next."""
        with torch.enable_grad():
            return _number((self._counter + 0).grad_fn)

    def forget(self) -> None:
        """Drop the graph and every hook on it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._unclaimed.clear()
        self._arrived = self._caused = False

    def claim(self, outputs: Iterable[Tensor], module: str, first: int) -> None:
        """Operations behind `outputs` with numbers from `first` on that no child has claimed are `module`'s."""
        waiting = [
            tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None
        ] + self._unclaimed
        self._unclaimed = []
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in self._hooked or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                self._hook(node, self._parameters.get(id(variable), "").rpartition(".")[0])
            elif _number(node) < first:
                self._unclaimed.append(node)
            else:
                self._hook(node, module)
                waiting += [after for after, _ in node.next_functions]

    def arrives_from_loss(self, outputs: Sequence[Tensor]) -> None:
        """`outputs` are the whole model's: what comes back to them has been computed outside of it."""
        for tensor in outputs:
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(self._from_loss))

    def _from_loss(self, gradient: Tensor) -> None:
        if not _finite(gradient) and not self._caused:
            self._caused = True
            self._tell(Spoiled(LOSS, "", "gradient of the model's output", gradient))

    def _hook(self, node: Any, module: str) -> None:
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
        came = next(
            (gradient for gradient in given if gradient is not None and not _finite(gradient)), None
        )
        if came is not None:
            # Whatever produced it was well: a hook changed it, or a sum over several uses overflowed.
            if not self._arrived:
                self._arrived = True
                name = self._parameters.get(id(getattr(node, "variable", None)), "")
                what = (
                    "gradient of a parameter, as it arrived"
                    if name
                    else "gradient of its output, as it arrived"
                )
                self._tell(
                    Spoiled(
                        module, node.name(), what, came, (name,) if name else (), recorded(node)
                    )
                )
            return
        bad = [
            place
            for place, gradient in enumerate(produced)
            if gradient is not None and not _finite(gradient)
        ]
        if not bad:
            return
        self._caused = True
        targets = [self._parameter_behind(node, place) for place in bad]
        what = "gradient of its input" if "" in targets else "gradient of a parameter"
        tensor = produced[bad[targets.index("") if "" in targets else 0]]
        assert tensor is not None
        names = tuple(name for name in targets if name)
        self._tell(Spoiled(module, node.name(), what, tensor, names, recorded(node), self._arrived))

    def _parameter_behind(self, node: Any, place: int) -> str:
        """The parameter that this gradient is of, through casts and views; empty if it is of an activation."""
        after = node.next_functions[place][0] if place < len(node.next_functions) else None
        while after is not None:
            variable = getattr(after, "variable", None)
            if variable is not None:
                return self._parameters.get(id(variable), "")
            if after.name() not in _PASSED or not after.next_functions:
                return ""
            after = after.next_functions[0][0]
        return ""


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _finite(gradient: Tensor) -> bool:
    return gradient.layout != torch.strided or bool(torch.isfinite(gradient).all())


class FirstBad(TorchFunctionMode):
    """Watches calls of torch's functions while `inside` is set.

    badness: of a value, as `origin.badness`. operation, where: of the first call that
    was given finite values and returned a NaN or inf, else of the first that returned -inf, which may be a mask.
    """

    def __init__(self, badness: Callable[[Any], int]) -> None:
        super().__init__()
        self.inside = False
        self.operation = self.where = ""
        self._badness = badness
        self._found = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        watching = (
            self.inside and self._found < _WORST and not any(word in name for word in _ALLOCATE)
        )
        clean = watching and not self._badness(
            (args, kwargs)
        )  # before the call, which may work in place
        result = func(*args, **kwargs)
        if clean and (badness := self._badness(result)) > self._found:
            self._found = badness
            self.operation = resolve_name(func) or name
            self.where = _innermost(f'File "{f.filename}", line {f.lineno}, in {f.name}\n    {f.line}' for f in
                                    traceback.extract_stack())  # fmt: skip
        return result


def recorded(node: Any) -> str:
    """Where forward recorded an operation of autograd, if anomaly mode was on then."""
    return _innermost(node.metadata.get("traceback_", ()))


def _innermost(frames: Iterable[str]) -> str:
    """The innermost frame that is neither torch's nor this package's, as `file:line, in function: source`."""
    found = ""
    for frame in frames:
        match = _FRAME.search(frame)
        if match and not match["file"].startswith((_TORCH, _OURS, "<")):
            found = f"{match['file']}:{match['line']}, in {match['name']}: {match['text']}"
    return found


# pyright: standard
# Strict typing would be wasted here: torch types hooks and operations of autograd only in part.


MAX_ROWS = 16
"""Rows of a tensor that a finding lists at most."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where finite values became non-finite.

    module: qualified name, empty for the model itself, LOSS for what comes after it. kind: its class. direction:
    "forward" or "backward". tensor: which one, such as "output" or "gradient of its input". nan, inf: how many elements
    of `elements`. rows: indices along its first dimension that have any, at most MAX_ROWS. operation: autograd's name
    for it, in backward; torch's, in forward, once located. parameters: forward: those of the module that are not finite
    themselves, the cause; backward: those whose gradient it is. into: where the module has children: the first module
    that was given the value. micro_batch, call: which forward of the model, which call of this module in it, from 1.
    doubtful: nothing but -inf, as in a mask, and no step that was well to compare with. where: the line of the program
    that computed it, if asked for.
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
    """What one forward and backward of the model showed. lost: whether the model's own output was not finite."""

    forward: Finding | None = None
    backward: Finding | None = None
    lost: bool = False


@dataclass
class Origin:
    """What `watch` saw. usual: places that had non-finite values, to be passed as `known` when watching another step.

    gradients: by parameter, (L2 norm, largest magnitude, non-finite elements) of the accumulated gradient as it was
    in the last micro-batch, still scaled.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    usual: set[str] = field(default_factory=set)
    gradients: dict[str, tuple[float, float, int]] = field(default_factory=dict)

    @property
    def first(self) -> Finding | None:
        """The first finding, in the order of execution.

        One that may be meant (a mask of -inf) counts if it reached the model's output, or if there is no other.
        """
        for seen in self.micro_batches:
            if seen.forward is not None and (seen.lost or not seen.forward.doubtful):
                return seen.forward
            if seen.backward is not None:
                return seen.backward
        return next((seen.forward for seen in self.micro_batches if seen.forward is not None), None)


@contextmanager
def watch(
    model: nn.Module, known: Collection[str] | None = None, lines: bool = False
) -> Iterator[Origin]:
    """Watch every forward and backward of `model` inside of the block.

    known: `Origin.usual` of a step that was well: what is not finite there is not finite by intent. lines: find the
    line of the program behind a finding in backward too (slow; for one in forward, see `locate`).
    """
    watcher = _Watcher(model, None if known is None else frozenset(known))
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False) if lines else nullcontext():
            yield watcher.origin
    finally:
        watcher.remove()


@contextmanager
def locate(model: nn.Module, finding: Finding) -> Iterator[FirstBad]:
    """Find the operation and the line behind a `finding` in forward, when its step is run once more in the block."""
    mode = FirstBad(lambda value: max((badness(tensor) for _, tensor in tensors(value)), default=0))
    guilty = model.get_submodule(finding.module)
    running: list[nn.Module] = []

    def enter(module: nn.Module, *_: Any) -> None:
        running.append(module)
        mode.inside = module is guilty  # not in its children: they are well

    def leave(*_: Any) -> None:
        running.pop()
        mode.inside = bool(running) and running[-1] is guilty

    handles = [module.register_forward_pre_hook(enter) for module in guilty.modules()]
    handles += [module.register_forward_hook(leave) for module in guilty.modules()]
    try:
        with mode:
            yield mode
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Call:
    """A module's forward that has begun. first: number of the next autograd operation then."""

    module: nn.Module
    first: int
    clean: bool
    number: int


class _Watcher:
    def __init__(self, model: nn.Module, known: frozenset[str] | None) -> None:
        self.origin = Origin()
        self._model, self._known, self._compared = (
            model,
            known or frozenset[str](),
            known is not None,
        )
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._graph = GraphWatch(self._parameters, self._on_backward)
        self._stack: list[_Call] = []
        self._calls: dict[nn.Module, int] = {}
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
        self._graph.forget()
        for handle in self._handles:
            handle.remove()

    @property
    def _now(self) -> MicroBatch:
        if not self.origin.micro_batches:
            self.origin.micro_batches.append(MicroBatch())
        return self.origin.micro_batches[-1]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self._model:
            self.origin.micro_batches.append(MicroBatch())
            self._graph.forget()
            self._stack.clear()
            self._calls.clear()
            self._received = ""
        self._calls[module] = self._calls.get(module, 0) + 1
        clean = not self._new(module, "input", (args, kwargs))
        if not clean and not self._received:
            self._received = self._names[module]
        self._stack.append(_Call(module, self._graph.next_number(), clean, self._calls[module]))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        while self._stack and self._stack[-1].module is not module:
            self._stack.pop()  # a recomputation that was cut short never left them
        if not self._stack:
            return
        call = self._stack.pop()
        spoiled = self._new(module, "output", output)
        if call.clean and spoiled and self._now.forward is None:
            self._now.forward = self._forward_finding(module, call, *spoiled[0])
        self._now.lost = self._now.lost or (module is self._model and bool(spoiled))
        found = [tensor for _, tensor in tensors(output)]
        self._graph.claim(found, self._names[module], call.first)
        if module is self._model:
            self._graph.arrives_from_loss(found)

    def _new(self, module: nn.Module, place: str, value: Any) -> list[tuple[str, Tensor]]:
        """Tensors in `value` with a NaN or Inf that is not known of this place."""
        new: list[tuple[str, Tensor]] = []
        for path, tensor in tensors(value, place):
            nan, inf = count_bad(tensor)
            keys = {
                f"{self._names[module]}:{path}:{kind}"
                for kind, count in (("nan", nan), ("inf", inf))
                if count
            }
            self.origin.usual |= keys
            if keys - self._known:
                new.append((path, tensor))
        return new

    def _forward_finding(
        self, module: nn.Module, call: _Call, path: str, tensor: Tensor
    ) -> Finding:
        own = [
            (self._parameters[id(p)], p)
            for p in module.parameters(recurse=False)
            if id(p) in self._parameters
        ]
        return self._finding(
            self._names[module],
            "forward",
            path,
            tensor,
            parameters=tuple(name for name, parameter in own if any(count_bad(parameter))),
            into=self._received if next(module.children(), None) is not None else "",
            call=call.number,
            doubtful=not self._compared and badness(tensor) < 2,
        )

    def _on_backward(self, spoiled: Spoiled) -> None:
        if self._now.lost or (self._now.backward is not None and not spoiled.replaces):
            return
        self._now.backward = self._finding(
            spoiled.module, "backward", spoiled.what, spoiled.tensor,
            operation=spoiled.operation, parameters=spoiled.parameters, where=spoiled.where,
        )  # fmt: skip

    def _finding(
        self, name: str, direction: str, what: str, tensor: Tensor, **rest: Any
    ) -> Finding:
        nan, inf = count_bad(tensor)
        module = next((module for module, each in self._names.items() if each == name), None)
        return Finding(
            module=name, kind="" if module is None else type(module).__name__, direction=direction, tensor=what,
            shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), nan=nan, inf=inf,
            elements=tensor.numel(), rows=bad_rows(tensor), micro_batch=len(self.origin.micro_batches), **rest,
        )  # fmt: skip

    def _accumulated(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            return
        values = gradient.detach().double()
        largest = float(values.abs().max()) if values.numel() else 0.0
        entry = (float(torch.linalg.vector_norm(values)), largest, sum(count_bad(gradient)))
        self.origin.gradients[self._parameters[id(parameter)]] = entry


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors in nested tuples, lists, mappings and dataclasses, each with its path."""
    if isinstance(value, Tensor):
        if (value.is_floating_point() or value.is_complex()) and value.layout == torch.strided:
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        alone = len(value) == 1
        for number, item in enumerate(value):
            yield from tensors(item, path if alone else f"{path}.{number}")
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors(getattr(value, each.name), f"{path}.{each.name}")


def count_bad(tensor: Tensor) -> tuple[int, int]:
    """Elements that are NaN, and that are infinite."""
    values = _plain(tensor)
    if bool(torch.isfinite(values).all()):
        return 0, 0
    return int(torch.isnan(values).sum()), int(torch.isinf(values).sum())


def badness(tensor: Tensor) -> int:
    """0: finite. 1: nothing worse than -inf, which may be a mask. 2: NaN or inf."""
    nan, inf = count_bad(tensor)
    return 2 if nan or (inf and bool((_plain(tensor) == math.inf).any())) else min(inf, 1)


def bad_rows(tensor: Tensor) -> tuple[int, ...]:
    """Indices along the first dimension with a non-finite element, at most MAX_ROWS; none for a 0-d tensor."""
    values = _plain(tensor)
    if values.ndim == 0 or values.numel() == 0:
        return ()
    bad = ~torch.isfinite(values).reshape(values.shape[0], -1).all(dim=1)
    return tuple(bad.nonzero()[:MAX_ROWS, 0].tolist())


def _plain(tensor: Tensor) -> Tensor:
    """FP8 types have no isfinite."""
    return tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()
