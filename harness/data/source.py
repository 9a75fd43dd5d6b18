"""What data were made of, so that a later start reports by name which files of the source have changed since.

A run goes on with what it made at its first start, and a new run on a prepared folder with what was prepared. Neither
need be what lies in the source now. `data/source.json` of a run records each file of the source: size, time, inode and
hash. At a start, a file with the same size, time and inode is the same; of any other the hash decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from harness.core.config import DataConfig
from harness.core.errors import ConfigError, some
from harness.core.files import MAX_LARGE, file_sha256, read_json, write_json
from harness.data.blocks import Stamp
from harness.data.splits import with_validation
from harness.data.text import Document, walk
from harness.data.tokenizer import tokenizer_file

RECORD = "source.json"
MADE_COPY, MADE_TOKENS, MADE_DATASET = "text", "token ids", "prepared"
"""What was made of a source: a copy of its text, token ids in the run, or what `harness data prepare` wrote."""

_FORMAT = 1
_NAMED = 5
_HASH_LETTERS = 32  # of a SHA-256 in hex
_SINCE = {
    MADE_COPY: "this run copied its text",
    MADE_TOKENS: "this run made its token ids",
    MADE_DATASET: "{out} was prepared from it",
}
_CONSEQUENCE = {
    MADE_COPY: "the run goes on with its copy, a new one would take what is there now",
    MADE_TOKENS: "the run goes on with its own token ids and tokenizer, a new one would take what is there now",
    MADE_DATASET: "what was prepared is used as it is; for what is there now: harness data prepare {source} --out NEW",
}


def files_of(source: Path, suffixes: Sequence[str] | None) -> dict[str, Path]:
    """Files of a source that may be data, by name relative to it. suffixes: of its format; None: any, as of text."""
    source = source.resolve()
    base = _base(source)
    found: dict[str, Path] = {}
    if source.is_dir():
        for file in walk(source):
            if suffixes is None or file.name.lower().endswith(tuple(suffixes)):
                found[_name(file, base)] = file
        return found
    for file, _ in with_validation(source, is_text=suffixes is None):
        found[_name(file, base)] = file
    return found


def stamps(files: Mapping[str, Path]) -> dict[str, Stamp]:
    """Stamps of those of `files` that are regular. Taken before the files are read, they show any later change."""
    found: dict[str, Stamp] = {}
    for name, path in files.items():
        try:
            found[name] = Stamp.of(path)
        except (OSError, ValueError):  # what reads the file reports it
            continue
    return found


def record_of_text(
    source: Path, before: Mapping[str, Stamp], documents: Iterable[Document]
) -> dict[str, Any]:
    """The record of text that was copied. before: `stamps` from before the documents were read."""
    contents = {document.name: document.content for document in documents}
    files: dict[str, str] = {}
    for name, stamp in before.items():
        if name in contents:
            sha256 = hashlib.sha256(contents[name]).hexdigest()
            files[name] = _entry(stamp, sha256)

    # Files that were there and skipped: they are not new at the next start.
    others = sorted(before.keys() - files.keys())
    return _record(source, None, files, others, None)


def record_of_files(
    source: Path,
    suffixes: Sequence[str] | None,
    listed: bool,
    files: Mapping[Path, Stamp],
    tokenizer: tuple[str, str] | None,
) -> dict[str, Any]:
    """The record of files that were made into token ids.

    listed: whether every file of these suffixes belongs to the source, so that a new one is reported.
    files: with their stamps from before they were read.
    tokenizer: its path and hash.

    Raises OSError.
    """
    base = _base(source)
    entries: dict[str, str] = {}
    for path, stamp in files.items():
        entries[_name(path, base)] = _entry(stamp, file_sha256(path))
    # Files that are there by now and were not read: they are not new at the next start.
    others: list[str] | None = None
    if listed:
        there = stamps(files_of(source, suffixes))
        others = sorted(there.keys() - entries.keys())
    return _record(source, suffixes, entries, others, tokenizer)


def _record(
    source: Path,
    suffixes: Sequence[str] | None,
    files: Mapping[str, str],
    others: Sequence[str] | None,
    tokenizer: tuple[str, str] | None,
) -> dict[str, Any]:
    """others: files that were there and not used; None: new files are not reported."""
    return {
        "format": _FORMAT,
        "path": str(source.resolve()),
        "suffixes": None if suffixes is None else list(suffixes),
        "files": dict(files),
        "others": None if others is None else list(others),
        "tokenizer": None if tokenizer is None else list(tokenizer),
    }


def save_record(
    folder: Path, record: Mapping[str, Any], made: str, out: Path | None = None
) -> None:
    """Write source.json in `folder` of a run's data. made: one of MADE_*. out: what was prepared. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path_of_out = "" if out is None else str(out)
    write_json(folder / RECORD, {**record, "made": made, "out": path_of_out})


