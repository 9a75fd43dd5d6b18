"""Copies of a TrainState from a GPU to host memory that training does not wait for.

`Staging` queues its copies on the stream that training computes on, so the next step begins when they have arrived. A
copy within the card is tens of times faster than one over its bus. So here a copy takes two steps:

1. The compute stream copies the tensors into a buffer on the card. Training may change them from then on.
2. A second stream copies the buffer to pinned host memory, slice by slice, while training goes on. Each step queues a
   part of the slices (`OnItsWay`). The event after the last slice says that the copy is complete.

Where the card has no room for a whole copy, two buffers of one slice each take turns. The compute stream then waits for
each slice until a buffer is free again. So training waits for nearly the whole copy, as it does with `Staging`. The
copies never make the host wait. Of several ranks it waits once, when they agree that no copy failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from harness.checkpoint.copy_stream import CopyStream, Event, Slice
from harness.checkpoint.staging import ALIGNMENT, Staging, bytes_in_block
from harness.core.collectives import any_rank
from harness.core.memory import size_text
from harness.core.protocols import Tensors

_SLICE_BYTES = 32 << 20
# Steps over which a whole copy is spread. Snapshots are at least as far apart, unless a user wants more of them.
_PARTS = 16
# Buffers that take turns where there is no room for more: one is filled while the other is emptied.
_TURNS = 2
# Of the card's memory, what stays free beside a whole copy: later steps may need more than those so far (validation,
# samples of statistics), and memory is fragmented.
_MARGIN = 0.1


class CopyError(Exception):
    """A copy of the state failed. Its bytes must not be used."""


def buffer_bytes(state: int, free: int, total: int, slice_bytes: int = _SLICE_BYTES) -> int:
    """Bytes on the card for copies of a state of `state` bytes there: a whole copy where there is room, or two slices.

    free, total: of the card's memory.
    """
    least = min(state, _TURNS * slice_bytes)
    return state if state + total * _MARGIN <= free else least


def copy_bytes(tensors: Tensors, on_device: Callable[[Tensor], bool]) -> int:
    """Bytes that a whole copy of a state takes on the device. on_device: which tensors are there."""
    size = 0
    for named in tensors.values():
        for tensor in named.values():
            if on_device(tensor):
                size += bytes_in_block(tensor)
    return size


@dataclass
class _Batch:
    """Pieces of the state that go to the host in one slice.

    to: views into the block in host memory, one after the other.
    sources: the pieces, one for each.
    """

    to: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """Its first byte in the block."""
        return _begin(self.to[0])

    @property
    def end(self) -> int:
        """The byte of the block after its last one."""
        return _end(self.to[-1])

    @property
    def base(self) -> int:
        """The last multiple of ALIGNMENT up to `begin`: a piece of a tensor may begin anywhere."""
        return self.begin - self.begin % ALIGNMENT


class OnItsWay:
    """A copy to the host that is queued part by part, one at every step.

    A card copies to the host in the order in which copies were queued, whatever their streams. The host waits for the
    figures of every step. Behind a whole copy of 10 GiB they arrived 206 ms late (H100). A part that is queued as a
    step begins is through before that step ends, by its size; no card has timed that yet.

    parts: slices of each part.
    after: the copies come after this event, which is also the last one if there are no parts.
    """

    def __init__(self, stream: CopyStream, parts: Iterable[Sequence[Slice]], after: Event) -> None:
        self._stream = stream
        self._left = deque(parts)
        self._after = self._last = after
        self._error: RuntimeError | None = None

    def go_on(self) -> None:
        """Queue the next part, if there is one. What the device raises is kept for who waits for the copy."""
        if not self._left:
            return
        try:
            self._last = self._stream.copy(self._left.popleft(), self._after)
        except RuntimeError as error:
            self._error = error
            self._left.clear()

    def queued(self) -> Event:
        """Queue what is left. Returns the event after the last slice. Raises RuntimeError, as CUDA does."""
        while self._left:
            self.go_on()
        if self._error is not None:
            raise self._error
        return self._last

    def synchronize(self) -> None:
        """The host waits until the copy is complete. Raises as `queued`, and if the copy failed."""
        self.queued().synchronize()


class Copier:
    """Copies tensors from a device to host memory. All copies share its buffer on the device.

    Call `decide` before the first copy.

    event: `Tracker.event`: the way of copying is logged once it is decided.
    slice_bytes: of one copy to the host; a multiple of ALIGNMENT.
    """

    def __init__(
        self, stream: CopyStream, event: Callable[..., None], slice_bytes: int = _SLICE_BYTES
    ) -> None:
        self.stream = stream
        self.event = event
        self._most = slice_bytes
        self._whole: bool | None = None
        self._buffer: Tensor | None = None
        self._way: OnItsWay | None = None
        # Views into the buffer, by those into a block: making thousands of views takes the host milliseconds.
        self._mirrored = WeakIdKeyDictionary()

    def decide(self, step: int, tensors: Tensors) -> None:
        """Decide once, for all ranks alike, whether whole copies fit on the card, and log it. Collective.

        Called after some steps, as what they need is not free any more.
        """
        if self._whole is not None:
            return
        size = copy_bytes(tensors, self.stream.has)
        fitting = buffer_bytes(size, *self.stream.memory(), self._most)
        self._whole = not any_rank(fitting < size, self.stream.device)
        text = f"snapshots take {size_text(size)} of the card: training does not wait for their way to the host"
        if not self._whole:
            text = f"no room on the card for a copy of the state ({size_text(size)}): training waits for snapshots"
        self.event(step, "snapshot.buffer", text=text)

    def copy_to(
        self, block: Tensor, copies: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> OnItsWay:
        """Copy `sources`, which are on the device; returns the way of the copies, of which one part is queued.

        block: uint8, host memory.
        copies: contiguous views into `block`, in the order of their places.
        Raises RuntimeError, as CUDA does.
        """
        # The copy before this one may still be read from the buffer.
        if self._way is not None:
            self.stream.hold(self._way.queued())
        if self._whole:
            self._way = self._at_once(block, copies, sources)
        else:
            last = self._in_turns(block, copies, sources)
            self._way = OnItsWay(self.stream, (), last)
        self._way.go_on()
        return self._way

    def _at_once(
        self, block: Tensor, copies: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> OnItsWay:
        """The buffer takes a whole copy, with the layout of the block.

        The host queues as few operations as it can: it has the next step to queue.
        """
        size = _end(copies[-1]) if copies else 0
        buffer = self._buffer_of(size)

        # One kernel copies many tensors of one dtype.
        alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for to, source in zip(copies, sources, strict=True):
            held, given = alike.setdefault(to.dtype, ([], []))
            if to not in self._mirrored:
                self._mirrored[to] = _like(to, buffer, _begin(to))
            held.append(self._mirrored[to])
            given.append(source)
        for held, given in alike.values():
            torch._foreach_copy_(held, given)

        slices: list[Slice] = []
        for begin, end in _ranges(copies):
            for first in range(begin, end, self._most):
                last = min(first + self._most, end)
                slices.append((block[first:last], buffer[first:last]))
        count = -(-len(slices) // _PARTS)
        parts = [slices[first : first + count] for first in range(0, len(slices), count or 1)]
        return OnItsWay(self.stream, parts, self.stream.computed())

    def _in_turns(
        self, block: Tensor, copies: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Event:
        """Two buffers of one slice: one is filled while the other is emptied."""
        buffer = self._buffer_of(_TURNS * self._most)
        emptied: list[Event] = []
        for number, each in enumerate(_batches(copies, sources, self._most)):
            if number >= _TURNS:
                self.stream.hold(emptied[number - _TURNS])
            # The buffer has the layout of the block from `base` on.
            shift = number % _TURNS * self._most - each.base
            held = [_like(to, buffer, _begin(to) + shift) for to in each.to]
            torch._foreach_copy_(held, each.sources)
            there = block[each.begin : each.end]
            here = buffer[each.begin + shift : each.end + shift]
            emptied.append(self.stream.copy([(there, here)], self.stream.computed()))
        return emptied[-1] if emptied else self.stream.computed()

    def _buffer_of(self, size: int) -> Tensor:
        """The buffer, which grows if it is smaller than `size` bytes."""
        if self._buffer is None or self._buffer.numel() < size:
            # Its memory goes to other tensors once it is free: nothing may still read from it.
            if self._way is not None:
                self._way.synchronize()
            self._buffer = None
            self._mirrored.clear()
            self._buffer = self.stream.buffer(size)
        return self._buffer


class OverlappedStaging(Staging):
    """As `Staging`, for the tensors of a GPU; training does not wait for the copies."""

    def __init__(self, copier: Copier) -> None:
        super().__init__(pinned=True)
        self._copier = copier
        self._way: OnItsWay | None = None

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> Tensors:
        """As `Staging.copy`. The copies are complete after `wait`.

        Raises CopyError if the device refuses; what was copied before is lost, too.
        """
        # What failed here before was asked for by `wait`.
        self._arrived = self._way = None
        copies, sources = self._matched(tensors)
        # Copies and their sources: near ones are in host memory, far ones on the device.
        near: tuple[list[Tensor], list[Tensor]] = [], []
        far: tuple[list[Tensor], list[Tensor]] = [], []
        for copy, source in zip(copies, sources, strict=True):
            kind = far if self._copier.stream.has(source) else near
            kind[0].append(copy)
            kind[1].append(source)
        # The host may write to its own tensors as soon as this returns.
        if near[0]:
            torch._foreach_copy_(*near)
        try:
            self._arrived = self._way = self._copier.copy_to(self._block, *far)
        except RuntimeError as error:
            raise CopyError(str(error)) from error
        return self._named_views()

    def go_on(self) -> None:
        """As `Staging.go_on`."""
        if self._way is not None:
            self._way.go_on()

    def wait(self) -> None:
        """As `Staging.wait`. Raises CopyError if the copy failed on its way."""
        try:
            super().wait()
        except RuntimeError as error:
            raise CopyError(str(error)) from error


def _ranges(copies: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Ranges of the block, [begin, end) in bytes, that cover `copies` and no other tensor."""
    ranges: list[tuple[int, int]] = []
    for copy in copies:
        begin, end = _begin(copy), _end(copy)
        if ranges and _adjacent(ranges[-1][1], begin):
            begin = ranges.pop()[0]
        ranges.append((begin, end))
    return ranges


