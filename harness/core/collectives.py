"""Small reductions over the ranks of the default process group; without one they return their argument."""

from __future__ import annotations

import torch
import torch.distributed as dist

# Before anybody joins a group: this module's defaults are `group.WORLD`, and DistributedDataParallel imports it. Later,
# the defaults would hold the group to the interpreter's end, whose finalisation aborts or hangs in the group's threads.
import torch.distributed.nn.functional
from torch import Tensor


def world_size() -> int:
    """Ranks of the default process group; 1 where none is initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def world_rank() -> int:
    """This process's rank in the default process group; 0 where none is initialised."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def max_over_ranks(values: Tensor) -> Tensor:
    """Maximum over ranks, in place and in one collective; `values` itself is returned.

    Infinities are kept, NaN is not defined.
    """
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def mean_over_ranks(values: Tensor) -> Tensor:
    """Mean over ranks, summed in rank order: the same bits on every rank."""
    return values if world_size() == 1 else gather_over_ranks(values).mean(dim=0)


def gather_over_ranks(values: Tensor) -> Tensor:
    """Every rank's `values`, of one shape: [ranks, *shape], the same on every rank."""
    ranks = world_size()
    if ranks == 1:
        return values[None]
    gathered = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(gathered, values.contiguous())
    return torch.stack(gathered)


def gather_texts(text: str) -> list[str]:
    """Every rank's `text`, in rank order."""
    texts = [text] * world_size()
    if len(texts) > 1:
        dist.all_gather_object(texts, text)
    return texts
