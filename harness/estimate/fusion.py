"""What a step launches where its blocks are compiled: the operations of an eager step, fused as a compiler does.

TorchInductor fuses what lies between matrix products. The rules here, for the operations of one block in forward or in
backward of one micro-batch:

1. Matrix products, convolutions, attention and this project's own operators stay as they are. All others may be fused.
2. Two are in one kernel if they share memory and neither needs, through one of these, what the other computes. A
   reduction of a whole tensor to one number ends its kernel, too.
3. A kernel reads once what it did not compute, and writes what is read after it.
4. What forward computes and only fused kernels of backward read is not written: these compute it again from what the
   forward's kernel had read.
5. A float32 tensor that only this project's casts read is written in 16 bits.

Memory (`Fusion.kept`): a tensor that only its own kernel reads takes none. Of one that backward can compute again, and
of what it needs for that, the smaller is kept from forward to backward.

`tests/cuda_on_paper/test_compiled_blocks.py` holds the bytes against those of code that TorchInductor generates.
Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.estimate.memory import Kept
from harness.estimate.roofline import Op, Piece

_Region = tuple[int, str, int]
"""Block, phase and micro-batch: what is compiled as one graph."""


@dataclass(slots=True)
class _Kernel:
    """Operations that are launched together, by their places in the step."""

    places: list[int]
    memory: set[int]


class Fusion:
    """The operations of one step, those of its blocks fused.

    ops: of a whole step, in order; each micro-batch has its own.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        # Who reads and writes each storage.
        self.readers: defaultdict[int, list[int]] = defaultdict(list)
        self.makers: dict[int, int] = {}
        for place, op in enumerate(ops):
            for piece in op.inputs:
                self.readers[piece.storage].append(place)
            read = {piece.storage for piece in op.inputs}
            for piece in op.outputs:
                # A storage that is written before it was made here is older than the step.
                if piece.storage not in read:
                    self.makers.setdefault(piece.storage, place)

        self.kernels = self._kernels()
        self.kernel_of: dict[int, _Kernel] = {}
        for kernel in self.kernels:
            for place in kernel.places:
                self.kernel_of[place] = kernel
        # What may be computed again in backward, and from what.
        self._sources_of: dict[int, frozenset[Piece]] = {}
        for storage, place in self.makers.items():
            if self._may_be_again(storage, place):
                self._sources_of[storage] = self._sources(storage)
        self.again = {
            storage: sources
            for storage, sources in self._sources_of.items()
            if not self._forward_readers(storage)
        }

    def _kernels(self) -> list[_Kernel]:
        """Rules 1 and 2."""
        # How many unfused operations a storage's values have come through, in its region.
        depths: dict[tuple[_Region, int], int] = {}
        open_kernels: defaultdict[tuple[_Region, int], list[_Kernel]] = defaultdict(list)
        for place, op in enumerate(self.ops):
            region = _region_of(op)
            if region is None:
                continue
            depth = max((depths.get((region, piece.storage), 0) for piece in op.inputs), default=0)
            fuses = _fuses(op)
            # All of a tensor is read before one number of it is known.
            ends = not fuses or _is_number(op)
            for piece in op.outputs:
                depths[region, piece.storage] = depth + ends
            if not fuses:
                continue

            # It joins all kernels of its depth with which it shares memory, and so they become one.
            memory = {piece.storage for piece in (*op.inputs, *op.outputs)}
            apart: list[_Kernel] = []
            joined = _Kernel([place], memory)
            for kernel in open_kernels[region, depth]:
                if kernel.memory & memory:
                    joined.places += kernel.places
                    joined.memory |= kernel.memory
                else:
                    apart.append(kernel)
            open_kernels[region, depth] = [*apart, joined]
        return [kernel for kernels in open_kernels.values() for kernel in kernels]

    def _may_be_again(self, storage: int, made: int) -> bool:
        """Whether backward reads it, and only in fused kernels of the block that has made it."""
        if made not in self.kernel_of or self.ops[made].phase != "forward":
            return False
        later = [place for place in self.readers[storage] if not self._is_forward(place)]
        return bool(later) and all(self._again_in(place, made) for place in later)

    def _saves_memory(self, storage: int) -> bool:
        """Whether it is larger than what has to be kept to compute it again."""
        needed = (
            piece
            for piece in self._sources_of[storage]
            if all(self._is_forward(place) for place in self.readers[piece.storage])
        )
        outputs = self.ops[self.makers[storage]].outputs
        return _bytes(needed) < _bytes(piece for piece in outputs if piece.storage == storage)

    def _is_forward(self, place: int) -> bool:
        return self.ops[place].phase == "forward"

    def _readers_outside(self, kernel: _Kernel, storage: int) -> list[int]:
        return [place for place in self.readers[storage] if self.kernel_of.get(place) is not kernel]

    def _forward_readers(self, storage: int) -> list[int]:
        """Those in forward outside of the kernel that has made it."""
        later = self._readers_outside(self.kernel_of[self.makers[storage]], storage)
        return [place for place in later if self._is_forward(place)]

    def _again_in(self, place: int, made: int) -> bool:
        reader, maker = self.ops[place], self.ops[made]
        same = (reader.block, reader.micro) == (maker.block, maker.micro)
        return same and reader.phase == "backward" and place in self.kernel_of

    def _sources(self, storage: int) -> frozenset[Piece]:
        """What a storage's values are computed from, of what its kernel reads."""
        own = self.kernel_of[self.makers[storage]]
        found: set[Piece] = set()
        todo, seen = [self.makers[storage]], set[int]()
        while todo:
            place = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            for piece in self.ops[place].inputs:
                if self._made_in(own, piece):
                    todo.append(self.makers[piece.storage])
                else:
                    found.add(piece)
        return frozenset(found)

    def _made_in(self, kernel: _Kernel, piece: Piece) -> bool:
        made = self.makers.get(piece.storage)
        return made is not None and self.kernel_of.get(made) is kernel

    def reads(self, kernel: _Kernel) -> set[Piece]:
        """Rules 3 and 4: what a kernel reads of others' memory."""
        pieces: list[Piece] = []
        for place in kernel.places:
            pieces += [each for each in self.ops[place].inputs if not self._made_in(kernel, each)]
        return self._unfolded(pieces, self.again)

    def writes(self, kernel: _Kernel) -> set[Piece]:
        """Rules 3 to 5: what a kernel leaves in memory."""
        found: set[Piece] = set()
        for place in kernel.places:
            for piece in self.ops[place].outputs:
                later = self._readers_outside(kernel, piece.storage)
                older = piece.storage not in self.makers
                if piece.storage in self.again or not (later or older):
                    continue
                found.add(self._rounded(piece, later))
        return found

    def _rounded(self, piece: Piece, later: Iterable[int]) -> Piece:
        """Rule 5."""
        casts = all(self.ops[place].own for place in later)
        if casts and piece.itemsize > 2 and piece.storage in self.makers:
            return piece._replace(itemsize=2)
        return piece

    def fused(self) -> list[Op]:
        """The operations that are launched. A kernel has the name of its operation with the most traffic."""
        found: list[Op] = []
        rounded: dict[int, int] = {}
        for kernel in self.kernels:
            writes = self.writes(kernel)
            for piece in writes:
                rounded[piece.storage] = piece.itemsize
            members = [self.ops[place] for place in kernel.places]
            largest = max(members, key=lambda op: op.reads + op.writes)
            found.append(
                replace(
                    largest,
                    reads=_bytes(self.reads(kernel)),
                    writes=_bytes(writes),
                    kernels=max(op.kernels for op in members),
                    compiled=True,
                )
            )
        for place, op in enumerate(self.ops):
            if place in self.kernel_of:
                continue
            saved = 0
            if op.own:
                for piece in op.inputs:
                    size = rounded.get(piece.storage, piece.itemsize)
                    saved += piece.elements * (piece.itemsize - size)
            found.append(replace(op, reads=op.reads - saved, compiled=True))
        return found

    def kept(self, first: int = 0) -> Kept:
        """What fusing does to the memory of the storages that blocks make.

        first: number of operations that were recorded before this step.
        """
        again = {
            storage: sources
            for storage, sources in self._sources_of.items()
            if self._saves_memory(storage)
        }
        share: dict[int, float] = {}
        for kernel in self.kernels:
            for place in kernel.places:
                for piece in self.ops[place].outputs:
                    if not self._made_in(kernel, piece):
                        continue
                    if piece.storage in again:
                        readers = self._forward_readers(piece.storage)
                    else:
                        readers = self._readers_outside(kernel, piece.storage)
                    size = self._rounded(piece, readers).itemsize if readers else 0
                    share[piece.storage] = size / piece.itemsize

        until: dict[int, int] = {}
        for storage, sources in again.items():
            last = max(self.readers[storage])
            for piece in self._unfolded(sources, again):
                own = max(self.readers[piece.storage])
                # Several may be computed from it.
                until[piece.storage] = max(first + max(last, own), until.get(piece.storage, first))
            if forward := self._forward_readers(storage):
                until[storage] = first + max(forward)
        return Kept(share, until)

    def _unfolded(
        self, pieces: Iterable[Piece], again: Mapping[int, Iterable[Piece]]
    ) -> set[Piece]:
        """`pieces`; in place of one that is computed `again`, what that is computed from."""
        found: set[Piece] = set()
        todo, seen = list(pieces), set[Piece]()
        while todo:
            piece = todo.pop()
            if piece in seen:
                continue
            seen.add(piece)
            if piece.storage in again:
                todo += again[piece.storage]
            else:
                found.add(piece)
        return found


def _region_of(op: Op) -> _Region | None:
    """What it is compiled with; None if it is not within a block's forward or backward."""
    if op.block is None or op.phase not in ("forward", "backward"):
        return None
    return op.block, op.phase, op.micro


def _fuses(op: Op) -> bool:
    return not (op.flops or op.own)


def _is_number(op: Op) -> bool:
    """Whether it makes one number of a tensor."""
    made = max((piece.elements for piece in op.outputs), default=0)
    return made == 1 and any(piece.elements > 1 for piece in op.inputs)


def _bytes(pieces: Iterable[Piece]) -> int:
    return sum(piece.elements * piece.itemsize for piece in pieces)
