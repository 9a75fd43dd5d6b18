"""The snapshot: the run's text as bytes on disk, hashed, so that a resume anywhere sees the same tokens.

A token is a byte, so the vocabulary has 256 entries and the losses of any two texts compare in bits per byte. The
run keeps `data/train.bin` and `data/val.bin` (uint8) and `data/corpus.json`, which is written last: without it there
is no snapshot. Each file is read where it lies on disk.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.config import DataConfig
from harness.core.errors import DataError, Problem
from harness.core.files import MAX_LARGE, atomic_file, dump_json, read_json
from harness.data.text import Document, Text, read_text, split_documents, standard_library

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


VOCAB = 256
"""Number of token ids: one per byte value."""

_FORMAT = 1
_SEPARATOR = b"\n"
_LISTED = {"files": "split", "skipped": "reason"}


@dataclass(frozen=True, slots=True)
class TokenData:
    """A run's tokens. train, val: uint8, one token per byte, read from the snapshot when they are wanted.

    info: the contents of `corpus.json`: source, files (name, split, bytes), skipped files, sha256 of each split and
    of both in a row, unigram_bits_per_byte.
    """

    train: TokenFile | npt.NDArray[np.uint8]
    val: TokenFile | npt.NDArray[np.uint8]
    info: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """Hash of the training bytes followed by the validation bytes."""
        return self.info["sha256"]

    @property
    def unigram_bits_per_byte(self) -> float:
        """Entropy of the whole text's byte distribution, in bits: what a model that only counts bytes reaches."""
        return self.info["unigram_bits_per_byte"]


def prepare(config: DataConfig, run_dir: Path, global_batch: int = 1) -> TokenData:
    """The run's tokens: its snapshot if it has one, else one made now from `config.path` or the standard library.

    An existing snapshot is checked against its hashes and used even if the source has changed since. With several
    ranks: rank 0 calls this first, the others after a barrier. Raises DataError for unusable text (see `read_text`),
    a damaged snapshot, a folder that cannot be written, or text too short for `global_batch` training samples and one
    validation sample.
    """
    folder = run_dir / "data"
    if not (folder / "corpus.json").exists():
        text = read_text(Path(config.path), config.bad) if config.path else standard_library()
        train, val = split_documents(text.documents, config.val_fraction)
        _check_length(text.source, _size(train), _size(val), config, global_batch)
        try:
            _write(folder, text, train, val)
        except OSError as error:
            raise DataError(
                Problem(
                    f"the text cannot be copied into the run: {error.strerror}",
                    str(folder),
                    fix="make the run folder writable, or free some space",
                )
            ) from error
    data = _open(folder)
    _check_length(data.info["source"], len(data.train), len(data.val), config, global_batch)
    return data


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Shannon entropy in bits of the distribution that `counts` gives: -sum p log2 p (Shannon, 1948)."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _write(folder: Path, text: Text, train: Sequence[Document], val: Sequence[Document]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    overall = hashlib.sha256()
    counts = np.zeros(VOCAB, dtype=np.int64)
    info: dict[str, Any] = {"format": _FORMAT, "source": text.source, "separator": _SEPARATOR.decode()}
    for split, documents in (("train", train), ("val", val)):
        digest = hashlib.sha256()
        with atomic_file(folder / f"{split}.bin") as stream:
            for chunk in _chunks(documents):
                stream.write(chunk)
                digest.update(chunk)
                overall.update(chunk)
                counts += np.bincount(np.frombuffer(chunk, dtype=np.uint8), minlength=VOCAB)
        info[split] = {"bytes": _size(documents), "sha256": digest.hexdigest()}
    info["files"] = [
        {"name": document.name, "split": split, "bytes": len(document.content)}
        for split, documents in (("train", train), ("val", val))
        for document in documents
    ]
    info["skipped"] = [{"name": skip.name, "reason": skip.reason} for skip in text.skipped]
    info["sha256"] = overall.hexdigest()
    info["unigram_bits_per_byte"] = unigram_entropy(counts)
    described = dump_json(info)
    if len(described) > MAX_LARGE:
        fix = "join small files into larger ones"
        raise DataError(Problem(f"{len(info['files'])} files are too many", text.source, fix=fix))
    with atomic_file(folder / "corpus.json") as stream:
        stream.write(described)


