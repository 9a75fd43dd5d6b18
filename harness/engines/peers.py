"""Which rank was lost: the ranks of this machine know each other's processes, and look when a collective fails."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from harness.core.collectives import gather_texts, world_rank, world_size
from harness.core.errors import LostRankError, Problem, some

# The kernel closes a dying process's connections before it shows the process as gone.
_SHOWS_WITHIN = 1.0
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "": "gone", "Z": "gone", "X": "gone"}
_NAMED = 5

_peers: list[tuple[str, int]] = []
"""Host and process of every rank, in rank order; empty until the ranks have met."""


def meet() -> None:
    """Let the ranks of the default process group know each other's processes. Collective."""
    _peers[:] = [tuple(json.loads(text)) for text in gather_texts(json.dumps([socket.gethostname(), os.getpid()]))]


@contextmanager
def lost_rank_named() -> Iterator[None]:
    """Around collectives: one that fails because a rank is gone or frozen raises LostRankError, naming the rank."""
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:  # gloo's errors have no class of their own
        if world_size() == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise LostRankError(_problem(str(error).partition("\n")[0])) from error


def _problem(why: str) -> Problem:
    deadline = time.monotonic() + _SHOWS_WITHIN
    while not (lost := _lost()) and time.monotonic() < deadline:
        time.sleep(0.05)
    where = f"rank {world_rank()}"
    fix = "start the same command again: it resumes at the newest checkpoint; what ended the rank is told above this"
    if lost:
        return Problem(f"lost {some(lost, _NAMED)}", where, why=why, fix=fix)
    elsewhere = sum(host != socket.gethostname() for host, _ in _peers)
    told = f"; {elsewhere} ranks are on other machines" if elsewhere else ""
    return Problem(f"another rank does not answer; none of this machine is gone or stopped{told}", where, why, fix)


def _lost() -> list[str]:
    """Every rank of this machine that is not running, such as `rank 1 (process 123, gone)`."""
    here = socket.gethostname()
    states = [(rank, pid, _STATES.get(_state(pid))) for rank, (host, pid) in enumerate(_peers) if host == here]
    return [f"rank {rank} (process {pid}, {state})" for rank, pid, state in states if state]


def _state(pid: int) -> str:
    """The letter that the kernel has for a process, empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
