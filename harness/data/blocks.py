"""Files that are read where they lie, each block of them checked against its hash whenever it is read.

A run does not copy a large corpus. It keeps a hash of every block of its files, and what it trains on comes only out of
blocks that have just been hashed, or are still in memory since. Which file, and why, is told with whatever differs.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

BLOCK = 256 << 10
"""Bytes that one hash is of: a sample is read with all of its block, and a manifest has 16 bytes for each."""
DIGEST = 16
"""Bytes kept of a block's SHA-256: 128 bits, which no accident forges."""
CACHED = 256
"""Blocks of all files together that stay in memory: 64 MiB."""
SAMPLED = 8
"""Blocks of a file that are hashed at a start if nothing else speaks against it."""

_CHUNK = 32 * BLOCK


class Damaged(Exception):
    """A part of a file that is not what its hash says, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells a file that was touched: bytes, time of its last change in ns, inode."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Of a regular file. Raises OSError, and ValueError for anything else: opening a pipe would wait for ever."""
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


def digest(block: bytes | memoryview) -> bytes:
    """The hash that is kept of a block: the first DIGEST bytes of its SHA-256."""
    return hashlib.sha256(block).digest()[:DIGEST]


def scan(path: Path, see: Callable[[int, bytes], None] | None = None) -> bytes:
    """Digests of all blocks of a file, in a row. see: is given every chunk (whole blocks) with its place, in order.

    Hashes on as many threads as there are cores, in bounded memory. Raises OSError, and Damaged if the file shrinks.
    """
    size = Stamp.of(path).size
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    workers = min(8, len(os.sched_getaffinity(0)))

    def hashed(start: int) -> tuple[int, bytes, bytes]:
        data = read_fully(descriptor, start, min(_CHUNK, size - start))
        view = memoryview(data)
        return start, data, b"".join(digest(view[at : at + BLOCK]) for at in range(0, len(data), BLOCK))

    digests: list[bytes] = []
    try:
        with ThreadPoolExecutor(workers) as pool:
            for start, data, made in _ahead(pool, hashed, range(0, size, _CHUNK), workers):
                digests.append(made)
                if see is not None:
                    see(start, data)
    finally:
        os.close(descriptor)
    return b"".join(digests)


def _ahead(pool: ThreadPoolExecutor, work: Callable[[_T], _R], items: Sequence[_T], most: int) -> Iterator[_R]:
    """`pool.map` with at most `most` results waiting: the whole of a file must not pile up in memory."""
    waiting = [pool.submit(work, item) for item in items[:most]]
    for item in items[most:]:
        done = waiting.pop(0)
        waiting.append(pool.submit(work, item))
        yield done.result()
    for each in waiting:
        yield each.result()


def read_fully(descriptor: int, start: int, count: int) -> bytes:
    """`count` bytes from `start` on. Raises OSError, and Damaged if the file ends before."""
    read = os.pread(descriptor, count, start)
    while len(read) < count and (rest := os.pread(descriptor, count - len(read), start + len(read))):
        read += rest
    if len(read) != count:
        raise Damaged(f"it ends at byte {os.fstat(descriptor).st_size}")
    return read


def differing(path: Path, digests: bytes, sampled: bool) -> list[int]:
    """Numbers of the blocks of a file that are not what `digests` says; sampled: of SAMPLED blocks, evenly spread.

    Raises OSError, and Damaged if the file is not as long as it was.
    """
    blocks = len(digests) // DIGEST
    if not sampled:
        found = scan(path)
        if len(found) != len(digests):
            raise Damaged(f"it has {len(found) // DIGEST} blocks, and had {blocks}")
        pairs = ((found[at : at + DIGEST], digests[at : at + DIGEST]) for at in range(0, len(found), DIGEST))
        return [number for number, (new, old) in enumerate(pairs) if new != old]
    size = Stamp.of(path).size
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        wrong: list[int] = []
        for number in sorted({place * max(0, blocks - 1) // max(1, SAMPLED - 1) for place in range(SAMPLED)}):
            if number < blocks:
                data = read_fully(descriptor, number * BLOCK, min(BLOCK, size - number * BLOCK))
                if digest(data) != digests[number * DIGEST : (number + 1) * DIGEST]:
                    wrong.append(number)
        return wrong
    finally:
        os.close(descriptor)


class BlockCache:
    """Blocks that were checked, the most recently used of all files; for several threads."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str, number: int) -> bytes | None:
        with self._lock:
            block = self._blocks.get((path, number))
            if block is not None:
                self._blocks.move_to_end((path, number))
            return block

    def put(self, path: str, number: int, block: bytes) -> None:
        with self._lock:
            self._blocks[path, number] = block
            while len(self._blocks) > CACHED:
                self._blocks.popitem(last=False)


class CheckedFile:
    """A file of which every block is checked as it is read; stays open, so that renaming or deleting does no harm.

    Not a memory map: if the file shrank, or its disk failed, the kernel would kill the process (SIGBUS) without a word.
    digests: `scan`'s. reading: told the path before the disk is asked and None after it, so that a read that hangs can
    be named. Raises OSError if the file cannot be opened.
    """

    def __init__(
        self, path: Path, size: int, digests: bytes, cache: BlockCache, reading: Callable[[str | None], None]
    ) -> None:
        self.path, self._size, self._digests = str(path), size, digests
        self._cache, self._reading = cache, reading
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, count: int) -> bytes:
        """Bytes [start, start + count). Raises Damaged, naming the file, where a block is not what it was."""
        first, last = start // BLOCK, (start + count - 1) // BLOCK
        if first == last:
            begin = start - first * BLOCK
            return self._block(first)[begin : begin + count]
        data = b"".join(self._block(number) for number in range(first, last + 1))
        return data[start - first * BLOCK : start - first * BLOCK + count]

    def _block(self, number: int) -> bytes:
        known = self._cache.get(self.path, number)
        if known is not None:
            return known
        start = number * BLOCK
        self._reading(self.path)
        try:
            block = read_fully(self._descriptor, start, min(BLOCK, self._size - start))
        except OSError as error:
            raise Damaged(f"{self.path}: bytes {start} to {start + BLOCK}: {error.strerror}") from error
        except Damaged as error:
            raise Damaged(f"{self.path}: {error}; it had {self._size} bytes") from error
        finally:
            self._reading(None)
        if digest(block) != self._digests[number * DIGEST : (number + 1) * DIGEST]:
            why = f"bytes {start} to {start + len(block)} differ from their hash of when the run began"
            raise Damaged(f"{self.path}: {why}")
        self._cache.put(self.path, number, block)
        return block
