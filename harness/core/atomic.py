"""Write a file so that after any crash it is either the old one or the new one, whole, on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary stream that becomes `path` when the block ends well, and leaves nothing behind when it does not.

    One writer at a time: the temporary name `.<name>.tmp` is fixed, so a killed writer's leftover is replaced by the
    next one. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with _new(temporary) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _new(path: Path) -> BinaryIO:
    """A file of its own at `path`: what is there may be a link or a pipe, if somebody else has made the folder."""
    try:
        return path.open("xb")
    except FileExistsError:
        path.unlink()
        return path.open("xb")


def dump_json(value: Any) -> bytes:
    """Strict JSON, without NaN or Infinity, keys in the order given. Raises ValueError, TypeError."""
    return (json.dumps(value, allow_nan=False, indent=1) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as strict JSON. Raises OSError, and what `dump_json` raises."""
    data = dump_json(value)
    with atomic_file(path) as stream:
        stream.write(data)
