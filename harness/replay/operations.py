# pyright: standard
# Strict typing would be wasted here: torch types operations of autograd, and what it hands to a function mode, in part.
"""Which operation makes finite values non-finite, and the line of the program that called it.

Backward: operations of autograd are numbered in the order in which forward records them, so those recorded between a
module's entry and its exit, and not inside of one of its children, are its own. Forward: calls of torch's functions.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

LOSS = "<loss>"
"""In place of a module: what was computed from the model's output."""

# Between a parameter and the operation that uses it: casts and views.
_IN_BETWEEN = ("ToCopy", "T", "View", "UnsafeView", "Reshape", "Transpose", "Permute", "Alias", "Clone", "Expand")
_PASSED = {f"{name}Backward{number}" for name in _IN_BETWEEN for number in (0, 1)}

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
# What these return is memory as it was, or a constant of the program's.
_ALLOCATE = ("empty", "full")
_WORST = 2
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n\s*(?P<text>[^\n]*)')


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
        waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None] + self._unclaimed
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

        def ran(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> None:
            if not self._caused:
                self._judge(node, module, grad_inputs, grad_outputs)

        self._handles.append(node.register_hook(ran))

    def _judge(
        self, node: Any, module: str, produced: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]
    ) -> None:
        came = next((gradient for gradient in given if gradient is not None and not _finite(gradient)), None)
        if came is not None:
            # Whatever produced it was well: a hook changed it, or a sum over several uses overflowed.
            if not self._arrived:
                self._arrived = True
                name = self._parameters.get(id(getattr(node, "variable", None)), "")
                what = "gradient of a parameter, as it arrived" if name else "gradient of its output, as it arrived"
                self._tell(Spoiled(module, node.name(), what, came, (name,) if name else (), recorded(node)))
            return
        bad = [place for place, gradient in enumerate(produced) if gradient is not None and not _finite(gradient)]
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
        watching = self.inside and self._found < _WORST and not any(word in name for word in _ALLOCATE)
        clean = watching and not self._badness((args, kwargs))  # before the call, which may work in place
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
