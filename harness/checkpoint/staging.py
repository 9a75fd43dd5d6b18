"""Copies of a TrainState in host memory, for saves in the background and for snapshots.

Training waits only for the copy. A copy into memory that was used before is several times faster than one into new
memory, whose pages the kernel must find and zero first. So one block is allocated once, and every copy reuses it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from harness.checkpoint.copy_stream import Event
from harness.core.errors import one_line
from harness.core.protocols import Tensors

ALIGNMENT = 64
"""Bytes: a cache line. Every tensor begins at a multiple of it in the block, which aligns every dtype."""


def bytes_in_block(tensor: Tensor) -> int:
    """Bytes that a tensor takes in a block: its own, rounded up to ALIGNMENT."""
    lines = -(-tensor.nbytes // ALIGNMENT)
    return lines * ALIGNMENT


# Of one tensor: part, name, shape and dtype. A copy with the same layout reuses the views of the one before it.
_Layout = list[tuple[str, str, torch.Size, torch.dtype]]


class Staging:
    """One block of memory that every copy reuses.

    pinned: page-locked memory, for tensors of a GPU: the host does not wait for such copies.
    pageable: why the block is ordinary memory all the same; empty if it is not, or if nobody asked for pinned memory.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._pageable = ""
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layout: _Layout = []
        self._views: Tensors = {}
        self._reserving: threading.Thread | None = None
        self._arrived: Event | None = None

    @property
    def pageable(self) -> str:
        """See the class. Waits for the end of an allocation that is under way."""
        self._reserved()
        return self._pageable

    def reserve(self, size: int) -> None:
        """Begin to allocate `size` bytes on a thread; returns at once."""

        def allocate() -> None:
            with suppress(OSError, MemoryError):  # `copy` tries again, and can raise
                self._allocate(size)

        self._reserving = threading.Thread(target=allocate, name="staging", daemon=True)
        self._reserving.start()

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> Tensors:
        """Copy `tensors`; returns the copies, contiguous views into the block. The next call overwrites them.

        Copies from a GPU may still be under way when this returns: see `wait`. Work that is queued on the current
        stream afterwards comes after them. Raises OSError or MemoryError if there is no room.

        tensors: by part and name, of any device, dtype and layout.
        """
        copies, sources = self._matched(tensors)
        # One call for all tensors: there are thousands.
        if sources:
            torch._foreach_copy_(copies, sources, non_blocking=True)
        if any(source.is_cuda for source in sources):
            self._arrived = torch.cuda.current_stream().record_event()
        return self._named_views()

    def go_on(self) -> None:
        """Queue the next part of copies that are queued part by part: here there are none."""

    def wait(self) -> None:
        """Wait until the copies have arrived. Any thread may call it."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def _matched(self, tensors: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """Views into the block and the tensors that they are copies of, in the order of the block."""
        self._reserved()

        # Tensors get new places in the block only when some were added or changed: an optimizer's state grows. Part
        # names are compared as well, since a part without tensors is in no layout.
        layout: _Layout = []
        sources: list[Tensor] = []
        for part, named in tensors.items():
            for name, tensor in named.items():
                layout.append((part, name, tensor.shape, tensor.dtype))
                sources.append(tensor.detach())
        if layout != self._layout or tensors.keys() != self._views.keys():
            self._lay_out(tensors, layout)

        copies: list[Tensor] = []
        for named in self._views.values():
            copies += named.values()
        return copies, sources

    def _reserved(self) -> None:
        """Wait for the thread of `reserve`."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _named_views(self) -> Tensors:
        return {part: dict(named) for part, named in self._views.items()}

    def _lay_out(self, tensors: Tensors, layout: _Layout) -> None:
        """Give every tensor its place in the block, which grows if it is too small."""
        sizes: list[int] = []
        for named in tensors.values():
            sizes += [bytes_in_block(tensor) for tensor in named.values()]
        if sum(sizes) > self._block.numel():
            self._allocate(sum(sizes))

        offsets = accumulate(sizes, initial=0)
        self._views = {}
        for part, named in tensors.items():
            self._views[part] = {
                name: self._view(next(offsets), tensor) for name, tensor in named.items()
            }
        self._layout = layout

    def _view(self, offset: int, like: Tensor) -> Tensor:
        """The bytes of the block from `offset` on, as a tensor with shape and dtype of `like`."""
        return self._block[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    def _allocate(self, size: int) -> None:
        """Replace the block by a new one of at least `size` bytes, and touch all of its pages."""
        if self._pinned:
            try:
                self._block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
                self._pageable = ""
                return
            except RuntimeError as error:
                # No more memory can be locked: ordinary memory will do.
                self._pageable = one_line(error)

        # Large pages: fewer page faults now, and faster copies later.
        memory = mmap.mmap(-1, max(size, mmap.PAGESIZE))
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        block = torch.frombuffer(memory, dtype=torch.uint8)
        # ctypes releases Python's lock meanwhile, so that training goes on.
        ctypes.memset(block.data_ptr(), 0, block.numel())
        self._block = block
