"""Custom operators of FP8 layers and their kernels: torch.compile calls them, and does not look into them.

A compiled graph must not fix which layer it belongs to, since equal blocks share their graph. So every operator takes a
handle, a tensor with the layer's number. The operator finds the layer by it when it runs, and then reads what may
change between two steps (demotion, sampling) from the layer.
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
    """A handle for `layer`, int64 0-d on the CPU. It does not keep the layer alive."""
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
    """Register an operator.

    name: compiled code is cached on disk by it, so an operator with other results needs another name.
    run: what it computes.
    fake: its outputs' shapes and dtypes, for the compiler.
    backward, setup: its gradient, and what that needs from the forward.
    mutates: arguments that the compiler shall take for written in place.

    `torch.library.custom_op` does the same, and checks for aliases at every call, which costs 1% of a small layer's
    time.
    """
    full = f"hopper_harness::{name}"
    # A CUDA graph replays kernels, not the Python that reads the layer: it would keep what the layer was when recorded.
    tags = (torch.Tag.cudagraph_unsafe,)
    torch.library.define(full, torch.library.infer_schema(run, mutates_args=mutates), tags=tags)
    torch.library.impl(full, "default", run)
    torch.library.register_fake(full, fake)
    if backward is not None:
        torch.library.register_autograd(full, backward, setup_context=setup)
