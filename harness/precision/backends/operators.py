"""Operators that `torch.compile` cannot look into, and how they find the FP8 layer that they work for.

A graph finds its layer by a number in a tensor, which it takes as an input: identical blocks share their compiled code.
What may change between two steps (demotion, sampling) is read from the layer when an operator runs, or is one flag for
a whole block, so that no number of switches compiles a block more than twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from harness.precision.compiling import blocks_of

_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_numbers = count()


def register(layer: nn.Module) -> Tensor:
    """A handle for `layer`, int64 0-d on the CPU, which does not keep it alive."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def layer_of(handle: Tensor) -> Any:
    """The layer that was registered under `handle`."""
    return _layers[int(handle)]


def define(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., Any] | None = None,
    mutates: tuple[str, ...] = (),
) -> None:
    """Register an operator. Compiled code is cached on disk by its name: other results need another name.

    mutates: arguments that the compiler shall take for written in place. `torch.library.custom_op` does the same, and
    checks for aliases at every call: 1% of a small layer's time.
    """
    full = f"hopper_harness::{name}"
    torch.library.define(full, torch.library.infer_schema(run, mutates_args=mutates))
    torch.library.impl(full, "default", run)
    torch.library.register_fake(full, fake)
    if backward is not None:
        torch.library.register_autograd(full, backward, setup_context=setup)


@dataclass(slots=True)
class Block:
    """Layers that are compiled together. switching: in this window one of them is in BF16, or measured."""

    switching: bool = False


class Blocks:
    """The layers of class `kind` in `model`, by the block that they are compiled with; the rest of it counts as one."""

    def __init__(self, model: nn.Module, kind: type[nn.Module]) -> None:
        found = [
            (Block(), {child for child in block.modules() if isinstance(child, kind)})
            for block in (*blocks_of(model), model)
        ]
        taken: dict[nn.Module, Block] = {}
        for block, layers in found:
            for layer in layers:
                taken.setdefault(layer, block)
        self._blocks = [(block, [layer for layer in layers if taken[layer] is block]) for block, layers in found]
        self._of = taken

    def of(self, layer: nn.Module) -> Block:
        """The first block with `layer` in it."""
        return self._of[layer]

    def mark(self, sampling: bool, demoted: Iterable[nn.Module]) -> None:
        """Set every flag. One for both reasons: a guard each would compile a block once for each combination."""
        apart = set(demoted)
        for block, layers in self._blocks:
            block.switching = sampling or not apart.isdisjoint(layers)
