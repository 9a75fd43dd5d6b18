"""A copy of the state's tensors in host memory: what a save or a rollback reads while training goes on."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from harness.core.protocols import Tensors

_ALIGNMENT = 64
_CGROUP = Path("/sys/fs/cgroup")


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
        offset, places = 0, []
        for named in tensors.values():
            for tensor in named.values():
                places.append(offset)
                offset += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if offset > self._block.numel():
            self._allocate(offset)
        place = iter(places)
        self._views = {
            part: {name: self._view(next(place), tensor) for name, tensor in named.items()}
            for part, named in tensors.items()
        }
        self._layout = layout

    def _view(self, offset: int, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        return self._block[offset : offset + size].view(like.dtype).view(like.shape)

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


def free_memory() -> int:
    """Bytes that can be allocated without swapping, on this machine and in this container (cgroup v2)."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024  # from kibibytes
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = int(counts["inactive_file"])  # of files: the kernel gives it back when it is needed
    except (OSError, ValueError, KeyError):  # no container, or one without a limit
        return free
    return min(free, max(limit - used + cached, 0))
