"""The two streams of a GPU that an overlapped copy needs: the one that training computes on, and one for copies.

Work on one stream runs in order. Two streams run side by side, and wait for each other only at events. The code that
orders copies (`overlapped.py`) knows streams through `CopyStream` alone, so it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Slice = tuple[Tensor, Tensor]
"""Bytes in host memory, and bytes on the device that are copied there: uint8, of one size."""


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """The host waits until the work before this point is done. Raises RuntimeError if some of it failed."""
        ...


class CopyStream(Protocol):
    """A device's streams. No method lets the host wait. All may raise RuntimeError, as CUDA does.

    device: where tensors are copied from.
    """

    device: torch.device

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor is in the device's memory, not in the host's."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes that are free on the device, and bytes that it has."""
        ...

    def buffer(self, size: int) -> Tensor:
        """New memory on the device: uint8 [size], not initialised."""
        ...

    def computed(self) -> Event:
        """The present end of what is queued on the compute stream."""
        ...

    def hold(self, event: Event) -> None:
        """What is queued on the compute stream from now on waits for `event`."""
        ...

    def copy(self, slices: Sequence[Slice], after: Event) -> Event:
        """Queue copies on the copy stream, after `after`. Returns the event of their end."""
        ...


class CudaCopyStream:
    """The streams of a CUDA device. The compute stream is the one that is current when a method is called."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def has(self, tensor: Tensor) -> bool:
        """As `CopyStream.has`."""
        return tensor.device.type != "cpu"

    def memory(self) -> tuple[int, int]:
        """As `CopyStream.memory`. What the allocator keeps for later steps does not count as free."""
        return torch.cuda.mem_get_info(self.device)

    def buffer(self, size: int) -> Tensor:
        """As `CopyStream.buffer`. Raises torch.OutOfMemoryError, which is a RuntimeError."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def computed(self) -> Event:
        """As `CopyStream.computed`."""
        return torch.cuda.current_stream(self.device).record_event()

    def hold(self, event: Any) -> None:
        """As `CopyStream.hold`."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def copy(self, slices: Sequence[Slice], after: Any) -> Event:
        """As `CopyStream.copy`. Into memory that is not pinned, the host waits for each."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for there, here in slices:
                there.copy_(here, non_blocking=True)
            return self._stream.record_event()
