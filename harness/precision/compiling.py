"""torch.compile, block by block, and a watch for blocks that run eager after all.

Blocks are compiled, not the whole model. Equal blocks share their compiled code, so a model of any depth compiles in
the time of one block. What else in the model cannot be compiled does not matter.

`engine.compile=auto` compiles on a GPU if a small function compiles there first. Without Triton, a C compiler or
Python's headers the run would fail at its first step; with `auto` it runs eager, and says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from harness.core.blocks import blocks_of
from harness.core.collectives import max_over_ranks, world_size
from harness.core.errors import ConfigError, Problem, clipped
from harness.core.processes import find_compiler
from harness.precision.backends.registry import BACKENDS
from harness.precision.recipe import Rung

_WHERE = "engine.compile=blocks"
_MOST_REASON = 300
# How torch's logger begins what it says of a function that it cannot compile.
_NOT_CONVERTED = "WON'T CONVERT"


class Compiling(NamedTuple):
    """Whether a run compiles its blocks.

    note: for the plan; empty where nothing has to be said.
    failed: why blocks run eager although `auto` was to compile them; empty if they do not, or are not meant to be.
    """

    compiled: bool
    note: str = ""
    failed: str = ""


def choose_compiling(
    asked: Literal["auto", "none", "blocks"],
    rung: Rung,
    model: nn.Module,
    device: torch.device,
    fuse: bool = False,
) -> Compiling:
    """What `engine.compile` means for `model` on this rung and machine; the same on all ranks. Collective.

    fuse: the recipe's layers.fuse.

    Raises ConfigError if blocks are to be compiled and cannot be.
    """
    # auto compiles on a GPU alone.
    if asked == "none" or (asked == "auto" and device.type != "cuda"):
        return Compiling(False)
    problems = check_compile(rung, model, device, fuse)
    # Who asks for compiled blocks gets an error, not eager ones.
    if asked == "blocks":
        if problems:
            raise ConfigError(problems)
        return Compiling(True)

    eager = "blocks run eager (engine.compile=auto)"
    if why := BACKENDS[rung.backend].not_by_default:
        return Compiling(False, f"{eager}: {why}")

    # Every rank takes part, also one that has found a reason: a library may be missing on one machine alone.
    failed = "" if problems else try_compile(device)
    cannot = bool(problems or failed)
    if world_size() > 1:
        mine = torch.tensor(float(cannot), device=device)
        cannot = bool(max_over_ranks(mine).item())
    if not cannot:
        return Compiling(True, "blocks are compiled (engine.compile=auto)")
    reasons: list[str] = []
    for each in problems:
        reason = f"{each.what}: {each.why}" if each.why else each.what
        reasons.append(reason)
    if not reasons:
        failed = failed or "it failed on another rank, whose log says why"
        reasons = [f"torch.compile does not work here: {failed}"]
    why = "; ".join(reasons)
    return Compiling(False, f"{eager}: {why}", why)


@cache
def try_compile(device: torch.device) -> str:
    """Compile a small function for `device` and run it; returns why that failed, empty if it worked.

    Tried once in a process: what torch.compile needs from a machine does not come while it runs.
    """

    def twice(x: Tensor) -> Tensor:
        return 2 * x

    try:
        torch.compile(twice, fullgraph=True)(torch.ones(8, device=device))
    except Exception as error:  # of torch, Triton or a compiler: whatever the machine lacks
        text = f"{type(error).__name__}: {error}"
        return clipped(" ".join(text.split()), _MOST_REASON)
    return ""


def compiles(rung: Rung, fuse: bool) -> bool:
    """Whether blocks can be compiled on this rung. fuse: the recipe's layers.fuse."""
    declared = BACKENDS[rung.backend]
    return not declared.not_compiled and not (fuse and declared.fuses)


