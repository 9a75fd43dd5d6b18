"""The TrainState in memory: the short way back, over a few steps, without a disk."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.core.protocols import Meta, Tensors


@dataclass
class _Snapshot:
    """One copy of the state. step: 0 while empty. healthy: healthy steps judged since it was taken."""

    tensors: Tensors = field(default_factory=dict)
    meta: Meta = field(default_factory=dict)
    step: int = 0
    healthy: int = 0


class Snapshots:
    """Two copies of a rank's TrainState in the host's memory: one that is good, one that is on the way there.

    A snapshot is good once `healthy_steps` healthy steps in a row have followed it. Buffers are allocated once (pinned,
    for tensors of a GPU, whose copy then does not hold up the host) and reused: fresh ones cost several times the
    copy. One snapshot serves one rollback: if the run breaks again before another has become good, going back to the
    same state would not help, and the disk has older ones.

    Every rank holds its own and, as all see the same verdicts, all agree on which is good.
    """

    def __init__(self, healthy_steps: int) -> None:
        self._healthy_steps = healthy_steps
        self._good = _Snapshot()
        self._next = _Snapshot()

    def take(self, step: int, tensors: Tensors, meta: Meta) -> None:
        """Copy the state of `step`, unless an earlier copy is still earning its mark."""
        if self._next.step and self._next.healthy:
            return
        self._next = _Snapshot(_copied(tensors, self._next.tensors), copy.deepcopy(meta), step)

    def observe(self, step: int, healthy: bool) -> None:
        """Step `step` was judged."""
        waiting = self._next
        if waiting.step and waiting.step <= step:
            waiting.healthy = waiting.healthy + 1 if healthy else 0
            if waiting.healthy >= self._healthy_steps:
                self._good, self._next = waiting, _Snapshot(tensors=self._good.tensors)

    @property
    def good(self) -> int | None:
        """Step of the good snapshot, if there is one."""
        return self._good.step or None

    def load(self) -> tuple[Tensors, Meta]:
        """The good snapshot; its tensors are the buffers themselves. It is good no longer, nor is any other."""
        tensors, meta = self._good.tensors, self._good.meta
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # its copy may still be under way
        self.clear()
        return tensors, meta

    def clear(self) -> None:
        """Nothing here is to be gone back to (the run went back further); the buffers are kept."""
        self._good = _Snapshot(tensors=self._good.tensors)
        self._next = _Snapshot(tensors=self._next.tensors)


def _copied(tensors: Tensors, buffers: Tensors) -> Tensors:
    return {
        part: {name: _into(tensor, buffers.get(part, {}).get(name)) for name, tensor in each.items()}
        for part, each in tensors.items()
    }


def _into(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return buffer.copy_(tensor.detach(), non_blocking=True)


def room_for_two(bytes_each: int) -> bool:
    """Whether two copies take at most a quarter of the host memory that is available now."""
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))  # kibibytes
    return 2 * bytes_each <= available * 1024 / 4
