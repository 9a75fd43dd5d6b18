"""Documents out of JSONL and text, part by part: what is tokenized, and by several processes at once.

A part is a range of one file that can be read alone, in bounded memory, and always gives the same documents.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from harness.core.errors import DataError, Problem, some
from harness.core.files import MAX_LARGE, read_bounded
from harness.data.shards import Split, is_validation, named_splits, text_beside, validation_beside, without_tests
from harness.data.text import FIX_FILE, BadFiles, no_text, walk

PIECE = 1 << 20
"""Bytes of a text that are tokenized at once: longer ones are cut after a line."""
MAX_ROW = 256 << 20
"""Bytes of a row of JSONL."""
ARRAY = ".json"
_RANGE = 8 << 20
_GROWS = 4  # what gzip makes smaller, about
NAMED = 20
_LOOKED_AT = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file. begin, end: bytes of text and JSONL, row groups of Parquet, of Arrow nothing. size: about how
    many bytes it has, for the progress bar and to share the work."""

    path: str
    begin: int
    end: int
    size: int
    split: Split = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """What a source has to read, in order, and what it leaves out: names and why."""

    parts: tuple[Part, ...]
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """text: a document, or a piece of one. ends: whether the document ends with it. where: how a message names it.
    fault: why it cannot be used, empty if it can. hint: what to say of the first that cannot."""

    text: str | bytes
    where: str
    ends: bool = True
    fault: str = ""
    hint: str = ""


