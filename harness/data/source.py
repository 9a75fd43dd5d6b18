"""What data were made of: the source's files as they were, so that what changed since is told by name.

A run goes on with what it made at its beginning (`tokens`), and so does a new run on what was prepared (`prepare`);
neither is what lies in the source now. `data/source.json` has each file's size, time, inode and hash. At a start a file
with the same size, time and inode is the same; of any other the hash decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from harness.core.config import DataConfig
from harness.core.errors import ConfigError, some
from harness.core.files import MAX_LARGE, file_sha256, read_json, write_json
from harness.data.blocks import BLOCK, SAMPLED, Stamp, digest
from harness.data.shards import text_beside, validation_beside
from harness.data.text import Document, walk
from harness.data.tokenizer import tokenizer_file

RECORD = "source.json"
WHOLE = 64 << 20
"""Bytes up to which a file is hashed from end to end; of a larger one SAMPLED blocks are, evenly spread."""
MUCH = 1 << 30
"""Bytes of a source from which on SAMPLED blocks of every file are enough: reading it all once more would take long."""
COPY, TOKENS, PREPARED = "text", "token ids", "prepared"
"""What was made of a source: a copy of its text, token ids in the run, or what `harness data prepare` wrote."""

_FORMAT = 1
_NAMED = 5


def look_around(source: Path, suffixes: Sequence[str] | None) -> dict[str, Path]:
    """Files of a source that may be data, by name relative to it. suffixes: None: whatever is there, as of text."""
    source = source.resolve()
    if not source.is_dir():
        beside = validation_beside(source) if suffixes else text_beside(source)
        return {_name(each, source.parent): each for each in (source, beside) if each is not None}
    found = (each for each in walk(source) if suffixes is None or each.name.lower().endswith(tuple(suffixes)))
    return {_name(each, source): each for each in found}


def stamps(files: Mapping[str, Path]) -> dict[str, Stamp]:
    """Of the files that can be looked at. Taken before they are read: a later change is then one since they were."""
    found: dict[str, Stamp] = {}
    for name, path in files.items():
        try:
            found[name] = Stamp.of(path)
        except (OSError, ValueError):  # who reads it says so
            continue
    return found


def origin_of_text(source: Path, before: Mapping[str, Stamp], documents: Iterable[Document]) -> dict[str, Any]:
    """The record of a text that was copied: `before` by `stamps`, and what was read then."""
    contents = {document.name: document.content for document in documents}
    files = {
        name: _entry(
            stamp, fingerprint(len(contents[name]), lambda at, count, name=name: contents[name][at : at + count], WHOLE)
        )
        for name, stamp in before.items()
        if name in contents
    }
    return _origin(source, None, files, sorted(before.keys() - files.keys()), None, WHOLE)


def origin_of_files(
    source: Path, suffixes: Sequence[str] | None, listed: bool, files: Mapping[Path, Stamp], tokenizer: Any
) -> dict[str, Any]:
    """The record of files that were made into token ids. listed: every file of these suffixes is one of the source's.
    tokenizer: its path and its hash, or None. Raises OSError.
    """
    base = source.resolve() if source.is_dir() else source.resolve().parent
    whole = WHOLE if sum(stamp.size for stamp in files.values()) <= MUCH else SAMPLED * BLOCK
    entries = {_name(path, base): _entry(stamp, fingerprint_file(path, whole)) for path, stamp in files.items()}
    others = sorted(stamps(look_around(source, suffixes)).keys() - entries.keys()) if listed else None
    return _origin(source, suffixes, entries, others, tokenizer, whole)


def fingerprint_file(path: Path, whole: int) -> str:
    """`fingerprint` of a file. Raises OSError."""
    with path.open("rb") as stream:

        def read(start: int, count: int) -> bytes:
            stream.seek(start)
            return stream.read(count)

        return fingerprint(os.fstat(stream.fileno()).st_size, read, whole)


def fingerprint(size: int, read: Callable[[int, int], bytes], whole: int) -> str:
    """What is kept of `size` bytes, hex: their hash up to `whole` bytes, else that of SAMPLED blocks of them."""
    if size <= whole:
        return digest(read(0, size)).hex()
    step = (size - BLOCK) // (SAMPLED - 1)
    return digest(b"".join(read(number * step, BLOCK) for number in range(SAMPLED))).hex()


def save_origin(folder: Path, origin: Mapping[str, Any], made: str, out: Path | None = None) -> None:
    """Write what `folder`, of a run's data, was made of. made: COPY, TOKENS or PREPARED, in `out`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORD, {**origin, "made": made, "out": str(out) if out else ""})


