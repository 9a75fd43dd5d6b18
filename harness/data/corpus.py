"""A corpus of token ids that stays where it is: what a run writes down of it, checks at a start, and reads.

The run keeps `data/corpus.json`: every file with its size, time, inode, dtype and the hash of each of its blocks; which
part of it is in which split; how large ids get. At a start a file whose size, time and inode are unchanged is sampled,
any other is hashed from end to end, and what is read in between is checked block by block (`blocks.CheckedFile`).
"""

from __future__ import annotations

import bisect
import hashlib
import math
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import DataError, Problem, some
from harness.core.files import MAX_LARGE, atomic_file, dump_json, file_sha256
from harness.data.blocks import BLOCK, DIGEST, BlockCache, CheckedFile, Damaged, Stamp, differing, scan
from harness.data.shards import DTYPES, Shard, Shards, document_starts

FORMAT = 2
PADDED_TO = 16
"""Vocabularies are rounded up to a multiple of this: the head of a model can then run in FP8."""
LARGEST = 1 << 22
"""Ids from here on are taken for a wrong dtype: no tokenizer has as many."""

_COUNTED = 256 << 20
_NAMED = 8
_OTHER_FILES = 512
_FIX_CHANGED = "put the files back as they were when the run began, or start a new run with another --name"
_FIX_DTYPE = "set data.dtype to what the file was written with, or write it again"
Ids = npt.NDArray[Any]


def padded(ids: int) -> int:
    """The vocabulary for `ids` different ids: rounded up to PADDED_TO."""
    return -(-ids // PADDED_TO) * PADDED_TO


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """ids: how many there are, from 0. separator: the id that ends a document, None if there is none. tokenizer: its
    hash, empty for bytes, or where nobody said which it was."""

    ids: int
    separator: int | None = None
    tokenizer: str = ""


class Tokens:
    """One split: pieces of files in a row, read by place and checked as they are read."""

    def __init__(self, pieces: Sequence[tuple[CheckedFile, Shard, int, int]], starts: npt.NDArray[np.int64]) -> None:
        """pieces: (file, what it is, first token, tokens). starts: places of this split where a document begins."""
        self._pieces = pieces
        self._ends = np.cumsum([count for *_, count in pieces]).tolist()
        self.starts = starts

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], dict[int, str]]:
        """Tokens at `places`, int64 [rows, width], each row's in a sequence; rows that cannot be read are 0, and the
        second result says why, with the file."""
        width = places.shape[1]
        rows = np.zeros(places.shape, dtype=np.int64)
        damage: dict[int, str] = {}
        for number, start in enumerate(places[:, 0].tolist()):
            try:
                rows[number] = self._read(start, width)
            except Damaged as error:
                damage[number] = str(error)
        return rows, damage

    def _read(self, start: int, width: int) -> Ids:
        number = bisect.bisect_right(self._ends, start)
        parts: list[Ids] = []
        while width:
            file, shard, first, count = self._pieces[number]
            place = start - (self._ends[number] - count)
            take = min(width, count - place)
            size = shard.numpy_dtype.itemsize
            data = file.read(shard.offset + (first + place) * size, take * size)
            parts.append(np.frombuffer(data, dtype=shard.numpy_dtype))
            start, width, number = start + take, width - take, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What reading a whole file told: digests of its blocks, its largest id (-1: none), how often each id was counted,
    if at all, and a smallest id under 0, else 0."""

    digests: bytes
    largest: int
    smallest: int
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a file already. digests: of its blocks. largest: its largest id."""

    stamp: Stamp
    digests: bytes
    largest: int


