"""One split of the snapshot, read where it lies on disk."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.core.errors import DataError, Problem

_CHUNK = 1 << 22
FIX = "restore the data folder from another copy of this run, or start a new run with another --name"
"""What helps when the snapshot is damaged."""


class TokenFile:
    """A file of uint8 tokens, read by place; keeps the file open, so that renaming or deleting it does no harm.

    Not a memory map: if the file shrank, or its disk failed, the kernel would kill the process (SIGBUS) without a word.
    Raises OSError, and ValueError for anything but a regular file of `size` bytes.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, path: Path, size: int) -> None:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is not a regular file")
        self._path, self._size = path, size
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        actual = os.fstat(self._descriptor).st_size
        if actual != size:
            raise ValueError(f"{actual} bytes, {size} expected")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Tokens at `places`, int64 [rows, width]: places of a row in a sequence. Raises DataError."""
        width = places.shape[1]
        rows = [self._read(start, width) for start in places[:, 0].tolist()]
        return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(places.shape)

    def chunks(self) -> Iterator[bytes]:
        """All of it, in pieces of bounded size. Raises DataError."""
        for start in range(0, self._size, _CHUNK):
            yield self._read(start, min(_CHUNK, self._size - start))

    def tobytes(self) -> bytes:
        """All of it at once. Raises DataError."""
        return b"".join(self.chunks())

    def _read(self, start: int, count: int) -> bytes:
        try:
            data = os.pread(self._descriptor, count, start)
            while len(data) < count and (more := os.pread(self._descriptor, count - len(data), start + len(data))):
                data += more
        except OSError as error:
            raise self._lost(f"bytes {start} to {start + count}: {error.strerror}") from error
        if len(data) < count:
            raise self._lost(f"it ends at byte {os.fstat(self._descriptor).st_size}; it had {self._size}")
        return data

    def _lost(self, why: str) -> DataError:
        return DataError(
            Problem("the run's copy of its text cannot be read any longer", str(self._path), why=why, fix=FIX)
        )
