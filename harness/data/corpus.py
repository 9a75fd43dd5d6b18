"""A corpus of token ids that stays where it is: described once, checked at every start, read block by block.

1. `describe_corpus` reads all files once. `save_corpus` writes what it returns, `data/corpus.json` of the run: every
   file with its size, time, inode, dtype and the hash of each of its blocks; which part of which file is in which
   split; how large ids get.
2. `check_corpus`, at a start, compares the files with that: some blocks of a file whose size, time and inode are
   unchanged, all blocks of any other.
3. `open_corpus` gives `Tokens`, which read only blocks that match their hashes (`blocks.CheckedFile`).
"""

from __future__ import annotations

import bisect
import hashlib
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import DataError, Problem, some
from harness.core.files import MAX_LARGE, atomic_file, dump_json, file_sha256
from harness.data.arrays import Ints
from harness.data.blocks import (
    BLOCK,
    DIGEST,
    CheckedFile,
    Damaged,
    Stamp,
    block_cache,
    differing,
    scan,
)
from harness.data.shards import Shard, Shards, document_starts

FORMAT = 4
PADDED_TO = 16
"""Vocabularies are rounded up to a multiple of this: the head of a model can then run in FP8."""
LARGEST = 1 << 22
"""Ids from here on mean a wrong dtype: no tokenizer has as many."""

# The frequencies of ids are counted in about this many bytes of the corpus.
_COUNTED = 256 << 20
_NAMED = 8
_OTHER_FILES = 512
_FIX_CHANGED = (
    "put the files back as they were when the run began, or start a new run with another --name"
)
Ids = npt.NDArray[Any]


def padded_vocabulary(ids: int) -> int:
    """The vocabulary for `ids` different ids: rounded up to PADDED_TO."""
    return -(-ids // PADDED_TO) * PADDED_TO


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer may make.

    ids: how many ids there are, from 0.
    separator: the id that ends a document; None if there is none.
    tokenizer: its hash; empty for bytes, or where nobody said which tokenizer it was.
    """

    ids: int
    separator: int | None = None
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A part of a file that belongs to a split: `count` tokens from the token `first` on."""

    file: CheckedFile
    shard: Shard
    first: int
    count: int


class Tokens:
    """One split: pieces of files, one after the other, read by place and checked as they are read.

    starts: int64, sorted: the places of the split where a document is known to begin.
    """

    def __init__(self, pieces: Sequence[FilePiece], starts: Ints) -> None:
        self._pieces = pieces
        self._ends = np.cumsum([piece.count for piece in pieces]).tolist()
        self.starts = starts

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, places: Ints) -> tuple[Ints, dict[int, str]]:
        """Tokens at `places`, int64 [rows, width]; the places of a row follow each other.

        A row that cannot be read is 0, and the second result says why, with the file.
        """
        width = places.shape[1]
        rows = np.zeros(places.shape, dtype=np.int64)
        damage: dict[int, str] = {}
        for number, start in enumerate(places[:, 0].tolist()):
            try:
                rows[number] = self._read_row(start, width)
            except Damaged as error:
                damage[number] = str(error)
        return rows, damage

    def _read_row(self, start: int, width: int) -> Ids:
        """`width` tokens from `start` on; they may lie in several pieces."""
        number = bisect.bisect_right(self._ends, start)
        parts: list[Ids] = []
        while width:
            piece = self._pieces[number]
            dtype = piece.shard.numpy_dtype
            # From the place in the split to the place in the piece, and from there to bytes of the file.
            inside = start - (self._ends[number] - piece.count)
            take = min(width, piece.count - inside)
            first_byte = piece.shard.offset + (piece.first + inside) * dtype.itemsize
            data = piece.file.read(first_byte, take * dtype.itemsize)
            parts.append(np.frombuffer(data, dtype=dtype))
            start, width, number = start + take, width - take, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class EarlierRead:
    """What an earlier reading of a whole file has found.

    stamp: of the file when it was read.
    digests: of its blocks.
    largest: its largest id; -1 if it has none.
    """

    stamp: Stamp
    digests: bytes
    largest: int


