"""Copies of the TrainState in host memory, for a rollback over a few steps without reading a disk.

A fault shows some steps after its cause. So a copy is not good when it is taken, but after healthy steps have followed
it. Until then the earlier good copy stays: two buffers take turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from harness.checkpoint.copy_stream import CudaCopyStream
from harness.checkpoint.overlapped import Copier, CopyError, OverlappedStaging
from harness.checkpoint.staging import Staging
from harness.core.collectives import any_rank, ranks_here
from harness.core.memory import free_memory
from harness.core.protocols import Meta, Tensors, Tracker

_CPU = torch.device("cpu")


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
    copier: makes copies that training does not wait for; None: training waits for each.
    device: of what ranks exchange.
    event: `Tracker.event`: at the first copy it is logged that memory could not be pinned; None: nobody asks.
    """

    def __init__(
        self,
        healthy_steps: int,
        size: int = 0,
        *,
        pinned: bool = False,
        copier: Copier | None = None,
        device: torch.device = _CPU,
        event: Callable[..., None] | None = None,
    ) -> None:
        self._event = event
        self._healthy_steps = healthy_steps
        self._copier = copier
        self._device = device
        memories: list[Staging] = []
        for _ in range(2):
            memory = Staging(pinned=pinned) if copier is None else OverlappedStaging(copier)
            if size:
                memory.reserve(size)
            memories.append(memory)
        self._good, self._next = map(_Snapshot, memories)

    def take(self, step: int, tensors: Tensors, meta: Meta) -> None:
        """Copy the state of `step`. Does nothing while the previous copy is gathering healthy steps. Collective.

        Raises CopyError on every rank if a copy failed on any, this one or one before: then use no snapshot any more.
        """
        if self._next.step and self._next.healthy:
            return
        if self._copier is not None:
            self._copier.decide(step, tensors)
        memory = self._next.memory
        # A copy that fails half-way must not be taken for what was there before.
        self._next = _Snapshot(memory)
        error = self._error()
        try:
            if not error:
                self._next = _Snapshot(memory, memory.copy(tensors), json.dumps(meta), step)
        except (CopyError, MemoryError, OSError) as failed:
            error = str(failed) or type(failed).__name__
        self._agree(error)
        self._log_pageable(step)

    def _log_pageable(self, step: int) -> None:
        """At the first copy, log that some rank's memory could not be pinned: it was still being allocated before."""
        if self._event is None:
            return
        event, self._event = self._event, None
        why = self._good.memory.pageable or self._next.memory.pageable
        if any_rank(bool(why), self._device):
            where = why or "on another rank"
            text = (
                f"no pinned memory for snapshots ({where}): the host waits for each of their copies"
            )
            event(step, "snapshot.pageable", text=text)

    def observe(self, step: int, healthy: bool) -> None:
        """Count a judged step. A snapshot with enough healthy steps becomes the good one, and the old one is reused.

        Copies that training does not wait for go on by a part.
        """
        for each in (self._good, self._next):
            each.memory.go_on()
        waiting = self._next
        if waiting.step and waiting.step <= step:
            waiting.healthy = waiting.healthy + 1 if healthy else 0
            if waiting.healthy >= self._healthy_steps:
                self._good, self._next = waiting, _Snapshot(self._good.memory)

    @property
    def good(self) -> int | None:
        """Step of the good snapshot, if there is one."""
        return self._good.step or None

    def newest_good(self) -> int | None:
        """As `good`, once its copy is complete on every rank: the host waits for it. Collective.

        Raises CopyError on every rank if that copy failed on any.
        """
        if self.good is not None:
            self._agree(self._error())
        return self.good

    def _error(self) -> str:
        """Why a copy of this rank failed on its way, after waiting for both; empty if none did."""
        try:
            for each in (self._good, self._next):
                each.memory.wait()
        except CopyError as error:
            return str(error)
        return ""

    def _agree(self, error: str) -> None:
        """Raise CopyError if any rank has an error."""
        if any_rank(bool(error), self._device):
            raise CopyError(error or "it failed on another rank")

    def load(self) -> tuple[Tensors, Meta]:
        """Tensors and meta data of the good snapshot. Afterwards no snapshot is good.

        The tensors are not copied: they are valid until the next `take`.
        """
        self._good.memory.wait()
        tensors, meta = self._good.tensors, json.loads(self._good.meta)
        self.clear()
        return tensors, meta

    def clear(self) -> None:
        """Drop both snapshots, as the run went back further than they reach. The memory is kept."""
        self._good = _Snapshot(self._good.memory)
        self._next = _Snapshot(self._next.memory)


def room_for_snapshots(
    size: int, healthy_steps: int, device: torch.device, tracker: Tracker, overlapped: bool
) -> Snapshots | None:
    """Snapshots for a state of `size` bytes on `device`; None if some rank lacks the memory. Collective.

    tracker: logs that no snapshots are taken, how they are copied, and that memory for them could not be pinned.
    overlapped: whether training goes on while a GPU's state is copied. A CPU's is copied as ever.
    """
    # Every rank of a machine keeps two, and the kernel would end the run if they took all of its memory.
    ranks = ranks_here()
    if any_rank(2 * size * ranks > free_memory() / 4, device):
        whose = f", of each of {ranks} ranks here," if ranks > 1 else ""
        text = f"two copies of the state{whose} would take over a quarter of the free memory: no snapshots are taken"
        tracker.event(0, "snapshot.off", text=text)
        return None
    on_gpu = device.type == "cuda"
    copier = None
    if overlapped and on_gpu:
        copier = Copier(CudaCopyStream(device), tracker.event)
    return Snapshots(
        healthy_steps,
        size,
        pinned=on_gpu,
        copier=copier,
        device=device,
        event=tracker.event if on_gpu else None,
    )
