"""Read the text of a file or a folder, say by name what is wrong with every file that cannot be used, and divide it.

Without a path there is the source of Python's own standard library: real text that is on every machine.

Whole files go to training or to validation. If their names do not say which, some are held out in the order of a hash
of their names, so that every run on the same files validates on the same text.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.core.errors import DataError, Problem, some
from harness.data.splits import splits_of_text, with_validation

MAX_BYTES = 1 << 30
"""Most bytes of text a run takes by itself: all of it is held in memory once, while it is copied into the run."""
FIX_FILE = (
    "give a UTF-8 text file or a folder of them; convert others: iconv -f utf-16 -t utf-8 OLD > NEW (or -f latin1); "
    "what is no text (pictures, arrays, tables of numbers) goes through data.target: docs/guide/datasets.md"
)

NAMED = 20
"""Files or problems that a message names."""

INSIDE = "link within the folder"
"""Why such a link is skipped, whatever data.bad says."""

BadFiles = Literal["auto", "skip", "fail"]
"""What to do about files of a folder that are no text."""

LFS = b"version https://git-lfs.github.com/spec/"
"""How a pointer of Git LFS begins, which is there until the file itself is fetched."""
IS_LFS = "a pointer of Git LFS, not the file itself (git lfs pull)"

_CHUNK = 1 << 20
_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # its byte-order marks; UTF-8 cannot begin with either


@dataclass(frozen=True, slots=True)
class Document:
    """One file. name: path relative to the source, with forward slashes. content: its UTF-8 bytes, unchanged."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that was skipped, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Text:
    """The documents of one source, sorted by name, and what was skipped."""

    source: str
    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...] = ()


def read_text(path: Path, bad: BadFiles = "auto") -> Text:
    """The text at `path`: one UTF-8 file, or every UTF-8 file of a folder, recursively, sorted by relative path.

    In a folder, hidden files and folders are ignored, and links within it are skipped and listed, since their targets
    are read in their own place. Empty and binary files (NUL bytes, not UTF-8) are bad, and so are unreadable ones and
    links out of the folder. bad: "skip": skip and list them all; "fail": a Problem for each of them; "auto": skip the
    first two, a Problem for each of the others.

    Raises DataError with these problems; when nothing is left; and when there is more text than MAX_BYTES.
    """
    try:
        path = path.expanduser()
        folder = path.is_dir()
        root = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(_unreadable(path, error)) from error
    if folder:
        return _read_files(str(path), root, walk(root), bad)

    # A file was named, so nothing of it is skipped: an empty one is "nothing left", one of a pair is an error.
    files = [file for file, _ in with_validation(root, is_text=True)]
    bad = "auto" if len(files) == 1 else "fail"
    text = _read_files(str(path), root.parent, files, bad)
    return Text(text.source, text.documents)


def _read_files(
    source: str,
    root: Path,
    paths: Iterable[Path],
    bad: BadFiles = "auto",
) -> Text:
    """The text of `paths`, named relative to `root`. Raises DataError as `read_text` does."""
    documents: list[Document] = []
    skipped: list[Skipped] = []
    problems: list[Problem] = []
    total = 0
    for path in paths:
        # A name need not be UTF-8, but the journal must.
        relative = path.relative_to(root).as_posix()
        name = relative.encode("utf-8", "backslashreplace").decode()
        try:
            content = _read_file(path, root)
        except DataError as error:
            if bad != "skip":
                problems += error.problems
                continue
            content = error.problems[0].what

        # Text in place of bytes: the reason to skip the file.
        if isinstance(content, str):
            if bad == "fail" and content != INSIDE:
                fix = f"{FIX_FILE}; or set data.bad=skip"
                problems.append(Problem(f"no text: {content}", _where(path), fix=fix))
            skipped.append(Skipped(name, content))
            continue
        total += len(content)
        if total > MAX_BYTES:
            problems.append(_too_large(source))
            break
        documents.append(Document(name, content))

    if not documents and not problems:
        problems.append(_nothing_left(source, skipped))
    if problems:
        raise DataError(first_of(problems, source))

    # A disk lists its files in any order; a run on the same files has the same bytes.
    documents.sort(key=lambda document: document.name)
    skipped.sort(key=lambda skip: skip.name)
    return Text(source, tuple(documents), tuple(skipped))


