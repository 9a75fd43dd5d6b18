"""Every kind of data there is: what `data.path` leads to is looked at, and read as what it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from harness.core.errors import DataError, Problem, some
from harness.core.files import MAX_LARGE, read_mapping
from harness.data.advice import TABLES, advice, suffix_of
from harness.data.columns import ArrowFolder, Parquet
from harness.data.rows import ARRAY, DocumentSource, JsonLines, PlainText
from harness.data.text import walk

Kind = Literal["tokens", "prepared", "JSONL", "Parquet", "Arrow", "text"]

PREPARED = "dataset.json"
"""What `harness data prepare` leaves in its folder, and nothing else does."""
TOKENS = (".bin",)
DOCUMENTS: dict[str, DocumentSource] = {
    source.kind: source for source in (JsonLines(), Parquet(), ArrowFolder(), PlainText())
}
"""What is made into token ids before it is trained on. To add one is a class in `rows` and its name here."""

# What lies beside data without being any.
_COMPANIONS = (".idx", ".md", ".json", ".yaml", ".yml", ".pkl", ".py", ".rst", ".sha256", ".txt.license")
_COMPANION_NAMES = ("LICENSE", "README", "COPYING")
_FEW = 10
_NAMED = 5
_LOOKED_AT = 10_000
# Of the bytes of a folder of text, what rows may be of them: a source tree has some for its tests.
_ROWS = 0.05
_PROSE = (".py", ".md", ".rst")


def look(path: Path) -> Kind:
    """What is at `path`. A folder is one kind if all its files are, but for what usually lies beside data; else text.

    Raises DataError for what is not read, with what to do instead, and if a folder has files of several kinds, since
    each may be meant.
    """
    if not path.is_dir():
        suffix = suffix_of(path.name)
        if suffix in TOKENS or (suffix == ".idx" and path.with_suffix(".bin").is_file()):
            return "tokens"
        kind = _kind_of(suffix) if suffix != ARRAY else "JSONL"
        if kind == "text" and (told := advice(path, [path])):
            raise DataError(told)
        return kind
    if "vocabulary" in read_mapping(path / PREPARED, MAX_LARGE):
        return "prepared"
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return "Arrow"
    files, beside = _data_files(path)
    suffixes = {suffix_of(file.name) for file in files}
    if suffixes == set(TOKENS) and all(file.parent == path for file in files):
        return "tokens"
    if not files and beside and all(file.suffix.lower() == ARRAY for file in beside):
        return "JSONL"
    kinds: set[Kind] = {_kind_of(suffix) for suffix in suffixes}
    if len(kinds) == 1 and "text" not in kinds:
        return kinds.pop()
    if told := advice(path, files):
        raise DataError(told)
    _one_kind(path, files)
    return "text"


def _kind_of(suffix: str) -> Kind:
    return cast("Kind", next((kind for kind, source in DOCUMENTS.items() if suffix in source.suffixes), "text"))


def _data_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Files of a folder: those that may be data, and what usually lies beside such; where there is more of that than
    of the others, it is the data."""
    files: list[Path] = []
    beside: list[Path] = []
    for file in walk(path):
        name = file.name
        is_beside = name.lower().endswith(_COMPANIONS) or name.upper().startswith(_COMPANION_NAMES)
        if not is_beside:
            files.append(file)
        elif not name.upper().startswith(_COMPANION_NAMES):
            beside.append(file)
        if len(files) + len(beside) >= _LOOKED_AT:
            break
    prose = [file for file in beside if file.suffix.lower() in _PROSE]
    return (files + prose, []) if len(prose) > max(_FEW, len(files)) else (files, beside)


def _one_kind(path: Path, files: Sequence[Path]) -> None:
    """Raises DataError if a folder of text has token ids or rows in it that count."""
    train = path / "train.bin"
    rows: dict[str, list[Path]] = {}
    for file in files:
        suffix = suffix_of(file.name)
        kind = _kind_of(suffix) if suffix not in TABLES else "tables"
        if kind != "text":
            rows.setdefault(kind, []).append(file)
    named = {kind: [file.relative_to(path).as_posix() for file in found] for kind, found in rows.items()}
    texts = [file.name for file in files if file.suffix.lower() not in TOKENS]
    if train.is_file():
        why = f"train.bin beside {some(texts, _NAMED)}: either may be meant"
        fix = f"data.path={train}, or the text's own path"
        raise DataError(Problem("has both token ids and text", f"data.path: {path}", why, fix))
    sizes = [
        sum(_size(file) for file in group) for group in ([each for found in rows.values() for each in found], files)
    ]
    if rows and sizes[0] >= _ROWS * sizes[1]:
        why = "; ".join(f"{kind}: {some(names, _NAMED)}" for kind, names in named.items())
        reads = [f"data.format={kind}" for kind in rows if kind != "tables"]
        fix = f"{' or '.join([*reads, 'data.format=text'])} (all of it, as it stands), or a folder for each kind"
        raise DataError(Problem("has files of several kinds", f"data.path: {path}", why, fix))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # who reads it says so
        return 0