@dataclass(frozen=True, slots=True)
class _Record:
    """A source.json that was read.

    made, out: as `save_record` was given them.
    source: where the source was.
    suffixes, others: as in `_record`.
    files: by name, the entry of each file.
    tokenizer: its path and hash, or None.
    """

    made: str
    out: str
    source: Path
    suffixes: Sequence[str] | None
    others: Sequence[str] | None
    files: Mapping[str, str]
    tokenizer: tuple[str, str] | None

    @classmethod
    def read(cls, path: Path) -> _Record:
        """Raises OSError; ValueError, TypeError, LookupError or AttributeError if it is damaged."""
        found = read_json(path, MAX_LARGE)
        if found["format"] != _FORMAT or found["made"] not in _SINCE:
            raise ValueError("it is of another format")
        files: dict[str, str] = found["files"]
        # Size, time, inode and hash, see `_entry`.
        for entry in files.values():
            if len(entry.split()) != 4:
                raise ValueError("an entry of a file has not four values")
        tokenizer = None
        if found["tokenizer"]:
            path_of_it, sha256 = found["tokenizer"][:2]
            tokenizer = str(path_of_it), str(sha256)
        return cls(
            made=found["made"],
            out=found["out"],
            source=Path(found["path"]),
            suffixes=found["suffixes"],
            others=found["others"],
            files=files,
            tokenizer=tokenizer,
        )


def source_changes(config: DataConfig, folder: Path) -> list[str]:
    """What has changed since the data in `folder` of a run were made: a text for each source that has changed.

    A source that is not there at all is no change: the run may have moved to another machine.
    """
    if config.target is not None:
        return []
    tokenizer = config.tokenizer
    if not config.mixture:
        texts = [_changes(folder, config.path, tokenizer)]
    else:
        # Each source has a folder of its own, named by its number.
        texts: list[str] = []
        for number, part in enumerate(config.mixture):
            own = folder / str(number)
            texts.append(_changes(own, part.path, tokenizer))
    return [text for text in texts if text]


def _changes(folder: Path, given: str | None, tokenizer: str | None) -> str:
    """What has changed of one source. given, tokenizer: as the config has them now."""
    path = folder / RECORD
    if not path.exists():
        return ""
    try:
        record = _Record.read(path)
        # The config names what was prepared, not what it was prepared from.
        prepared = record.made == MADE_DATASET
        moved_to = None if prepared else _moved_to(given)
        source = moved_to or record.source
        changed = ""
        if record.files and source.exists():
            changed = _changed_files(source, record)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        return f"{path} cannot be read ({why}): nothing shows whether the source has changed"

    found: list[str] = []
    if changed:
        since = _SINCE[record.made].format(out=record.out)
        found.append(f"{source} has changed since {since} ({changed})")
    if record.tokenizer:
        # A prepared folder was made with its own tokenizer, whatever the config names now.
        given_now = None if prepared else tokenizer
        if file := _changed_tokenizer(record.tokenizer, given_now):
            found.append(f"the tokenizer {file} has changed since it made the token ids")
    if not found:
        return ""
    consequence = _CONSEQUENCE[record.made].format(source=source)
    return f"{'; '.join(found)}: {consequence}"


def _moved_to(given: str | None) -> Path | None:
    """Where the source is now, if the project moved; None if that is not known."""
    if not given:
        return None
    try:
        path = Path(given).expanduser()
        return path.resolve() if path.exists() else None
    except (OSError, RuntimeError):
        return None


def _changed_files(source: Path, record: _Record) -> str:
    """Which files are others than in the record, in words; empty if none. Raises OSError."""
    base = _base(source)
    there: dict[str, Path] = {}
    if record.others is not None:
        there = files_of(source, record.suffixes)
    files = {name: there.get(name, base / name) for name in record.files}
    now = stamps(files)

    # A file is hashed only if its stamp differs and its size does not: most files cost one stat.
    changed: list[str] = []
    for name, stamp in now.items():
        *written, hashed = record.files[name].split()
        if written == [str(each) for each in astuple(stamp)]:
            continue
        same_size = written[0] == str(stamp.size)
        if not same_size or not file_sha256(files[name]).startswith(hashed):
            changed.append(name)
    gone = [name for name in record.files if name not in now]

    # A pipe or a socket is no data, and was none when the record was made.
    known = record.files.keys() | set(record.others or ())
    new = sorted(stamps(there).keys() - known)
    found: list[str] = []
    for word, names in (("changed", changed), ("gone", gone), ("new", new)):
        if names:
            text = some(names, _NAMED)
            found.append(f"{word}: {text}")
    return "; ".join(found)


def _changed_tokenizer(recorded: tuple[str, str], given: str | None) -> Path | None:
    """The tokenizer's file, if it is another than in the record."""
    path, hashed = recorded
    # A run reads its own copy: a file that is gone misleads nobody.
    try:
        file = tokenizer_file(Path(given or path))
        same = file_sha256(file) == hashed
    except (ConfigError, OSError):
        return None
    return None if same else file


def _entry(stamp: Stamp, sha256: str) -> str:
    """A file as the record has it: size, time, inode and hash, separated by spaces."""
    size, mtime_ns, inode = astuple(stamp)
    return f"{size} {mtime_ns} {inode} {sha256[:_HASH_LETTERS]}"


def _base(source: Path) -> Path:
    source = source.resolve()
    return source if source.is_dir() else source.parent


def _name(path: Path, base: Path) -> str:
    # A name on a Linux disk is bytes, which need not be UTF-8; JSON is.
    name = path.relative_to(base).as_posix()
    return name.encode("utf-8", "backslashreplace").decode()
