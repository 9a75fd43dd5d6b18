"""Documents, part by part: what a source of them is, and the source that is plain text. `rows` has the others.

A part is a range of one file that is read in bounded memory, and always gives the same documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from harness.core.errors import DataError, Problem
from harness.data.shards import Split, is_validation, named_splits, text_beside, validation_beside, without_tests
from harness.data.text import FIX_FILE, BadFiles, no_text, walk

PIECE = 1 << 20
"""Bytes of a text that are tokenized at once: longer ones are cut after a line."""
RANGE = 8 << 20
"""Bytes of a file in one part."""
NAMED = 20
Files = tuple[Sequence[tuple[Path, Split]], list[tuple[str, str]]]
"""Files with their splits, and what is left out: names and why."""
_LOOKED_AT = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file. begin, end: bytes of plain text, rows of everything else. size: about how many bytes it has,
    for the progress bar and to share the work."""

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

    suffixes: tuple[str, ...]
    """Of its files, lower case; a folder of these alone is taken for this kind."""

    def parts(self, path: Path, key: str, bad: BadFiles, files: Files | None = None) -> Listed:
        """Every part below `path`, or of `files`. key: where rows have their text. Raises DataError with all
        problems."""
        ...

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """The documents of a part. Quickest where parts are asked for in their order. Raises OSError, DataError."""
        ...


def files_below(path: Path, suffixes: Sequence[str]) -> Files:
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


def ranges(size: int) -> list[tuple[int, int]]:
    """(begin, end) of every RANGE of `size` bytes; the last one may be shorter."""
    return [(begin, min(begin + RANGE, size)) for begin in range(0, size, RANGE)]


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


class PlainText:
    """UTF-8 text: a file is a document."""

    suffixes: tuple[str, ...] = (".txt",)

    def parts(self, path: Path, key: str, bad: BadFiles, files: Files | None = None) -> Listed:
        """Ranges of bytes of every file that begins as text does."""
        found, left_out = files or self._divided(path)
        parts: list[Part] = []
        problems: list[Problem] = []
        for file, split in found:
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
            parts += [Part(str(file), begin, end, end - begin, split) for begin, end in ranges(size)]
        return listed(parts, left_out, problems, path)

    def _divided(self, path: Path) -> Files:
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


def listed(parts: list[Part], left_out: list[tuple[str, str]], problems: list[Problem], path: Path) -> Listed:
    """What a source has to read. Raises DataError if there are problems, or nothing is left."""
    if len(problems) > NAMED:
        problems = [*problems[:NAMED], Problem(f"{len(problems) - NAMED} more like these", str(path))]
    if problems:
        raise DataError(problems)
    if not parts:
        why = "; ".join(f"{name} ({reason})" for name, reason in left_out[:NAMED]) or "it has no rows"
        raise DataError(Problem("has nothing to train on", f"data.path: {path}", why))
    return Listed(tuple(parts), tuple(left_out))
