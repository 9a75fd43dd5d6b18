"""Documents, part by part: what every source of documents is, and the source that is plain text.

A source lists its parts, and then reads them. A part is a range of one file; it is read in bounded memory, and always
gives the same documents. So `prepare` can divide the work before it begins, and go on with the rest after a kill.

The other sources are rows of tables: `rows`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from harness.core.errors import DataError, Problem
from harness.data.splits import (
    SECOND_LINK,
    LeftOut,
    Split,
    is_validation,
    splits_of_text,
    with_validation,
    without_second_links,
    without_tests,
)
from harness.data.text import FIX_FILE, INSIDE, NAMED, BadFiles, first_of, no_file, no_text, walk

PIECE = 1 << 20
"""Bytes of a text that are tokenized at once: longer ones are cut after a line."""
RANGE = 8 << 20
"""Bytes of a file in one part."""
Files = tuple[Sequence[tuple[Path, Split]], LeftOut]
"""Files with their splits, and what is left out."""

_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file.

    begin, end: bytes of plain text; of everything else rows, counted from 0.
    size: bytes, about, to share the work and for the progress bar.
    split: empty where the documents are divided later, by data.val_fraction.
    """

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
    """A document, or a piece of one.

    text: bytes are UTF-8.
    where: the place that a message names.
    ends: whether the document ends with this piece.
    fault: why it cannot be used; empty if it can.
    hint: what helps to understand the fault.
    fix: what to do if the first piece of a file has it.
    """

    text: str | bytes
    where: str
    ends: bool = True
    fault: str = ""
    hint: str = ""
    fix: str = ""


class DocumentSource(Protocol):
    """A way to keep documents in files."""

    suffixes: tuple[str, ...]
    """Endings of its files, lower case."""

    def parts(
        self,
        path: Path,
        key: str,
        bad: BadFiles,
        files: Files | None = None,
    ) -> Listed:
        """Every part below `path`, or of `files`. key: where rows have their text. Raises DataError with all
        problems."""
        ...

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """The documents of a part. Fastest if parts are read in their order. Raises OSError, DataError."""
        ...


class PlainText:
    """UTF-8 text: a file is a document."""

    suffixes: tuple[str, ...] = (".txt",)

    def parts(
        self,
        path: Path,
        key: str,
        bad: BadFiles,
        files: Files | None = None,
    ) -> Listed:
        """Ranges of bytes of every file that begins as text does.

        bad="auto" skips files that are no text, and reports files that cannot be read. "skip" skips both, "fail"
        reports both.
        """
        found, left_out = files or self._files(path)
        in_folder = path.is_dir()
        root = (path if in_folder else path.parent).resolve()
        parts: list[Part] = []
        problems: list[Problem] = []
        for file, split in found:
            where = f"data.path: {file}"
            size = 0
            try:
                size, fault = _look_at(file, root)
            except DataError as error:
                # A link that leads nowhere or out of the folder, or a folder that cannot be listed.
                if bad != "skip":
                    problems += error.problems
                    continue
                fault = error.problems[0].what
            except OSError as error:
                fault = f"cannot be read: {error.strerror}"
                if bad == "auto":
                    problems.append(Problem(fault, where, fix="data.bad=skip leaves it out"))
                    continue

            if fault:
                name = file.relative_to(path).as_posix() if in_folder else file.name
                left_out.append((name, fault))
                # A file that was named is never skipped. A link within the folder always is: its target is read.
                is_skipped_here = in_folder and (bad != "fail" or fault == INSIDE)
                if not is_skipped_here:
                    problems.append(Problem(f"no text: {fault}", where, fix=FIX_FILE))
                continue
            for begin, end in ranges(size):
                part = Part(str(file), begin, end, end - begin, split)
                parts.append(part)
        return listed(parts, left_out, problems, path, FIX_FILE)

    def _files(self, path: Path) -> Files:
        if not path.is_dir():
            return with_validation(path, is_text=True), []
        found = {each.relative_to(path).as_posix(): each for each in walk(path)}
        splits, left_out = splits_of_text(list(found))
        files: list[tuple[Path, Split]] = []
        for name, split in splits.items():
            files.append((found[name], split))
        return files, left_out

    def read(self, part: Part, key: str) -> Iterator[Piece]:
        """Pieces of about PIECE bytes, cut after a line where lines are short."""
        with open(part.path, "rb") as stream:
            size = stream.seek(0, 2)
            # The part before ends at the same cut, so that no byte is read twice or left out.
            place = _cut(stream, part.begin, size)
            end = _cut(stream, part.end, size)
            while place < end:
                after = min(_cut(stream, place + PIECE, size), end)
                stream.seek(place)
                text = stream.read(after - place)
                if place == 0:
                    text = text.removeprefix(codecs.BOM_UTF8)
                yield Piece(text, f"{part.path}, byte {place}", after >= size, no_text(text))
                place = after


