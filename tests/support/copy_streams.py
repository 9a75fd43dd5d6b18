"""A device's streams without a device: memory of the host, and copies that run as late as they may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint.copy_stream import Slice

_CPU = torch.device("cpu")
_BROKEN = "CUDA error: an illegal memory access was encountered"


class LaterEvent:
    """An event of `LaterStreams`. done: whether the work before it has run."""

    def __init__(self, streams: LaterStreams, done: bool) -> None:
        self._streams, self.done = streams, done

    def synchronize(self) -> None:
        self._streams.host_waits += not self.done
        self._streams.run_to(self)
        if self._streams.broken:
            raise RuntimeError(_BROKEN)


class Events:
    """Keeps the events that are logged: (step, code, text)."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, str]] = []

    def event(self, step: int, code: str, **fields: Any) -> None:
        self.seen.append((step, code, fields["text"]))


@dataclass
class LaterStreams:
    """A `CopyStream` whose compute stream is the host itself. A copy runs once something waits for its event.

    free, total: of the device's memory, as it is measured.
    most: bytes of a buffer, beyond which there is no memory for it.
    on_host: tensors that count as the host's; every other one is the device's.
    fails_at: number of the queued copy that fails, from 0; -1: none.
    refuses: whether copies cannot be queued any more.
    sizes: of the buffers that were asked for.
    queued: places that copies wrote to: (address, bytes).
    host_waits, held: how often the host, and the compute stream, had to wait for copies.
    """

    free: int = 1 << 40
    total: int = 1 << 40
    most: int = 1 << 40
    on_host: list[Tensor] = field(default_factory=list)
    fails_at: int = -1
    refuses: bool = False
    device: torch.device = _CPU
    sizes: list[int] = field(default_factory=list)
    queued: list[tuple[int, int]] = field(default_factory=list)
    host_waits: int = 0
    held: int = 0
    broken: bool = False
    _later: deque[tuple[Callable[[], Any], LaterEvent]] = field(default_factory=deque)

    def has(self, tensor: Tensor) -> bool:
        return all(tensor.data_ptr() != each.data_ptr() for each in self.on_host)

    def memory(self) -> tuple[int, int]:
        return self.free, self.total

    def buffer(self, size: int) -> Tensor:
        if size > self.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.sizes.append(size)
        return torch.full((size,), 0xA5, dtype=torch.uint8)

    def computed(self) -> LaterEvent:
        return LaterEvent(self, True)

    def hold(self, event: Any) -> None:
        self.held += not event.done
        self.run_to(event)

    def copy(self, slices: Sequence[Slice], after: Any) -> LaterEvent:
        assert after.done
        if self.refuses:
            raise RuntimeError(_BROKEN)
        first = len(self.queued)
        self.queued += [(there.data_ptr(), there.nbytes) for there, _ in slices]

        def work() -> None:
            for number, (there, here) in enumerate(slices, first):
                # A device that failed does nothing any more.
                self.broken = self.broken or number == self.fails_at
                if not self.broken:
                    there.copy_(here)

        event = LaterEvent(self, False)
        self._later.append((work, event))
        return event

    def run_to(self, event: Any) -> None:
        while not event.done:
            work, ended = self._later.popleft()
            work()
            ended.done = True
