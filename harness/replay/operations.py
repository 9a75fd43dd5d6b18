"""Records the result of every operation of a step as a hash, to find the first one that gives other bits next time.

A dispatch mode sees each operation that reaches torch's kernels, in forward, backward and the update, in the order in
which they run. Of two recordings from one state, the first entry that differs is the culprit: all that it was computed
from was the same. Code that torch does not see, such as a library's own kernel, shows at the operation that uses its
result.

After the backwards only the optimizer's own operations are recorded: the others pack a step's figures, and times and
sizes of memory differ each time.

*Which module.* In forward, hooks know which module is running. In backward, the running node of autograd has a number;
the module is the one in whose forward that number was given out.

Compiled code runs as one operation: turn it off around a recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.core.collectives import Fingerprint
from harness.core.progress import training
from harness.core.sharded import local_of
from harness.replay.origin import calling_line, number_of

# pyright: standard
# Strict typing would be wasted here: torch types dispatch modes, hooks and operations of autograd only in part.

# Operations of these libraries return before their result is there.
_IN_FLIGHT = ("c10d", "_c10d_functional")
_ALLOCATE = ("empty", "resize")
_OPTIMIZER = "optimizer"


class Operation(NamedTuple):
    """One operation that ran.

    name: of the operation, such as `aten.mul.Tensor`.
    module: in whose forward it ran, or whose backward; empty: the model itself, or what is computed from its output.
    direction: "forward" or "backward"; "optimizer"; empty: outside of these, as in the loss.
    hashes: of its results, and of what it changed in place.
    where: the line of the program, if the operation differs from the one that was expected.
    """

    name: str
    module: str
    direction: str
    hashes: tuple[int, ...]
    where: str = ""

    def __str__(self) -> str:
        text = f"operation {self.name}"
        if self.direction == _OPTIMIZER:
            text += " in the optimizer"
        elif self.direction:
            text += f" in the {self.direction} of {self.module or 'the model itself'}"
        else:
            text += " outside of the model, as in the loss"
        return f"{text}, {self.where}" if self.where else text


class Hashes:
    """Hashes of tensors on any device, as numbers of the host."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Fingerprint] = {}

    def of(self, tensor: Tensor) -> int:
        """The hash of a tensor's bits; of one that is sharded, of this rank's rows. Waits for the device."""
        plain = local_of(tensor.detach())
        device = plain.device
        if device not in self._by_device:
            self._by_device[device] = Fingerprint(device)
        return int(self._by_device[device].of([plain])[0])


@dataclass
class Recording:
    """What ran.

    operations: in order, if nothing was expected; else only counted.
    first: the first operation that was not as expected.
    place: its place among all operations, from 0.
    """

    operations: list[Operation] = field(default_factory=list)
    first: Operation | None = None
    place: int = 0


@contextmanager
def recorded_operations(
    model: nn.Module, expected: Sequence[Operation] = ()
) -> Iterator[Recording]:
    """Record every operation inside of the block.

    expected: the operations of an earlier recording from the same state; they are compared, and not kept again.
    """
    recorder = _Recorder(model, expected)
    try:
        with recorder:
            yield recorder.recording
    finally:
        recorder.remove()


class _Call(NamedTuple):
    """Numbers that autograd gave out in one forward of a module: from `first` up to, not including, `end`."""

    module: str
    first: int
    end: int


class _Recorder(TorchDispatchMode):
    """See `recorded_operations`."""

    def __init__(self, model: nn.Module, expected: Sequence[Operation]) -> None:
        super().__init__()
        self.recording = Recording()
        self._expected = expected
        self._count = 0
        self._hashes = Hashes()
        self._names = {module: name for name, module in model.named_modules()}
        # The forwards that have begun, the innermost last, each with autograd's next number; and those that ended.
        self._running: list[tuple[nn.Module, int]] = []
        self._ended: list[_Call] = []
        self._stepping = False
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ]
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave))

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _begin_step(self, *_: Any) -> None:
        self._stepping = True

    def _end_step(self, *_: Any) -> None:
        self._stepping = False

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._running.append((module, _next_number()))

    def _leave(self, module: nn.Module, *rest: Any) -> None:
        while self._running and self._running[-1][0] is not module:
            self._running.pop()  # a recomputation that was cut short never left them
        if self._running:
            first = self._running.pop()[1]
            end = _next_number()
            self._ended.append(_Call(self._names[module], first, end))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        counts = self._stepping or training.phase != "update"
        if counts and self.recording.first is None and func.namespace not in _IN_FLIGHT:
            self._note(func, result, args, kwargs)
        return result

    def _note(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        # Memory that was only allocated, or is only looked at another way, holds whatever was there.
        if any(word in func._schema.name for word in _ALLOCATE) or _is_view(func):
            return
        # Results, and what the operation has written into: some return nothing.
        touched = tree_leaves(result)
        if func._schema.is_mutable:
            touched += tree_leaves((args, kwargs))
        plain = [
            each for each in touched if isinstance(each, Tensor) and each.layout == torch.strided
        ]
        hashes = [self._hashes.of(each) for each in plain]
        module, direction = self._place()
        now = Operation(str(func), module, direction, tuple(hashes))
        place, self._count = self._count, self._count + 1
        if not self._expected:
            self.recording.operations.append(now)
        elif place >= len(self._expected) or self._expected[place] != now:
            self.recording.first = now._replace(where=calling_line())
            self.recording.place = place

    def _place(self) -> tuple[str, str]:
        """(module, direction) of the operation that runs now."""
        node = torch._C._current_autograd_node()
        if self._running and (node is None or self._recomputes(node)):
            return self._names[self._running[-1][0]], "forward"
        if node is None:
            return "", _OPTIMIZER if self._stepping else ""
        # The innermost module is the call with the fewest numbers around this one.
        number = number_of(node)
        around = [call for call in self._ended if call.first <= number < call.end]
        if not around:
            return "", "backward"
        innermost = min(around, key=lambda call: call.end - call.first)
        return innermost.module, "backward"

    def _recomputes(self, node: Any) -> bool:
        """Whether a forward runs within backward: it began after `node` was recorded."""
        return self._running[-1][1] > number_of(node)


def _next_number() -> int:
    """The number that autograd gives to the operation that is recorded next."""
    autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 (torch's stub lacks it)
    return autograd._get_sequence_nr()


def _is_view(func: Any) -> bool:
    """Whether all that an operation returns is memory of its inputs, which it does not write."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
