"""One shard of token ids while it is made: a `.bin` with Megatron's `.idx`, hashed as it is written."""

from __future__ import annotations

import hashlib
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from harness.data.blocks import BLOCK, digest
from harness.data.shards import write_index


def smallest_dtype(ids: int) -> str:
    """The smallest dtype for so many ids that Megatron's index knows."""
    return "uint8" if ids <= 1 << 8 else "uint16" if ids <= 1 << 16 else "int32"


@dataclass(slots=True)
class ShardWriter:
    """Tokens go to the disk at once, hashes and the lengths of documents stay in memory. Raises OSError."""

    path: Path
    dtype: str
    split: str
    stream: IO[bytes] | None = None
    buffer: bytearray = field(default_factory=bytearray)
    digests: list[bytes] = field(default_factory=list)
    lengths: array[int] = field(default_factory=lambda: array("i"))
    open_length: int = 0
    tokens: int = 0
    largest: int = -1

    @property
    def temporary(self) -> Path:
        """Of this process: one that was killed may have left its own."""
        return self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")

    def add(self, ids: npt.NDArray[Any]) -> None:
        if self.stream is None:
            self.stream = self.temporary.open("wb")
        self.buffer += ids.astype(np.dtype(self.dtype).newbyteorder("<")).tobytes()
        self.largest = max(self.largest, int(ids.max(initial=-1)))
        self.open_length += len(ids)
        self.tokens += len(ids)
        whole = len(self.buffer) // BLOCK * BLOCK
        if whole:
            view = memoryview(self.buffer)
            self.digests += [digest(view[at : at + BLOCK]) for at in range(0, whole, BLOCK)]
            self.stream.write(view[:whole])
            view.release()
            del self.buffer[:whole]

    def end_document(self) -> None:
        if self.open_length:
            self.lengths.append(self.open_length)
            self.open_length = 0

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self.stream is not None:
            self.stream.close()
        self.temporary.unlink(missing_ok=True)

    def commit(self) -> dict[str, Any] | None:
        """What the marker says of it; None if it has no tokens."""
        self.end_document()
        if self.stream is None:
            return None
        if self.buffer:
            self.digests.append(digest(bytes(self.buffer)))
            self.stream.write(self.buffer)
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
        index = write_index(self.path, self.dtype, self.lengths)
        small = self.temporary.with_suffix(".idx.tmp")
        with small.open("wb") as stream:
            stream.write(index)
            stream.flush()
            os.fsync(stream.fileno())
        small.replace(self.path.with_suffix(".idx"))
        self.temporary.replace(self.path)
        return {
            "name": self.path.name,
            "split": self.split,
            "bytes": self.path.stat().st_size,
            "tokens": self.tokens,
            "documents": len(self.lengths),
            "largest": self.largest,
            "index_sha256": hashlib.sha256(index).hexdigest(),
            "blocks": b"".join(self.digests).hex(),
        }
