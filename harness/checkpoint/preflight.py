"""Before any work: will the checkpoints of this run fit where they are to go, and may we write there?"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from harness.core.errors import Problem

COPIES = 3
"""Checkpoints that must fit: the two that always verify, and the one that is being written."""
_FILES = 64
_PROBE = ".preflight"


def lacks_room(folder: Path, bytes_each: int, existing: int) -> list[Problem]:
    """Why `folder`, which exists, cannot take files, or three checkpoints of `bytes_each` bytes; empty if it can.

    existing: committed checkpoints that are there already; one more must fit in any case.
    """
    try:
        _write(folder / _PROBE)
        disk = os.statvfs(folder)
    except OSError as error:
        fix = "choose a folder that you may write to: start from another working folder, or give another --name"
        return [Problem("checkpoints cannot be written here", str(folder), why=error.strerror or str(error), fix=fix)]
    problems: list[Problem] = []
    count = max(COPIES - existing, 1)
    free = disk.f_bavail * disk.f_frsize
    if free < count * bytes_each:
        problems.append(
            Problem(
                f"{_size(free)} free, {_size(count * bytes_each)} needed: {count} checkpoint(s) of {_size(bytes_each)}",
                str(folder),
                why="two that verify must stay while the next is written",
                fix="free space, start from a folder on a larger disk, or train a smaller model",
            )
        )
    if disk.f_files and disk.f_favail < _FILES:
        fix = "delete files on this disk, or start from a folder on another"
        problems.append(Problem(f"the disk has room for {disk.f_favail} more files", str(folder), fix=fix))
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < bytes_each:
        why = f"a checkpoint's files may need up to {_size(bytes_each)}"
        text = f"this process may write files of at most {_size(limit)}"
        problems.append(Problem(text, str(folder), why=why, fix="raise it: ulimit -f unlimited"))
    return problems


def _write(path: Path) -> None:
    with path.open("wb") as stream:
        stream.write(b"\0")
        stream.flush()
        os.fsync(stream.fileno())
    path.unlink()


def _size(count: int) -> str:
    """Such as "1.7 GB", in powers of ten."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
