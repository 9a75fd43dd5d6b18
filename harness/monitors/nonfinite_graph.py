# pyright: standard
# Strict typing would be wasted here: torch types hooks and operations of autograd only in part.
"""The backward half of `nonfinite`: which operation of autograd turns finite gradients into non-finite ones.

Operations are numbered in the order in which forward records them, so those recorded between a module's entry and its
exit, and not inside of one of its children, are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.monitors.nonfinite_lines import recorded

LOSS = "<loss>"
"""In place of a module: what was computed from the model's output."""

# Between a parameter and the operation that uses it: casts and views.
_IN_BETWEEN = ("ToCopy", "T", "View", "UnsafeView", "Reshape", "Transpose", "Permute", "Alias", "Clone", "Expand")
_PASSED = {f"{name}Backward{number}" for name in _IN_BETWEEN for number in (0, 1)}


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