def _look_at(file: Path, root: Path) -> tuple[int, str]:
    """(bytes of a file below `root`, why it is no text). The second is empty for text. Raises OSError, DataError."""
    if fault := no_file(file, root):
        return 0, fault
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    # The head of a longer file may end within a character.
    return size, no_text(head, whole=size <= _HEAD_BYTES)


def _cut(stream: BinaryIO, place: int, size: int) -> int:
    """Where to cut a text of `size` bytes near `place`: after the next line end if one is near, else before the next
    character. Two parts that meet agree on it."""
    if place <= 0 or place >= size:
        return max(0, min(place, size))

    # From the byte before `place`: if a line ends with it, the cut is at `place` itself.
    stream.seek(place - 1)
    near = stream.read(_HEAD_BYTES)
    line_end = near.find(b"\n")
    if line_end >= 0:
        return place + line_end

    # A character has four bytes at most. All bytes but its first begin with the bits 10.
    for number, byte in enumerate(near[1:5]):
        if byte & 0xC0 != 0x80:
            return place + number
    return place


def is_skipped(fault: str, bad: BadFiles) -> bool:
    """Whether a piece with this fault is skipped, and counted; otherwise it ends the reading."""
    return bad == "skip" or (bad == "auto" and fault == "empty")


def files_below(path: Path, suffixes: Sequence[str]) -> Files:
    """Files of these endings with their splits, which their names say; of one file, its validation beside it."""
    if not path.is_dir():
        return with_validation(path), []
    of_these = [file for file in walk(path) if file.name.lower().endswith(tuple(suffixes))]
    kept, links = without_second_links([file for file in of_these if file.is_file()])
    names, left_out = without_tests([file.relative_to(path).as_posix() for file in kept])
    left_out += [(file.relative_to(path).as_posix(), SECOND_LINK) for file in links]

    # Names divide the files only if they say validation of some and not of all.
    validation = {name for name in names if is_validation(name)}
    divided = 0 < len(validation) < len(names)
    files: list[tuple[Path, Split]] = []
    for name in names:
        split: Split = ""
        if divided:
            split = "val" if name in validation else "train"
        files.append((path / name, split))
    return files, left_out


def ranges(size: int) -> list[tuple[int, int]]:
    """(begin, end) of every RANGE of `size` bytes; the last one may be shorter."""
    begins = range(0, size, RANGE)
    return [(begin, min(begin + RANGE, size)) for begin in begins]


def listed(
    parts: Sequence[Part], left_out: LeftOut, problems: Sequence[Problem], path: Path, fix: str = ""
) -> Listed:
    """What a source has to read. Raises DataError if there are problems; or if nothing is left, with `fix`."""
    if problems:
        raise DataError(first_of(problems, str(path)))
    if not parts:
        reasons = [f"{name} ({reason})" for name, reason in left_out[:NAMED]]
        why = "; ".join(reasons) or "it has no rows"
        raise DataError(Problem("has nothing to train on", f"data.path: {path}", why, fix))
    return Listed(tuple(parts), tuple(left_out))
