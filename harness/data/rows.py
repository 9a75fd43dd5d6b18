"""Documents out of JSONL, Parquet, Arrow and text, part by part: what is tokenized, and by several processes at once.

A part is a range of one file that can be read alone, in bounded memory, and always gives the same documents.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from harness.core.errors import DataError, Problem
from harness.core.files import MAX_LARGE, read_mapping
from harness.core.target import import_extra
from harness.data.shards import is_validation, validation_beside
from harness.data.text import BadFiles, walk

Split = Literal["train", "val", ""]
"""Of a part; empty: its documents are still to be divided."""

PIECE = 1 << 20
"""Bytes of a text that are tokenized at once: longer ones are cut after a line."""
MAX_ROW = 256 << 20
"""Bytes of a row of JSONL."""
_RANGE = 8 << 20
_BATCH = 1024
_NAMED = 20
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
    fault: why it cannot be used, empty if it can."""

    text: str | bytes
    where: str
    ends: bool = True
    fault: str = ""


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


def _files(path: Path, suffixes: Sequence[str]) -> list[tuple[Path, Split]]:
    """Files below `path` with their splits: names say which are validation; one file alone may have it beside it."""
    if path.is_dir():
        found = [each for each in walk(path) if each.suffix.lower() in suffixes and each.is_file()]
        val = [each for each in found if is_validation(each.relative_to(path).as_posix())]
        known: Split = "train" if val and len(val) < len(found) else ""
        return [(each, "val" if known and each in val else known) for each in found]
    beside = validation_beside(path)
    return [(path, "train"), (beside, "val")] if beside else [(path, "")]


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
    """A JSON object a line, its text under a key."""

    kind = "JSONL"
    suffixes = (".jsonl", ".ndjson")

    def parts(self, path: Path, key: str, bad: BadFiles) -> Listed:
        """Ranges of bytes. The first row of every file must have the key."""
        parts: list[Part] = []
        problems: list[Problem] = []
        empty: list[tuple[str, str]] = []
        for file, split in _files(path, self.suffixes):
            size = file.stat().st_size
            if not size:
                empty.append((file.name, "empty"))
                continue
            ranges = _ranges(file, size, split)
            first = next(self.read(ranges[0], key), None)
            if first is not None and first.fault and bad != "skip":
                problems.append(Problem(first.fault, f"data.path: {first.where}", fix=_FIX_ROW))
            parts += ranges
        return _listed(parts, empty, problems, path)

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """The rows whose lines begin in the part."""
        with open(part.path, "rb") as stream:
            _first_line(stream, part.begin)
            while (place := stream.tell()) < part.end and (line := stream.readline(MAX_ROW)):
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
                yield _row(row.get(key) if isinstance(row, dict) else None, key, where)


class Parquet:
    """A column of Parquet files."""

    kind = "Parquet"
    suffixes = (".parquet",)

    def parts(self, path: Path, key: str, bad: BadFiles) -> Listed:
        """Row groups. Every file must have the column, with text in it."""
        library = import_extra("pyarrow.parquet", "hf", "data.path")
        parts: list[Part] = []
        problems: list[Problem] = []
        for file, split in _files(path, self.suffixes):
            try:
                with library.ParquetFile(file) as opened:
                    problem = _column(opened.schema_arrow, key, file)
                    if problem:
                        problems.append(problem)
                        continue
                    groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
                    parts += [
                        Part(str(file), number, number + 1, group.total_byte_size, split)
                        for number, group in enumerate(groups)
                    ]
            except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
                problems.append(Problem("cannot be read as Parquet", f"data.path: {file}", str(error)[:300], _FIX_COPY))
        return _listed(parts, [], problems, path)

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """The rows of a row group."""
        library = import_extra("pyarrow.parquet", "hf", "data.path")
        try:
            with library.ParquetFile(part.path) as opened:
                groups = list(range(part.begin, part.end))
                row = 0
                for batch in opened.iter_batches(batch_size=_BATCH, row_groups=groups, columns=[key]):
                    for value in batch.column(0).to_pylist():
                        yield _row(value, key, f"{part.path}, row group {part.begin}, row {row}")
                        row += 1
        except ValueError as error:
            raise DataError(Problem("cannot be read", part.path, str(error)[:300], _FIX_COPY)) from error


class ArrowFolder:
    """What `save_to_disk` of the datasets library writes: a folder with state.json, or one of them for each split."""

    kind = "Arrow"
    suffixes = (".arrow",)

    def parts(self, path: Path, key: str, bad: BadFiles) -> Listed:
        """Whole files. Every file must have the column, with text in it."""
        library = import_extra("pyarrow", "hf", "data.path")
        ipc = import_extra("pyarrow.ipc", "hf", "data.path")
        parts: list[Part] = []
        problems: list[Problem] = []
        for file, split in self._listed(path):
            try:
                with library.OSFile(str(file)) as source, ipc.open_stream(source) as stream:
                    problem = _column(stream.schema, key, file)
                if problem:
                    problems.append(problem)
                    continue
                parts.append(Part(str(file), 0, 0, file.stat().st_size, split))
            except (OSError, ValueError) as error:
                problems.append(Problem("cannot be read as Arrow", f"data.path: {file}", str(error)[:300], _FIX_COPY))
        return _listed(parts, self._other_splits(path), problems, path)

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """The rows of a file."""
        library = import_extra("pyarrow", "hf", "data.path")
        ipc = import_extra("pyarrow.ipc", "hf", "data.path")
        row = 0
        try:
            with library.OSFile(part.path) as source, ipc.open_stream(source) as stream:
                for batch in stream:
                    for value in batch.column(key).to_pylist():
                        yield _row(value, key, f"{part.path}, row {row}")
                        row += 1
        except ValueError as error:
            raise DataError(Problem("cannot be read", part.path, str(error)[:300], _FIX_COPY)) from error

    def _listed(self, path: Path) -> list[tuple[Path, Split]]:
        splits = _split_names(path)
        if splits is None:
            return [(file, "") for file in _arrow_files(path)]
        val = next((name for name in splits if is_validation(name)), None)
        train = "train" if "train" in splits else next((name for name in splits if name != val), None)
        known: Split = "train" if val else ""
        named: list[tuple[str | None, Split]] = [(train, known), (val, "val")]
        return [(file, split) for name, split in named if name for file in _arrow_files(path / name)]

    def _other_splits(self, path: Path) -> list[tuple[str, str]]:
        used = {Path(file).parent.name for file, _ in self._listed(path)}
        names = [name for name in _split_names(path) or [] if name not in used]
        return [(name, "a split that is neither train nor validation") for name in names]


