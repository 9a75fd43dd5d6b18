"""Which split a file belongs to, as its name says: `val.bin` beside `train.bin`, `x_val_000.bin`, `test.jsonl`.

A name says train, val or test if such a word stands alone in it: `my-validation.bin` and `dev.jsonl` are validation,
`values.bin` says nothing. A name that says train is training, whatever else it says (`train_val.bin`). Test files are
never used, unless they are all there is.
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

SECOND_LINK = "a link to another file of the folder"
"""Why such a link is left out."""

_TRAINING = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
_VALIDATION_WORDS = ("val", "valid", "validation", "dev", "eval", "evaluation")
_VALIDATION = re.compile(rf"(?<![a-z])({'|'.join(_VALIDATION_WORDS)})(?![a-z])", re.IGNORECASE)
_TEST = re.compile(r"(?<![a-z])(test|testing|holdout|heldout)(?![a-z])", re.IGNORECASE)
_OTHER = re.compile(
    r"(^|/)(README|LICENSE|COPYING)[^/]*$|\.(md|rst|json|ya?ml|sha256)$", re.IGNORECASE
)
_WHY_LEFT_OUT = {
    "test": "a test split: neither trained nor validated on",
    "other": "beside files that are called train, val or test",
}


def said_by(name: str) -> Literal["train", "val", "test", "other", ""]:
    """What a file's name says of its split. other: a README or the like, which is no data; empty: nothing."""
    if _TRAINING.search(name):
        return "train"
    if _VALIDATION.search(name):
        return "val"
    if _TEST.search(name):
        return "test"
    return "other" if _OTHER.search(name) else ""


def is_validation(name: str) -> bool:
    """Whether a file's name says that it is validation."""
    return said_by(name) == "val"


def without_second_links(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """`files` without links to others of them, in their order, and these links.

    A file and a link to it are one file: the file itself is taken, or the first of several links.
    """
    taken: dict[Path, Path] = {}
    for file in sorted(files, key=lambda file: (file.is_symlink(), file.as_posix())):
        taken.setdefault(file.resolve(), file)
    first = set(taken.values())
    kept = [file for file in files if file in first]
    links = [file for file in files if file not in first]
    return kept, links


def without_tests(names: Sequence[str]) -> tuple[list[str], LeftOut]:
    """(the files of a folder to use, what is left out): test files are left out, unless there is nothing else."""
    kept = [name for name in names if said_by(name) != "test"]
    if not kept:
        return list(names), []
    tests = [name for name in names if said_by(name) == "test"]
    return kept, [(name, _WHY_LEFT_OUT["test"]) for name in tests]


def splits_of_text(names: Sequence[str]) -> tuple[dict[str, Split], LeftOut]:
    """The split of each file of a folder of text that is used, and what is left out.

    A folder of text may have anything in it: `validation.py` of a source tree is no validation split. So the names
    count only if each of them says something (a README says "other"), and they say train and at least one of val and
    test.

    - If the names do not count, every file is used, and its split is empty.
    - If they count, test files and READMEs are left out. Without a validation file the splits are empty, too.

    The documents of a file whose split is empty are divided later.
    """
    # Does every name say something, and do they say train and something else?
    said = {name: said_by(name) for name in names}
    words = set(said.values()) - {"other"}
    if "" in words or "train" not in words or len(words) == 1:
        return dict.fromkeys(names, ""), []

    # The names count. Training files are to be divided if no file is validation.
    splits: dict[str, Split] = {}
    left_out: LeftOut = []
    for name, word in said.items():
        if word == "train" or word == "val":
            splits[name] = word if "val" in words else ""
        else:
            left_out.append((name, _WHY_LEFT_OUT[word]))
    return splits, left_out


def validation_beside(path: Path) -> Path | None:
    """The validation file of a single file, None if there is none.

    It has the same name with one of _VALIDATION_WORDS for "train", or else is `val.<suffix>` in the same folder.
    """
    # x_train_0.bin -> x_val_0.bin, and so on; the likeliest first.
    names: list[str] = []
    if _TRAINING.search(path.name):
        for word in _VALIDATION_WORDS:
            name = _TRAINING.sub(word, path.name)
            names.append(name)
    names.append(f"val{path.suffix}")
    for name in names:
        found = path.with_name(name)
        if found != path and found.is_file():
            return found
    return None


def with_validation(path: Path, is_text: bool = False) -> list[tuple[Path, Split]]:
    """A single file and its validation file, with their splits.

    A text file has a validation file only if its own name says train.
    """
    if is_text and said_by(path.name) != "train":
        return [(path, "")]
    validation = validation_beside(path)
    if validation is None:
        return [(path, "")]
    return [(path, "train"), (validation, "val")]
