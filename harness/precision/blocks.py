"""The repeated blocks of a model, and which FP8 layers are compiled together with each.

Whether a block has a layer in BF16, or one that is measured, is one flag for the whole block: no number of switches
compiles it more than twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Elements of the outermost nn.ModuleLists of `model`, each once."""
    found: dict[nn.Module, None] = {}

    def search(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList) and not isinstance(
                child, nn.ModuleList | nn.ModuleDict
            ):
                found[child] = None
            else:
                search(child)

    search(model)
    return list(found)


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
        self._blocks = [
            (block, [layer for layer in layers if taken[layer] is block]) for block, layers in found
        ]
        self._of = taken

    def of(self, layer: nn.Module) -> Block:
        """The first block with `layer` in it."""
        return self._of[layer]

    def mark(self, sampling: bool, demoted: Iterable[nn.Module]) -> None:
        """Set every flag. One for both reasons: a guard each would compile a block once for each combination."""
        apart = set(demoted)
        for block, layers in self._blocks:
            block.switching = sampling or not apart.isdisjoint(layers)
