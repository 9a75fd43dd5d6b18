"""Copies of the TrainState in host memory, for a rollback over a few steps without reading a disk.

A fault shows some steps after its cause. So a copy is not good when it is taken, but after healthy steps have followed
it. Until then the earlier good copy stays: two buffers take turns.
"""

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
    """One copy of the state.

    memory: what the tensors are views of.
    meta: JSON, as in a checkpoint.
    step: when it was taken; 0: empty.
    healthy: healthy steps in a row since then.
    """

    memory: Staging
    tensors: Tensors = field(default_factory=dict)
    meta: str = ""
    step: int = 0
    healthy: int = 0


class Snapshots:
    """Two copies of this rank's TrainState in host memory: a good one, and a newer one that may become good.

    A snapshot serves one rollback. If the run breaks again before the next one is good, the same state would break
    again. That rollback takes a checkpoint, which is older. Every rank has its own snapshots. All ranks see the same
    verdicts, so they agree on which step is good.

    healthy_steps: healthy steps in a row after which a snapshot is good.
    size: bytes to reserve for each copy; 0: reserve nothing.
    pinned: as in `Staging`.
    """

    def __init__(self, healthy_steps: int, size: int = 0, *, pinned: bool = False) -> None:
        self._healthy_steps = healthy_steps
        self._good = _Snapshot(Staging(pinned=pinned))
        self._next = _Snapshot(Staging(pinned=pinned))
        for each in (self._next, self._good):
            if size:
                each.memory.reserve(size)

    def take(self, step: int, tensors: Tensors, meta: Meta) -> None:
        """Copy the state of `step`. Does nothing while the previous copy is gathering healthy steps."""
        if self._next.step and self._next.healthy:
            return
        memory = self._next.memory
        self._next = _Snapshot(memory, memory.copy(tensors), json.dumps(meta), step)

    def observe(self, step: int, healthy: bool) -> None:
        """Count a judged step. A snapshot with enough healthy steps becomes the good one, and the old one is reused."""
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
        """Tensors and meta data of the good snapshot. Afterwards no snapshot is good.

        The tensors are not copied: they are valid until the next `take`.
        """
        tensors, meta = self._good.tensors, json.loads(self._good.meta)
        self._good.memory.wait()
        self.clear()
        return tensors, meta

    def clear(self) -> None:
        """Drop both snapshots, as the run went back further than they reach. The memory is kept."""
        self._good = _Snapshot(self._good.memory)
        self._next = _Snapshot(self._next.memory)


def room_for_snapshots(
    size: int, healthy_steps: int, device: torch.device, tracker: Tracker
) -> Snapshots | None:
    """Snapshots for a state of `size` bytes on `device`; None if some rank lacks the memory. Collective.

    tracker: logs that no snapshots are taken.
    """
    lacks = torch.tensor(float(2 * size > free_memory() / 4), device=device)
    if max_over_ranks(lacks).item():
        text = "two copies of the state would take over a quarter of the free memory: no snapshots are taken"
        tracker.event(0, "snapshot.off", text=text)
        return None
    return Snapshots(healthy_steps, size, pinned=device.type == "cuda")