def check_compile(
    rung: Rung, model: nn.Module, device: torch.device, fuse: bool = False
) -> list[Problem]:
    """Why the blocks of `model` cannot be compiled on this rung and machine; empty if they can.

    fuse: the recipe's layers.fuse.
    """
    problems: list[Problem] = []
    declared = BACKENDS[rung.backend]
    why = declared.not_compiled
    if fuse and declared.fuses:
        what = f"layers.fuse does not go with torch.compile on {rung.name}"
        fix = "set layers.fuse: false in the recipe, or engine.compile=none"
        problems.append(Problem(what, _WHERE, fix=fix))
    if why:
        *others, last = [name for name, each in BACKENDS.items() if not each.not_compiled]
        what = f"the {rung.backend} backend does not compile"
        fix = f"take a recipe whose rung here is {', '.join(others)} or {last}, or engine.compile=none"
        problems.append(Problem(what, _WHERE, why, fix))
    if not blocks_of(model):
        what = f"{type(model).__name__} has no nn.ModuleList with blocks in it"
        why = ""
        lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
        if any(isinstance(child, nn.ModuleDict) for each in lists for child in each):
            why = "an nn.ModuleDict in it is no block: it has no forward to compile"
        fix = "keep the repeated blocks, each a module with a forward, in an nn.ModuleList, or engine.compile=none"
        problems.append(Problem(what, _WHERE, why, fix))

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
    """Notices what runs eager although it was to be compiled.

    torch gives up compiled code after torch._dynamo.config.recompile_limit variants of a function (shapes, dtypes,
    branches), and where it may fall back, for a function that it cannot compile. It reports both to its logger only.

    A block is compiled by its first call as a module. The code of a block that is called in another way, such as
    `block.run(x)` or `block.forward(x)`, is never compiled, and torch does not report that at all.

    uncalled: names of the blocks that have not been called as modules yet, in the model's order.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.uncalled: list[str] = []
        self._found = ""
        self._taken = False

    def emit(self, record: logging.LogRecord) -> None:
        """Called by torch's logger."""
        text = record.getMessage()
        gave_up = "recompile_limit" in text or text.startswith(_NOT_CONVERTED)
        if gave_up and not self._found:
            # The first lines name the function and the guard that failed, or the place.
            lines = [line.strip() for line in text.splitlines()[:3]]
            if record.exc_info and record.exc_info[1]:
                lines.append(clipped(str(record.exc_info[1]), _MOST_REASON))
            self._found = "; ".join(lines)

    def take(self) -> str:
        """The first function that runs eager, and why. Given once; empty before and after."""
        if self._taken or not self._found:
            return ""
        self._taken = True
        return self._found

    def called(self, name: str) -> None:
        """The block `name` was called as a module for the first time."""
        if name in self.uncalled:
            self.uncalled.remove(name)

    def take_uncalled(self) -> str:
        """After the first step: blocks that it did not call as modules. Given once; empty if there are none."""
        if not self.uncalled:
            return ""
        first, *others = self.uncalled
        name = f"{first} and {len(others)} more" if others else first
        self.uncalled.clear()
        return (
            f"{name}: not called as a module in the first step, so not compiled; call block(...), not a method "
            "of the block"
        )


def compile_blocks(model: nn.Module, may_fall_back: bool = False) -> EagerWatch:
    """Compile the blocks of `model` in place, each at its first call. state_dict keys stay as they are.

    may_fall_back: a block that torch cannot compile runs eager, in this whole process; else its first call fails.
    """
    watch = EagerWatch()
    if may_fall_back:
        torch._dynamo.config.suppress_errors = True
    logging.getLogger("torch._dynamo").addHandler(watch)
    names = {module: name for name, module in model.named_modules()}
    for block in blocks_of(model):
        block.compile()
        watch.uncalled.append(names[block])
        _note_first_call(block, partial(watch.called, names[block]))
    return watch


def _note_first_call(block: nn.Module, note: Callable[[], None]) -> None:
    """Have the first call of `block` as a module call `note`.

    A hook would become part of what is compiled, and compile it again when it is removed.
    """
    compiled = block._compiled_call_impl
    assert compiled is not None

    def first(*args: Any, **kwargs: Any) -> Any:
        block._compiled_call_impl = compiled
        note()
        return compiled(*args, **kwargs)

    block._compiled_call_impl = first
