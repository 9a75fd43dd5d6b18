"""Copies of a TrainState in host memory, in one block that is allocated once: for background saves and snapshots."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from harness.core.protocols import Tensors

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
        layout = [
            (part, name, t.shape, t.dtype)
            for part, named in tensors.items()
            for name, t in named.items()
        ]
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

    def _lay_out(
        self, tensors: Tensors, layout: list[tuple[str, str, torch.Size, torch.dtype]]
    ) -> None:
        sizes = [
            -(-t.nbytes // _ALIGNMENT) * _ALIGNMENT
            for named in tensors.values()
            for t in named.values()
        ]
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
