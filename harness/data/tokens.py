"""What a run trains on: described in `data/corpus.json`, hashed, so that a resume anywhere sees the same tokens.

Text without a tokenizer is copied into the run, a snapshot: a token is a byte, so the vocabulary has 256 entries and
the losses of any two texts compare in bits per byte. It is `data/train.bin` and `data/val.bin` (uint8). Rows, and text
with a tokenizer, are made into token ids in `data/tokens/`. Files of token ids, and folders that `harness data prepare`
made, stay where they are (`corpus`).
corpus.json is written last: without it there is no data. Each file is read where it lies on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.config import DataConfig, Documents
from harness.core.errors import DataError, Problem
from harness.core.files import MAX_LARGE, atomic_file, home, read_json, read_mapping
from harness.data import corpus, registry
from harness.data.blocks import BLOCK, Damaged, Stamp, read_fully
from harness.data.corpus import Known, Tokens, Vocabulary, write_corpus
from harness.data.hub import PREFIX, Fetched, fetch
from harness.data.prepare import Preparation, prepare_dataset, too_large
from harness.data.registry import no_such
from harness.data.shards import Shards, is_validation, read_files, read_shard, validation_beside, without_tests
from harness.data.source import (
    COPY,
    PREPARED,
    RECORD,
    TOKENS,
    look_around,
    origin_of_files,
    origin_of_text,
    save_origin,
    stamps,
)
from harness.data.text import MAX_BYTES, Document, Text, divide, read_text, repeated, standard_library
from harness.data.tokenizer import load_encoder, tokenizer_file

_CHUNK = 1 << 22
FIX = "restore the data folder from another copy of this run, or start a new run with another --name"
"""What helps when the snapshot is damaged."""


class TokenFile:
    """A file of uint8 tokens, read by place; keeps the file open, so that renaming or deleting it does no harm.

    Not a memory map: if the file shrank, or its disk failed, the kernel would kill the process (SIGBUS) without a word.
    Raises OSError, and ValueError for anything but a regular file of `size` bytes.
    """

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

    def _read(self, start: int, count: int) -> bytes:
        try:
            return read_fully(self._descriptor, start, count)
        except OSError as error:
            raise self._lost(f"bytes {start} to {start + count}: {error.strerror}") from error
        except Damaged as error:
            raise self._lost(f"{error}; it had {self._size}") from error

    def _lost(self, why: str) -> DataError:
        return DataError(
            Problem("the run's copy of its text cannot be read any longer", str(self._path), why=why, fix=FIX)
        )


VOCAB = 256
"""Number of token ids: one per byte value."""

_FORMAT = 1
# Bytes of a source that a run makes into token ids by itself: the other ranks wait, and every run does it anew.
_TOKENIZED = 256 << 20
_SEPARATOR = b"\n"
_PREPARE_FIX = "prepare it again into an empty folder, or copy it again"
_LISTED = {"files": "split", "skipped": "reason"}


@dataclass(frozen=True, slots=True)
class TokenData:
    """A run's tokens, read when they are wanted. train, val: of a snapshot uint8, one token per byte.

    info: the contents of `corpus.json`. Of a snapshot: source, files (name, split, bytes), skipped files, sha256 of
    each split and of both in a row, unigram_bits_per_byte (entropy of the whole text's bytes: what a model that only
    counts bytes reaches). Of a corpus: see `corpus.write_corpus`.
    """

    train: TokenFile | Tokens | npt.NDArray[np.uint8]
    val: TokenFile | Tokens | npt.NDArray[np.uint8]
    info: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """Of a snapshot: hash of the training bytes followed by the validation bytes. Of a corpus: of what it is."""
        return self.info["sha256"]

    @property
    def vocab(self) -> int:
        """How many ids a model must know: a multiple of corpus.PADDED_TO."""
        return self.info.get("vocab", VOCAB)

    @property
    def is_snapshot(self) -> bool:
        """Whether the run has a copy of it, as bytes."""
        return self.info["format"] == _FORMAT

    @property
    def ids(self) -> int:
        """How many ids there may be, from 0: of the tokenizer, else the largest of both splits + 1."""
        return self.info.get("ids", VOCAB)

    def starts(self, split: str) -> npt.NDArray[np.int64]:
        """Places of a split's tokens where a document is known to begin, sorted."""
        tokens = self.train if split == "train" else self.val
        if isinstance(tokens, Tokens):
            return tokens.starts
        sizes = [file["bytes"] + len(_SEPARATOR) for file in self.info["files"] if file["split"] == split]
        return np.concatenate([[0], np.cumsum(np.array(sizes, dtype=np.int64))])[: max(1, len(sizes))]


