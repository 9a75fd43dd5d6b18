"""Files of token ids as people have them: recognised by their first bytes and neighbours, and checked before use.

- A headerless `.bin` (nanoGPT): nothing but ids of `data.dtype`.
- A `.bin` with a header of 256 int32 (llm.c): a magic number that names the dtype, a version, and the count of ids.
- A `.bin` with an `.idx` beside it (Megatron's indexed data set). The index has 9 bytes of magic, uint64 version 1,
  uint8 dtype, uint64 sequences, uint64 documents + 1; then each sequence's length (int32), each sequence's place in
  bytes (int64), and each document's first sequence (int64).

All numbers are little-endian. The largest id is known only after all ids were read, so `corpus` checks it.
`ShardWriter` writes the third kind, and hashes it as it is written.

To add a format of token ids: a reader that `read_shard` calls. It must refuse by name everything that can be wrong.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import DataError, Problem
from harness.data.arrays import Ints
from harness.data.blocks import BLOCK, Stamp, block_digests
from harness.data.splits import LeftOut
from harness.data.text import IS_LFS, LFS
from harness.data.widths import other_width

HEADER_BYTES = 1024
"""Size of llm.c's header."""

# llm.c: magic number -> (version, dtype).
_MAGICS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
# Other contents that are often called .bin.
_OTHERS = {
    b"\x93NUMPY": "a NumPy array (.npy)",
    LFS: IS_LFS,
    b"PK\x03\x04": "a zip archive (torch.save writes such)",
    b"\x1f\x8b\x08": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
}
_PRINTABLE = bytes(range(32, 127)) + b"\t\n\r"
_HEAD_BYTES = 4096
_LEAST_TEXT = 64  # fewer printable bytes may be ids by chance
_INDEX_MAGIC = b"MMIDIDX\0\0"
_INDEX_HEAD = struct.Struct("<QBQQ")
_INDEX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True, slots=True)
class Shard:
    """Token ids in a file, read where they lie.

    path: the file.
    dtype: numpy's name of it; the bytes are little-endian.
    offset: bytes before the first id.
    tokens: how many ids follow.
    index: Megatron's, which says where documents begin; None if there is none.
    """

    path: Path
    dtype: str
    offset: int
    tokens: int
    index: Path | None = None

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The dtype with the byte order that it has on disk."""
        return np.dtype(self.dtype).newbyteorder("<")


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of one source by split. val is empty where a share of train is still to be held out."""

    train: tuple[Shard, ...]
    val: tuple[Shard, ...]
    left_out: tuple[tuple[str, str], ...] = ()


def read_shards(
    train: Sequence[Path], val: Sequence[Path], dtype: str, left_out: LeftOut
) -> Shards:
    """`read_shard` of training and validation files. Raises DataError with the problems of all of them."""
    problems: list[Problem] = []

    def read(paths: Sequence[Path]) -> tuple[Shard, ...]:
        found: list[Shard] = []
        for path in paths:
            try:
                found.append(read_shard(path, dtype))
            except DataError as error:
                problems.extend(error.problems)
        return tuple(found)

    made = Shards(read(train), read(val), tuple(left_out))
    if problems:
        raise DataError(problems)
    return made


def read_shard(path: Path, dtype: str) -> Shard:
    """What the file at `path` is. dtype: of ids without a header or an index. Raises DataError."""
    # An index counts before the first bytes: then the file has nothing but ids, which may look like a header.
    try:
        size = Stamp.of(path).size
        index = path.with_suffix(".idx")
        if index.exists():
            return _with_index(path, size, index)
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
        begin = head[:12].ljust(12, b"\0")  # the file may be shorter
        magic, version, count = struct.unpack("<iii", begin)
        if magic in _MAGICS:
            return _with_header(path, size, magic, version, count)
        return _headerless(path, size, head, dtype)
    except OSError as error:
        raise DataError(_problem(path, f"cannot be read: {error.strerror}")) from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(_problem(path, str(error))) from error