def first_of(problems: Sequence[Problem], source: str) -> list[Problem]:
    """NAMED of the problems, and how many more there are: a message fits on one screen."""
    named = list(problems[:NAMED])
    more = len(problems) - NAMED
    if more > 0:
        named.append(Problem(f"{more} more like these", source))
    return named


def walk(root: Path) -> Iterator[Path]:
    """Files and links below `root`, without hidden ones; last the folders that cannot be listed."""
    closed: list[Path] = []

    def note(error: OSError) -> None:
        closed.append(Path(error.filename))

    for folder, folders, files in os.walk(root, onerror=note):
        # In place: os.walk enters what is left in the list, in this order. It does not follow links.
        visible = [name for name in folders if not name.startswith(".")]
        folders[:] = sorted(visible)
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted([*files, *links]):
            if not name.startswith("."):
                yield Path(folder, name)
    yield from closed


def no_file(path: Path, root: Path) -> str:
    """Why what `walk` found below `root` is not to be opened: a link, a pipe, a device. Empty if it is a file.

    Raises DataError for a link that leads nowhere or out of `root`, and for a folder that cannot be listed.
    """
    try:
        # The target of a link within the folder is read in its own place.
        if path.is_symlink():
            target = path.resolve(strict=True)
            if target.is_relative_to(root):
                return INSIDE
            what = f"is a link out of the folder, to {target}"
            raise DataError(Problem(what, _where(path), fix="copy the file there instead"))
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            os.listdir(path)  # raises what made the walk stop there
    except (OSError, RuntimeError) as error:
        raise DataError(_unreadable(path, error)) from error
    # Opening a pipe would wait for ever.
    return "" if stat.S_ISREG(status.st_mode) else "not a regular file"


def _read_file(path: Path, root: Path) -> bytes | str:
    """A file's bytes, or the reason to skip it. Raises DataError."""
    try:
        if reason := no_file(path, root):
            return reason
        # A huge file would fill the memory before it could be counted.
        if path.stat().st_size > MAX_BYTES:
            raise DataError(_too_large(str(path)))
        content = path.read_bytes()
    except (OSError, RuntimeError) as error:
        raise DataError(_unreadable(path, error)) from error
    # Editors on Windows put a byte order mark before UTF-8. It is no text.
    content = content.removeprefix(codecs.BOM_UTF8)
    return no_text(content) or content


def no_text(content: bytes, whole: bool = True) -> str:
    """Why `content` is no text; empty if it is. whole: False: it goes on, and may end within a character."""
    if not content:
        return "empty"
    if content.startswith(_UTF16):
        return "UTF-16, not UTF-8"
    if content.startswith(LFS):
        return IS_LFS
    if b"\0" in content:
        return "binary: it has NUL bytes"

    # A character may lie across two chunks, so they are decoded one after the other.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(content), _CHUNK):
            end = start + _CHUNK
            decoder.decode(content[start:end], final=whole and end >= len(content))
    except UnicodeDecodeError:
        return "binary: it is not UTF-8"
    return ""


def _where(path: Path | str) -> str:
    return f"data.path: {path}"


def _unreadable(path: Path, error: Exception) -> Problem:
    if isinstance(error, FileNotFoundError) and not path.is_symlink():
        return Problem("no such file or folder", _where(path), fix="check the path")
    reason = error.strerror if isinstance(error, OSError) else str(error)
    if isinstance(error, RuntimeError):
        reason = "a link that leads to itself"
    fix = "make it readable for this user, or leave it out"
    if path.is_symlink():
        fix = "remove the link, or mend it"
    return Problem(f"cannot be read: {reason}", _where(path), fix=fix)


def _too_large(source: str) -> Problem:
    fix = f"prepare it once, for all runs: harness data prepare {source} --out DIR; then data.path=DIR"
    return Problem(f"more than {MAX_BYTES >> 20} MiB of text", _where(source), fix=fix)


def _nothing_left(source: str, skipped: Sequence[Skipped]) -> Problem:
    why = "it has no visible files"
    if len(skipped) == 1:
        why = str(skipped[0])
    elif skipped:
        why = f"skipped {some(skipped, NAMED)}"
    return Problem("has no text to train on", _where(source), why, FIX_FILE)


