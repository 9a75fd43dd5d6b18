"""Files of token ids as people have them, each told by its first bytes and its neighbours, checked before it is read.

- A headerless `.bin`: nothing but ids of `data.dtype` (nanoGPT).
- A `.bin` that begins with 256 int32: a magic that names the dtype, a version, and how many ids follow (llm.c).
- A `.bin` with an `.idx` beside it: Megatron's indexed data set. The index has, little-endian: 9 bytes magic, uint64
  version 1, uint8 dtype, uint64 sequences, uint64 documents + 1, then the sequences' lengths (int32), their places in
  bytes (int64), and each document's first sequence (int64).

All of them are little-endian. What is only known once the ids were read (the largest) is `corpus`'s to check.
`ShardWriter` makes one of the third kind, hashed as it is written.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from harness.core.errors import DataError, Problem
from harness.data.blocks import BLOCK, Stamp, digest
from harness.data.widths import other_width

Split = Literal["train", "val", ""]
"""Of a file, or a part of one; empty: its documents are still to be divided."""
HEADER_BYTES = 1024
_MAGICS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
# How files begin that are called .bin and have no ids.
_OTHERS = {
    b"\x93NUMPY": "a NumPy array (.npy)",
    b"PK\x03\x04": "a zip archive (torch.save writes such)",
    b"\x1f\x8b\x08": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"GGUF": "weights of a model (GGUF)",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
}
_PRINTED = bytes(range(32, 127)) + b"\t\n\r"
_LOOKED_AT, _LETTERS = 4096, 64
_INDEX_MAGIC = b"MMIDIDX\0\0"
_INDEX_HEAD = struct.Struct("<QBQQ")
_INDEX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
DTYPES = (*_INDEX_DTYPES.values(), "uint32")
"""Of token ids."""
_VALIDATION = re.compile(r"(?<![a-z])(val|valid|validation)(?![a-z])", re.IGNORECASE)
_TEST = re.compile(r"(?<![a-z])test(?![a-z])", re.IGNORECASE)
_BESIDE = re.compile(r"(^|/)(README|LICENSE|COPYING)[^/]*$|\.(md|rst|json|ya?ml|sha256)$", re.IGNORECASE)
_TRAINING = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shard:
    """Token ids in a file, where they lie.

    dtype: numpy's name, little-endian. offset: bytes before the first id. index: Megatron's, which says where its
    documents begin; None if nothing says it.
    """

    path: Path
    dtype: str
    offset: int
    tokens: int
    index: Path | None = None

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """Its dtype with the byte order that it has on disk."""
        return np.dtype(self.dtype).newbyteorder("<")


def read_shard(path: Path, dtype: str) -> Shard:
    """What the file at `path` is. dtype: of a file that does not tell. Raises DataError."""
    try:
        size = Stamp.of(path).size
        with path.open("rb") as stream:
            head = stream.read(_LOOKED_AT)
        index = path.with_suffix(".idx")
        if index.exists():
            return _megatron(path, size, index)
        magic, version, count = struct.unpack("<iii", head[:12].ljust(12, b"\0"))
        if magic in _MAGICS and size >= HEADER_BYTES and _MAGICS[magic][0] == version:
            return _headed(path, size, _MAGICS[magic][1], count)
        if magic in _MAGICS:
            known = ", ".join(f"{each} of version {number}" for each, (number, _) in _MAGICS.items())
            why = f"its header begins with {magic} and version {version}, in {size} bytes; {known} are read"
            fix = "write it again, or without the header"
            raise DataError(_problem(path, "has a header of llm.c that is not read", why, fix))
        if what := _no_ids(head, dtype):
            fix = "give what it is by its own name, or the file of ids that was meant"
            raise DataError(_problem(path, f"is {what}, not token ids", f"it begins with {head[:8]!r}", fix))
        return _headerless(path, size, dtype)
    except OSError as error:
        raise DataError(_problem(path, f"cannot be read: {error.strerror}")) from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(_problem(path, str(error))) from error


def _no_ids(head: bytes, dtype: str) -> str:
    """What a file without a header begins like, if that is no token ids: those have zeros, or bytes of all values."""
    if known := next((name for start, name in _OTHERS.items() if head.startswith(start)), ""):
        return known
    plain = len(head) >= _LETTERS and not head.translate(None, _PRINTED)
    return "text" if plain and dtype != "uint8" else ""


def _headerless(path: Path, size: int, dtype: str) -> Shard:
    width = np.dtype(dtype).itemsize
    if size == 0:
        raise DataError(_problem(path, "is empty", fix="write it again"))
    if size % width:
        why = f"{size} bytes are no whole number of {dtype} ids: it was cut short, or has another dtype"
        raise DataError(_problem(path, "ends within a token id", why, "write it again, or set data.dtype"))
    if other := other_width(path, size, dtype):
        what = f"does not look like {other.looks_like or dtype}"
        raise DataError(_problem(path, what, other.why, other.fix))
    return Shard(path, dtype, 0, size // width)


def _headed(path: Path, size: int, dtype: str, count: int) -> Shard:
    there = size - HEADER_BYTES
    wanted = count * np.dtype(dtype).itemsize
    if there != wanted:
        what = "is cut short" if there < wanted else "is longer than its header says"
        why = f"its header counts {count} ids of {dtype}, {wanted} bytes; {there} follow it"
        raise DataError(_problem(path, what, why, "write it again, or copy it again"))
    return Shard(path, dtype, HEADER_BYTES, count)


def _megatron(path: Path, size: int, index: Path) -> Shard:
    dtype, lengths, pointers, documents = _read_index(index)
    width = np.dtype(dtype).itemsize
    sizes = lengths.astype(np.int64) * width
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    why = ""
    if (lengths < 0).any() or not np.array_equal(pointers, ends - sizes):
        why = "its sequences do not lie one after the other"
    elif total > size:
        why = f"it points up to byte {total}, and {path.name} has {size}"
    elif total < size:
        why = f"it describes {total} bytes, and {path.name} has {size}"
    elif not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        why = "its documents are no division of its sequences"
    if why:
        raise DataError(_problem(index, "does not fit its .bin", why, "copy both files again, or write them again"))
    if total == 0:
        raise DataError(_problem(path, "is empty", fix="write it again"))
    return Shard(path, dtype, 0, total // width, index)


def _read_index(index: Path) -> tuple[str, npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(dtype, lengths, places in bytes, each document's first sequence). Raises OSError, and DataError by name."""
    size = Stamp.of(index).size
    begin = len(_INDEX_MAGIC) + _INDEX_HEAD.size
    with index.open("rb") as stream:
        head = stream.read(begin)
        if len(head) < begin or not head.startswith(_INDEX_MAGIC):
            fix = "take the .idx away if it belongs to something else: the .bin is then read as headerless"
            raise DataError(_problem(index, "is no index of Megatron's", "its first bytes are others", fix))
        version, code, sequences, documents = _INDEX_HEAD.unpack(head[len(_INDEX_MAGIC) :])
        if version != 1 or code not in _INDEX_DTYPES:
            raise DataError(
                _problem(index, f"is of version {version} with dtype {code}", "1 and whole numbers are read")
            )
        need = begin + 12 * sequences + 8 * documents
        if size < need:
            why = f"{sequences} sequences and {documents - 1} documents take {need} bytes; it has {size}"
            raise DataError(_problem(index, "is cut short", why, "copy it again"))
        lengths = np.frombuffer(stream.read(4 * sequences), "<i4")
        pointers = np.frombuffer(stream.read(8 * sequences), "<i8")
        starts = np.frombuffer(stream.read(8 * documents), "<i8")
    return _INDEX_DTYPES[code], lengths, pointers, starts


