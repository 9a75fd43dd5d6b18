"""A run's own copy of its text, a token for each byte: `data/train.bin`, `data/val.bin` and `data/corpus.json`.

Text without a tokenizer is small, so the run copies it and can resume on any machine. A token is a byte: there are 256
ids, and the losses of any two texts compare in bits per byte. Documents are separated by a line end. corpus.json is
written last, without it there is no copy; it has the SHA-256 of both files, which is compared at every start.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.errors import DataError, Problem
from harness.core.files import atomic_file
from harness.data.arrays import Ints
from harness.data.blocks import Damaged, read_fully
from harness.data.corpus import entropy, write_description
from harness.data.text import Document, Text, repeated

FORMAT = 1
VOCAB = 256
"""Number of token ids: one for each value of a byte."""
FIX = (
    "restore the data folder from another copy of this run, or start a new run with another --name"
)
"""What helps when the copy is damaged."""

_CHUNK = 1 << 22
_SEPARATOR = b"\n"


class TokenFile:
    """One split of the copy, read by place.

    The file stays open, so renaming or deleting it does no harm. It is not a memory map: if the file shrank, or its
    disk failed, the kernel would kill the process (SIGBUS) without a message.

    starts: int64, sorted: the places where a document begins.
    """

    def __init__(self, path: Path, size: int, starts: Ints) -> None:
        """Raises OSError; ValueError for anything but a regular file of `size` bytes."""
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is not a regular file")
        self._path, self._size = path, size
        self.starts = starts
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        actual = os.fstat(self._descriptor).st_size
        if actual != size:
            raise ValueError(f"{actual} bytes, {size} expected")

    def __len__(self) -> int:
        return self._size

    def read(self, places: Ints) -> tuple[Ints, dict[int, str]]:
        """As `corpus.Tokens.read`, but raises DataError in place of reporting damage."""
        width = places.shape[1]
        rows = [self._read(start, width) for start in places[:, 0].tolist()]
        tokens = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(places.shape)
        return tokens.astype(np.int64), {}

    def chunks(self) -> Iterator[bytes]:
        """All of it, in pieces of bounded size. Raises DataError."""
        for start in range(0, self._size, _CHUNK):
            yield self._read(start, min(_CHUNK, self._size - start))

    def _read(self, start: int, count: int) -> bytes:
        try:
            return read_fully(self._descriptor, start, count)
        except OSError as error:
            raise self._lost(f"bytes {start} to {start + count}: {error.strerror}") from error
        except Damaged as error:
            raise self._lost(f"{error}; it had {self._size}") from error

    def _lost(self, why: str) -> DataError:
        what = "the run's copy of its text cannot be read any longer"
        return DataError(Problem(what, str(self._path), why, FIX))


def size_of(documents: Sequence[Document]) -> int:
    """Bytes of the documents with the separators between them."""
    contents = sum(len(document.content) for document in documents)
    return contents + len(_SEPARATOR) * max(0, len(documents) - 1)


def write_snapshot(
    folder: Path, text: Text, train: Sequence[Document], val: Sequence[Document]
) -> None:
    """Copy the documents of both splits, and describe the copy. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    info: dict[str, Any] = {
        "format": FORMAT,
        "source": text.source,
        "separator": _SEPARATOR.decode(),
    }
    # Each chunk is read once: written, hashed for its split and for the whole, and counted.
    files: list[dict[str, Any]] = []
    overall = hashlib.sha256()
    counts = np.zeros(VOCAB, dtype=np.int64)
    for split, documents in (("train", train), ("val", val)):
        own = hashlib.sha256()
        with atomic_file(folder / f"{split}.bin") as stream:
            for chunk in _chunks(documents):
                stream.write(chunk)
                own.update(chunk)
                overall.update(chunk)
                ids = np.frombuffer(chunk, dtype=np.uint8)
                counts += np.bincount(ids, minlength=VOCAB)
        info[split] = {"bytes": size_of(documents), "sha256": own.hexdigest()}
        for each in documents:
            entry = {"name": each.name, "split": split, "bytes": len(each.content)}
            files.append(entry)

    # Written last: without corpus.json there is no copy.
    info["files"] = files
    if copies := repeated(train, val):
        info["repeated"] = copies
    skipped = text.skipped
    info["skipped"] = [{"name": skip.name, "reason": skip.reason} for skip in skipped]
    info["sha256"] = overall.hexdigest()
    info["unigram_bits_per_byte"] = entropy(counts) / math.log(2)
    write_description(folder, info)


def _chunks(documents: Sequence[Document]) -> Iterator[bytes]:
    """The documents and the separators between them, in pieces of bounded size."""
    for number, document in enumerate(documents):
        if number:
            yield _SEPARATOR
        for start in range(0, len(document.content), _CHUNK):
            yield document.content[start : start + _CHUNK]


def open_snapshot(folder: Path, info: Mapping[str, Any]) -> dict[str, TokenFile]:
    """The splits of the copy in `folder`, which `info` describes.

    Raises DataError naming each file that differs from its hash; ValueError, TypeError, KeyError or AttributeError if
    the description itself is damaged.
    """
    _check_types(info)
    splits: dict[str, TokenFile] = {}
    problems: list[Problem] = []
    overall = hashlib.sha256()
    for split in ("train", "val"):
        path = folder / f"{split}.bin"
        own = hashlib.sha256()
        try:
            # Every start reads the whole copy: it is small.
            splits[split] = TokenFile(path, info[split]["bytes"], _starts(info, split))
            for chunk in splits[split].chunks():
                own.update(chunk)
                overall.update(chunk)
        except DataError as error:
            problems += error.problems
        except (OSError, ValueError) as error:
            problems.append(damaged(path, getattr(error, "strerror", None) or str(error)))
        else:
            if own.hexdigest() != info[split]["sha256"]:
                problems.append(damaged(path, "its SHA-256 differs from the one in corpus.json"))
    # A run's data are compared by this hash, so that it must be of these files.
    if not problems and overall.hexdigest() != info["sha256"]:
        why = "its overall SHA-256 is not that of the two files"
        problems.append(damaged(folder / "corpus.json", why))
    if problems:
        raise DataError(problems)
    return splits


def _check_types(info: Mapping[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError if a value has another type than `write_snapshot` gave it."""
    texts = [info["source"], info["sha256"], info["train"]["sha256"], info["val"]["sha256"]]
    sizes = [info["train"]["bytes"], info["val"]["bytes"]]
    for file in info["files"]:
        texts += [file["name"], file["split"]]
        sizes.append(file["bytes"])
    for skip in info["skipped"]:
        texts += [skip["name"], skip["reason"]]
    are_texts = all(isinstance(text, str) for text in texts)
    if info["format"] != FORMAT or not are_texts:
        raise ValueError("it is of another format")
    # `bool` would pass as an int.
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("a size is no whole number")
    bits = info["unigram_bits_per_byte"]
    if not isinstance(bits, float) or not math.isfinite(bits):
        raise ValueError("unigram_bits_per_byte is no number")


def _starts(info: Mapping[str, Any], split: str) -> Ints:
    starts: list[int] = []
    place = 0
    for file in info["files"]:
        if file["split"] == split:
            starts.append(place)
            place += file["bytes"] + len(_SEPARATOR)
    # A split without a file still has a beginning.
    return np.array(starts or [0], dtype=np.int64)


def damaged(path: Path, why: str) -> Problem:
    """What to say of a file of the copy, or its description."""
    return Problem("the run's copy of its text is damaged", str(path), why=why, fix=FIX)
