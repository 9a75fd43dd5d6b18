"""Whether a model can be built on this machine at all, asked before its memory is gone.

Of the models of this package the sizes tell beforehand (`require_room`). How large a model of somebody else's will be
is known only as it is built: there the building ends, by name, when next to nothing is left (`watched`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from harness.core.errors import ConfigError, Problem
from harness.core.memory import all_memory, free_memory, size_text

# A lower bound: Python's own objects take 2.4 KiB (CPython 3.11), with torch's 6 KiB, a weight's elements not counted.
_MODULE = 2 * 2**10
# Of more elements torch cannot count the bytes, wherever they are.
_MOST_ELEMENTS = 2**60
# Between two looks at the memory that is left, which take some 50 microseconds.
_LOOK_EVERY = 64 * 2**20
# Of all memory; a run needs many times that beside its weights.
_LEAST_LEFT = 0.01


def require_room(parameters: int, modules: int, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if float32 weights and Python objects of one such model exceed all memory, swap included.

    A model that fits is never refused: neither what training adds, nor other ranks and processes are counted.
    sizes: keys of `model.args` with their values, for the message. Weights take nothing on the meta device, in fake
    tensors and on a GPU.
    """
    weights = 4 * parameters if parameters > _MOST_ELEMENTS or _takes_host_memory() else 0
    objects = _MODULE * modules
    there = all_memory()
    if not there or weights + objects <= there:
        return
    why = f"{modules:,} Python modules take {size_text(objects)} at least"
    if weights:
        why = f"{parameters:,} float32 parameters take {size_text(weights)}, {why}"
    needed = size_text(weights + objects)
    raise ConfigError(
        Problem(
            f"needs {needed} or more to be built, and this machine has {size_text(there)}, swap included",
            f"model.args ({', '.join(f'{key} {value}' for key, value in sizes.items())})",
            why,
            "lower the size that is too large; training takes some four times the weights, see harness estimate",
        )
    )


@contextmanager
def watched(where: str) -> Iterator[None]:
    """Around the building of a model: raises ConfigError from it where under 1% of the memory is left.

    where: what builds it, for the message. It looks when modules and Parameters are registered, in this thread: one
    weight that is larger than what is left is not seen before it is written.
    """
    watch = _Watch(where)
    hooks = [
        register_module_module_registration_hook(watch.module),
        register_module_parameter_registration_hook(watch.parameter),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Watch:
    """Counts what is registered, and looks at the memory once in a while."""

    def __init__(self, where: str) -> None:
        self._where, self._thread = where, threading.get_ident()
        self._modules = self._parameters = self._unseen = 0

    def module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._modules += 1
            self._add(_MODULE)

    def parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._parameters += 1
            self._add(_MODULE + (parameter.nbytes if parameter.device.type == "cpu" else 0))

    def _add(self, size: int) -> None:
        self._unseen += size
        if self._unseen < _LOOK_EVERY or threading.get_ident() != self._thread:
            return
        self._unseen = 0
        left, there = free_memory(swap=True), all_memory()
        if left < _LEAST_LEFT * there:
            raise ConfigError(
                Problem(
                    f"the model takes all memory as it is built: {size_text(left)} of {size_text(there)} left, "
                    "swap included",
                    self._where,
                    f"{self._modules:,} modules and {self._parameters:,} Parameters are there, and more were to come",
                    "build a smaller model (look at model.args), or end what else takes this machine's memory",
                )
            )


def _takes_host_memory() -> bool:
    probe = torch.empty(0)
    return probe.device.type == "cpu" and not isinstance(probe, FakeTensor)
