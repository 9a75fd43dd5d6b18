"""The two records about checkpoints: the manifest inside each one, and the list of good ones. Free of torch.

`manifest.json` lists every file of a checkpoint with its size and SHA-256. Neither safetensors nor JSON notices a
flipped bit; the manifest does. It also holds the SHA-256 of its own content, and it must be byte for byte what that
content serialises to.

`good.json` lists the steps of checkpoints that a rollback may return to. It lies beside the checkpoints, because a
checkpoint never changes once it is committed. A list that cannot be read counts as empty: the marks are earned again
within a few steps.
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
    """The error for something under `path` that could not be written or read because of `error`."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        why = error.strerror
    fix = "check free space and permissions of the folder"
    return CheckpointError(Problem(what, str(path), why, fix))


MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"

_FORMAT = 1
_MAX_MANIFEST = 1 << 20
# Bytes of a safetensors header. An entry takes about a hundred bytes and the tensor's name: room for some 200 000.
_MAX_HEADER = 32 << 20
# What torch allows: dimensions of a tensor, and the length of one.
_MAX_RANK = 64
_MAX_LENGTH = 1 << 63
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9]+)?")
_FIX = "use another checkpoint of this run: a plain resume picks the newest whole one by itself"


def part_file(part: str) -> str:
    """The name of the file for a part's tensors. Raises ValueError for a part that makes no plain file name."""
    name = part + TENSORS
    if not _NAME.fullmatch(name):
        raise ValueError(f"part name {part!r} is not of the form a-z, 0-9, _ and -")
    return name


def file_entry(path: Path) -> dict[str, Any]:
    """The manifest's entry for the file at `path`, which is read back for its SHA-256. Raises OSError."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def manifest_bytes(
    step: int,
    files: Mapping[str, Mapping[str, Any]],
    versions: Mapping[str, str],
    metrics: Mapping[str, float] | None = None,
) -> bytes:
    """The bytes of a manifest, with the SHA-256 of its own content.

    step: of the checkpoint.
    files: `file_entry` by file name.
    versions: of the software that writes it.
    metrics: finite numbers.
    """
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

    # Its content is serialised again: every byte must be the same, white space and hash included.
    try:
        content = parse_json(raw)
        without_hash = {key: value for key, value in content.items() if key != "sha256"}
        expected = _with_sha256(without_hash)
    except (ValueError, AttributeError) as error:
        raise ValueError("is not a manifest") from error
    if raw != expected:
        raise ValueError("differs from its own SHA-256")

    # A correct hash says that nothing changed since it was written, not that this version understands it.
    if content.get("format") != _FORMAT:
        raise ValueError(f"has format {content.get('format')!r}, this version reads {_FORMAT}")
    files = content.get("files")
    if not isinstance(files, dict) or STATE not in files:
        raise ValueError("lists no state")
    if outside := [name for name in files if not _NAME.fullmatch(name)]:
        raise ValueError(f"lists names that are not plain files: {outside}")
    return content


def check_folder(folder: Path, step: int) -> list[Problem]:
    """Everything that is wrong with the checkpoint of `step` in `folder`; empty if every byte is as it was written."""
    # Without a manifest that can be trusted there is nothing to compare the files with.
    try:
        if folder.is_symlink():
            raise ValueError("the checkpoint is a link")
        manifest = read_manifest(folder)
        if manifest.get("step") != step:
            raise ValueError(f"is of step {manifest.get('step')!r}, in the folder of step {step}")
        present = set(os.listdir(folder))
    except (OSError, ValueError) as error:
        return [_problem(folder / MANIFEST, error)]

    # Files that nobody wrote, and files that are not what was written.
    unknown = sorted(present - {*manifest["files"], MANIFEST})
    problems = [Problem("is not in the manifest", str(folder / name), fix=_FIX) for name in unknown]
    for name, entry in sorted(manifest["files"].items()):
        try:
            _check_file(folder / name, entry)
        except (OSError, ValueError) as error:
            problems.append(_problem(folder / name, error))
    return problems


def _check_file(path: Path, entry: Any) -> None:
    """Compare the file at `path` with its `entry` in the manifest. Raises ValueError or OSError if it differs."""
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
    """Check what safetensors itself accepts in the header of the file at `path`. Raises ValueError or OSError.

    These are: a header of any length, a name that occurs twice (the last one wins), and shapes beyond torch's limits.
    Offsets, data types and sizes are left to safetensors, which checks them when it loads the file.
    """
    _check_regular(path)
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(_MAX_HEADER, path.stat().st_size - 8):
            raise ValueError(f"claims a header of {length} bytes")
        raw = stream.read(length)

    # `parse_json` refuses a name that occurs twice.
    header = parse_json(raw)
    if not isinstance(header, dict):
        raise ValueError("has no header")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or len(shape) > _MAX_RANK:
            raise ValueError(f"has no shape for {name[:80]!r}")
        if not all(type(length) is int and 0 <= length < _MAX_LENGTH for length in shape):
            raise ValueError(f"has an impossible shape for {name[:80]!r}")


def _check_regular(path: Path) -> None:
    """Raise ValueError for a link, which could lead out of the checkpoint, and for a pipe, which would never end."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("is not a regular file")


def _problem(path: Path, error: OSError | ValueError) -> Problem:
    """What is wrong with the file at `path`. The messages of ValueError here begin with a verb: "has", "differs"."""
    what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
    return Problem(what, str(path), fix=_FIX)


def _with_sha256(content: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(dump_json(content)).hexdigest()
    return dump_json({**content, "sha256": digest})


_FILE = "good.json"
# Newest marks to keep. Those of deleted checkpoints are among them.
_KEPT = 64


def read_marks(root: Path) -> list[int]:
    """Steps of checkpoints that are marked good, oldest first. Some may have been deleted since."""
    try:
        good = read_json(root / _FILE)["good"]
        return sorted({step for step in good if type(step) is int and step >= 0})
    except (OSError, ValueError, TypeError, KeyError):
        return []


def add_mark(root: Path, step: int) -> None:
    """Mark the checkpoint of `step` good. Raises OSError."""
    marked = sorted({*read_marks(root), step})
    write_json(root / _FILE, {"good": marked[-_KEPT:]})


def forget_after(root: Path, step: int) -> None:
    """Remove the marks of steps after `step`: new checkpoints may get the same numbers. Raises OSError."""
    marked = read_marks(root)
    if any(good > step for good in marked):
        write_json(root / _FILE, {"good": [good for good in marked if good <= step]})
