"""Replace Linear modules by another class while sharing their Parameters: ties, optimizers and hooks survive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import nn

L = TypeVar("L", bound=nn.Linear)


def swap_linears(model: nn.Module, names: Sequence[str], to: type[L]) -> dict[str, L]:
    """Replace each named Linear of `model` by a `to` with the same Parameter objects; returns them by name.

    A module reachable under several names is replaced once and put back under all of them. Forward and backward
    hooks registered on the module move along.
    """
    wanted = set(names)
    swapped: dict[str, L] = {}
    replacements: dict[nn.Module, L] = {}
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            if name in wanted and isinstance(child, nn.Linear):
                replacements[child] = swapped[name] = _twin(child, to)
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                setattr(parent, child_name, replacements[child])
    return {name: swapped[name] for name in names}


def _twin(linear: nn.Linear, to: type[L]) -> L:
    """A `to` with the same state as `linear`: Parameters by identity, hooks and training flag included."""
    twin = to.__new__(to)
    twin.__dict__.update(linear.__dict__)
    return twin