def write_corpus(
    folder: Path,
    source: str,
    kind: str,
    shards: Shards,
    vocabulary: Vocabulary | None,
    separator: int | None,
    held_out: Callable[[int], int],
    known: Mapping[str, Known] | None = None,
    unigram_nats: float | None = None,
) -> dict[str, Any]:
    """Read all files once and say what they are: the contents of `folder`/corpus.json.

    vocabulary: of the tokenizer, None: as many ids as there are. separator: the id that ends a document. held_out: how
    many tokens of the end are validation, of so many, where no file is. known: by path, of files that were hashed
    before: these are sampled if they are untouched. unigram_nats: if it is known. Raises DataError with the problems of
    all files, OSError.
    """
    known = known or {}
    files: list[dict[str, Any]] = []
    problems: list[Problem] = []
    counts = np.zeros(0, dtype=np.int64)
    largest = -1
    every = [*shards.train, *shards.val]
    total = sum(shard.tokens * shard.numpy_dtype.itemsize for shard in every)
    stride = max(1, -(-total // _COUNTED))
    for shard in every:
        try:
            stamp = Stamp.of(shard.path)
            seen = _seen_before(shard, stamp, known) or _look(shard, stride)
            before = known.get(str(shard.path))
            if before is not None and before.digests != seen.digests:
                raise Damaged("it is not what was prepared: its blocks differ from their hashes")
            if Stamp.of(shard.path) != stamp:
                raise Damaged("it changed while it was read")
        except (OSError, Damaged) as error:
            why = getattr(error, "strerror", None) or str(error)
            problems.append(Problem("cannot be read", f"data.path: {shard.path}", why, "copy it again"))
            continue
        problems += _implausible(shard, seen, vocabulary)
        largest = max(largest, seen.largest)
        counts = add_counts(counts, seen.counts)
        files.append(_entry(folder, shard, stamp, seen.digests))
    if problems:
        raise DataError(problems)
    ids = vocabulary.ids if vocabulary else largest + 1
    pieces = _pieces(shards, held_out)
    info: dict[str, Any] = {
        "format": FORMAT,
        "source": source,
        "kind": kind,
        "ids": ids,
        "vocab": padded(ids),
        "largest": largest,
        "separator": separator,
        "tokenizer": vocabulary.tokenizer if vocabulary else "",
        "block_bytes": BLOCK,
        **{split: {"tokens": sum(piece[2] for piece in each), "pieces": each} for split, each in pieces.items()},
        "unigram_nats": entropy(counts) if unigram_nats is None else unigram_nats,
        "files": files,
        "skipped": [{"name": name, "reason": reason} for name, reason in shards.left_out],
    }
    info["sha256"] = _identity(info)
    return info


def save_corpus(folder: Path, info: Mapping[str, Any]) -> None:
    """Write corpus.json. Raises OSError; DataError if there are too many files to describe."""
    described = dump_json(dict(info))
    if len(described) > MAX_LARGE:
        fix = "join small files into larger ones"
        raise DataError(Problem(f"{len(info['files'])} files are too many", info["source"], fix=fix))
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / "corpus.json") as stream:
        stream.write(described)


def relocate(folder: Path, info: Mapping[str, Any], source: Path | None) -> dict[str, Any]:
    """`info` with the places where its files are now, if they moved with `source`: a rental's disk is another one's
    folder. What is there is compared with its hashes all the same."""
    if source is None:
        return dict(info)

    def now(written: str) -> str:
        old = _path(folder, written)
        near = [old, source / old.name, source.with_name(old.name)]
        return _written(folder, next((path for path in near if path.is_file()), old))

    files = [
        {**file, "path": now(file["path"]), "index": now(file["index"]) if file["index"] else ""}
        for file in info["files"]
    ]
    return {**info, "files": files}


def check_corpus(folder: Path, info: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the files with what was written down of them; `info`, with their new times where only these changed.

    Raises DataError naming each file that is gone, or differs, and whether ids are larger than the vocabulary now.
    """
    problems: list[Problem] = []
    files: list[dict[str, Any]] = []
    for file in info["files"]:
        path = _path(folder, file["path"])
        where = f"data.path: {path}"
        digests = bytes.fromhex(file["blocks"])
        try:
            stamp = Stamp.of(path)
            same = asdict(stamp) == {key: file[key] for key in ("size", "mtime_ns", "inode")}
            if stamp.size != file["size"]:
                raise Damaged(f"it has {stamp.size} bytes, and had {file['size']}{_larger(path, file, info)}")
            if wrong := differing(path, digests, sampled=same):
                blocks = len(digests) // DIGEST
                why = f"{len(wrong)} of {blocks} blocks of {BLOCK} bytes differ: {some(wrong, _NAMED)}"
                raise Damaged(f"{why}{_larger(path, file, info)}")
        except (OSError, ValueError, Damaged) as error:
            why = getattr(error, "strerror", None) or str(error)
            problems.append(Problem("is not what this run began with", where, why, _FIX_CHANGED))
            continue
        files.append({**file, **asdict(stamp)})
    if problems:
        raise DataError(problems)
    return {**info, "files": files}


def open_corpus(
    folder: Path, info: Mapping[str, Any], documents: bool, reading: Callable[[str | None], None]
) -> dict[str, Tokens]:
    """The splits of a corpus that was checked, to read from. documents: find out where these begin.

    Raises DataError if a file, or an index, is gone or differs.
    """
    _allow(len(info["files"]))
    cache = BlockCache()
    opened: list[tuple[CheckedFile, Shard]] = []
    problems: list[Problem] = []
    starts: list[npt.NDArray[np.int64]] = []
    for file in info["files"]:
        path = _path(folder, file["path"])
        index = _path(folder, file["index"]) if file["index"] else None
        shard = Shard(path, file["dtype"], file["offset"], file["tokens"], index)
        try:
            checked = CheckedFile(path, file["size"], bytes.fromhex(file["blocks"]), cache, reading)
            if documents and index is not None and file_sha256(index) != file["index_sha256"]:
                raise Damaged(f"{index.name} differs from what it was when the run began")
            starts.append(document_starts(index) if documents and index is not None else np.zeros(1, dtype=np.int64))
        except (OSError, Damaged) as error:
            why = getattr(error, "strerror", None) or str(error)
            problems.append(Problem("is not what this run began with", f"data.path: {path}", why, _FIX_CHANGED))
            continue
        opened.append((checked, shard))
    if problems:
        raise DataError(problems)
    splits: dict[str, Tokens] = {}
    for split in ("train", "val"):
        pieces = [(*opened[number], first, count) for number, first, count in info[split]["pieces"]]
        begins: list[npt.NDArray[np.int64]] = []
        at = 0
        for number, first, count in info[split]["pieces"]:
            inside = starts[number][(starts[number] >= first) & (starts[number] < first + count)]
            begins.append(np.concatenate([[at], inside - first + at]))
            at += count
        splits[split] = Tokens(pieces, np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *begins])))
    return splits


def parse_corpus(info: Any) -> dict[str, Any]:
    """`info` if it is what `write_corpus` gave. Raises ValueError, TypeError, KeyError or AttributeError."""
    texts = [info["source"], info["kind"], info["sha256"], info["tokenizer"]]
    texts += [file[key] for file in info["files"] for key in ("name", "path", "dtype", "blocks", "index")]
    texts += [skip[key] for skip in info["skipped"] for key in ("name", "reason")]
    numbers = [info["ids"], info["vocab"], info["block_bytes"]]
    numbers += [file[key] for file in info["files"] for key in ("size", "mtime_ns", "inode", "offset", "tokens")]
    numbers += [value for split in ("train", "val") for piece in info[split]["pieces"] for value in piece]
    if info["format"] != FORMAT or not all(isinstance(text, str) for text in texts):
        raise ValueError("it is of another format")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a number in it is no whole number")
    if info["block_bytes"] != BLOCK or _identity(info) != info["sha256"]:
        raise ValueError("its hash is another one")
    if not isinstance(info["unigram_nats"], float) or not math.isfinite(info["unigram_nats"]):
        raise ValueError("unigram_nats is no number")
    for file in info["files"]:
        blocks = -(-file["size"] // BLOCK)
        if file["dtype"] not in DTYPES or len(bytes.fromhex(file["blocks"])) != blocks * DIGEST:
            raise ValueError("a file in it has no dtype or no hashes")
    for split in ("train", "val"):
        for number, first, count in info[split]["pieces"]:
            if first + count > info["files"][number]["tokens"]:
                raise ValueError("a piece lies outside its file")
    return info


def hold_out(tokens: int, share: float, least: int) -> int:
    """How many tokens of the end are validation where no file is: the share of all, but one sample at least."""
    return min(tokens, max(round(tokens * share), least))


def _entry(folder: Path, shard: Shard, stamp: Stamp, digests: bytes) -> dict[str, Any]:
    index = shard.index
    return {
        "name": shard.path.name,
        "path": _written(folder, shard.path),
        **asdict(stamp),
        "dtype": shard.dtype,
        "offset": shard.offset,
        "tokens": shard.tokens,
        "index": _written(folder, index) if index else "",
        "index_sha256": file_sha256(index) if index else "",
        "blocks": digests.hex(),
    }


def _written(folder: Path, path: Path) -> str:
    """A path for corpus.json: what lies in the run is named from there, so that the run can be moved."""
    path, folder = path.resolve(), folder.resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _path(folder: Path, written: str) -> Path:
    return Path(os.path.join(folder.resolve(), written))


def _allow(files: int) -> None:
    """Let this process have so many files open, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and wanted > soft:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _seen_before(shard: Shard, stamp: Stamp, known: Mapping[str, Known]) -> _Seen | None:
    """What is known of an untouched file, after a look at some of its blocks. Raises OSError, Damaged."""
    before = known.get(str(shard.path))
    if before is None or before.stamp != stamp:
        return None
    if wrong := differing(shard.path, before.digests, sampled=True):
        raise Damaged(f"it is not what was prepared: blocks that differ from their hashes: {some(wrong, _NAMED)}")
    return _Seen(before.digests, before.largest, 0, np.zeros(0, dtype=np.int64))


def _look(shard: Shard, stride: int) -> _Seen:
    dtype = shard.numpy_dtype
    largest, smallest = -1, 0
    counts = np.zeros(0, dtype=np.int64)
    chunk = 0

    def see(start: int, data: bytes) -> None:
        nonlocal largest, smallest, counts, chunk
        skip = shard.offset if start == 0 else 0
        whole = (len(data) - skip) // dtype.itemsize * dtype.itemsize
        ids = np.frombuffer(data, dtype=dtype, count=whole // dtype.itemsize, offset=skip)
        if not len(ids):
            return
        largest, smallest = max(largest, int(ids.max())), min(smallest, int(ids.min()))
        if chunk % stride == 0 and smallest >= 0 and largest < LARGEST:
            counts = add_counts(counts, np.bincount(ids))
        chunk += 1

    digests = scan(shard.path, see)
    return _Seen(digests, largest, smallest, counts)


def _implausible(shard: Shard, seen: _Seen, vocabulary: Vocabulary | None) -> list[Problem]:
    where = f"data.path: {shard.path}"
    if seen.smallest < 0:
        return [Problem(f"has the token id {seen.smallest}", where, "ids begin at 0", _FIX_DTYPE)]
    if seen.largest >= LARGEST:
        why = f"no vocabulary is as large: read as {shard.dtype}, it is probably of another dtype"
        return [Problem(f"has the token id {seen.largest}", where, why, _FIX_DTYPE)]
    if vocabulary is not None and seen.largest >= vocabulary.ids:
        why = f"the tokenizer has {vocabulary.ids} ids, 0 to {vocabulary.ids - 1}"
        fix = "give the tokenizer that made these ids in data.tokenizer, or none"
        return [Problem(f"has the token id {seen.largest}, which the tokenizer does not", where, why, fix)]
    return []


def _larger(path: Path, file: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    """What to add if a file that changed has ids that the run's vocabulary has not."""
    try:
        shard = Shard(path, file["dtype"], file["offset"], 0)
        largest = _look(shard, 1 << 62).largest
    except (OSError, ValueError, Damaged):
        return ""
    known = info["vocab"]
    return f"; its largest id is {largest} now, and the run's vocabulary is {known}" if largest >= known else ""


def _pieces(shards: Shards, held_out: Callable[[int], int]) -> dict[str, list[list[int]]]:
    """[number of the file, first token, tokens] of every piece of each split."""
    every = [*shards.train, *shards.val]
    whole = [[number, 0, shard.tokens] for number, shard in enumerate(every)]
    train, val = whole[: len(shards.train)], whole[len(shards.train) :]
    if val:
        return {"train": train, "val": val}
    left = held_out(sum(count for *_, count in train))
    while left and train:
        number, first, count = train.pop()
        take = min(left, count)
        cut = _document_cut(every[number], count - take) if take < count else 0
        val.insert(0, [number, cut, count - cut])
        left -= take
        if cut:
            train.append([number, first, cut])
    return {"train": train, "val": val}


def _document_cut(shard: Shard, place: int) -> int:
    """Where to cut a shard near `place`: where a document begins, if one does within half of what follows."""
    if shard.index is None:
        return place
    starts = document_starts(shard.index)
    reach = (shard.tokens - place) // 2
    near = starts[(starts > 0) & (abs(starts - place) <= reach)]
    return int(near[np.argmin(abs(near - place))]) if len(near) else place


def add_counts(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sum of two counts by id, of which one may know larger ids."""
    if len(one) < len(other):
        one, other = other, one
    made = one.copy()
    made[: len(other)] += other
    return made


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Shannon entropy in nats of the distribution that `counts` gives: -sum p ln p (Shannon, 1948)."""
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum()) if len(shares) else 0.0


def _identity(info: Mapping[str, Any]) -> str:
    """SHA-256 of what a run trains on: blocks, dtypes, pieces of each split, vocabulary; not of where they lie."""
    files = [[file["dtype"], file["offset"], file["blocks"], file["index_sha256"]] for file in info["files"]]
    kept = [info["vocab"], info["separator"], files, info["train"]["pieces"], info["val"]["pieces"]]
    return hashlib.sha256(dump_json(kept)).hexdigest()
