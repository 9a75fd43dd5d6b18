"""Which FP8 layers are compiled together with each of the repeated blocks of a model.

A block's compiled code depends on whether any of its layers runs in BF16 in this window, and on whether the window is
measured. It does not depend on which layers these are. So a block is compiled two or three times at most, however often
layers switch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from harness.core.blocks import blocks_of


@dataclass(slots=True)
class Block:
    """Layers that are compiled together.

    demoted: in this window one of them is in BF16.
    switching: the same, or they are measured. A backend that needs no more than this flag compiles a block twice.
    """

    demoted: bool = False
    switching: bool = False


class Blocks:
    """The layers of class `kind` in `model`, by the block that they are compiled with. What is outside of all blocks
    counts as one block.
    """

    def __init__(self, model: nn.Module, kind: type[nn.Module]) -> None:
        # The model itself comes last, for the layers that no block holds.
        found: list[tuple[Block, set[nn.Module]]] = []
        for module in (*blocks_of(model), model):
            layers = {child for child in module.modules() if isinstance(child, kind)}
            found.append((Block(), layers))

        # A layer belongs to the first block that holds it.
        self._of: dict[nn.Module, Block] = {}
        for block, layers in found:
            for layer in layers:
                self._of.setdefault(layer, block)
        self._blocks: list[tuple[Block, list[nn.Module]]] = []
        for block, layers in found:
            own = [layer for layer in layers if self._of[layer] is block]
            self._blocks.append((block, own))

    def of(self, layer: nn.Module) -> Block:
        """The first block that holds `layer`."""
        return self._of[layer]

    def mark(self, sampling: bool, demoted: Iterable[nn.Module]) -> None:
        """Set the flags of every block."""
        apart = set(demoted)
        for block, layers in self._blocks:
            block.demoted = not apart.isdisjoint(layers)
            block.switching = sampling or block.demoted
