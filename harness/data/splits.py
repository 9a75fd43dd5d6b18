"""Which split a file belongs to, as its name says: `val.bin` beside `train.bin`, `x_val_000.bin`, `test.jsonl`.

A name says train, val or test if that word stands alone in it: `my-validation.bin` is validation, `values.bin` says
nothing. A name that says train is training, whatever else it says (`train_val.bin`). Test files are never used, unless
they are all there is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Split = Literal["train", "val", ""]
"""The split of a file, or of a part of one. Empty: its documents are still to be divided."""

LeftOut = list[tuple[str, str]]
"""What a source leaves out: names, and why."""

_TRAINING = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
_VALIDATION = re.compile(r"(?<![a-z])(val|valid|validation)(?![a-z])", re.IGNORECASE)
_TEST = re.compile(r"(?<![a-z])test(?![a-z])", re.IGNORECASE)
_BESIDE = re.compile(
    r"(^|/)(README|LICENSE|COPYING)[^/]*$|\.(md|rst|json|ya?ml|sha256)$", re.IGNORECASE
)
_WHY_LEFT_OUT = {
    "test": "a test split: neither trained nor validated on",
    "beside": "beside files that are called train, val or test",
}


def said_by(name: str) -> Literal["train", "val", "test", "beside", ""]:
    """What a file's name says of its split. beside: a README or the like; empty: nothing."""
    if _TRAINING.search(name):
        return "train"
    if _VALIDATION.search(name):
        return "val"
    if _TEST.search(name):
        return "test"
    return "beside" if _BESIDE.search(name) else ""


def is_validation(name: str) -> bool:
    """Whether a file's name says that it is validation."""
    return said_by(name) == "val"


def without_tests(names: Sequence[str]) -> tuple[list[str], LeftOut]:
    """The files of a folder without its test split; and that split. A test split that is alone is the data."""
    kept = [name for name in names if said_by(name) != "test"]
    if not kept:
        return list(names), []
    return kept, [(name, _WHY_LEFT_OUT["test"]) for name in names if said_by(name) == "test"]


def splits_of_text(names: Sequence[str]) -> tuple[dict[str, Split], LeftOut]:
    """The split of each file of a folder of text that is used, and what is left out.

    A folder of text may have anything in it: `validation.py` of a source tree is no validation split. So names count
    only if every file says train, val, test or beside, and there is train and another. Otherwise, or if no file is
    validation, the splits are empty.
    """
    said = {name: said_by(name) for name in names}
    words = set(said.values()) - {"beside"}
    if "" in words or "train" not in words or len(words) == 1:
        return dict.fromkeys(names, ""), []

    splits: dict[str, Split] = {}
    left_out: LeftOut = []
    for name, word in said.items():
        if word == "train" or word == "val":
            splits[name] = word if "val" in words else ""
        else:
            left_out.append((name, _WHY_LEFT_OUT[word]))
    return splits, left_out


def validation_beside(path: Path) -> Path | None:
    """The validation file of a single file: its name with val for train, else `val` in its folder; None if none."""
    names: list[str] = []
    if _TRAINING.search(path.name):
        names += [_TRAINING.sub(word, path.name) for word in ("val", "valid", "validation")]
    names.append(f"val{path.suffix}")
    for name in names:
        found = path.with_name(name)
        if found != path and found.is_file():
            return found
    return None


def with_validation(path: Path, is_text: bool = False) -> list[tuple[Path, Split]]:
    """A single file and the validation beside it, with their splits. Text has one only if it is called train."""
    beside = None if is_text and said_by(path.name) != "train" else validation_beside(path)
    return [(path, "train"), (beside, "val")] if beside else [(path, "")]
