"""Buffers that ranks share: which models need it, and how an engine does it that does not do it by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def shares_buffers(model: nn.Module) -> bool:
    """Whether every forward must begin with rank 0's buffers.

    It must if forward may write into a buffer that a checkpoint holds, such as BatchNorm's averages. A checkpoint holds
    rank 0's buffers only: if each rank went on with its own, a resume would not be exact.
    """
    saved = model.state_dict().keys()
    buffers = model.named_buffers()
    return any(name in saved and buffer.is_floating_point() for name, buffer in buffers)


def follow_rank_0(model: nn.Module, now: Callable[[], bool] = lambda: True) -> None:
    """Let forwards of `model` begin with rank 0's buffers, as DistributedDataParallel does by itself.

    now: whether the forward that begins does so, the same on every rank.
    """

    def take_buffers(module: nn.Module, _: object) -> None:
        if now():
            for buffer in module.buffers():
                torch.distributed.broadcast(buffer, 0)

    model.register_forward_pre_hook(take_buffers)
