"""Refuses a model that does not fit into this machine's memory, before the memory is gone.

Models of this package know their size in advance: `require_room` refuses them before they are built. The size of a
user's own model is known only while it is built. `watched` ends the building with an error when less than 1% of the
memory is left. Without it the kernel would kill the process without a word.
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

from harness.core.deferred import is_building
from harness.core.errors import ConfigError, Problem
from harness.core.memory import all_memory, free_memory, size_text

# Bytes of one nn.Module without the elements of its weights, a lower bound. Measured: 2.4 KiB of Python objects
# (CPython 3.11), 6 KiB with torch's.
_MODULE = 2 * 2**10
# torch cannot compute the bytes of a tensor of more elements than this, not even on the meta device.
_MOST_ELEMENTS = 2**60
# Bytes that are registered between two looks at the free memory. A look takes some 50 microseconds.
_LOOK_EVERY = 64 * 2**20
# Share of all memory that must stay free while a model is built. A run needs many times that beside its weights.
_LEAST_LEFT = 0.01


def require_room(parameters: int, modules: int, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if float32 weights and Python objects of one such model exceed all memory, swap included.

    A model that fits is never refused: neither training's own memory nor other ranks and processes are counted.
    sizes: keys of `model.args` with their values, for the message.
    """
    # On the meta device, in fake tensors and on a GPU, weights take no memory of the host. They are counted all the
    # same if torch could not compute their bytes.
    weights = 0
    if parameters > _MOST_ELEMENTS or _takes_host_memory():
        weights = 4 * parameters
    objects = _MODULE * modules
    # 0: not known, so nothing can be refused.
    there = all_memory()
    if not there or weights + objects <= there:
        return

    why = f"{modules:,} Python modules take {size_text(objects)} at least"
    if weights:
        why = f"{parameters:,} float32 parameters take {size_text(weights)}, {why}"
    needed = size_text(weights + objects)
    what = f"needs {needed} or more to be built, and this machine has {size_text(there)}, swap included"
    given = [f"{key} {value}" for key, value in sizes.items()]
    where = f"model.args ({', '.join(given)})"
    fix = "lower the size that is too large; training takes some four times the weights, see harness estimate"
    raise ConfigError(Problem(what, where, why, fix))


@contextmanager
def watched(where: str) -> Iterator[None]:
    """Context around building a model. ConfigError is raised inside it when less than 1% of the memory is left.

    where: what builds the model, for the message.

    Memory is checked when this thread registers a module or Parameter. A weight is registered only after it was
    written, so a single one that is larger than the free memory is not noticed in time.
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
    """Counts what is registered, and looks at the free memory after every `_LOOK_EVERY` bytes."""

    def __init__(self, where: str) -> None:
        self._where = where
        # torch calls the hooks in all threads. Only this one builds the model, and only its memory is counted.
        self._thread = threading.get_ident()
        self._modules = 0
        self._parameters = 0
        # Bytes since the last look.
        self._added = 0

    def module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """torch's hook: a module was registered."""
        if child is None or threading.get_ident() != self._thread:
            return
        self._modules += 1
        self._add(_MODULE)

    def parameter(
        self,
        module: nn.Module,
        name: str,
        parameter: nn.Parameter | None,
    ) -> None:
        """torch's hook: a Parameter was registered."""
        if parameter is None or threading.get_ident() != self._thread:
            return
        self._parameters += 1
        # Less than a module, but this only decides how often the memory is looked at.
        size = _MODULE
        if parameter.device.type == "cpu":
            size += parameter.nbytes
        self._add(size)

    def _add(self, size: int) -> None:
        self._added += size
        if self._added < _LOOK_EVERY:
            return
        self._added = 0
        left = free_memory(swap=True)
        there = all_memory()
        if left < _LEAST_LEFT * there:
            free = f"{size_text(left)} of {size_text(there)} left, swap included"
            what = f"the model takes all memory as it is built: {free}"
            why = f"{self._modules:,} modules and {self._parameters:,} Parameters are there, and more were to come"
            fix = "build a smaller model (look at model.args), or end what else takes this machine's memory"
            raise ConfigError(Problem(what, self._where, why, fix))


def _takes_host_memory() -> bool:
    """Whether a new tensor takes memory of this machine: not on another default device, as a fake, or deferred."""
    if is_building():
        return False
    probe = torch.empty(0)
    return probe.device.type == "cpu" and not isinstance(probe, FakeTensor)
