"""Files that are read where they lie; each block of them is compared with its hash whenever it comes from the disk.

A run does not copy a large corpus. It keeps the hash of every block of BLOCK bytes, and trains only on blocks that were
just compared, or are still in memory since. So a lost, damaged or swapped file is found before its bytes are used.

Three checks, from the cheapest: `Stamp` (size, time and inode: was the file touched?), `differing` with sampled=True
(SAMPLED blocks) and `differing` of all blocks.
"""

from __future__ import annotations

import hashlib
import os
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

BLOCK = 256 << 10
"""Bytes under one hash. A sample is read with its whole block; a description has 16 bytes for each block."""
DIGEST = 16
"""Bytes kept of a block's SHA-256: 128 bits, which no accident forges."""
CACHED = 256
"""Blocks of a corpus that stay in memory: 64 MiB."""
SAMPLED = 8
"""Blocks of an untouched file that are compared at a start."""

_CHUNK = 32 * BLOCK


class Damaged(Exception):
    """A part of a file differs from its hash, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Shows whether a file was touched: its bytes, the time of its last change in ns, its inode."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """The stamp of a regular file.

        Raises OSError, and ValueError for anything else: opening a pipe would wait for ever.
        """
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


def digest(block: bytes | memoryview) -> bytes:
    """The hash of one block: the first DIGEST bytes of its SHA-256."""
    return hashlib.sha256(block).digest()[:DIGEST]


def block_digests(data: bytes) -> bytes:
    """The hashes of all blocks of `data`, one after the other; the last block may be shorter."""
    view = memoryview(data)
    digests = bytearray()
    for at in range(0, len(data), BLOCK):
        digests += digest(view[at : at + BLOCK])
    return bytes(digests)


def scan(path: Path, see: Callable[[int, bytes], None] | None = None) -> bytes:
    """The hashes of all blocks of a file, one after the other, on as many threads as there are cores.

    see: gets every chunk (of whole blocks) with its place, in order; memory stays bounded. Raises OSError; Damaged if
    the file shrinks meanwhile.
    """
    size = Stamp.of(path).size
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    # Threads, not processes: hashlib gives the interpreter's lock back while it hashes.
    workers = min(8, len(os.sched_getaffinity(0)))

    def hashed(start: int) -> tuple[int, bytes, bytes]:
        data = read_fully(descriptor, start, min(_CHUNK, size - start))
        return start, data, block_digests(data)

    digests = bytearray()
    try:
        with ThreadPoolExecutor(workers) as pool:
            for start, data, made in _map_bounded(pool, hashed, range(0, size, _CHUNK), workers):
                digests += made
                if see is not None:
                    see(start, data)
    finally:
        os.close(descriptor)
    return bytes(digests)


def _map_bounded(
    pool: ThreadPoolExecutor, work: Callable[[_T], _R], items: Sequence[_T], most: int
) -> Iterator[_R]:
    """`pool.map` with at most `most` results waiting: a whole file must not pile up in memory."""
    waiting = [pool.submit(work, item) for item in items[:most]]
    for item in items[most:]:
        done = waiting.pop(0)
        waiting.append(pool.submit(work, item))
        yield done.result()
    for each in waiting:
        yield each.result()


def read_fully(descriptor: int, start: int, count: int) -> bytes:
    """`count` bytes from `start` on. Raises OSError; Damaged if the file ends before."""
    # One call may return less than was asked for, with more to come (over 2 GiB, on a network file system).
    read = os.pread(descriptor, count, start)
    while len(read) < count:
        rest = os.pread(descriptor, count - len(read), start + len(read))
        if not rest:
            break
        read += rest
    if len(read) != count:
        raise Damaged(f"it ends at byte {os.fstat(descriptor).st_size}")
    return read


def differing(path: Path, digests: bytes, sampled: bool) -> list[int]:
    """Numbers of the blocks of a file that differ from `digests`. sampled: compare SAMPLED blocks, evenly spread.

    Raises OSError; Damaged if the file is not as long as it was.
    """
    blocks = len(digests) // DIGEST
    if not sampled:
        found = scan(path)
        if len(found) != len(digests):
            raise Damaged(f"it has {len(found) // DIGEST} blocks, and had {blocks}")
        pairs = [(_nth(found, number), _nth(digests, number)) for number in range(blocks)]
        return [number for number, (now, then) in enumerate(pairs) if now != then]

    # The first block and the last are always among them.
    size = Stamp.of(path).size
    places = {place * (blocks - 1) // (SAMPLED - 1) for place in range(SAMPLED)}
    wrong: list[int] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for number in sorted(places):
            start = number * BLOCK
            data = read_fully(descriptor, start, min(BLOCK, size - start))
            if digest(data) != _nth(digests, number):
                wrong.append(number)
    finally:
        os.close(descriptor)
    return wrong


def _nth(digests: bytes, number: int) -> bytes:
    return digests[number * DIGEST : (number + 1) * DIGEST]


class CheckedFile:
    """A file whose blocks are compared with their hashes as they are read.

    It stays open, so renaming or deleting it does no harm. It is not a memory map: if the file shrank, or its disk
    failed, the kernel would kill the process (SIGBUS) without a message.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        digests: bytes,
        block: Callable[[CheckedFile, int], bytes],
        reading: Callable[[str | None], None],
    ) -> None:
        """digests: of all blocks, as `scan` gives them. block: `block_cache()`, one for all files of a corpus.
        reading: called with the path before the disk is read and with None after it, so that a read that hangs can be
        named. Raises OSError if the file cannot be opened."""
        self.path, self._size, self._digests = str(path), size, digests
        self._block, self._reading = block, reading
        # A run has no moment at which it closes its data: a file is closed when nobody holds it any longer.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, count: int) -> bytes:
        """Bytes [start, start + count). Raises Damaged, naming the file, where a block differs from its hash."""
        first, last = start // BLOCK, (start + count - 1) // BLOCK
        begin = start - first * BLOCK
        # Nearly every sample lies in one block.
        if first == last:
            return self._block(self, first)[begin : begin + count]
        blocks = [self._block(self, number) for number in range(first, last + 1)]
        return b"".join(blocks)[begin : begin + count]

    def read_block(self, number: int) -> bytes:
        """A block from the disk, compared with its hash. Raises Damaged, naming the file."""
        start = number * BLOCK
        self._reading(self.path)
        try:
            block = read_fully(self._descriptor, start, min(BLOCK, self._size - start))
        except OSError as error:
            where = f"bytes {start} to {start + BLOCK}"
            raise Damaged(f"{self.path}: {where}: {error.strerror}") from error
        except Damaged as error:
            raise Damaged(f"{self.path}: {error}; it had {self._size} bytes") from error
        finally:
            self._reading(None)
        # Right length, other bytes: a disk that decays, or somebody who wrote to the file.
        if digest(block) != _nth(self._digests, number):
            where = f"bytes {start} to {start + len(block)}"
            raise Damaged(f"{self.path}: {where} differ from their hash of when the run began")
        return block


def block_cache() -> Callable[[CheckedFile, int], bytes]:
    """`CheckedFile.read_block` that keeps the CACHED blocks used last, of all files. A damaged one is not kept."""
    return lru_cache(maxsize=CACHED)(CheckedFile.read_block)