def _batches(copies: Iterable[Tensor], sources: Iterable[Tensor], most: int) -> Iterator[_Batch]:
    """Batches of at most `most` bytes that cover every byte of `copies`, and no other tensor of the block."""
    present = _Batch()
    for copy, source in zip(copies, sources, strict=True):
        for to, piece in zip(_pieces(copy, most), _pieces(source, most), strict=True):
            if present.to:
                fits = _end(to) - present.base <= most
                if not (fits and _adjacent(present.end, _begin(to))):
                    yield present
                    present = _Batch()
            present.to.append(to)
            present.sources.append(piece)
    if present.to:
        yield present


def _adjacent(end: int, begin: int) -> bool:
    """Whether nothing but alignment lies between two tensors. Else a tensor does that is copied another way."""
    return begin - end < ALIGNMENT


def _pieces(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Views that cover `tensor` in the order of its elements. How it is divided depends on shape and dtype alone.

    most: bytes of a slice. A piece leaves ALIGNMENT of them free, so it fits wherever it begins.
    """
    room = most - ALIGNMENT
    if tensor.nbytes <= room:
        if tensor.numel():
            yield tensor
        return
    row = tensor.nbytes // len(tensor)
    if row <= room:
        yield from tensor.split(room // row)
        return
    for each in tensor:
        yield from _pieces(each, most)


def _like(view: Tensor, buffer: Tensor, begin: int) -> Tensor:
    """The bytes of `buffer` from `begin` on, as a tensor with dtype and shape of `view`."""
    return buffer[begin : begin + view.nbytes].view(view.dtype).view(view.shape)


def _begin(view: Tensor) -> int:
    """The first byte of a view into a block, counted from the block's beginning."""
    return int(view.storage_offset()) * view.element_size()


def _end(view: Tensor) -> int:
    return _begin(view) + view.nbytes