def prepare(
    config: DataConfig,
    run_dir: Path,
    global_batch: int = 1,
    lead: bool = True,
    reading: Callable[[str | None], None] = lambda path: None,
) -> TokenData:
    """The run's tokens: those it began with, else what `config.path` (or the standard library) has now.

    What the run began with is checked against its hashes, and a snapshot used even if the source has changed since.
    With several ranks: rank 0 calls this first, the others after a barrier, without `lead`: they make and check
    nothing. reading: see `blocks.CheckedFile`. Raises DataError for data that cannot be used (naming all that is
    wrong), or has changed; a folder that cannot be written; or less than `global_batch` training samples and one
    validation sample; ConfigError for a tokenizer that cannot be read, or a library that is missing.
    """
    return prepare_in(config, run_dir / "data", global_batch, lead, reading)


def prepare_in(
    config: DataConfig, folder: Path, global_batch: int, lead: bool, reading: Callable[[str | None], None]
) -> TokenData:
    """As `prepare`, in a folder of the run's data."""
    if not (folder / "corpus.json").exists():
        try:
            _make(config, folder, global_batch)
        except OSError as error:
            raise DataError(
                Problem(
                    f"the text cannot be copied into the run: {error.strerror}",
                    str(folder),
                    fix="make the run folder writable, or free some space",
                )
            ) from error
    info = _read_info(folder)
    snapshot = info.get("format") == _FORMAT
    data = _open(folder, info) if snapshot else _open_corpus(folder, info, config, lead, reading)
    _check_length(data.info["source"], len(data.train), len(data.val), config, global_batch)
    return data


def _make(config: DataConfig, folder: Path, global_batch: int) -> None:
    """Write corpus.json, after what it describes. Raises OSError, DataError, ConfigError."""
    (folder / RECORD).unlink(missing_ok=True)
    if config.path and config.path.startswith(PREFIX):
        _from_hub(config, config.path, folder)
        return
    path = home(config.path) if config.path else None
    if path and not path.exists() and (whole := path.with_name(f"{path.name}.bin")).is_file():
        path = whole  # as Megatron names its pairs of files
    if config.path and path and not os.path.lexists(path):
        raise DataError(no_such(config.path, path))
    kind = config.format if config.format != "auto" else registry.look(path) if path else "text"
    if kind == "text" and not config.tokenizer:
        before = stamps(look_around(path, None)) if path else {}
        text = read_text(path, config.bad) if path else standard_library()
        text, train, val = divide(text, config.val_fraction)
        _check_length(text.source, _size(train), _size(val), config, global_batch)
        if path:
            save_origin(folder, origin_of_text(path, before, text.documents), COPY)
        _write(folder, text, train, val)
        return
    if path is None:
        fix = "give your own: data.path=<file or folder>"
        raise DataError(Problem("a tokenizer needs a text of yours", "data.tokenizer", fix=fix))
    if kind == "tokens":
        info = _token_files(config, path, folder)
        if config.tokenizer:
            known = [str(tokenizer_file(Path(config.tokenizer)).resolve()), info["tokenizer"]]
            save_origin(folder, origin_of_files(path, None, False, {}, known), TOKENS)
    elif kind == "prepared":
        info = _open_prepared(path, folder, _hold_out(config), config.tokenizer)
        if origin := read_mapping(path / registry.PREPARED, MAX_LARGE).get("origin"):
            save_origin(folder, origin, PREPARED, path)
    else:
        info = _tokenized(config, str(path), kind, folder)
    tokenizer = config.tokenizer or (str(path) if kind == "prepared" and (path / "tokenizer.json").is_file() else None)
    _save(folder, info, tokenizer)


