"""What ranks do with a checkpoint together: wait for each other in rounds, and share the reading of its files.

No rank waits long inside one collective, or it would time out. What takes long runs on a thread, and the ranks ask each
other again and again whether it has ended on all of them.

All functions are collective: every rank calls them in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError, Problem

ROUND = 0.5
"""Seconds between two questions. A rank that waited much longer in a collective would time out."""
_Result = TypeVar("_Result")


class Ranks(Protocol):
    """This rank among others, and their collectives: an engine, or a process group."""

    rank: int
    world_size: int
    device: torch.device

    def max(self, values: Tensor) -> Tensor: ...

    def broadcast(self, value: Any) -> Any: ...


def on_any_ranks(ranks: Ranks, *mine: bool) -> list[bool]:
    """For each of `mine`, whether it is true on any rank."""
    if ranks.world_size == 1:
        return list(mine)
    flags = torch.tensor([float(each) for each in mine], device=ranks.device)
    return [bool(each) for each in ranks.max(flags).tolist()]


def in_rounds(ranks: Ranks, work: Callable[[], _Result]) -> _Result:
    """Do `work`, which may take long on some ranks.

    Returns its result, or raises its exception, when no rank is at work any more.
    """
    results: list[_Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="checkpoint", daemon=True)
    thread.start()
    while True:
        thread.join(ROUND)
        (busy,) = on_any_ranks(ranks, thread.is_alive())
        if not busy:
            break
    if failures:
        raise failures[0]
    return results[0]


def verify_together(ranks: Ranks, store: Store, step: int) -> list[Problem]:
    """What is wrong with the checkpoint of `step`: empty on every rank, or on none.

    The ranks must see the same manifest. It has the hash of every file, so what a rank holds need not be compared,
    which differs from rank to rank. Each rank then reads its share of the files, unless all ranks know that they have
    done so before and nothing has changed since.
    """
    mine = ""
    files: list[str] = []
    problems: list[Problem] = []
    try:
        mine, files = store.manifest_sha256(step), store.file_names(step)
    except CheckpointError as error:
        problems = list(error.problems)
    differs = mine != ranks.broadcast(mine)
    differ, unread, due = on_any_ranks(ranks, differs, bool(problems), not store.is_verified(step))
    if differ or unread:
        return problems or [different_copies(ranks, step, unread)]
    if not due:
        return []

    # Which files are damaged, every rank learns from whoever has read them.
    problems = in_rounds(ranks, lambda: store.verify_share(step, ranks.rank, ranks.world_size))
    found = {Path(problem.where).name for problem in problems}
    wrong, *damaged = on_any_ranks(ranks, bool(problems), *(name in found for name in files))
    if not wrong:
        store.verified_together(step)
        return []
    for name, damage in zip(files, damaged, strict=True):
        if damage and name not in found:
            what = "another rank has read it, and it is not as it was written"
            problems.append(Problem(what, str(store.path(step) / name)))
    return problems or [different_copies(ranks, step, unread=True)]


def newest_valid_together(ranks: Ranks, store: Store) -> int | None:
    """As `Store.newest_valid`, by all ranks; the same on each, also if it raises CheckpointError."""
    damaged: dict[int, list[Problem]] = {}
    for step in reversed(ranks.broadcast(store.steps() if ranks.rank == 0 else [])):
        problems = verify_together(ranks, store, step)
        if not problems:
            # Only rank 0 renames them.
            store.damaged = damaged if ranks.rank == 0 else {}
            return step
        damaged[step] = problems
    if damaged:
        raise store.nothing_valid(damaged)
    return None


def different_copies(ranks: Ranks, step: int, unread: bool) -> Problem:
    """Why this rank cannot go on with its own copy of the checkpoint of `step`. unread: some rank has none."""
    what = f"the ranks read different checkpoints of step {step}"
    why = "each of them verifies, so the run folder is not the same folder on every machine"
    if unread:
        what = f"another rank cannot read the checkpoint of step {step}"
        why = "its copy is damaged or missing: its own message names the file"
    fix = "put the run folder on a disk that all machines share"
    return Problem(what, f"rank {ranks.rank}", why=why, fix=fix)
