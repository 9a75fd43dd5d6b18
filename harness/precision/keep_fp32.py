"""Modules that compute in float32 whatever the rung: autocast off in their forward, half-precision inputs cast up.

For what overflows or loses too much in 16 bits: attention scores, a router, the head, the loss. The module's class is
replaced by a subclass of its own class, so Parameters, hooks, names and state_dict keys stay as they are, activation
checkpointing recomputes the same, and equal modules still share their compiled code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.errors import Problem, near_match
from harness.precision.filters import names_of

_HALF = (torch.float16, torch.bfloat16)


def find_kept(model: nn.Module, patterns: Sequence[str], where: str) -> tuple[dict[nn.Module, str], list[Problem]]:
    """The modules that `patterns` mean, each with its pattern, and a Problem for each pattern that means none.

    A module that is never called cannot be kept: containers have no forward, and nn.MultiheadAttention reads the
    weights of its `out_proj` without calling it. where: the recipe key, for messages.
    """
    names = {module: found for module, found in names_of(model).items() if _is_called(module)}
    kept: dict[nn.Module, str] = {}
    problems: list[Problem] = []
    for pattern in patterns:
        matched = [module for module, found in names.items() if any(fnmatchcase(name, pattern) for name in found)]
        if not matched:
            known = [name for found in names.values() for name in found]
            what = f'pattern "{pattern}" matches no module that is called'
            problems.append(Problem(what, where, fix=near_match(pattern, known)))
        for module in matched:
            kept.setdefault(module, pattern)
            if "forward" in vars(module):
                what = f"{names[module][0]} had its forward replaced on the object"
                why = "an fp32 forward of its class would never run"
                problems.append(Problem(what, where, why, "prepare the model before other tools wrap it"))
    return kept, problems


def enclosing(kept: Mapping[nn.Module, str], names: Mapping[nn.Module, list[str]], module: nn.Module) -> str:
    """Name of a kept module around `module`, under any of its names; empty if there is none."""
    own = names[module]
    outer = (name for other in kept for name in names[other])
    return next((name for name in outer if any(inner.startswith(f"{name}.") for inner in own)), "")


def keep_in_fp32(model: nn.Module, names: Sequence[str], device_type: str) -> None:
    """From now on the named modules of `model` compute in float32 and return what they then return.

    A deep copy does the same; a pickle is of the module's own class.
    """
    for module in dict.fromkeys(model.get_submodule(name) for name in names):
        module.__class__ = _fp32_class(type(module), device_type)


@cache
def _fp32_class(base: type[nn.Module], device_type: str) -> type[nn.Module]:
    """One class for each `base`: torch.compile would compile equal blocks of different classes again and again."""

    @wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return base.forward(self, *_widened(args), **_widened(kwargs))

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        made = memo[id(self)] = object.__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return object.__new__, (base,), self.__getstate__()

    methods = {"forward": forward, "__deepcopy__": deepcopy, "__reduce_ex__": reduce, "__module__": base.__module__}
    return type(base.__name__, (base,), methods)


def _widened(value: Any) -> Any:
    """`value` with every float16 and bfloat16 tensor in it as float32; looks into tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_widened, value))
    if type(value) is tuple or type(value) is list:
        return type(value)(_widened(item) for item in value)
    if type(value) is dict:
        return {key: _widened(item) for key, item in value.items()}
    return value


def _is_called(module: nn.Module) -> bool:
    read_by_its_parent = nn.modules.linear.NonDynamicallyQuantizableLinear
    return type(module).forward is not nn.Module.forward and not isinstance(module, read_by_its_parent)
