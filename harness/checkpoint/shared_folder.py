"""Whether all ranks see the same folder, asked before the first step.

Ranks that share the state write one checkpoint together. A folder of the same name on each machine's own disk would
take only the pieces of the ranks there, and every save would fail.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.core.collectives import gather_texts
from harness.core.errors import CheckpointError, Problem
from harness.core.files import read_bounded

# Seconds for which NFS may keep from a client what another one wrote: its longest default, acdirmax.
_CACHED = 60.0
_PAUSE = 0.1
# Ranks that the message names.
_NAMED = 8


def check_shared_folder(
    folder: Path,
    rank: int,
    broadcast: Callable[[Any], Any],
    seconds: float,
    gather: Callable[[str], list[str]] = gather_texts,
) -> None:
    """Rank 0 writes a file in `folder`, and the others must find it there. Collective.

    Raises CheckpointError on every rank, naming the ranks that do not find it.

    broadcast: gives rank 0's value on every rank.
    seconds: how long the others look for it at most; less than the ranks' timeout.
    gather: gives every rank's text, in rank order, on every rank.
    """
    # The name has the token too: what an earlier start left is not found.
    token, error = "", ""
    if rank == 0:
        token = secrets.token_hex(16)
        try:
            (folder / _name(token)).write_text(token)
        except OSError as failure:
            error = failure.strerror or str(failure)
    token, error = broadcast([token, error])
    if error:
        fix = "check free space and permissions of the folder"
        raise CheckpointError(Problem("cannot be written by rank 0", str(folder), error, fix))

    found = rank == 0 or _finds(folder, token, min(seconds, _CACHED))
    hosts = gather("" if found else socket.gethostname())
    if rank == 0:
        with suppress(OSError):
            (folder / _name(token)).unlink()

    lost = [f"{number} (on {host})" for number, host in enumerate(hosts) if host]
    if lost:
        named = ", ".join(lost[:_NAMED])
        if len(lost) > _NAMED:
            named += f" and {len(lost) - _NAMED} more"
        what = f"is not the folder of rank 0 on these ranks: {named}"
        why = "every rank writes its own rows of a checkpoint, and all must be in one folder"
        fix = "start from a folder on a disk that all machines share, such as NFS or Lustre"
        raise CheckpointError(Problem(what, str(folder), why, fix))


def _name(token: str) -> str:
    return f".shared-{token}"


def _finds(folder: Path, token: str, seconds: float) -> bool:
    """Whether the file is there within `seconds`."""
    until = time.monotonic() + seconds
    while True:
        with suppress(OSError, ValueError):
            # Listing the folder makes NFS ask its server.
            os.listdir(folder)
            if read_bounded(folder / _name(token), len(token)) == token.encode():
                return True
        if time.monotonic() > until:
            return False
        time.sleep(_PAUSE)
