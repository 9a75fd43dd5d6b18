"""The two records about checkpoints: the manifest inside each one, and the list of good ones. Free of torch.

`manifest.json` lists every file of a checkpoint with its size and SHA-256. Neither safetensors nor JSON notices a
flipped bit; the manifest does. It also holds the SHA-256 of its own content, and it must be byte for byte what that
content serialises to. Pieces that several ranks wrote (`pieces.py`) are also compared with what state.json says.

`good.json` lists the steps of checkpoints that a rollback may return to. It lies beside the checkpoints, because a
checkpoint never changes once it is committed. A list that cannot be read counts as empty: the marks are earned again
within a few steps.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.checkpoint.pieces import (
    MAX_DIMENSIONS,
    MAX_LENGTH,
    PLAIN_NAME,
    SHARDS,
    TENSORS,
    Shards,
    is_piece,
    piece_file,
    piece_problems,
    set_problems,
    whole_problems,
)
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

_FORMAT = 1
MAX_MANIFEST = 8 << 20
"""Bytes of a manifest. A file takes some 150: room for 10 files of each of 4,096 ranks."""
# Bytes of a safetensors header. An entry takes about a hundred bytes and the tensor's name: room for some 200 000.
_MAX_HEADER = 32 << 20
_FIX = "use another checkpoint of this run: a plain resume picks the newest whole one by itself"


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

    Raises ValueError if there are more files than can be read again.
    """
    content = {
        "format": _FORMAT,
        "step": step,
        "files": files,
        "versions": versions,
        "metrics": metrics or {},
    }
    data = _with_sha256(content)
    if len(data) > MAX_MANIFEST:
        raise ValueError(
            f"{MANIFEST} would have {len(data)} bytes; at most {MAX_MANIFEST} can be read again"
        )
    return data


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in `folder`. Raises ValueError or OSError saying why it cannot be trusted."""
    path = folder / MANIFEST
    _check_regular(path)
    raw = read_bounded(path, MAX_MANIFEST)

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
    if outside := [name for name in files if not PLAIN_NAME.fullmatch(name)]:
        raise ValueError(f"lists names that are not plain files: {outside}")
    return content


def check_folder(folder: Path, step: int, rank: int = 0, ranks: int = 1) -> list[Problem]:
    """Everything that is wrong with the checkpoint of `step` in `folder`; empty if every byte is as it was written.

    rank, ranks: `ranks` ranks share the reading. Each reads every `ranks`-th file from its own on, and all of them look
        at the manifest, at the names of the files, and at what state.json says of them.
    """
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
    files: dict[str, Any] = manifest["files"]
    unknown = sorted(present - {*files, MANIFEST})
    problems = [Problem("is not in the manifest", str(folder / name), fix=_FIX) for name in unknown]
    return problems + check_files(folder, files, rank, ranks)


def check_files(folder: Path, files: Mapping[str, Any], rank: int, ranks: int) -> list[Problem]:
    """Everything that is wrong with `files`, a manifest's, in `folder`. rank, ranks: as for `check_folder`."""
    mine = sorted(files)[rank::ranks]
    whole: list[str] = []
    problems: list[Problem] = []
    for name in mine:
        try:
            _check_file(folder / name, files[name])
            whole.append(name)
        except (OSError, ValueError) as error:
            problems.append(_problem(folder / name, error))

    # The pieces of several ranks, if state.json itself can be trusted.
    if STATE in mine and STATE not in whole:
        return problems
    return problems + _check_pieces(folder, files, whole)


def read_shards(folder: Path) -> Shards | None:
    """What the pieces in `folder` are of, as state.json has it; None if there are none. Raises OSError, ValueError."""
    _check_regular(folder / STATE)
    state = read_json(folder / STATE, MAX_LARGE)
    if not isinstance(state, dict):
        raise ValueError("holds no state")
    return Shards.from_json(state[SHARDS]) if SHARDS in state else None


def _check_pieces(folder: Path, files: Mapping[str, Any], whole: Sequence[str]) -> list[Problem]:
    """Compare the pieces of a checkpoint with what state.json says of them.

    files: of the manifest. Its names must be those that the ranks write.
    whole: files whose bytes are as they were written; their headers are compared.
    """
    try:
        shards = read_shards(folder)
    except (OSError, ValueError) as error:
        return [_problem(folder / STATE, error)]
    if wrong := set_problems(shards, files):
        return [Problem(text, str(folder / MANIFEST), fix=_FIX) for text in wrong]
    if shards is None:
        return []

    # Dtypes are compared with those of the first rank's piece.
    problems: list[Problem] = []
    first: dict[str, Mapping[str, Any]] = {}
    for name in whole:
        try:
            if is_piece(name):
                part, _ = shards.piece_of(name) or ("", 0)
                if part not in first:
                    first[part] = check_header(folder / piece_file(part, 0, shards.ranks))
                wrong = piece_problems(shards, name, check_header(folder / name), first[part])
            elif name.endswith(TENSORS):
                sharded = shards.tensors.get(name.removesuffix(TENSORS), {})
                wrong = whole_problems(sharded, check_header(folder / name))
            problems += [Problem(text, str(folder / name), fix=_FIX) for text in wrong]
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


def check_header(path: Path) -> dict[str, dict[str, Any]]:
    """Check what safetensors itself accepts in the header of the file at `path`; returns its entries by tensor.

    Raises ValueError or OSError.

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
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"has no shape for {name[:80]!r}")
        if not all(type(length) is int and 0 <= length < MAX_LENGTH for length in shape):
            raise ValueError(f"has an impossible shape for {name[:80]!r}")
    header.pop("__metadata__", None)
    return header


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