class PlainText:
    """UTF-8 text: a file is a document."""

    kind = "text"
    suffixes = (".txt",)

    def parts(self, path: Path, key: str, bad: BadFiles) -> Listed:
        """Ranges of bytes of every file that begins as text does."""
        files: list[tuple[Path, Split]] = [(each, "") for each in walk(path)] if path.is_dir() else [(path, "")]
        parts: list[Part] = []
        problems: list[Problem] = []
        left_out: list[tuple[str, str]] = []
        for file, split in files:
            try:
                if file.is_symlink() or not file.is_file():
                    left_out.append((file.name, "a link" if file.is_symlink() else "not a regular file"))
                    continue
                size = file.stat().st_size
                with file.open("rb") as stream:
                    fault = "empty" if not size else _no_text(stream.read(_LOOKED_AT), size <= _LOOKED_AT)
            except OSError as error:
                fault = f"cannot be read: {error.strerror}"
                if bad == "auto":
                    problems.append(Problem(fault, f"data.path: {file}", fix="data.bad=skip passes over it"))
                    continue
                size = 0
            if fault:
                left_out.append((file.relative_to(path).as_posix() if path.is_dir() else file.name, fault))
                if bad == "fail" or not path.is_dir():
                    problems.append(Problem(f"no text: {fault}", f"data.path: {file}", fix=_FIX_TEXT))
                continue
            parts += _ranges(file, size, split)
        return _listed(parts, left_out, problems, path)

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """Pieces of about PIECE bytes, cut after a line where lines are short."""
        with open(part.path, "rb") as stream:
            size = stream.seek(0, 2)
            place, end = _cut(stream, part.begin, size), _cut(stream, part.end, size)
            while place < end:
                after = min(_cut(stream, place + PIECE, size), end)
                stream.seek(place)
                text = stream.read(after - place)
                yield Piece(text, f"{part.path}, byte {place}", after >= size, _no_text(text, True))
                place = after


_FIX_ROW = "set data.text_key to the key that has the text, or data.bad=skip to pass over such rows"
_FIX_COPY = "copy the file again, or write it again"
_FIX_TEXT = "give a UTF-8 text file or a folder of them; convert others with: iconv -t utf-8"


def _row(value: Any, key: str, where: str) -> Piece:
    if not isinstance(value, str):
        what = "is missing" if value is None else f"is a {type(value).__name__}, not text"
        return Piece("", where, fault=f'"{key}" {what}')
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return Piece("", where, fault=f'"{key}" has half of a surrogate pair')
    return Piece(value, where, fault="" if value else "empty")


def _no_text(content: bytes, whole: bool) -> str:
    if b"\0" in content:
        return "binary: it has NUL bytes"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=whole)
    except UnicodeDecodeError:
        return "binary: it is not UTF-8"
    return ""


def _column(schema: Any, key: str, file: Path) -> Problem | None:
    names: list[str] = list(schema.names)
    if key not in names:
        why = f"its columns: {', '.join(names[:_NAMED]) or 'none'}"
        return Problem(f'has no column "{key}"', f"data.path: {file}", why, "set data.text_key to the one with text")
    kind = str(schema.field(key).type)
    if "string" not in kind:
        fix = "set data.text_key to a column of text"
        return Problem(f'column "{key}" has {kind}, not text', f"data.path: {file}", fix=fix)
    return None


def _split_names(path: Path) -> list[str] | None:
    """Of a folder with several splits; None for a single one."""
    names = read_mapping(path / "dataset_dict.json").get("splits")
    return [str(name) for name in names] if isinstance(names, list) else None


def _arrow_files(path: Path) -> list[Path]:
    """The files that state.json names. Raises DataError if it names none that are there."""
    state = read_mapping(path / "state.json", MAX_LARGE)
    named = state.get("_data_files")
    names = [entry.get("filename") for entry in named if isinstance(entry, dict)] if isinstance(named, list) else []
    files = [path / name for name in names if isinstance(name, str) and "/" not in name]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files or state.get("_indices_files"):
        why = f"missing: {', '.join(missing[:_NAMED])}" if missing else "its state.json names no files that can be read"
        raise DataError(Problem("is no whole data set", f"data.path: {path}", why, "write it again with save_to_disk"))
    return files


def _listed(parts: list[Part], left_out: list[tuple[str, str]], problems: list[Problem], path: Path) -> Listed:
    if len(problems) > _NAMED:
        problems = [*problems[:_NAMED], Problem(f"{len(problems) - _NAMED} more like these", str(path))]
    if problems:
        raise DataError(problems)
    if not parts:
        why = "; ".join(f"{name} ({reason})" for name, reason in left_out[:_NAMED])
        raise DataError(Problem("has nothing to train on", f"data.path: {path}", why))
    return Listed(tuple(parts), tuple(left_out))
