"""The two corpora of `benchmarks.cost`, each a list of files that is pinned with hashes.

`python`: source of the standard library of CPython 3.11.7. `licences`: licence texts and copyright notices of this
project's pinned environment (torch 2.13.0+cpu) and of Debian 12. Which files: all of at most 100,000 bytes, each
content once, in the order of their SHA-256, until there are 2.5 million bytes. The order is that of a coin, so that the
validation split, the corpus's end, is a random set of files. The texts are not part of this repository:
`python -m benchmarks.cost --make-corpora FOLDER` makes them where those files are.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path
from typing import Any

from harness.core.errors import DataError, Problem

PINNED = Path(__file__).with_name("cost_corpora.json")
LARGEST, ENOUGH = 100_000, 2_500_000


def pinned() -> dict[str, Any]:
    """name -> bytes and sha256 of the whole, and files: place -> sha256, in order."""
    return json.loads(PINNED.read_text())


def places() -> dict[str, Path]:
    """Where the first part of a pinned file's place is on this machine."""
    return {
        "stdlib": Path(sysconfig.get_path("stdlib")),
        "site-packages": Path(sysconfig.get_path("purelib")),
        "share": Path("/usr/share"),
    }


def make(folder: Path, roots: dict[str, Path] | None = None, wanted: dict[str, Any] | None = None) -> None:
    """Write each corpus to `folder`/<name>.txt. Raises DataError naming the files that are missing or differ."""
    roots, wanted = roots or places(), wanted or pinned()
    problems: list[Problem] = []
    made: dict[str, bytes] = {}
    for name, corpus in wanted.items():
        parts: list[bytes] = []
        for place, digest in corpus["files"].items():
            root, _, rest = place.partition("/")
            path = roots[root] / rest
            data = path.read_bytes() if path.is_file() else None
            if data is None:
                problems.append(Problem("is missing", f"{name}: {path}", fix=_FIX))
            elif hashlib.sha256(data).hexdigest() != digest:
                problems.append(Problem("is another version than the pinned one", f"{name}: {path}", fix=_FIX))
            else:
                parts.append(data)
        made[name] = b"".join(parts)
    if problems:
        raise DataError(problems)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in made.items():
        (folder / f"{name}.txt").write_bytes(data)
        read(folder, name, wanted)


_FIX = "take the corpora from a machine with CPython 3.11.7, Debian 12 and the pinned environment"


def read(folder: Path, name: str, wanted: dict[str, Any] | None = None) -> bytes:
    """A corpus that `make` wrote. Raises DataError if it is missing or not the pinned one."""
    path, corpus = folder / f"{name}.txt", (wanted or pinned())[name]
    if not path.is_file():
        fix = f"python -m benchmarks.cost --make-corpora {folder}"
        raise DataError(Problem("the corpus is missing", str(path), fix=fix))
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != corpus["sha256"]:
        raise DataError(Problem("the corpus is not the pinned one", str(path), "its SHA-256 differs", _FIX))
    return data


def pin(roots: dict[str, Path]) -> dict[str, Any]:
    """The corpora as this machine has them, by the rule above."""
    texts = {
        "python": [("stdlib", "*.py")],
        "licences": [
            ("site-packages", "**/*LICENSE*"),
            ("site-packages", "**/*COPYING*"),
            ("site-packages", "**/*NOTICE*"),
            ("share", "common-licenses/*"),
            ("share", "doc/*/copyright"),
        ],
    }
    found: dict[str, Any] = {}
    for name, patterns in texts.items():
        by_digest: dict[str, tuple[str, int]] = {}
        for root, pattern in patterns:
            for path in sorted(roots[root].glob(pattern)):
                is_text = path.is_file() and not path.is_symlink() and (name == "python" or path.suffix != ".py")
                if is_text and path.suffix != ".pyc" and 0 < path.stat().st_size <= LARGEST:
                    digest = hashlib.sha256(path.read_bytes()).hexdigest()
                    by_digest.setdefault(digest, (f"{root}/{path.relative_to(roots[root])}", path.stat().st_size))
        files: dict[str, str] = {}
        whole, size = hashlib.sha256(), 0
        for digest, (place, length) in sorted(by_digest.items()):
            if size >= ENOUGH:
                break
            files[place] = digest
            root, _, rest = place.partition("/")
            whole.update((roots[root] / rest).read_bytes())
            size += length
        found[name] = {"bytes": size, "sha256": whole.hexdigest(), "files": files}
    return found