class DocumentSource(Protocol):
    """A way to keep documents in files."""

    @property
    def kind(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of its files, lower case; a folder of these alone is taken for this kind."""
        ...

    def parts(self, path: Path, key: str, bad: BadFiles) -> Listed:
        """Every part below `path`. key: where rows have their text. Raises DataError with all problems."""
        ...

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """The documents of a part. Raises OSError, DataError."""
        ...


def files_below(path: Path, suffixes: Sequence[str]) -> tuple[list[tuple[Path, Split]], list[tuple[str, str]]]:
    """Files below `path` with their splits, and what is left out: names say which are validation, and which a test;
    one file alone may have its validation beside it."""
    if path.is_dir():
        every = [each for each in walk(path) if each.name.lower().endswith(tuple(suffixes)) and each.is_file()]
        found, left_out = without_tests([each.relative_to(path).as_posix() for each in every])
        val = {name for name in found if is_validation(name)}
        known: Split = "train" if val and len(val) < len(found) else ""
        return [(path / name, "val" if known and name in val else known) for name in found], left_out
    beside = validation_beside(path)
    return ([(path, "train"), (beside, "val")] if beside else [(path, "")]), []


def _ranges(path: Path, size: int, split: Split) -> list[Part]:
    starts = range(0, size, _RANGE)
    return [Part(str(path), start, min(start + _RANGE, size), min(_RANGE, size - start), split) for start in starts]


def _first_line(stream: BinaryIO, begin: int) -> None:
    """Go to the first line that begins at `begin` or later."""
    stream.seek(max(0, begin - 1))
    if begin:
        _skip_line(stream)


def _skip_line(stream: BinaryIO) -> None:
    while (rest := stream.readline(PIECE)) and not rest.endswith(b"\n"):
        pass


def _cut(stream: BinaryIO, place: int, size: int) -> int:
    """Where a text of `size` bytes is cut near `place`: after the next line end if one is near, else before the next
    character."""
    if place <= 0 or place >= size:
        return max(0, min(place, size))
    stream.seek(place - 1)
    window = stream.read(_LOOKED_AT)
    found = window.find(b"\n")
    if found >= 0:
        return place + found
    inside = window[1:5]
    return place + next((number for number, byte in enumerate(inside) if byte & 0xC0 != 0x80), 0)


class JsonLines:
    """A JSON object a line, its text under a key; or, in a file called .json, one array of such objects."""

    kind = "JSONL"
    suffixes = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz")

    def parts(self, path: Path, key: str, bad: BadFiles) -> Listed:
        """Ranges of bytes; of what is compressed, or an array, whole files. The first row of every file must have the
        key."""
        parts: list[Part] = []
        problems: list[Problem] = []
        files, empty = files_below(path, self.suffixes)
        if not files:  # beside others a .json describes them
            files, empty = files_below(path, (ARRAY,))
        for file, split in files:
            size = file.stat().st_size
            if not size:
                empty.append((file.name, "empty"))
                continue
            grows = _GROWS if _is_packed(file) else 1
            whole = grows > 1 or file.name.lower().endswith(ARRAY)
            ranges = [Part(str(file), 0, size, grows * size, split)] if whole else _ranges(file, size, split)
            try:
                first = next(self.read(ranges[0], key), None)
            except DataError as error:
                problems += error.problems
                continue
            if first is not None and first.fault and bad != "skip":
                problems.append(Problem(first.fault, f"data.path: {first.where}", first.hint, _FIX_ROW))
            parts += ranges
        return listed(parts, empty, problems, path)

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """The rows whose lines begin in the part. Raises DataError for what cannot be decompressed."""
        if part.path.lower().endswith(ARRAY) and not _is_lines(part.path):
            yield from _array(part.path, key)
            return
        packed = _is_packed(Path(part.path))
        end = 1 << 62 if packed else part.end
        try:
            with gzip.open(part.path) if packed else open(part.path, "rb") as stream:
                yield from self._lines(cast("BinaryIO", stream), part, end, key)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            problem = Problem("cannot be decompressed", f"data.path: {part.path}", str(error)[:300], FIX_COPY)
            raise DataError(problem) from error

    def _lines(self, stream: BinaryIO, part: Part, end: int, key: str) -> Iterator[Piece]:
        _first_line(stream, part.begin)
        while (place := stream.tell()) < end and (line := stream.readline(MAX_ROW)):
            where = f"{part.path}, byte {place}"
            if len(line) == MAX_ROW and not line.endswith(b"\n"):
                _skip_line(stream)
                yield Piece("", where, fault=f"is longer than {MAX_ROW} bytes")
                continue
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Piece("", where, fault=f"is no JSON: {error}"[:200])
                continue
            yield _row(row, key, where)


def _is_packed(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


def _is_lines(path: str) -> bool:
    """Whether a file called .json is JSON lines all the same: its first line is an object."""
    with open(path, "rb") as stream:
        try:
            return isinstance(json.loads(stream.readline(MAX_ROW)), dict) and bool(stream.read(1))
        except (RecursionError, ValueError):
            return False


def _array(path: str, key: str) -> Iterator[Piece]:
    """The rows of an array, or the only one of an object. All of it is in memory at once."""
    try:
        rows = json.loads(read_bounded(Path(path), MAX_LARGE))
    except (ValueError, RecursionError) as error:
        fix = " (an array this large: write it as JSON lines)" if "is larger" in str(error) else ""
        yield Piece("", path, fault=f"is no JSON: {error}{fix}"[:200])
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        yield _row(row, key, f"{path}, row {number}")


class PlainText:
    """UTF-8 text: a file is a document."""

    kind = "text"
    suffixes = (".txt",)

    def parts(self, path: Path, key: str, bad: BadFiles) -> Listed:
        """Ranges of bytes of every file that begins as text does."""
        files, left_out = self._divided(path)
        parts: list[Part] = []
        problems: list[Problem] = []
        for file, split in files:
            try:
                if file.is_symlink() or not file.is_file():
                    left_out.append((file.name, "a link" if file.is_symlink() else "not a regular file"))
                    continue
                size = file.stat().st_size
                with file.open("rb") as stream:
                    fault = "empty" if not size else no_text(stream.read(_LOOKED_AT), size <= _LOOKED_AT)
            except OSError as error:
                fault = f"cannot be read: {error.strerror}"
                if bad == "auto":
                    problems.append(Problem(fault, f"data.path: {file}", fix="data.bad=skip passes over it"))
                    continue
                size = 0
            if fault:
                left_out.append((file.relative_to(path).as_posix() if path.is_dir() else file.name, fault))
                if bad == "fail" or not path.is_dir():
                    problems.append(Problem(f"no text: {fault}", f"data.path: {file}", fix=FIX_FILE))
                continue
            parts += _ranges(file, size, split)
        return listed(parts, left_out, problems, path)

    def _divided(self, path: Path) -> tuple[list[tuple[Path, Split]], list[tuple[str, str]]]:
        """Files with their splits, and those of a test split."""
        if not path.is_dir():
            beside = text_beside(path)
            return ([(path, "train"), (beside, "val")] if beside else [(path, "")]), []
        found = {each.relative_to(path).as_posix(): each for each in walk(path)}
        splits, left_out = named_splits(list(found))
        return [(found[name], split) for name, split in splits.items()], left_out

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """Pieces of about PIECE bytes, cut after a line where lines are short."""
        with open(part.path, "rb") as stream:
            size = stream.seek(0, 2)
            place, end = _cut(stream, part.begin, size), _cut(stream, part.end, size)
            while place < end:
                after = min(_cut(stream, place + PIECE, size), end)
                stream.seek(place)
                text = stream.read(after - place)
                yield Piece(text, f"{part.path}, byte {place}", after >= size, no_text(text))
                place = after


TOKENS_FIX = (
    "token ids are read from a .bin: numpy.concatenate(ROWS).astype('<u4').tofile('train.bin'), each row with its "
    "end-of-text id; then data.path=train.bin data.dtype=uint32"
)
_KINDS = {list: "list", str: "text", type(None): "null"}
_KEYS, _LONG = 8, 300
_FIX_ROW = "set data.text_key to the key that has the text, or data.bad=skip to pass over such rows"
FIX_COPY = "copy the file again, or write it again"


def _row(row: Any, key: str, where: str) -> Piece:
    """A row of JSON. key: `meta.text` is what lies under text in meta, where the row has no key of that name."""
    value = row
    for part in [key] if isinstance(row, dict) and key in row else key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is not None:
        return piece_of(value, key, where)
    if not isinstance(row, dict):
        return Piece("", where, fault=f"the row is a {_KINDS.get(type(row), 'number')}, not an object with keys")
    return Piece("", where, fault=f'"{key}" is missing', hint=f"the row has {some([*row], _KEYS) or 'no keys'}"[:_LONG])


def piece_of(value: Any, key: str, where: str) -> Piece:
    if not isinstance(value, str):
        what = "is missing" if value is None else f"is a {type(value).__name__}, not text"
        ids = isinstance(value, list) and all(isinstance(each, int) for each in value)
        return Piece("", where, fault=f'"{key}" {what}', hint=TOKENS_FIX if ids else "")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return Piece("", where, fault=f'"{key}" has half of a surrogate pair')
    return Piece(value, where, fault="" if value else "empty")


def listed(parts: list[Part], left_out: list[tuple[str, str]], problems: list[Problem], path: Path) -> Listed:
    if len(problems) > NAMED:
        problems = [*problems[:NAMED], Problem(f"{len(problems) - NAMED} more like these", str(path))]
    if problems:
        raise DataError(problems)
    if not parts:
        why = "; ".join(f"{name} ({reason})" for name, reason in left_out[:NAMED]) or "it has no rows"
        raise DataError(Problem("has nothing to train on", f"data.path: {path}", why))
    return Listed(tuple(parts), tuple(left_out))