def source_changes(config: DataConfig, folder: Path) -> list[str]:
    """What has changed since the data in `folder`, of a run, were made: a text for each source of which something has.

    A source that is not there at all is no change: the run may have moved to another machine.
    """
    if config.target is not None:
        return []
    parts = [(folder / str(number), part.path) for number, part in enumerate(config.mixture)]
    told = [_changes(own, path, config) for own, path in parts or [(folder, config.path)]]
    return [text for text in told if text]


def _changes(folder: Path, given: str | None, config: DataConfig) -> str:
    record = folder / RECORD
    if not record.exists():
        return ""
    try:
        origin = read_json(record, MAX_LARGE)
        made, out, source = origin["made"], origin["out"], Path(origin["path"])
        tokenizer, suffixes, others = origin["tokenizer"], origin["suffixes"], origin["others"]
        known = {name: tuple(text.split()) for name, text in origin["files"].items()}
        if made not in _GOES_ON or origin["format"] != _FORMAT or any(len(entry) != 4 for entry in known.values()):
            raise ValueError("it is of another format")
        now = _now(given) if made != PREPARED else None
        source = now if now is not None else source
        parts = _of_files(source, known, suffixes, others, int(origin["whole"])) if known and source.exists() else []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return (
            f"{record} cannot be read ({type(error).__name__}: {error}): nothing tells whether the source has changed"
        )
    told = [f"{source} has changed since {_MADE[made].format(out=out)} ({'; '.join(parts)})"] if parts else []
    if tokenizer and (change := _of_tokenizer(tokenizer, config.tokenizer if made != PREPARED else None)):
        told.append(change)
    if not told:
        return ""
    return f"{'; '.join(told)}: {_GOES_ON[made].format(out=out, source=source)}"


_MADE = {
    COPY: "this run copied its text",
    TOKENS: "this run made its token ids",
    PREPARED: "{out} was prepared from it",
}
_GOES_ON = {
    COPY: "the run goes on with its copy, a new one would take what is there now",
    TOKENS: "the run goes on with its own token ids and tokenizer, a new one would take what is there now",
    PREPARED: "what was prepared is used as it is; for what is there now: harness data prepare {source} --out NEW",
}


def _now(given: str | None) -> Path | None:
    """Where the source is, if the project moved; None where it cannot be said."""
    try:
        path = Path(given).expanduser() if given else None
        return path.resolve() if path is not None and path.exists() else None
    except (OSError, RuntimeError):
        return None


def _of_files(
    source: Path,
    known: Mapping[str, tuple[str, ...]],
    suffixes: Sequence[str] | None,
    others: Sequence[str] | None,
    whole: int,
) -> list[str]:
    """What became of the files, in words. Raises OSError."""
    base = source.resolve() if source.is_dir() else source.resolve().parent
    there = look_around(source, suffixes) if others is not None else {}
    files = {name: there.get(name, base / name) for name in known}
    now = stamps(files)
    changed: list[str] = []
    touched: list[str] = []
    for name, entry in known.items():
        stamp = now.get(name)
        if stamp is None or _entry(stamp, entry[3]).split() == list(entry):
            continue
        if stamp.size != int(entry[0]) or fingerprint_file(files[name], whole) != entry[3]:
            changed.append(name)
        elif stamp.size > whole:
            touched.append(name)
    gone = [name for name in known if name not in now]
    # A pipe or a socket is no data, and was none when the record was made.
    new = sorted(stamps(there).keys() - known.keys() - set(others or ()))
    words = {
        "changed": changed,
        "gone": gone,
        "new": new,
        f"touched, and the same in the {SAMPLED} places looked at": touched,
    }
    return [f"{word}: {some(names, _NAMED)}" for word, names in words.items() if names]


def _of_tokenizer(recorded: Sequence[str], given: str | None) -> str:
    path, known = recorded
    try:
        file = tokenizer_file(Path(given or path))
        same = file_sha256(file) == known
    except (ConfigError, OSError):
        return ""  # what is not there cannot be mistaken for what was
    return "" if same else f"the tokenizer {file} has changed since it made the token ids"


def _origin(
    source: Path,
    suffixes: Sequence[str] | None,
    files: Mapping[str, str],
    others: Sequence[str] | None,
    tokenizer: Sequence[str] | None,
    whole: int,
) -> dict[str, Any]:
    """others: names that are there and were not used; None: what is there besides is nobody's business."""
    return {
        "format": _FORMAT,
        "path": str(source.resolve()),
        "whole": whole,
        "suffixes": None if suffixes is None else list(suffixes),
        "files": dict(files),
        "others": None if others is None else list(others),
        "tokenizer": None if tokenizer is None else list(tokenizer),
    }


def _entry(stamp: Stamp, hashed: str) -> str:
    return " ".join(map(str, (*astuple(stamp), hashed)))


def _name(path: Path, base: Path) -> str:
    return path.relative_to(base).as_posix().encode("utf-8", "backslashreplace").decode()
