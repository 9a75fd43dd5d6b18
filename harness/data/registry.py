"""Every kind of data there is: what `data.path` leads to is looked at, and read as what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from harness.core.errors import DataError, Problem, some
from harness.core.files import MAX_LARGE, read_mapping
from harness.data.rows import ArrowFolder, DocumentSource, JsonLines, Parquet, PlainText
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
_NAMED = 5
_LOOKED_AT = 10_000


def look(path: Path) -> Kind:
    """What is at `path`. A folder is one kind if all its files are, but for what usually lies beside data; else text.

    Raises DataError if a folder has a train.bin beside text, since either may be meant.
    """
    if not path.is_dir():
        suffix = path.suffix.lower()
        if suffix in TOKENS or (suffix == ".idx" and path.with_suffix(".bin").is_file()):
            return "tokens"
        return next((kind for kind, source in DOCUMENTS.items() if suffix in source.suffixes), "text")  # pyright: ignore
    if "vocabulary" in read_mapping(path / PREPARED, MAX_LARGE):
        return "prepared"
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return "Arrow"
    files: list[Path] = []
    for file in walk(path):
        if file.suffix.lower() in _COMPANIONS or file.name.upper().startswith(_COMPANION_NAMES):
            continue
        files.append(file)
        if len(files) == _LOOKED_AT:
            break
    suffixes = {file.suffix.lower() for file in files}
    if suffixes == set(TOKENS):
        return "tokens" if all(file.parent == path for file in files) else "text"
    kind = next((kind for kind, source in DOCUMENTS.items() if suffixes and suffixes <= set(source.suffixes)), "text")
    train = path / "train.bin"
    if kind == "text" and train.is_file():
        texts = [file.name for file in files if file.suffix.lower() not in TOKENS]
        raise DataError(
            Problem(
                "has both token ids and text",
                f"data.path: {path}",
                why=f"train.bin beside {some(texts, _NAMED)}: either may be meant",
                fix=f"data.path={train}, or the text's own path",
            )
        )
    return kind  # pyright: ignore[reportReturnType]