@dataclass(slots=True)
class _Seen:
    """What the reading of a whole file has found.

    digests, largest: as in `EarlierRead`.
    smallest: the smallest id below 0, else 0.
    counts: how often each id occurs in the chunks that were counted.
    """

    digests: bytes = b""
    largest: int = -1
    smallest: int = 0
    counts: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


def describe_corpus(
    folder: Path,
    source: str,
    kind: str,
    shards: Shards,
    vocabulary: Vocabulary | None,
    separator: int | None,
    held_out: Callable[[int], int],
    earlier: Mapping[str, EarlierRead] | None = None,
    unigram_nats: float | None = None,
) -> dict[str, Any]:
    """Read all files once. Returns their description, which `save_corpus` writes into `folder`.

    folder: paths in the description are relative to it where they can be.
    source: the config's `data.path` or the like, for messages.
    kind: of the files.
    shards: the files, and what was left out.
    vocabulary: of the tokenizer; None: as many ids as there are.
    separator: the id that ends a document.
    held_out: number of tokens in all -> how many of them, at the end, are validation. Asked if no file is validation.
    earlier: by path, files that were hashed before; of an untouched one only some blocks are compared.
    unigram_nats: the entropy of the ids, if it is known.

    Raises DataError with the problems of all files; OSError.
    """
    earlier = earlier or {}
    every = [*shards.train, *shards.val]
    # Ids are counted in every `stride`-th chunk, so that _COUNTED bytes of a large corpus are enough.
    total = sum(shard.tokens * shard.numpy_dtype.itemsize for shard in every)
    stride = max(1, -(-total // _COUNTED))

    # Go on after a bad file: one error names all of them.
    files: list[dict[str, Any]] = []
    problems: list[Problem] = []
    counts = np.zeros(0, dtype=np.int64)
    largest = -1
    for shard in every:
        try:
            stamp = Stamp.of(shard.path)
            before = earlier.get(str(shard.path))
            seen = _read(shard, stamp, before, stride)
            if Stamp.of(shard.path) != stamp:
                raise Damaged("it changed while it was read")
        except (OSError, Damaged) as error:
            where = f"data.path: {shard.path}"
            problems.append(Problem("cannot be read", where, _reason(error), "copy it again"))
            continue
        problems += _implausible(shard, seen, vocabulary)
        largest = max(largest, seen.largest)
        counts = add_counts(counts, seen.counts)
        files.append(_entry(folder, shard, stamp, seen.digests))
    if problems:
        raise DataError(problems)

    # What nobody has given follows from the ids that were read.
    if vocabulary is None:
        vocabulary = Vocabulary(largest + 1)
    separators: int | None = None
    if unigram_nats is None:
        unigram_nats = entropy(counts)
        if separator is not None:
            separators = int(counts[separator]) if separator < len(counts) else 0
    left_out = shards.left_out
    skipped = [{"name": name, "reason": reason} for name, reason in left_out]
    info: dict[str, Any] = {
        "format": FORMAT,
        "source": source,
        "kind": kind,
        "ids": vocabulary.ids,
        "vocab": padded_vocabulary(vocabulary.ids),
        "largest": largest,
        "separator": separator,
        "separators": separators,
        "tokenizer": vocabulary.tokenizer,
        "block_bytes": BLOCK,
        "unigram_nats": unigram_nats,
        "files": files,
        "skipped": skipped,
    }
    for split, pieces in _divide(shards, held_out).items():
        tokens = sum(count for *_, count in pieces)
        info[split] = {"tokens": tokens, "pieces": pieces}
    # Last: it is the hash of the rest.
    info["sha256"] = _identity(info)
    return info


def _read_ids(shard: Shard, stride: int) -> _Seen:
    """Read a whole file; count the ids of every `stride`-th chunk."""
    dtype = shard.numpy_dtype
    seen = _Seen()
    chunk = 0

    def see(start: int, data: bytes) -> None:
        nonlocal chunk
        header = shard.offset if start == 0 else 0
        count = (len(data) - header) // dtype.itemsize
        ids = np.frombuffer(data, dtype, count, header)
        if not len(ids):
            return
        seen.largest = max(seen.largest, int(ids.max()))
        seen.smallest = min(seen.smallest, int(ids.min()))

        # bincount takes no negative ids, and memory for every id up to the largest: a wrong dtype would fill it.
        if chunk % stride == 0 and seen.smallest >= 0 and seen.largest < LARGEST:
            seen.counts = add_counts(seen.counts, np.bincount(ids))
        chunk += 1

    seen.digests = scan(shard.path, see)
    return seen


def _read(shard: Shard, stamp: Stamp, before: EarlierRead | None, stride: int) -> _Seen:
    """Read a whole file, or compare it with what was found before: an untouched one by some of its blocks.

    Raises OSError; Damaged if it differs.
    """
    if before is None:
        return _read_ids(shard, stride)
    what = "it is not what was prepared"
    # Untouched since: some of the blocks are enough, to find a disk that has lost bits.
    if stamp == before.stamp:
        if wrong := differing(shard.path, before.digests, sampled=True):
            named = some(wrong, _NAMED)
            raise Damaged(f"{what}: blocks that differ from their hashes: {named}")
        return _Seen(before.digests, before.largest)
    seen = _read_ids(shard, stride)
    if seen.digests != before.digests:
        raise Damaged(f"{what}: its blocks differ from their hashes")
    return seen


def _implausible(
    shard: Shard,
    seen: _Seen,
    vocabulary: Vocabulary | None,
) -> list[Problem]:
    """What is wrong with the ids of a file."""
    where = f"data.path: {shard.path}"
    # A header or an index names the dtype, which data.dtype does not change.
    fix = "write it again"
    if shard.index is None and shard.offset == 0:
        fix = f"set data.dtype to what the file was written with, or {fix}"
    if seen.smallest < 0:
        return [Problem(f"has the token id {seen.smallest}", where, "ids begin at 0", fix)]
    if seen.largest >= LARGEST:
        why = f"no vocabulary is as large: read as {shard.dtype}, it is probably of another dtype"
        return [Problem(f"has the token id {seen.largest}", where, why, fix)]
    if vocabulary is not None and seen.largest >= vocabulary.ids:
        what = f"has the token id {seen.largest}, which the tokenizer does not"
        why = f"the tokenizer has {vocabulary.ids} ids, 0 to {vocabulary.ids - 1}"
        fix = "give the tokenizer that made these ids in data.tokenizer, or none"
        return [Problem(what, where, why, fix)]
    return []


def _entry(folder: Path, shard: Shard, stamp: Stamp, digests: bytes) -> dict[str, Any]:
    index, index_sha256 = "", ""
    if shard.index is not None:
        index = _written(folder, shard.index)
        index_sha256 = file_sha256(shard.index)
    return {
        "name": shard.path.name,
        "path": _written(folder, shard.path),
        **asdict(stamp),
        "dtype": shard.dtype,
        "offset": shard.offset,
        "tokens": shard.tokens,
        "index": index,
        "index_sha256": index_sha256,
        "blocks": digests.hex(),
    }


def _divide(shards: Shards, held_out: Callable[[int], int]) -> dict[str, list[list[int]]]:
    """[number of the file, first token, tokens] of every piece of each split."""
    every = [*shards.train, *shards.val]
    whole = [[number, 0, shard.tokens] for number, shard in enumerate(every)]
    train = whole[: len(shards.train)]
    val = whole[len(shards.train) :]
    if val:
        return {"train": train, "val": val}

    # Hold out the end: whole files from the last one on, and a part of the one where enough is reached.
    wanted = held_out(sum(count for *_, count in train))
    while wanted and train:
        number, first, count = train.pop()
        take = min(wanted, count)
        # Validation gets the tokens from `cut` on. 0: the whole file.
        cut = 0
        if take < count:
            cut = _document_cut(every[number], count - take)
        val.insert(0, [number, cut, count - cut])
        wanted -= take
        if cut:
            train.append([number, first, cut])
    return {"train": train, "val": val}


def _document_cut(shard: Shard, place: int) -> int:
    """Where to cut a shard: the beginning of a document that is nearest to `place`.

    If none is within half of the tokens that follow `place`, or the documents are not known, it is `place` itself.
    """
    if shard.index is None:
        return place
    starts = document_starts(shard.index)
    reach = (shard.tokens - place) // 2
    # Not at 0, or training would get nothing of the file.
    near = starts[(starts > 0) & (abs(starts - place) <= reach)]
    if not len(near):
        return place
    nearest = np.argmin(abs(near - place))
    return int(near[nearest])


def hold_out(tokens: int, share: float, least: int) -> int:
    """How many of all `tokens` are validation, at their end: `share` of them, but at least `least` (one sample's)."""
    return min(tokens, max(round(tokens * share), least))


def save_corpus(folder: Path, info: Mapping[str, Any]) -> None:
    """Write corpus.json with its checksum. Raises as `write_description`."""
    write_description(folder, {**info, "checksum": _checksum(info)})


def write_description(folder: Path, info: Mapping[str, Any]) -> None:
    """Write corpus.json. Raises OSError; DataError if there are too many files to describe."""
    described = dump_json(info)
    if len(described) > MAX_LARGE:
        what = f"{len(info['files'])} files are too many"
        fix = "join small files into larger ones"
        raise DataError(Problem(what, info["source"], fix=fix))
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / "corpus.json") as stream:
        stream.write(described)


def parse_corpus(info: Mapping[str, Any]) -> dict[str, Any]:
    """What `save_corpus` was given. Raises ValueError, TypeError or KeyError if corpus.json is damaged."""
    described = dict(info)
    if described["format"] != FORMAT or described["block_bytes"] != BLOCK:
        raise ValueError("it is of another format")
    if described.pop("checksum") != _checksum(described):
        raise ValueError("it differs from its checksum")
    return described


def _checksum(info: Mapping[str, Any]) -> str:
    """SHA-256 of a whole description: finds one that is damaged."""
    return hashlib.sha256(dump_json(info)).hexdigest()


def _identity(info: Mapping[str, Any]) -> str:
    """SHA-256 of what a run trains on: blocks, dtypes, pieces of each split, vocabulary; not of where files lie."""
    files: list[list[Any]] = []
    for file in info["files"]:
        index = file["index_sha256"]
        files.append([file["dtype"], file["offset"], file["blocks"], index])
    pieces = [info["train"]["pieces"], info["val"]["pieces"]]
    kept = [info["vocab"], info["separator"], files, *pieces]
    return hashlib.sha256(dump_json(kept)).hexdigest()


def relocate(
    folder: Path,
    info: Mapping[str, Any],
    source: Path | None,
) -> dict[str, Any]:
    """`info` with the present paths of files that moved together with `source`, for example to another machine.

    Their contents are not looked at here: `check_corpus` compares them with the hashes.
    """
    if source is None:
        return dict(info)

    def now(written: str) -> str:
        # Where it was; in the folder that the config names; or beside the file that it names.
        old = _path(folder, written)
        for path in (old, source / old.name, source.with_name(old.name)):
            if path.is_file():
                return _written(folder, path)
        return written

    files: list[dict[str, Any]] = []
    for file in info["files"]:
        index = now(file["index"]) if file["index"] else ""
        files.append({**file, "path": now(file["path"]), "index": index})
    return {**info, "files": files}


def check_corpus(folder: Path, info: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the files with their description. Returns `info`, with the present times and inodes of the files.

    Raises DataError naming each file that is gone or differs, with the blocks that differ.
    """
    problems: list[Problem] = []
    files: list[dict[str, Any]] = []
    for file in info["files"]:
        path = _path(folder, file["path"])
        try:
            stamp = Stamp.of(path)
            untouched = stamp == Stamp(file["size"], file["mtime_ns"], file["inode"])
            if stamp.size != file["size"]:
                raise Damaged(f"it has {stamp.size} bytes, and had {file['size']}")
            # A file that was touched is read as a whole.
            digests = bytes.fromhex(file["blocks"])
            if wrong := differing(path, digests, sampled=untouched):
                blocks = len(digests) // DIGEST
                count = f"{len(wrong)} of {blocks} blocks"
                raise Damaged(f"{count} of {BLOCK} bytes differ: {some(wrong, _NAMED)}")
        except (OSError, ValueError, Damaged) as error:
            problems.append(_changed(path, error))
            continue
        files.append({**file, **asdict(stamp)})
    if problems:
        raise DataError(problems)
    return {**info, "files": files}


def open_corpus(
    folder: Path, info: Mapping[str, Any], documents: bool, reading: Callable[[str | None], None]
) -> dict[str, Tokens]:
    """The splits of a corpus that was checked.

    documents: whether to read where documents begin, from each file's index.
    reading: see `CheckedFile`.

    Raises DataError if a file or an index is gone, or an index differs.
    """
    _allow_open_files(len(info["files"]))
    cache = block_cache()

    # By number of the file: the open file, and where in it documents begin.
    opened: list[tuple[CheckedFile, Shard]] = []
    starts: list[Ints] = []
    problems: list[Problem] = []
    for file in info["files"]:
        path = _path(folder, file["path"])
        index = _path(folder, file["index"]) if file["index"] else None
        digests = bytes.fromhex(file["blocks"])
        try:
            checked = CheckedFile(path, file["size"], digests, cache, reading)
            # Without an index nothing is known but that the file begins a document.
            begins = np.zeros(1, dtype=np.int64)
            if documents and index is not None:
                if file_sha256(index) != file["index_sha256"]:
                    raise Damaged(f"{index.name} differs from what it was when the run began")
                begins = document_starts(index)
        except (OSError, Damaged) as error:
            problems.append(_changed(path, error))
            continue
        shard = Shard(path, file["dtype"], file["offset"], file["tokens"], index)
        opened.append((checked, shard))
        starts.append(begins)
    if problems:
        raise DataError(problems)

    splits: dict[str, Tokens] = {}
    for split in ("train", "val"):
        pieces: list[FilePiece] = []
        begins = [np.zeros(0, dtype=np.int64)]
        at = 0  # the place of the piece in the split
        for number, first, count in info[split]["pieces"]:
            checked, shard = opened[number]
            pieces.append(FilePiece(checked, shard, first, count))

            # A piece begins a document, even where a file was cut within one: the rest of it is in the other split.
            of_file = starts[number]
            inside = of_file[(of_file >= first) & (of_file < first + count)]
            begins.append(np.concatenate([[at], inside - first + at]))
            at += count
        splits[split] = Tokens(pieces, np.unique(np.concatenate(begins)))
    return splits


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _changed(path: Path, error: Exception) -> Problem:
    what = "is not what this run began with"
    return Problem(what, f"data.path: {path}", _reason(error), _FIX_CHANGED)


def _written(folder: Path, path: Path) -> str:
    """A path as corpus.json has it: relative if it lies in the run, so that the run can be moved."""
    path, folder = path.resolve(), folder.resolve()
    if path.is_relative_to(folder):
        path = path.relative_to(folder)
    return str(path)


def _path(folder: Path, written: str) -> Path:
    return Path(os.path.join(folder.resolve(), written))


def _allow_open_files(files: int) -> None:
    """Let this process have so many files open, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def add_counts(one: Ints, other: Ints) -> Ints:
    """The sum of two counts by id; one may have more ids than the other."""
    if len(one) < len(other):
        one, other = other, one
    made = one.copy()
    made[: len(other)] += other
    return made


def entropy(counts: Ints) -> float:
    """Shannon entropy in nats of the distribution that `counts` gives: -sum p ln p (Shannon, 1948)."""
    if not counts.any():
        return 0.0
    # An id that does not occur adds nothing: p ln p goes to 0.
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
