"""Copies of the TrainState in host memory: what a background save writes while training goes on, and snapshots, the
short way back over a few steps, without a disk.
"""

from __future__ import annotations

import copy
import ctypes
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from harness.checkpoint import manifest
from harness.checkpoint.store import Store
from harness.core.collectives import max_over_ranks
from harness.core.errors import CheckpointError
from harness.core.memory import free_memory
from harness.core.protocols import Meta, Tensors, Tracker

_ALIGNMENT = 64


class Staging:
    """One block of memory that is allocated once and filled again and again.

    To touch fresh memory for the first time costs several times the copy, so `reserve` does it beforehand, on a thread.
    pinned: page-locked, for tensors of a GPU: their copies then do not hold up the host.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._block = torch.empty(0, dtype=torch.uint8)
        self._layout: list[tuple[str, str, torch.Size, torch.dtype]] = []
        self._views: Tensors = {}
        self._reserving: threading.Thread | None = None
        self._arrived: torch.Event | None = None

    def reserve(self, size: int) -> None:
        """Have room for `size` bytes soon; returns at once."""

        def allocate() -> None:
            with suppress(OSError, MemoryError):  # `copy` tries again, where it can be told
                self._allocate(size)

        self._reserving = threading.Thread(target=allocate, name="staging", daemon=True)
        self._reserving.start()

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> Tensors:
        """Copy `tensors` (by part and name; any device, dtype and layout) and return the copies: contiguous views.

        Raises OSError or MemoryError if there is no room. The copies are overwritten by the next call. Those from a GPU
        may still be under way (`wait`); what is queued on the current stream afterwards comes after them.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        layout = [(part, name, t.shape, t.dtype) for part, named in tensors.items() for name, t in named.items()]
        if layout != self._layout or tensors.keys() != self._views.keys():
            self._lay_out(tensors, layout)
        sources = [tensor.detach() for named in tensors.values() for tensor in named.values()]
        copies = [copy for named in self._views.values() for copy in named.values()]
        if sources:
            torch._foreach_copy_(copies, sources, non_blocking=True)
        if any(source.is_cuda for source in sources):
            self._arrived = torch.cuda.current_stream().record_event()
        return {part: dict(named) for part, named in self._views.items()}

    def wait(self) -> None:
        """Until the copies have arrived; from any thread."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def _lay_out(self, tensors: Tensors, layout: list[tuple[str, str, torch.Size, torch.dtype]]) -> None:
        sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for named in tensors.values() for t in named.values()]
        if sum(sizes) > self._block.numel():
            self._allocate(sum(sizes))
        offsets = accumulate(sizes, initial=0)
        self._views = {
            part: {name: self._view(next(offsets), tensor) for name, tensor in named.items()}
            for part, named in tensors.items()
        }
        self._layout = layout

    def _view(self, offset: int, like: Tensor) -> Tensor:
        return self._block[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    def _allocate(self, size: int) -> None:
        if self._pinned:
            with suppress(RuntimeError):  # no more memory can be locked: other memory will do
                self._block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                return
        # Large pages: fewer faults while the block is new, and faster copies ever after.
        memory = mmap.mmap(-1, max(size, mmap.PAGESIZE))
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        block = torch.frombuffer(memory, dtype=torch.uint8)
        ctypes.memset(block.data_ptr(), 0, block.numel())  # without Python's lock: training goes on
        self._block = block


# Behind training, and no further: a core that is wanted elsewhere is shared by weights of 1.25 a level: a save
# that gets a tenth of it takes ten times as long, and the next one waits for it.
_NICENESS = 3


@dataclass
class Saved:
    """What became of the save of `step`. path: None and `error` if it failed. deleted: older ones, by retention."""

    step: int
    metrics: Mapping[str, float]
    path: Path | None = None
    error: str = ""
    deleted: Sequence[int] = field(default_factory=list)
    seconds: float = 0.0


class Saver:
    """Writes one checkpoint at a time to `store`, then lets `prune` delete older ones (given the good steps).

    With `staging`, training waits for one copy of the state in memory; a thread of low priority does the rest. Without,
    `begin` returns when all is done. Only the thread that made it may call it. Nothing that training decides depends
    on how fast the disk is: the steps that are good are read when the save begins, and `wait` comes before the store
    or its marks are read for a decision.
    """

    def __init__(
        self, store: Store, prune: Callable[[Sequence[int]], Sequence[int]], staging: Staging | None = None
    ) -> None:
        self._store = store
        self._prune = prune
        self._staging = staging
        self._thread: threading.Thread | None = None
        self._now: Saved | None = None
        self._done: list[Saved] = []
        self._failed: set[int] = set()
        self._crash: BaseException | None = None

    def begin(
        self, step: int, tensors: Tensors, meta: Meta, metrics: Mapping[str, float], *, surely: bool = False
    ) -> None:
        """Save the state of `step`. Waits for the save before it. metrics: what the checkpoint is known by.

        tensors and meta may change as soon as this returns (on a GPU: by what is queued on the current stream).
        surely: they do not change before `wait` or `busy` says that it is done, so no copy is needed, and what was
        written is verified before it counts.
        """
        self.wait()
        self._now = Saved(step, dict(metrics))
        good = manifest.read_marks(self._store.root)
        copies = tensors if surely else self._copied(tensors)
        if copies is None:
            self._work(self._now, tensors, meta, good)
            self.wait()
            return
        arguments = (self._now, copies, copy.deepcopy(meta), good, surely)
        self._thread = threading.Thread(target=self._in_background, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def busy(self, seconds: float) -> bool:
        """Whether something is still being written, after waiting for it for at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def finished(self) -> list[Saved]:
        """Saves that have ended since the last call; never waits."""
        if self._thread is None or not self._thread.is_alive():
            self.wait()
        done, self._done = self._done, []
        return done

    def wait(self) -> None:
        """Until nothing is being written. Raises what no save should raise."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._crash is not None:
            crash, self._crash, self._now = self._crash, None, None
            raise crash
        if self._now is not None:
            if self._now.path is None:
                self._failed.add(self._now.step)
            else:  # perhaps at another try
                self._failed.discard(self._now.step)
            self._done.append(self._now)
            self._now = None

    def committed(self, step: int) -> bool | None:
        """Whether the save of `step` went well; None while it is under way."""
        if self._now is not None and self._now.step == step:
            if self.busy(0.0):
                return None
            self.wait()
        return step not in self._failed

    def _copied(self, tensors: Tensors) -> Tensors | None:
        try:
            return self._staging.copy(tensors) if self._staging is not None else None
        except (OSError, MemoryError):
            self._staging = None  # no room: from now on training waits for the disk
            return None

    def _in_background(self, saved: Saved, tensors: Tensors, meta: Meta, good: Sequence[int], surely: bool) -> None:
        try:
            # Of this thread alone, on Linux: where cores are scarce, training comes first.
            thread = threading.get_native_id()
            with suppress(OSError):
                if not surely:
                    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
            self._work(saved, tensors, meta, good, surely)
        except BaseException as error:
            self._crash = error

    def _work(self, saved: Saved, tensors: Tensors, meta: Meta, good: Sequence[int], surely: bool = False) -> None:
        began = time.monotonic()
        try:
            if self._staging is not None:
                self._staging.wait()
            path = self._store.save(saved.step, tensors, meta, saved.metrics)
            if surely and (problems := self._store.verify(saved.step)):
                raise CheckpointError(problems)
            saved.path = path
            saved.deleted = self._prune(good)
        except (CheckpointError, OSError, MemoryError) as error:
            saved.error = str(error) or type(error).__name__
        saved.seconds = time.monotonic() - began


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


def room_for_snapshots(size: int, healthy_steps: int, device: torch.device, tracker: Tracker) -> Snapshots | None:
    """Snapshots of a state of `size` bytes on `device`, if every rank has room for them. Collective."""
    lacks = torch.tensor(float(2 * size > free_memory() / 4), device=device)
    if max_over_ranks(lacks).item():
        text = "two copies of the state would take over a quarter of the free memory: no snapshots are taken"
        tracker.event(0, "snapshot.off", text=text)
        return None
    return Snapshots(healthy_steps, size, pinned=device.type == "cuda")