def document_starts(index: Path) -> npt.NDArray[np.int64]:
    """int64: the place of each document's first token, of all but empty ones. Raises OSError, DataError."""
    _, lengths, _, documents = _read_index(index)
    places = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.unique(places[documents[:-1]])


def write_index(path: Path, dtype: str, lengths: Sequence[int]) -> bytes:
    """The bytes of an index whose sequences, of `lengths` ids, are a document each. path: named if it cannot be."""
    code = next((code for code, name in _INDEX_DTYPES.items() if name == dtype), None)
    if code is None:
        raise DataError(_problem(path, f"cannot have {dtype} ids", "Megatron's index has no code for it"))
    sizes = np.asarray(lengths, dtype="<i4")
    width = np.dtype(dtype).itemsize
    places = (np.cumsum(sizes, dtype=np.int64) - sizes) * width
    documents = np.arange(len(sizes) + 1, dtype="<i8")
    head = _INDEX_MAGIC + _INDEX_HEAD.pack(1, code, len(sizes), len(documents))
    return head + sizes.tobytes() + places.astype("<i8").tobytes() + documents.tobytes()


def is_validation(name: str) -> bool:
    """Whether a file's name has val, valid or validation as a word of its own."""
    return _VALIDATION.search(name) is not None and _TRAINING.search(name) is None


