"""What `data.path` leads to: which format its files have, by their names; or what to do with what is not read.

A file is what its ending says, and text where the ending says nothing. A folder has the format that all its files have,
except for files that usually lie beside data (a README, a .json, a .py). `data.format` overrides all of this.

What a file's content is, its reader finds out, and refuses by name what it cannot read. Only in files whose names say
text, rows of JSON are looked for here: as text they would train without an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from harness.core.config import Documents
from harness.core.errors import DataError, Problem, some
from harness.core.files import MAX_LARGE, read_mapping
from harness.data.prepare import PREPARED
from harness.data.rows import FORMATS, JSON
from harness.data.text import walk

Kind = Literal["tokens", "prepared", Documents]

_TOKENS = ".bin"
_NAMED = 5
_MOST_GUESSES = 3
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

# What lies beside data without being any.
_COMPANIONS = (
    ".idx",
    ".md",
    ".json",
    ".yaml",
    ".yml",
    ".pkl",
    ".py",
    ".rst",
    ".sha256",
    ".txt.license",
)
_COMPANION_NAMES = ("LICENSE", "README", "COPYING")
_PROSE = (".py", ".md", ".rst")
_FEW_PROSE = 10  # with more prose than this, and than other files, a folder is a source tree: its prose is the data
_FILES_LOOKED_AT = 10_000
_LONGEST_ROW = 1 << 24  # bytes
_MOST_ROWS = 0.05  # share of a text folder's bytes that may be row files: a source tree has some for its tests

# Commands for what has to be unpacked or written anew first. {path}: the file; {stem}: without its ending.
_TAR = "mkdir '{stem}' && tar -xf '{path}' -C '{stem}'; then data.path={stem}"
_COMMANDS = {
    ".tar.gz": _TAR,
    ".tar.zst": _TAR,
    ".tar.xz": _TAR,
    ".tar.bz2": _TAR,
    ".tgz": _TAR,
    ".gz": "gunzip -k '{path}'; then data.path={stem}",
    ".zst": "zstd -d '{path}'; then data.path={stem}",
    ".bz2": "bunzip2 -k '{path}'; then data.path={stem}",
    ".xz": "unxz -k '{path}'; then data.path={stem}",
    ".zip": "unzip '{path}' -d '{stem}'; then data.path={stem}",
    ".npy": "token ids: python -c \"import numpy; numpy.load('{path}').ravel().astype('<u4').tofile('{stem}.bin')\"; "
    "then data.path={stem}.bin data.dtype=uint32. Anything else: data.target (docs/guide/datasets.md)",
}


def look(path: Path) -> Kind:
    """The format of what is at `path`.

    Raises DataError for packed files and NumPy arrays, with the command that makes them readable; and for a folder that
    has files of several formats, since each may be meant.
    """
    # A file: its ending says it. Megatron's pair of files may be named by either of the two.
    if not path.is_dir():
        if path.suffix.lower() == ".idx" and path.with_suffix(_TOKENS).is_file():
            return "tokens"
        if path.suffix.lower() == JSON:
            return "JSONL"
        kind = kind_of(path)
        if kind == "text":
            _refuse_packed(path, [path])
            _refuse_rows(path, [path])
        return kind

    # A folder that a program wrote as a whole has a file that says so.
    if "vocabulary" in read_mapping(path / PREPARED, MAX_LARGE):
        return "prepared"
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return "Arrow"

    # A .json is data only where there is nothing else.
    files, beside = _data_files(path)
    all_json = all(file.suffix.lower() == JSON for file in beside)
    if not files and beside and all_json:
        return "JSONL"

    # Any other: files of one format are of that format, and text with other files among it is text.
    kinds: set[Kind] = {kind_of(file) for file in files}
    if kinds == {"tokens"} and any(file.parent != path for file in files):
        return "text"  # shards are read from one folder only
    if len(kinds) == 1 and "text" not in kinds:
        return kinds.pop()
    _refuse_packed(path, files)
    _refuse_mixed(path, files, beside)
    _refuse_rows(path, files)
    return "text"


def kind_of(file: Path) -> Kind:
    """The format that the ending of a file says; text where it says nothing."""
    name = file.name.lower()
    if name.endswith(_TOKENS):
        return "tokens"
    for kind, source in FORMATS.items():
        if name.endswith(source.suffixes):
            return kind
    return "text"


def _data_files(path: Path) -> tuple[list[Path], list[Path]]:
    """(files of a folder that may be data, files that usually lie beside data)."""
    files: list[Path] = []
    beside: list[Path] = []
    for file in walk(path):
        # A README may have any ending, or none.
        if file.name.upper().startswith(_COMPANION_NAMES):
            continue
        if file.name.lower().endswith(_COMPANIONS):
            beside.append(file)
        else:
            files.append(file)
        if len(files) + len(beside) >= _FILES_LOOKED_AT:
            break

    # A source tree: its programs and pages are the data.
    prose = [file for file in beside if file.suffix.lower() in _PROSE]
    if len(prose) > max(_FEW_PROSE, len(files)):
        return files + prose, []
    return files, beside


def _refuse_packed(path: Path, files: Sequence[Path]) -> None:
    """Raises DataError if all files have to be unpacked, or written anew, before they can be read."""
    endings = [_packed_ending(file) for file in files]
    if not files or not all(endings):
        return
    # The command is for the first of them.
    file, ending = files[0], endings[0]
    stem = str(file)[: -len(ending)]  # by length: the ending may be in capitals
    what = f"is not read: {ending}"
    if path.is_dir():
        what += f" ({len(files)} such as {file.relative_to(path)})"
    fix = _COMMANDS[ending].format(path=file, stem=stem)
    raise DataError(Problem(what, f"data.path: {path}", fix=fix))


def _packed_ending(file: Path) -> str:
    """The ending in _COMMANDS that a file has, empty if none."""
    for ending in _COMMANDS:
        if file.name.lower().endswith(ending):
            return ending
    return ""


def _refuse_mixed(path: Path, files: Sequence[Path], beside: Sequence[Path]) -> None:
    """Raises DataError if a folder of text has token ids in it, or more than a few rows. A .json counts as rows."""
    # Either may be meant, and the wrong one would train without an error.
    tokens: list[Path] = []
    texts: list[Path] = []
    for file in files:
        is_shard = file.parent == path and kind_of(file) == "tokens"
        (tokens if is_shard else texts).append(file)
    train = path / "train.bin"
    mostly_tokens = bool(tokens) and sum(map(_size, tokens)) >= sum(map(_size, texts))
    if train.is_file() or mostly_tokens:
        likeliest = train if train.is_file() else tokens[0]
        names = some([file.name for file in texts], _NAMED)
        why = f"{likeliest.name} beside {names}: either may be meant"
        fix = f"data.path={likeliest}, data.format=text, or a folder for each kind"
        raise DataError(Problem("has both token ids and text", f"data.path: {path}", why, fix))

    # A few rows among much text may be some program's tests; more of them are data, too.
    rows: dict[Kind, list[str]] = {}
    size_of_rows = size_of_all = 0
    for file in (*files, *beside):
        size = _size(file)
        size_of_all += size
        kind = "JSONL" if file.suffix.lower() == JSON else kind_of(file)
        if kind not in ("text", "tokens"):
            rows.setdefault(kind, []).append(file.relative_to(path).as_posix())
            size_of_rows += size
    if rows and size_of_rows >= _MOST_ROWS * size_of_all:
        whys: list[str] = []
        for kind, names in rows.items():
            text = some(names, _NAMED)
            whys.append(f"{kind}: {text}")
        ways = " or ".join(f"data.format={kind}" for kind in (*rows, "text"))
        why = "; ".join(whys)
        fix = f"{ways} (all of it, as it stands), or a folder for each kind"
        raise DataError(Problem("has files of several kinds", f"data.path: {path}", why, fix))


def _refuse_rows(path: Path, files: Sequence[Path]) -> None:
    """Raises DataError if text is rows of JSON by its content, in more than a few files."""
    rows = [file for file in files if kind_of(file) == "text" and _has_rows(file)]
    if not rows or sum(map(_size, rows)) < _MOST_ROWS * sum(map(_size, files)):
        return
    what = "has a JSON object in every line, and a name that says text"
    fix = "data.format=JSONL, or data.format=text (as it stands, with all signs of JSON)"
    if path.is_dir():
        what = f"has {len(rows)} of {len(files)} files with a JSON object in every line, and a name that says text"
        fix = "call them .jsonl; or data.format=text (as it stands, with all signs of JSON)"
    raise DataError(Problem(what, f"data.path: {path}", f"such as {rows[0].name}", fix))


def _has_rows(file: Path) -> bool:
    """Whether the first two lines of a file are JSON objects."""
    try:
        # Not of a pipe, at which opening it would wait.
        if not file.is_file():
            return False
        with file.open("rb") as stream:
            for _ in range(2):
                line = stream.readline(_LONGEST_ROW)
                if not line.startswith(b"{") or not isinstance(json.loads(line), dict):
                    return False
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # what reads the file reports it
        return 0


def no_such(given: str, path: Path) -> Problem:
    """What to do about a path that leads nowhere: an address, a name of the hub, or a misspelt path."""
    where = f"data.path: {given}"
    scheme = given.partition("://")[0] if "://" in given else ""
    if scheme:
        fix = "copy it to a disk of this machine first"
        if scheme in ("http", "https", "ftp"):
            # The last part of the address, without what follows a question mark.
            last = given.rstrip("/").rpartition("/")[2]
            file = last.partition("?")[0] or "FILE"
            fix = f"curl -L -o {file} '{given}'; then data.path={file}"
        return Problem("is an address, and nothing is fetched", where, fix=fix)

    fix = "check the path"
    if path.parent.is_dir():
        names = [each.name for each in path.parent.iterdir()]
        if near := get_close_matches(path.name, names, _MOST_GUESSES):
            fix = f"did you mean {' or '.join(near)}?"
    elif _HUB_NAME.fullmatch(given):
        fix = f"if it is the name of a data set on the Hugging Face hub: data.path=hf:{given}. Else check the path"
    return Problem("no such file or folder", where, fix=fix)
