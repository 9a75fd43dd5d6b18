"""Operators that the compiler cannot look into: FP8 layers and their kernels.

A graph finds its layer by a number in a tensor, which it takes as an input. What may change between two steps
(demotion, sampling) is read from the layer when an operator runs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

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