def _headerless(path: Path, size: int, head: bytes, dtype: str) -> Shard:
    # Nothing in the file says that it has ids, so everything that can be wrong is looked for: other contents, the
    # length, and last how the bytes are spread.
    if what := _other_content(head, dtype):
        why = f"it begins with {head[:8]!r}"
        fix = "give what it is by its own name, or the file of ids that was meant"
        raise DataError(_problem(path, f"is {what}, not token ids", why, fix))
    width = np.dtype(dtype).itemsize
    if size == 0:
        raise DataError(_problem(path, "is empty", fix="write it again"))
    if size % width:
        why = f"{size} bytes are no whole number of {dtype} ids: it was cut short, or has another dtype"
        fix = "write it again, or set data.dtype"
        raise DataError(_problem(path, "ends within a token id", why, fix))
    if other := other_width(path, size, dtype):
        what = f"does not look like {other.looks_like or dtype}"
        raise DataError(_problem(path, what, other.why, other.fix))
    return Shard(path, dtype, 0, size // width)


def _other_content(head: bytes, dtype: str) -> str:
    """What a file begins like, if that is no token ids: these have zeros, or bytes of all values. Else empty."""
    for start, name in _OTHERS.items():
        if head.startswith(start):
            return name
    is_text = len(head) >= _LEAST_TEXT and not head.translate(None, _PRINTABLE)
    return "text" if is_text and dtype != "uint8" else ""


def _with_header(path: Path, size: int, magic: int, version: int, count: int) -> Shard:
    expected_version, dtype = _MAGICS[magic]
    if version != expected_version or size < HEADER_BYTES:
        headers = [f"{each} of version {number}" for each, (number, _) in _MAGICS.items()]
        why = f"its header begins with {magic} and version {version}, in {size} bytes; {', '.join(headers)} are read"
        fix = "write it again, or without the header"
        raise DataError(_problem(path, "has a header of llm.c that is not read", why, fix))
    there = size - HEADER_BYTES
    wanted = count * np.dtype(dtype).itemsize
    if there != wanted:
        what = "is cut short" if there < wanted else "is longer than its header says"
        why = f"its header counts {count} ids of {dtype}, {wanted} bytes; {there} follow it"
        raise DataError(_problem(path, what, why, "write it again, or copy it again"))
    return Shard(path, dtype, HEADER_BYTES, count)


def _with_index(path: Path, size: int, index: Path) -> Shard:
    dtype, lengths, pointers, documents = _read_index(index)
    # In bytes: where each sequence would end, if they lie one after the other as they must.
    width = np.dtype(dtype).itemsize
    sizes = lengths.astype(np.int64) * width
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0

    # Two files that belong together may be copied apart: the index must fit this .bin to the byte.
    why = ""
    if (lengths < 0).any() or not np.array_equal(pointers, ends - sizes):
        why = "its sequences do not lie one after the other"
    elif total > size:
        why = f"it points up to byte {total}, and {path.name} has {size}"
    elif total < size:
        why = f"it describes {total} bytes, and {path.name} has {size}"
    elif not _divides(documents, len(lengths)):
        why = "its documents do not divide its sequences"
    if why:
        fix = "copy both files again, or write them again"
        raise DataError(_problem(index, "does not fit its .bin", why, fix))
    if total == 0:
        raise DataError(_problem(path, "is empty", fix="write it again"))
    return Shard(path, dtype, 0, total // width, index)


def _divides(documents: Ints, sequences: int) -> bool:
    """Whether documents that begin with these sequences follow each other, from the first sequence to the last."""
    if not len(documents) or documents[0] != 0 or documents[-1] != sequences:
        return False
    return not (np.diff(documents) < 0).any()


def _read_index(
    index: Path,
) -> tuple[str, npt.NDArray[np.int32], Ints, Ints]:
    """(dtype, lengths, places in bytes, each document's first sequence). Raises OSError; DataError by name."""
    size = Stamp.of(index).size
    begin = len(_INDEX_MAGIC) + _INDEX_HEAD.size
    with index.open("rb") as stream:
        head = stream.read(begin)
        if len(head) < begin or not head.startswith(_INDEX_MAGIC):
            what, why = "is no index of Megatron's", "its first bytes are others"
            fix = "take the .idx away if it belongs to something else: the .bin is then read as headerless"
            raise DataError(_problem(index, what, why, fix))
        version, code, sequences, documents = _INDEX_HEAD.unpack(head[len(_INDEX_MAGIC) :])
        if version != 1 or code not in _INDEX_DTYPES:
            what = f"is of version {version} with dtype {code}"
            why = "version 1 with a dtype of whole numbers is read"
            raise DataError(_problem(index, what, why))

        # Before the reading: a damaged count must not ask for all of the memory.
        need = begin + 12 * sequences + 8 * documents
        if size < need:
            why = f"{sequences} sequences and {documents - 1} documents take {need} bytes; it has {size}"
            raise DataError(_problem(index, "is cut short", why, "copy it again"))
        lengths = np.frombuffer(stream.read(4 * sequences), "<i4")
        pointers = np.frombuffer(stream.read(8 * sequences), "<i8")
        starts = np.frombuffer(stream.read(8 * documents), "<i8")
    return _INDEX_DTYPES[code], lengths, pointers, starts


def document_starts(index: Path) -> Ints:
    """int64: the place of the first token of each document that is not empty. Raises OSError, DataError."""
    _, lengths, _, documents = _read_index(index)
    places = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.unique(places[documents[:-1]])


def write_index(path: Path, dtype: str, lengths: Sequence[int]) -> bytes:
    """The bytes of an index whose sequences, of `lengths` ids, are a document each.

    path: the file that an error names. Raises DataError if Megatron has no code for `dtype`.
    """
    codes = {name: code for code, name in _INDEX_DTYPES.items()}
    if dtype not in codes:
        why = "Megatron's index has no code for it"
        raise DataError(_problem(path, f"cannot have {dtype} ids", why))
    sizes = np.asarray(lengths, dtype="<i4")
    ends = np.cumsum(sizes, dtype=np.int64)
    places = (ends - sizes) * np.dtype(dtype).itemsize
    documents = np.arange(len(sizes) + 1, dtype="<i8")
    head = _INDEX_MAGIC + _INDEX_HEAD.pack(1, codes[dtype], len(sizes), len(documents))
    # In the order in which Megatron reads them.
    parts = [sizes.tobytes(), places.astype("<i8").tobytes(), documents.tobytes()]
    return head + b"".join(parts)


def _problem(path: Path, what: str, why: str = "", fix: str = "") -> Problem:
    return Problem(what, f"data.path: {path}", why, fix)


def smallest_dtype(ids: int) -> str:
    """The smallest dtype for so many ids that Megatron's index knows."""
    if ids <= 1 << 8:
        return "uint8"
    return "uint16" if ids <= 1 << 16 else "int32"


@dataclass(slots=True)
class ShardWriter:
    """Writes one shard. Tokens go to disk at once; hashes and lengths of documents stay in memory. Raises OSError.

    path: the .bin to make.
    dtype, split: of the shard.
    stream: the temporary file; None while there are no tokens.
    buffer: bytes of a block that is not full yet.
    digests: of the blocks that were written.
    lengths: tokens of each document that has ended.
    open_length: tokens so far of the document that has not ended.
    tokens, largest: count of all ids, and the largest of them (-1: none).
    """

    path: Path
    dtype: str
    split: str
    stream: IO[bytes] | None = None
    buffer: bytearray = field(default_factory=bytearray)
    digests: bytearray = field(default_factory=bytearray)
    lengths: array[int] = field(default_factory=lambda: array("i"))
    open_length: int = 0
    tokens: int = 0
    largest: int = -1

    @property
    def temporary(self) -> Path:
        """Named after this process: one that was killed may have left its own."""
        return self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Append ids to the open document."""
        if self.stream is None:
            self.stream = self.temporary.open("wb")
        on_disk = np.dtype(self.dtype).newbyteorder("<")
        self.buffer += ids.astype(on_disk).tobytes()
        self.largest = max(self.largest, int(ids.max(initial=-1)))
        self.open_length += len(ids)
        self.tokens += len(ids)
        # Whole blocks only: each has one hash.
        self._write(self.stream, len(self.buffer) // BLOCK * BLOCK)

    def _write(self, stream: IO[bytes], count: int) -> None:
        """Hash and write the first `count` bytes of the buffer."""
        data = bytes(self.buffer[:count])
        self.digests += block_digests(data)
        stream.write(data)
        del self.buffer[:count]

    def end_document(self) -> None:
        """What is added next begins a document."""
        if self.open_length:
            self.lengths.append(self.open_length)
            self.open_length = 0

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self.stream is not None:
            self.stream.close()
        self.temporary.unlink(missing_ok=True)

    def commit(self) -> dict[str, Any] | None:
        """Make the .bin and its .idx, whole and on disk; what the task's marker says of them. None: no tokens."""
        self.end_document()
        if self.stream is None:
            return None
        self._write(self.stream, len(self.buffer))
        _close_on_disk(self.stream)

        index = write_index(self.path, self.dtype, self.lengths)
        temporary_index = self.temporary.with_suffix(".idx.tmp")
        stream = temporary_index.open("wb")
        stream.write(index)
        _close_on_disk(stream)

        # The index first: a .bin without one would be read as headerless.
        temporary_index.replace(self.path.with_suffix(".idx"))
        self.temporary.replace(self.path)
        return {
            "name": self.path.name,
            "split": self.split,
            "bytes": self.path.stat().st_size,
            "tokens": self.tokens,
            "documents": len(self.lengths),
            "largest": self.largest,
            "index_sha256": hashlib.sha256(index).hexdigest(),
            "blocks": self.digests.hex(),
        }


def _close_on_disk(stream: IO[bytes]) -> None:
    """Close a file once its bytes are on the disk: after a power cut its final name must not lead to an empty file."""
    with stream:
        stream.flush()
        os.fsync(stream.fileno())
