"""torch.compile, block by block, and a watch for blocks that run eager after all.

Blocks are compiled, not the whole model. Equal blocks share their compiled code, so a model of any depth compiles in
the time of one block. What else in the model cannot be compiled does not matter.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch
from torch import nn

from harness.core.blocks import blocks_of
from harness.core.errors import Problem
from harness.core.processes import find_compiler
from harness.precision.backends.registry import BACKENDS
from harness.precision.recipe import Rung

_WHERE = "engine.compile=blocks"


def check_compile(rung: Rung, model: nn.Module, device: torch.device) -> list[Problem]:
    """Why the blocks of `model` cannot be compiled on this rung and machine; empty if they can."""
    problems: list[Problem] = []
    why = BACKENDS[rung.backend].not_compiled
    if why:
        *others, last = [name for name, each in BACKENDS.items() if not each.not_compiled]
        what = f"the {rung.backend} backend does not compile"
        fix = f"take a recipe whose rung here is {', '.join(others)} or {last}, or engine.compile=none"
        problems.append(Problem(what, _WHERE, why, fix))
    if not blocks_of(model):
        what = f"{type(model).__name__} has no nn.ModuleList with blocks in it"
        fix = "keep the repeated blocks in an nn.ModuleList, or engine.compile=none"
        problems.append(Problem(what, _WHERE, fix=fix))

    # What torch.compile itself needs. Without it the run would fail at its first step, in the middle of a traceback.
    if device.type == "cpu" and find_compiler() is None:
        why = "torch.compile writes C++ for a CPU"
        fix = "install g++, or engine.compile=none"
        problems.append(Problem("no C++ compiler", _WHERE, why, fix))
    if device.type == "cuda" and find_spec("triton") is None:
        why = "torch.compile writes Triton kernels for a GPU"
        fix = "pip install triton, or engine.compile=none"
        problems.append(Problem("triton is not installed", _WHERE, why, fix))
    return problems


class EagerWatch(logging.Handler):
    """Notices when torch gives up compiled code and runs a function eager.

    torch does so after torch._dynamo.config.recompile_limit variants of the function (shapes, dtypes, branches). It
    reports that to its logger only.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found = ""
        self._taken = False

    def emit(self, record: logging.LogRecord) -> None:
        """Called by torch's logger."""
        text = record.getMessage()
        if "recompile_limit" in text and not self._found:
            # The first lines name the function and the guard that failed.
            lines = text.splitlines()[:3]
            self._found = "; ".join(map(str.strip, lines))

    def take(self) -> str:
        """The first function that runs eager, and why. Given once; empty before and after."""
        if self._taken or not self._found:
            return ""
        self._taken = True
        return self._found


def compile_blocks(model: nn.Module) -> EagerWatch:
    """Compile the blocks of `model` in place, each at its first call. state_dict keys stay as they are."""
    watch = EagerWatch()
    logging.getLogger("torch._dynamo").addHandler(watch)
    for block in blocks_of(model):
        block.compile()
    return watch