def standard_library() -> Text:
    """The top-level modules of the running Python's standard library, sorted by name.

    Without packages, so without tests and site-packages; without links, by which distributions put local configuration
    into the folder; and without the generated variables of the build. Raises DataError if this Python ships without
    its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for path in folder.glob("*.py"):
        is_module = path.is_file() and not path.is_symlink()
        if is_module and not path.name.startswith("_sysconfigdata"):
            paths.append(path)
    if not paths:
        what = "this Python has no standard library source to train on"
        fix = "give your own text: data.path=<file or folder>"
        raise DataError(Problem(what, str(folder), fix=fix))
    return _read_files(f"Python {platform.python_version()} standard library", folder, paths)


def divide(text: Text, val_fraction: float) -> tuple[Text, list[Document], list[Document]]:
    """(the text without a test split, training, validation).

    The names of the files say which they are, if those of all files do (`train.txt` and `val.txt`, a folder `train` and
    one `test`). Otherwise, or if none is validation, see `split_documents`.
    """
    names = [document.name for document in text.documents]
    splits, left_out = splits_of_text(names)
    skipped = list(text.skipped)
    skipped += [Skipped(name, reason) for name, reason in left_out]
    skipped.sort(key=lambda skip: skip.name)
    kept: list[Document] = []
    train: list[Document] = []
    val: list[Document] = []
    for document in text.documents:
        split = splits.get(document.name)
        if split is None:  # a test split, which is among what was skipped
            continue
        kept.append(document)
        of_split = val if split == "val" else train
        of_split.append(document)

    text = Text(text.source, tuple(kept), tuple(skipped))
    if not val:
        return text, *split_documents(kept, val_fraction)
    return text, train, val


def repeated(train: Sequence[Document], val: Sequence[Document]) -> list[str]:
    """Names of validation files whose content is that of a training file, too: copies that lie in the same folder."""
    # By size first: a set hashes every byte of what is put into it.
    sizes = {len(document.content) for document in val}
    candidates: set[bytes] = set()
    for document in train:
        if len(document.content) in sizes:
            candidates.add(document.content)
    return [document.name for document in val if document.content in candidates]


def split_documents(
    documents: Sequence[Document], val_fraction: float
) -> tuple[list[Document], list[Document]]:
    """(train, validation), each in the order of `documents`.

    Files are held out in the order of a hash of their names until `val_fraction` of the bytes is reached; a file that
    would hold out over half as much again is skipped. If whole files cannot give at least half of the share (one
    file, or a few large ones), the tail of the largest remaining file is held out instead, cut at a line end. Neither
    the run's seed nor the contents matter, so that runs are validated on the same files.
    """
    total = sum(len(document.content) for document in documents)
    target = val_fraction * total
    # However large the share is, some text stays for training.
    most = min(1.5 * target, (target + total) / 2)

    # Whole files, as far as they fit.
    chosen: set[str] = set()
    held = 0
    for document in sorted(documents, key=_hash_order):
        if held < target and held + len(document.content) <= most:
            chosen.add(document.name)
            held += len(document.content)

    train = [document for document in documents if document.name not in chosen]
    val = [document for document in documents if document.name in chosen]

    # One file, or a few large ones: cut the largest.
    if held < target / 2:
        largest = max(train, key=lambda document: len(document.content))
        cut = _line_cut(largest.content, round(target - held))
        train[train.index(largest)] = Document(largest.name, largest.content[:cut])
        val.append(Document(largest.name, largest.content[cut:]))
    return train, val


def _hash_order(document: Document) -> bytes:
    return hashlib.sha256(document.name.encode()).digest()


def _line_cut(content: bytes, tail: int) -> int:
    """Where to cut so that about `tail` bytes follow: after the line end nearest to there, if one is near."""
    wanted = len(content) - tail
    reach = min(tail, wanted) // 2
    before = content.rfind(b"\n", wanted - reach, wanted) + 1
    after = content.find(b"\n", wanted, wanted + reach) + 1
    near = [cut for cut in (before, after) if cut]
    if near:
        return min(near, key=lambda cut: abs(cut - wanted))

    # One long line: cut it anywhere, with something on both sides.
    return max(1, min(wanted, len(content) - 1))
