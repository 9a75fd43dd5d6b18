"""Replace Linear modules by another class while sharing their Parameters: ties, optimizers and hooks survive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from torch import nn

L = TypeVar("L", bound=nn.Linear)
M = TypeVar("M", bound=nn.Module)


def swap_linears(model: nn.Module, names: Sequence[str], make: Callable[[nn.Linear], M]) -> dict[str, M]:
    """Replace each named Linear of `model` by `make(linear)`, which must share its Parameters; returns them by name.

    A module reachable under several names is replaced once and put back under all of them.
    """
    wanted = set(names)
    swapped: dict[str, M] = {}
    replacements: dict[nn.Module, M] = {}
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            if name in wanted and isinstance(child, nn.Linear):
                replacements[child] = swapped[name] = make(child)
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                setattr(parent, child_name, replacements[child])
    return {name: swapped[name] for name in names}


def twin(linear: nn.Linear, to: type[L]) -> L:
    """A `to` with the same state as `linear`: Parameters by identity, hooks and training flag included."""
    made = to.__new__(to)
    made.__dict__.update(linear.__dict__)
    return made


def pickled_as_linear(module: nn.Linear, own: Collection[str]) -> tuple[Any, ...]:
    """`__reduce_ex__` of a converted layer: a plain Linear without its `own` attributes: FP8 state belongs to a run."""
    state = {name: value for name, value in module.__dict__.items() if name not in own}
    return object.__new__, (nn.Linear,), state
