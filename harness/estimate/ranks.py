"""Imagines the other ranks of a run: a process group in which only this process exists.

torch's "fake" backend takes every collective and sends nothing. On fake tensors nothing is missing: what a collective
would write has a shape, and no values. So FSDP2 gathers, frees and reduces as it does among real ranks, and the
recorder counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.engines import fsdp, initial_weights


@contextmanager
def imagined(ranks: int) -> Iterator[None]:
    """In this context the process is rank 0 of `ranks`."""
    # Shapes of what collectives give, for fake tensors; and the backend itself.
    import torch.distributed._tools.fake_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def real_mesh(*args: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return init_device_mesh(*args)

    def gather_object(found: list[Any], value: Any, *_: Any) -> None:
        found[:] = [value] * ranks

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        # Objects and hashes travel as values of tensors, which fakes do not have. All ranks are as this one is.
        with (
            mock.patch.object(initial_weights, "gather_texts", lambda text: [text] * ranks),
            mock.patch.object(initial_weights.InitialWeights, "_differing", return_value=[]),
            mock.patch.object(fsdp.FsdpEngine, "_require_gradients", return_value=None),
            mock.patch.object(fsdp.FsdpEngine, "_require_same_order", return_value=None),
            mock.patch.object(fsdp, "init_device_mesh", real_mesh),
            mock.patch.object(dist, "all_gather_object", gather_object),
            mock.patch.object(dist, "broadcast_object_list", return_value=None),
        ):
            yield
    finally:
        dist.destroy_process_group()


# DistributedDataParallel's buckets: the first is small, so that the exchange begins early.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


def buckets(model: nn.Module) -> list[int]:
    """Bytes of each all-reduce of DistributedDataParallel in a step: the gradients, in the order of backward."""
    sizes = [0]
    for param in reversed(list(model.parameters())):
        if not param.requires_grad:
            continue
        limit = _FIRST_BUCKET if len(sizes) == 1 else _BUCKET
        if sizes[-1] >= limit:
            sizes.append(0)
        sizes[-1] += param.nbytes
    return sizes
