"""What is written down of checkpoints: the manifest of each, and which of them are good. Torch-free.

The manifest says what a checkpoint holds, byte for byte. Neither safetensors nor JSON notices a flipped bit, so it has
the size and SHA-256 of every file, and of itself: it is accepted only if it is exactly the bytes that its own content
serialises to.

`good.json` is a list of steps, kept apart from the checkpoints, which are never changed once committed. One that cannot
be read is taken for an empty list: the marks are earned again within a few steps.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.core.errors import CheckpointError, Problem
from harness.core.files import (
    MAX_LARGE,
    dump_json,
    file_sha256,
    parse_json,
    read_bounded,
    read_json,
    write_json,
)


def failed(what: str, path: Path, error: Exception) -> CheckpointError:
    """The error for something under `path` that could not be written or read."""
    why = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else f"{type(error).__name__}: {error}"
    )
    return CheckpointError(
        Problem(what, str(path), why, fix="check free space and permissions of the folder")
    )


MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"

_FORMAT = 1
_MAX_MANIFEST = 1 << 20
# A tensor's entry takes about a hundred bytes more than its name.
_MAX_HEADER = 32 << 20
# torch: dimensions of a tensor, and what fits into one.
_MAX_RANK = 64
_MAX_LENGTH = 1 << 63
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9]+)?")
_FIX = "use another checkpoint of this run: a plain resume picks the newest whole one by itself"


def part_file(part: str) -> str:
    """The file name of a part's tensors. Raises ValueError for a name that would not be a plain file name."""
    name = part + TENSORS
    if not _NAME.fullmatch(name):
        raise ValueError(f"part name {part!r} is not of the form a-z, 0-9, _ and -")
    return name


def file_entry(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, read back in chunks. Raises OSError."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def manifest_bytes(
    step: int,
    files: Mapping[str, Mapping[str, Any]],
    versions: Mapping[str, str],
    metrics: Mapping[str, float] | None = None,
) -> bytes:
    """The manifest of a checkpoint, with the SHA-256 of its own content. metrics: finite numbers."""
    content = {
        "format": _FORMAT,
        "step": step,
        "files": files,
        "versions": versions,
        "metrics": metrics or {},
    }
    return _with_sha256(content)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in `folder`. Raises ValueError or OSError saying why it cannot be trusted."""
    path = folder / MANIFEST
    _check_regular(path)
    raw = read_bounded(path, _MAX_MANIFEST)
    try:
        content = parse_json(raw)
        expected = _with_sha256({key: value for key, value in content.items() if key != "sha256"})
    except (ValueError, AttributeError) as error:
        raise ValueError("is not a manifest") from error
    if raw != expected:
        raise ValueError("differs from its own SHA-256")
    if content.get("format") != _FORMAT:
        raise ValueError(f"has format {content.get('format')!r}, this version reads {_FORMAT}")
    files = content.get("files")
    if not isinstance(files, dict) or STATE not in files:
        raise ValueError("lists no state")
    if outside := [name for name in files if not _NAME.fullmatch(name)]:
        raise ValueError(f"lists names that are not plain files: {outside}")
    return content


def check_folder(folder: Path, step: int) -> list[Problem]:
    """Everything that is wrong with the checkpoint in `folder`; empty if every byte is as it was written."""
    try:
        if folder.is_symlink():
            raise ValueError("the checkpoint is a link")
        manifest = read_manifest(folder)
        if manifest.get("step") != step:
            raise ValueError(f"is of step {manifest.get('step')!r}, in the folder of step {step}")
        present = set(os.listdir(folder))
    except (OSError, ValueError) as error:
        return [_problem(folder / MANIFEST, error)]
    problems = [
        Problem("is not in the manifest", str(folder / name), fix=_FIX)
        for name in sorted(present - {*manifest["files"], MANIFEST})
    ]
    for name, entry in sorted(manifest["files"].items()):
        try:
            _check_file(folder / name, entry)
        except (OSError, ValueError) as error:
            problems.append(_problem(folder / name, error))
    return problems


def _check_file(path: Path, entry: Any) -> None:
    """Raises ValueError or OSError for a file that is not as the manifest has it."""
    if not isinstance(entry, dict):
        raise ValueError("has no size and SHA-256 in the manifest")
    _check_regular(path)
    size = path.stat().st_size
    if size != entry.get("bytes"):
        raise ValueError(f"has {size} bytes, {entry.get('bytes')} were written")
    if file_entry(path)["sha256"] != entry.get("sha256"):
        raise ValueError("differs from its SHA-256")
    if path.name.endswith(TENSORS):
        check_header(path)
    if path.name == STATE and not isinstance(read_json(path, MAX_LARGE), dict):
        raise ValueError("holds no state")


def check_header(path: Path) -> None:
    """Raises OSError, and ValueError for what safetensors itself lets pass: endless headers, a name twice (the last one
    counts), shapes beyond torch's.

    Offsets, data types and sizes are checked by safetensors when it loads the file.
    """
    _check_regular(path)
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(_MAX_HEADER, path.stat().st_size - 8):
            raise ValueError(f"claims a header of {length} bytes")
        raw = stream.read(length)
    header = parse_json(raw)
    if not isinstance(header, dict):
        raise ValueError("has no header")
    for name, entry in header.items():
        shape = (
            []
            if name == "__metadata__"
            else entry.get("shape")
            if isinstance(entry, dict)
            else None
        )
        if not isinstance(shape, list) or len(shape) > _MAX_RANK:
            raise ValueError(f"has no shape for {name[:80]!r}")
        if not all(type(length) is int and 0 <= length < _MAX_LENGTH for length in shape):
            raise ValueError(f"has an impossible shape for {name[:80]!r}")


def _check_regular(path: Path) -> None:
    """A link could lead out of the checkpoint, and a pipe would wait for ever."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("is not a regular file")


def _problem(path: Path, error: OSError | ValueError) -> Problem:
    what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
    return Problem(what, str(path), fix=_FIX)


def _with_sha256(content: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(dump_json(content)).hexdigest()
    return dump_json({**content, "sha256": digest})


_FILE = "good.json"
_KEPT = 64


def read_marks(root: Path) -> list[int]:
    """Steps marked good, oldest first; checkpoints deleted since may be among them."""
    try:
        good = read_json(root / _FILE)["good"]
        return sorted({step for step in good if type(step) is int and step >= 0})
    except (OSError, ValueError, TypeError, KeyError):
        return []


def add_mark(root: Path, step: int) -> None:
    """Mark `step` good. Raises OSError."""
    write_json(root / _FILE, {"good": sorted({*read_marks(root), step})[-_KEPT:]})


def forget_after(root: Path, step: int) -> None:
    """Take the marks of steps after `step` away: other checkpoints may get those numbers. Raises OSError."""
    marked = read_marks(root)
    if any(good > step for good in marked):
        write_json(root / _FILE, {"good": [good for good in marked if good <= step]})
