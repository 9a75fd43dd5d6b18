"""Buffers that ranks share: which models need it, and how an engine does it that does not do it by itself."""

from __future__ import annotations

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


def follow_rank_0(model: nn.Module) -> None:
    """Let every forward of `model` begin with rank 0's buffers, as DistributedDataParallel does by itself."""
    model.register_forward_pre_hook(_take_buffers)


def _take_buffers(model: nn.Module, _: object) -> None:
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)
