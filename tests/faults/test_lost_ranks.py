"""Row 20: a rank is killed or frozen; every other ends, nothing is left, and the run resumes to the last bit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_support import ARGUMENTS, Launch, at_step, finishes, nothing_left, wait_until  # noqa: F401

from harness.checkpoint.store import Store
from tests.support.runs import wait_for_checkpoint

pytestmark = [pytest.mark.faults(20), pytest.mark.dist]

TIMEOUT = 8
LAUNCHERS_PATIENCE = 30
"""Seconds that torchrun and the deepspeed launcher give a rank between SIGTERM and SIGKILL."""
SLACK = 240
"""Seconds for interpreters to end on a busy machine."""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def lose(folder: Path, kind: str, rank: int, name: str, step: int) -> tuple[float, float]:
    """Signal `name` to one rank of two in a start of the run; seconds until the other rank, and all, had ended."""
    job = at_step(folder, step, *ARGUMENTS, f"engine.timeout_seconds={TIMEOUT}", kind=kind, ranks=2)
    wait_for_checkpoint(job.run, 10, job.process)
    victim, other = job.rank(rank), job.rank(1 - rank)
    os.kill(victim, signal.Signals[name])
    began = time.monotonic()
    if name == "SIGSTOP":
        wait_until(lambda: state(victim) == "T", "the rank is frozen")
    wait_until(lambda: other not in job.processes(), "the other rank ends", TIMEOUT + SLACK)
    alone = time.monotonic() - began
    job.ended(LAUNCHERS_PATIENCE + SLACK)
    everything = time.monotonic() - began
    assert job.process.wait() != 0
    check_lost(
        job,
        rank,
        f"lost rank {rank} (process {victim}, {'gone' if name == 'SIGKILL' else 'stopped by a signal'})",
    )
    return alone, everything


def check_lost(job: Launch, rank: int, told: str) -> None:
    """The rank that was left says which one it lost; no save was spoilt."""
    assert told in job.output(), job.output()[-3000:]
    store = Store(job.run / "checkpoints", readonly=True)
    assert store.steps()
    assert [problem for step in store.steps() for problem in store.verify(step)] == []
    if rank == 1:  # rank 0 is there to write it
        outcome = json.loads((job.run / "outcome.json").read_text())
        assert (outcome["status"], outcome["exit_code"]) == ("failed", 1)
        assert told in outcome["reason"]


@pytest.mark.slow
def test_a_killed_rank_ends_the_other_and_is_named(tmp_path: Path) -> None:
    lose(tmp_path, "torchrun", 0, "SIGKILL", 12)


@pytest.mark.parametrize(
    ("kind", "name", "victims"),
    [
        pytest.param("torchrun", "SIGSTOP", (0,), marks=pytest.mark.nightly, id="one"),
        pytest.param("torchrun", "SIGSTOP", (0, 1), marks=pytest.mark.nightly),
        pytest.param("torchrun", "SIGKILL", (0, 1), marks=pytest.mark.nightly),
        pytest.param("deepspeed", "SIGKILL", (0, 1), marks=pytest.mark.nightly),
        pytest.param("deepspeed", "SIGSTOP", (0, 1), marks=pytest.mark.nightly),
    ],
)
def test_a_run_survives_the_loss_of_any_rank(
    tmp_path: Path,
    kind: str,
    name: str,
    victims: tuple[int, ...],
    figure: Callable[..., None],
) -> None:
    most = {"SIGKILL": 5, "SIGSTOP": TIMEOUT + 5}[name]
    times = [lose(tmp_path, kind, rank, name, 12 + 30 * rank) for rank in victims]
    alone, everything = (max(each) for each in zip(*times, strict=True))
    lost = " or ".join(map(str, victims))
    target = f"{most} s for the ranks"
    if name == "SIGSTOP":
        target += f" (timeout {TIMEOUT} s), {LAUNCHERS_PATIENCE} s more for the launcher"
    value = f"{alone:.1f} s, {everything:.1f} s"
    figure(
        20,
        f"from the loss of rank {lost} to the other rank's end, all processes' end: {name}, {kind}",
        value,
        len(victims),
        target,
    )
    figure(20, "orphans after the loss of a rank", "0", len(victims), "0")
    finishes(tmp_path, kind, 2)