def is_test(name: str) -> bool:
    """Whether a file's name has test as a word of its own, and is neither training nor validation."""
    return _TEST.search(name) is not None and _TRAINING.search(name) is None and _VALIDATION.search(name) is None


def without_tests(names: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Files of one folder, without those that are a test split, if there are others; and these, with the reason."""
    kept = [name for name in names if not is_test(name)]
    return (kept, [(name, TEST_SPLIT) for name in names if is_test(name)]) if kept else (list(names), [])


TEST_SPLIT = "a test split: neither trained nor validated on"
_LEFT_OUT = {"test": TEST_SPLIT, "beside": "beside files that are called train, val or test"}


def named_splits(names: Sequence[str]) -> tuple[dict[str, Split], list[tuple[str, str]]]:
    """(the split of every file of text that is used, what is left out and why).

    Names count if those of all files say train, val, test or beside (a README), and there is train and another: folders
    of text may have anything in them, and a file that is called validation.py is no split of its own. Where they do
    not, or none is validation, a split is empty: the documents are still to be divided.
    """
    said = {name: _word(name) for name in names}
    splits = {*said.values()} - {"beside"}
    if "" in splits or "train" not in splits or len(splits) == 1:
        return dict.fromkeys(names, ""), []
    left_out = [(name, _LEFT_OUT[word]) for name, word in said.items() if word in _LEFT_OUT]
    used = [name for name in names if said[name] not in _LEFT_OUT]
    return {name: ("val" if said[name] == "val" else "train") if "val" in splits else "" for name in used}, left_out


def _word(name: str) -> str:
    if _TRAINING.search(name):
        return "train"
    if is_validation(name):
        return "val"
    if is_test(name):
        return "test"
    return "beside" if _BESIDE.search(name) else ""


def text_beside(path: Path) -> Path | None:
    """The validation split of a single file of text that is called train; None if there is none."""
    return validation_beside(path) if _TRAINING.search(path.name) else None


def validation_beside(path: Path) -> Path | None:
    """The validation split of a single file: its name with val for train, else val.bin in its folder; None if none."""
    words = ("val", "valid", "validation")
    names = [_TRAINING.sub(word, path.name) for word in words] if _TRAINING.search(path.name) else []
    found = [path.with_name(name) for name in [*names, f"val{path.suffix}"]]
    return next((each for each in found if each != path and each.is_file()), None)


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of one source, divided into splits; `val` is empty where a share is to be held out. left_out: names
    and why."""

    train: tuple[Shard, ...]
    val: tuple[Shard, ...]
    left_out: tuple[tuple[str, str], ...] = ()


def read_files(paths: Sequence[Path], val: Sequence[Path], read: Callable[[Path], Shard]) -> Shards:
    """Shards of training and validation files. Raises DataError with the problems of all of them."""
    splits: list[list[Shard]] = []
    problems: list[Problem] = []
    for group in (paths, val):
        shards: list[Shard] = []
        for path in group:
            try:
                shards.append(read(path))
            except DataError as error:
                problems += error.problems
        splits.append(shards)
    if problems:
        raise DataError(problems)
    return Shards(tuple(splits[0]), tuple(splits[1]))


def _problem(path: Path, what: str, why: str = "", fix: str = "") -> Problem:
    return Problem(what, f"data.path: {path}", why, fix)


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
