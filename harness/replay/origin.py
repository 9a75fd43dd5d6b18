# pyright: standard
# Strict typing would be wasted here: torch types hooks and operations of autograd only in part.
"""Where the first NaN or Inf of a step comes from: hooks on every module, used only when a step is replayed.

Forward: the first module in the order of execution that was given finite tensors and returned one that is not. A
module's children return before it does, so the innermost one is named, and a parent only for what it computes itself.
Backward: the first operation of autograd that was given finite gradients and returned one that is not, and the module
in whose forward that operation was recorded. Operations, not hooks on tensors: these see the sum over all uses of a
tensor, so that two layers with one input could not be told apart, and miss what is modified in place.

Hooks see eager code only: turn compiled code off around them. They read the device at every call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.replay.operations import FirstBad, GraphWatch, Spoiled

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
def watch(model: nn.Module, known: Collection[str] | None = None, lines: bool = False) -> Iterator[Origin]:
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
        self._model, self._known, self._compared = model, known or frozenset[str](), known is not None
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
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))

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
            keys = {f"{self._names[module]}:{path}:{kind}" for kind, count in (("nan", nan), ("inf", inf)) if count}
            self.origin.usual |= keys
            if keys - self._known:
                new.append((path, tensor))
        return new

    def _forward_finding(self, module: nn.Module, call: _Call, path: str, tensor: Tensor) -> Finding:
        own = [(self._parameters[id(p)], p) for p in module.parameters(recurse=False) if id(p) in self._parameters]
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

    def _finding(self, name: str, direction: str, what: str, tensor: Tensor, **rest: Any) -> Finding:
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
