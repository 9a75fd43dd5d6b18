"""Snapshots of the TrainState in host memory: the short way back over a few steps, without a disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch

from harness.checkpoint.staging import Staging
from harness.core.collectives import max_over_ranks
from harness.core.memory import free_memory
from harness.core.protocols import Meta, Tensors, Tracker


@dataclass
class _Snapshot:
    """One copy of the state. meta: JSON, as in a checkpoint. step: 0 while empty. healthy: such steps since it."""

    memory: Staging
    tensors: Tensors = field(default_factory=dict)
    meta: str = ""
    step: int = 0
    healthy: int = 0


class Snapshots:
    """Two copies of a rank's TrainState in the host's memory: one that is good, one that is on the way there.

    A snapshot is good once `healthy_steps` healthy steps in a row have followed it. One snapshot serves one rollback:
    if the run breaks again before another has become good, going back to the same state would not help, and the disk
    has older ones. size: bytes to reserve for each copy. pinned: as in `Staging`.

    Every rank holds its own and, as all see the same verdicts, all agree on which is good.
    """

    def __init__(self, healthy_steps: int, size: int = 0, *, pinned: bool = False) -> None:
        self._healthy_steps = healthy_steps
        self._good = _Snapshot(Staging(pinned=pinned))
        self._next = _Snapshot(Staging(pinned=pinned))
        for each in (self._next, self._good):
            if size:
                each.memory.reserve(size)

    def take(self, step: int, tensors: Tensors, meta: Meta) -> None:
        """Copy the state of `step`, unless an earlier copy is still earning its mark."""
        if self._next.step and self._next.healthy:
            return
        memory = self._next.memory
        self._next = _Snapshot(memory, memory.copy(tensors), json.dumps(meta), step)

    def observe(self, step: int, healthy: bool) -> None:
        """Step `step` was judged."""
        waiting = self._next
        if waiting.step and waiting.step <= step:
            waiting.healthy = waiting.healthy + 1 if healthy else 0
            if waiting.healthy >= self._healthy_steps:
                self._good, self._next = waiting, _Snapshot(self._good.memory)

    @property
    def good(self) -> int | None:
        """Step of the good snapshot, if there is one."""
        return self._good.step or None

    def load(self) -> tuple[Tensors, Meta]:
        """The good snapshot; its tensors are the copies themselves. It is good no longer, nor is any other."""
        tensors, meta = self._good.tensors, json.loads(self._good.meta)
        self._good.memory.wait()
        self.clear()
        return tensors, meta

    def clear(self) -> None:
        """Nothing here is to be gone back to (the run went back further); the memory is kept."""
        self._good = _Snapshot(self._good.memory)
        self._next = _Snapshot(self._next.memory)


def room_for_snapshots(
    size: int, healthy_steps: int, device: torch.device, tracker: Tracker
) -> Snapshots | None:
    """Snapshots of a state of `size` bytes on `device`, if every rank has room for them. Collective."""
    lacks = torch.tensor(float(2 * size > free_memory() / 4), device=device)
    if max_over_ranks(lacks).item():
        text = "two copies of the state would take over a quarter of the free memory: no snapshots are taken"
        tracker.event(0, "snapshot.off", text=text)
        return None
    return Snapshots(healthy_steps, size, pinned=device.type == "cuda")