def _chunks(documents: Sequence[Document]) -> Iterator[bytes]:
    """The documents and the separators between them, in pieces of bounded size."""
    for number, document in enumerate(documents):
        if number:
            yield _SEPARATOR
        for start in range(0, len(document.content), _CHUNK):
            yield document.content[start : start + _CHUNK]


def _open(folder: Path) -> TokenData:
    """The snapshot in `folder`. Raises DataError naming each file of it that does not match its hash."""
    try:
        info = read_json(folder / "corpus.json", MAX_LARGE)
        expected = _expected(info)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"it cannot be read as the snapshot's description: {type(error).__name__}: {error}"
        raise DataError(_damaged(folder / "corpus.json", why[:300])) from error
    splits: dict[str, TokenFile] = {}
    problems: list[Problem] = []
    overall = hashlib.sha256()
    for split, (size, sha256) in expected.items():
        path = folder / f"{split}.bin"
        digest = hashlib.sha256()
        try:
            splits[split] = TokenFile(path, size)
            for chunk in splits[split].chunks():
                digest.update(chunk)
                overall.update(chunk)
        except DataError as error:
            problems += error.problems
        except (OSError, ValueError) as error:
            problems.append(_damaged(path, getattr(error, "strerror", None) or str(error)))
        else:
            if digest.hexdigest() != sha256:
                problems.append(_damaged(path, "its SHA-256 differs from the one in corpus.json"))
    if not problems and overall.hexdigest() != info["sha256"]:
        problems.append(_damaged(folder / "corpus.json", "its overall SHA-256 is not that of the two files"))
    if problems:
        raise DataError(problems)
    return TokenData(splits["train"], splits["val"], info)


def _expected(info: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """(bytes, SHA-256) of each split. Raises ValueError, TypeError or KeyError if `info` is not what it should be."""
    entropy = info["unigram_bits_per_byte"]
    named = [(entry["name"], entry[key]) for part, key in _LISTED.items() for entry in info[part]]
    texts = [info["source"], info["sha256"], *(text for pair in named for text in pair)]
    if info["format"] != _FORMAT or not all(isinstance(text, str) for text in texts):
        raise ValueError("it is of another format")
    if not isinstance(entropy, float) or not math.isfinite(entropy):
        raise ValueError("unigram_bits_per_byte is no number")
    expected = {split: (info[split]["bytes"], info[split]["sha256"]) for split in ("train", "val")}
    if not all(type(size) is int and size >= 0 for size, _ in expected.values()):
        raise ValueError("a size is no whole number")
    return expected


def _damaged(path: Path, why: str) -> Problem:
    return Problem("the run's copy of its text is damaged", str(path), why=why, fix=FIX)


def _size(documents: Sequence[Document]) -> int:
    return sum(len(document.content) for document in documents) + len(_SEPARATOR) * max(0, len(documents) - 1)


def _check_length(source: str, train: int, val: int, config: DataConfig, global_batch: int) -> None:
    """n samples of `context` inputs and as many targets need n * context + 1 tokens: a target is the next input."""
    need_train, need_val = global_batch * config.context + 1, config.context + 1
    if train >= need_train and val >= need_val:
        return
    raise DataError(
        Problem(
            "too short to train on",
            f"data.path: {source}" if config.path else source,
            why=(
                f"training has {train} bytes and needs {need_train} (train.global_batch {global_batch} x data.context "
                f"{config.context} + 1); validation has {val} and needs {need_val}"
            ),
            fix="give more text, or lower data.context or train.global_batch",
        )
    )
