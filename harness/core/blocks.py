"""The repeated blocks of a model: what is compiled, and sharded over ranks, one by one."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Elements of the outermost nn.ModuleLists of `model`, each once."""
    found: dict[nn.Module, None] = {}

    def search(module: nn.Module) -> None:
        for child in module.children():
            # A list of lists is no block itself; its inner elements are.
            nested = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if isinstance(module, nn.ModuleList) and not nested:
                found[child] = None
            else:
                search(child)

    search(model)
    return list(found)
