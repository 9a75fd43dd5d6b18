"""torch.compile, block by block: which rungs can, which modules are compiled, and notice when one runs eager after all.

Blocks, not the whole model: equal blocks share their compiled code, so a model of any depth compiles as long as one
block does, and whatever else in the model cannot be compiled stays out of the way.

FP8 layers are operators that the compiler cannot look into. A graph finds its layer by a number in a tensor, which it
takes as an input. What may change between two steps (demotion, sampling) is read from the layer when an operator runs,
or is one flag for a whole block, so that no number of switches compiles a block more than twice.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from harness.core.errors import Problem
from harness.precision.backends.registry import BACKENDS
from harness.precision.recipe import Rung

_WHERE = "engine.compile=blocks"


def check_compile(rung: Rung, model: nn.Module, device: torch.device) -> list[Problem]:
    """Why the blocks of `model` cannot be compiled on this rung and machine; empty if they can."""
    problems: list[Problem] = []
    if why := BACKENDS[rung.backend].not_compiled:
        *others, last = (name for name, backend in BACKENDS.items() if not backend.not_compiled)
        fix = f"take a recipe whose rung here is {', '.join(others)} or {last}, or engine.compile=none"
        problems.append(Problem(f"the {rung.backend} backend does not compile", _WHERE, why, fix))
    if not blocks_of(model):
        fix = "keep the repeated blocks in an nn.ModuleList, or engine.compile=none"
        problems.append(Problem(f"{type(model).__name__} has no nn.ModuleList with blocks in it", _WHERE, fix=fix))
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        why = "torch.compile writes C++ for a CPU"
        problems.append(Problem("no C++ compiler", _WHERE, why, "install g++, or engine.compile=none"))
    if device.type == "cuda" and find_spec("triton") is None:
        why = "torch.compile writes Triton kernels for a GPU"
        problems.append(Problem("triton is not installed", _WHERE, why, "pip install triton, or engine.compile=none"))
    return problems


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Elements of the outermost nn.ModuleLists of `model`, each once."""
    found: dict[nn.Module, None] = {}

    def search(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                found[child] = None
            else:
                search(child)

    search(model)
    return list(found)


class EagerWatch(logging.Handler):
    """Remembers that compiled code was given up for eager.

    torch gives up a function after torch._dynamo.config.recompile_limit variants of it (shapes, dtypes, branches), and
    says so to its logger alone.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found = ""
        self._told = False

    def emit(self, record: logging.LogRecord) -> None:
        """Called by torch's logger."""
        text = record.getMessage()
        if "recompile_limit" in text and not self._found:
            self._found = "; ".join(line.strip() for line in text.splitlines()[:3])

    def take(self) -> str:
        """Which function fell back to eager, the first one, and why; told once, empty before and after."""
        if self._told or not self._found:
            return ""
        self._told = True
        return self._found


def compile_blocks(model: nn.Module) -> EagerWatch:
    """Compile the blocks of `model` in place, each at its first call; state_dict keys stay as they are."""
    watch = EagerWatch()
    logging.getLogger("torch._dynamo").addHandler(watch)
    for block in blocks_of(model):
        block.compile()
    return watch


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