def _from_hub(config: DataConfig, given: str, folder: Path) -> None:
    """As `_make`, of a data set of the hub."""
    most = _TOKENIZED if config.tokenizer else MAX_BYTES

    def check(size: int, kind: str) -> None:
        if size > most:
            raise too_large(given, kind, most, config.tokenizer)

    hub = fetch(given, config, config.cache, check)
    if config.format not in ("auto", hub.kind):
        raise DataError(Problem(f"is {hub.kind}", f"data.path: {given}", fix="leave data.format out"))
    _save(folder, _tokenized(config, hub.folder, hub.kind, folder, hub), config.tokenizer)


def _tokenized(
    config: DataConfig, source: str, kind: Documents, folder: Path, hub: Fetched | None = None
) -> dict[str, Any]:
    """Make the token ids of text in `folder`/tokens: what corpus.json says of them."""
    wanted = Preparation(source, kind, config.text_key, config.bad, config.tokenizer, config.val_fraction, hub)
    most = _TOKENIZED if config.tokenizer else MAX_BYTES
    if origin := prepare_dataset(wanted, folder / "tokens", most=most, anew=True).get("origin"):
        save_origin(folder, origin, TOKENS)
    return _open_prepared(folder / "tokens", folder, _hold_out(config), None)


def _save(folder: Path, info: Mapping[str, Any], tokenizer: str | None) -> None:
    """Write corpus.json, after a copy of the tokenizer."""
    if tokenizer:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tokenizer_file(Path(tokenizer)), folder / "tokenizer.json")
    corpus.save_corpus(folder, info)


def _token_files(config: DataConfig, path: Path, folder: Path) -> dict[str, Any]:
    vocabulary = load_encoder(config.tokenizer).vocabulary if config.tokenizer else None
    separator = config.separator if config.separator is not None else vocabulary.separator if vocabulary else None
    left_out: list[tuple[str, str]] = []
    if path.is_dir():
        every = sorted(each for each in path.iterdir() if each.suffix.lower() == ".bin")
        real_last = sorted(every, key=lambda each: (each.is_symlink(), each.name), reverse=True)
        first = {each.resolve(): each for each in real_last}
        links = [each for each in every if first[each.resolve()] != each]
        files, left_out = without_tests([each.name for each in every if each not in links])
        left_out += [(each.name, "a link to another file of the folder") for each in links]
        val = [path / name for name in files if is_validation(name)]
        train = [path / name for name in files if path / name not in val]
        ours = {*every, *(each.with_suffix(".idx") for each in every)}
        others = [each for each in sorted(path.iterdir()) if each not in ours]
        left_out += [(each.name, "not a .bin") for each in others if not each.name.startswith(".")]
    else:
        path = path.with_suffix(".bin") if path.suffix.lower() == ".idx" else path
        beside = validation_beside(path)
        train, val = [path], [beside] if beside else []
    if not train:
        raise DataError(Problem("has no training files", f"data.path: {path}", fix="name one without val in its name"))
    shards = read_files(train, val, lambda file: read_shard(file, config.dtype))
    shards = Shards(shards.train, shards.val, tuple(left_out))
    return write_corpus(folder, str(path), "tokens", shards, vocabulary, separator, _hold_out(config))


