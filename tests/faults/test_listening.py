"""On one machine nothing of a run listens beyond it: who connects to a rendezvous could change what ranks compute."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from launch_support import (
    START_SECONDS,
    Launch,
    launch,
    nothing_left,  # noqa: F401
    script,
)

from tests.support.matrix import rest_nightly
from tests.support.runs import wait_for_step

_LISTENS = "0A"


def listening(job: Launch) -> set[str]:
    """Addresses that any process of the job listens on, as `127.0.0.1` or `::`."""
    found: set[str] = set()
    for pid in job.processes():
        try:
            links = [each.readlink().name for each in Path(f"/proc/{pid}/fd").iterdir()]
            tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        except OSError:  # one that ends just now
            continue
        mine = {
            link.removeprefix("socket:[").removesuffix("]")
            for link in links
            if link.startswith("socket:[")
        }
        for row in (line.split() for table in tables for line in table.splitlines()[1:]):
            if row[3] == _LISTENS and row[9] in mine:
                address = bytes.fromhex(row[1].partition(":")[0])
                words = b"".join(address[at : at + 4][::-1] for at in range(0, len(address), 4))
                found.add(
                    socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
                )
    return found


@pytest.mark.slow
def test_alone_a_run_listens_nowhere(tmp_path: Path) -> None:
    job = launch(tmp_path, "--name", "r", "train.steps=100000")
    wait_for_step(job.run, 3, job.process, START_SECONDS)
    assert listening(job) == set()


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kind", rest_nightly(["torchrun", "deepspeed"], "torchrun"))
def test_under_the_launch_scripts_it_listens_on_loopback(tmp_path: Path, kind: str) -> None:
    job = script(tmp_path, kind, "train.steps=1000000")
    wait_for_step(job.run, 3, job.process, START_SECONDS)
    assert listening(job) == {"127.0.0.1"}
