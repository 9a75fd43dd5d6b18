"""A copy of a run's whole state on the host, to run a step again from exactly there."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from harness.core.protocols import Meta, Tensors
from harness.run import Run


class _Buffer(NamedTuple):
    """A buffer that no checkpoint holds.

    place: the module's name.
    live: its tensor object; None: the model makes it later.
    copied: the values.
    """

    place: str
    module: nn.Module
    name: str
    live: Tensor | None
    copied: Tensor | None


class Kept(NamedTuple):
    """A copy of the state.

    tensors: by part and name, on the host.
    meta: the rest, as in a checkpoint.
    buffers: the model's non-persistent ones.
    """

    tensors: Tensors
    meta: Meta
    buffers: list[_Buffer]


def keep(run: Run) -> Kept:
    """Copy the whole state to the host. Collective."""
    tensors, meta = run.state.state_dict()
    copied: Tensors = {}
    for part, of_part in tensors.items():
        copied[part] = {}
        for name, tensor in of_part.items():
            copied[part][name] = tensor.detach().to("cpu", copy=True)

    buffers: list[_Buffer] = []
    for place, module in run.engine.module.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            live = module._buffers.get(name)
            values = None if live is None else live.detach().clone()
            buffers.append(_Buffer(place, module, name, live, values))
    return Kept(copied, copy.deepcopy(meta), buffers)


def restore(run: Run, kept: Kept) -> None:
    """Load `kept`, also of another build of the same run. The ledger stays as it is. Collective."""
    run.state.load_state_dict(kept.tensors, copy.deepcopy(kept.meta))
    restore_buffers(run, kept)


@torch.no_grad()
def restore_buffers(run: Run, kept: Kept) -> None:
    """Restore the non-persistent buffers; in the run that they are of, as the same tensor objects."""
    modules = dict(run.engine.module.named_modules())
    for buffer in kept.buffers:
        module = modules[buffer.place]
        if buffer.copied is None:
            # The model makes it at its first use, and has not done so yet.
            module._buffers[buffer.name] = None
            continue
        live = buffer.live if module is buffer.module else module._buffers[buffer.name]
        if live is None:
            live = buffer.copied.clone()
        # The elements of an expanded buffer share memory: nothing can be copied into it, and forward cannot change it.
        if 0 not in live.stride():
            live.copy_(buffer.copied)
        module._buffers[buffer.name] = live