def _open_prepared(path: Path, folder: Path, held_out: Callable[[int], int], tokenizer: str | None) -> dict[str, Any]:
    """As `corpus.write_corpus`, for `folder` of a run. tokenizer: what the user gave beside it.

    Raises DataError for a folder that is not whole, or was made with another tokenizer; ConfigError, OSError.
    """
    where = f"data.path: {path}"
    try:
        info = read_json(path / registry.PREPARED, MAX_LARGE)
        vocabulary = Vocabulary(**info["vocabulary"])
        known = {
            str(path / shard["name"]): Known(
                Stamp(shard["bytes"], shard["mtime_ns"], shard["inode"]),
                bytes.fromhex(shard["blocks"]),
                shard["largest"],
            )
            for shard in info["shards"]
        }
        names = {
            split: [path / each["name"] for each in info["shards"] if each["split"] == split]
            for split in ("train", "val")
        }
        left_out = tuple((skip["name"], skip["reason"]) for skip in info["skipped"])
        nats, source, kind = float(info["unigram_nats"]), str(info["source"]), str(info["kind"])
        source_files = int(info["source_files"])
        ids, separator = vocabulary.ids, vocabulary.separator
        if type(ids) is not int or ids < 1 or not isinstance(separator, int | None):
            raise ValueError("its vocabulary is no number of ids")
        if info["block_bytes"] != BLOCK:
            raise ValueError(f"its blocks have {info['block_bytes']} bytes, not {BLOCK}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{registry.PREPARED}: {type(error).__name__}: {error}"[:300]
        raise DataError(Problem("is not whole", where, why, _PREPARE_FIX)) from error
    if tokenizer and load_encoder(tokenizer).vocabulary.tokenizer != vocabulary.tokenizer:
        was = "with another one" if vocabulary.tokenizer else "without one, as bytes"
        fix = "leave data.tokenizer out, or prepare the source again with it"
        raise DataError(Problem("was prepared with another tokenizer", where, f"it was made {was}", fix))
    missing = [file.name for files in names.values() for file in files if not file.is_file()]
    if missing:
        raise DataError([Problem("is missing", f"{where}/{name}", fix=_PREPARE_FIX) for name in missing])
    shards = read_files(names["train"], names["val"], lambda file: read_shard(file, "uint16"))
    shards = Shards(shards.train, shards.val, left_out)
    made = write_corpus(folder, source, kind, shards, vocabulary, vocabulary.separator, held_out, known, nats)
    return {**made, "source_files": source_files}


def _hold_out(config: DataConfig) -> Callable[[int], int]:
    return lambda tokens: corpus.hold_out(tokens, config.val_fraction, config.context + 1)


def _read_info(folder: Path) -> Mapping[str, Any]:
    try:
        info = read_json(folder / "corpus.json", MAX_LARGE)
        if not isinstance(info, dict):
            raise TypeError("it is no mapping")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(_undescribed(folder, error)) from error
    return info


def _open_corpus(
    folder: Path, info: Any, config: DataConfig, lead: bool, reading: Callable[[str | None], None]
) -> TokenData:
    try:
        info = corpus.parse_corpus(info)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise DataError(_undescribed(folder, error)) from error
    info = corpus.relocate(folder, written := info, home(config.path) if config.path else None)
    if lead:
        checked = corpus.check_corpus(folder, info)
        if checked != written:
            info = checked
            with contextlib.suppress(OSError):  # what is not written down is hashed again at the next start
                corpus.save_corpus(folder, info)
    splits = corpus.open_corpus(folder, info, config.packing == "documents", reading)
    return TokenData(splits["train"], splits["val"], info)


def _undescribed(folder: Path, error: Exception) -> Problem:
    why = f"it cannot be read as the snapshot's description: {type(error).__name__}: {error}"
    return _damaged(folder / "corpus.json", why[:300])


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
    if copies := repeated(train, val):
        info["repeated"] = copies
    info["skipped"] = [{"name": skip.name, "reason": skip.reason} for skip in text.skipped]
    info["sha256"] = overall.hexdigest()
    info["unigram_bits_per_byte"] = unigram_entropy(counts)
    corpus.save_corpus(folder, info)


def _chunks(documents: Sequence[Document]) -> Iterator[bytes]:
    """The documents and the separators between them, in pieces of bounded size."""
    for number, document in enumerate(documents):
        if number:
            yield _SEPARATOR
        for start in range(0, len(document.content), _CHUNK):
            yield document.content[start : start + _CHUNK]


def _open(folder: Path, info: Mapping[str, Any]) -> TokenData:
    """The snapshot in `folder`. Raises DataError naming each file of it that does not match its hash."""
    try:
        expected = _expected(info)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(_undescribed(folder, error)) from error
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
                f"training has {train} tokens and needs {need_train} (train.global_batch {global_batch} x data.context "
                f"{config.context} + 1); validation has {val} and needs {need_val}"
            ),
            fix="give more text, or lower data.context or train.global_batch",
        )
    )
