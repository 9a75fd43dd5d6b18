"""One run, one writer: a lock on the run's folder that the kernel releases with its owner, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from harness.core.errors import CheckpointError, Problem
from harness.core.files import dump_json

_FILE = "lock"


class RunLock:
    """The exclusive right to write into `run_dir`, as a context manager or by `acquire` and `release`.

    A killed owner's lock is free at once; the file that stays behind means nothing by itself.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises CheckpointError naming the owner if another process has it, or if nobody could."""
        descriptor: int | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Not through a link: what it leads to would be cut off.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, dump_json(_self()), 0)
        except OSError as error:
            owner = _owner(descriptor) if isinstance(error, BlockingIOError) else ""
            if descriptor is not None:
                os.close(descriptor)
            raise CheckpointError(self._refusal(error, owner)) from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _refusal(self, error: OSError, owner: str) -> Problem:
        where = str(self._path.parent)
        if isinstance(error, BlockingIOError):
            fix = "wait for it, stop it, or give this run another --name"
            return Problem(f"another process is writing this run: {owner}", where, fix=fix)
        fix = "choose a folder on a writable disk that supports file locks"
        return Problem("the run folder cannot be locked", where, why=error.strerror or str(error), fix=fix)


def _self() -> dict[str, int | str]:
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": started}


def _owner(descriptor: int | None) -> str:
    """Who has the lock, from what the owner wrote; it may still be writing."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0)) if descriptor is not None else {}
        return f"process {owner['pid']} on {owner['host']} since {owner['started']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "owner not known"
