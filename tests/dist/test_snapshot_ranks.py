"""Two ranks and a copy that fails on one of them: both are told at once, and neither restores its own.

Run as a script, this file is one rank. Every case is a key of what it writes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.checkpoint.overlapped import Copier, CopyError
from harness.checkpoint.snapshots import Snapshots
from harness.checkpoint.staging import Staging
from harness.core.collectives import ranks_here
from harness.core.protocols import Tensors
from tests.support.copy_streams import Events, LaterStreams
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.dist

SLICE = 256


def state(value: float) -> Tensors:
    return {"model": {"weight": torch.full((500,), float(value))}}


class Full(Staging):
    """There is no memory for its copies."""

    def copy(self, tensors: Tensors) -> Tensors:
        raise MemoryError


def outcome(snapshots: Snapshots) -> list[Any]:
    """Steps 20 and 40 with a snapshot each, and then a rollback: what came of each, by its step or error."""
    found: list[Any] = []

    def taken(step: int) -> int:
        snapshots.take(step, state(step), {})
        snapshots.observe(step + 1, True)
        return step

    for call in (lambda: taken(20), lambda: taken(40), snapshots.newest_good):
        try:
            found.append(call())
        except CopyError as error:
            found.append(str(error))
    return found


def rank_main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo")
    odd = rank == 1
    found: dict[str, Any] = {}
    for name, streams in (
        ("sound", LaterStreams()),
        ("fails on its way", LaterStreams(fails_at=2 if odd else -1)),
        ("no memory", LaterStreams(most=0 if odd else 1 << 40)),
        ("no room", LaterStreams(free=0 if odd else 1 << 40)),
    ):
        found[name] = outcome(Snapshots(1, copier=Copier(streams, Events().event, SLICE)))
        found[f"{name}: buffers"] = streams.sizes

    found["ranks here"] = ranks_here()

    # At a rollback before the next take.
    late = LaterStreams(fails_at=0 if odd else -1)
    snapshots = Snapshots(1, copier=Copier(late, Events().event, SLICE))
    snapshots.take(20, state(1.0), {})
    snapshots.observe(21, True)
    with pytest.raises(CopyError):
        snapshots.newest_good()

    blocking = Snapshots(1)
    if odd:
        blocking._next.memory = Full()
    found["blocking"] = outcome(blocking)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_ranks_agree_on_every_snapshot(tmp_path: Path) -> None:
    lead, odd = run_ranks(__file__, tmp_path, 2)
    other = "it failed on another rank"
    assert lead["ranks here"] == odd["ranks here"] == 2
    assert lead["sound"] == odd["sound"] == [20, 40, 40]

    broken = "CUDA error: an illegal memory access was encountered"
    assert odd["fails on its way"] == [20, broken, broken]
    assert lead["fails on its way"] == [20, other, other]

    full = "CUDA out of memory. Tried to allocate 2000 bytes."
    assert odd["no memory"] == [full, full, None]
    assert lead["no memory"][0] == other

    assert lead["no room"] == odd["no room"] == [20, 40, 40]
    assert lead["no room: buffers"] == odd["no room: buffers"] == [2 * SLICE]
    assert (lead["blocking"][0], odd["blocking"][0]) == (other, "MemoryError")


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(os.environ["RANK"]))
