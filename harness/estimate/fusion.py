"""What a step launches where its blocks are compiled: the operations of an eager step, fused as a compiler does.

TorchInductor fuses what lies between matrix products. The rules here, for the operations of one block in forward or in
backward of one micro-batch:

1. Matrix products, convolutions, attention and this project's own operators stay as they are. All others may be fused.
2. Two are in one kernel if they share memory and neither needs, through one of these, what the other computes. A
   reduction of a whole tensor to one number ends its kernel, too.
3. A kernel reads once what it did not compute, and writes what is read after it.
4. What forward computes and only fused kernels of backward read is not kept: these compute it again from what the
   forward's kernel had read.
5. A float32 tensor that only this project's casts read is written in 16 bits.

`tests/cuda_on_paper/test_compiled_blocks.py` holds the bytes against those of code that TorchInductor generates.
Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.estimate.roofline import Op, Piece

_Region = tuple[int, str, int]
"""Block, phase and micro-batch: what is compiled as one graph."""


@dataclass(slots=True)
class _Kernel:
    """Operations that are launched together, by their places in the step."""

    places: list[int]
    memory: set[int]


class _Step:
    """The operations of a step, and who reads and writes each storage."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
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
        self.again: dict[int, frozenset[Piece]] = {}
        for storage, place in self.makers.items():
            if self._computed_again(storage, place):
                self.again[storage] = self._sources(storage)

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

    def _computed_again(self, storage: int, made: int) -> bool:
        """Rule 4."""
        own = self.kernel_of.get(made)
        if own is None or self.ops[made].phase != "forward":
            return False
        later = self._readers_outside(own, storage)
        return bool(later) and all(self._again_in(place, made) for place in later)

    def _readers_outside(self, kernel: _Kernel, storage: int) -> list[int]:
        return [place for place in self.readers[storage] if self.kernel_of.get(place) is not kernel]

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
        found: set[Piece] = set()
        todo = [piece for place in kernel.places for piece in self.ops[place].inputs]
        while todo:
            piece = todo.pop()
            if self._made_in(kernel, piece) or piece in found:
                continue
            if piece.storage in self.again:
                todo += self.again[piece.storage]
            else:
                found.add(piece)
        return found

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


def fused(ops: Sequence[Op]) -> list[Op]:
    """The operations of one step, those of blocks fused. A kernel has the name of its operation with the most traffic.

    ops: of a whole step, in order; each micro-batch has its own.
    """
    step = _Step(ops)
    found: list[Op] = []
    rounded: dict[int, int] = {}
    for kernel in step.kernels:
        writes = step.writes(kernel)
        for piece in writes:
            rounded[piece.storage] = piece.itemsize
        members = [ops[place] for place in kernel.places]
        largest = max(members, key=lambda op: op.reads + op.writes)
        found.append(
            replace(
                largest,
                reads=_bytes(step.reads(kernel)),
                writes=_bytes(writes),
                kernels=max(op.kernels for op in members),
                compiled=True,
            )
        )
    for place, op in enumerate(ops):
        if place in step.kernel_of:
            continue
        saved = 0
        if op.own:
            for piece in op.inputs:
                size = rounded.get(piece.storage, piece.itemsize)
                saved += piece.elements * (piece.itemsize - size)
        found.append(replace(op, reads=op.reads - saved, compiled=True))
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
