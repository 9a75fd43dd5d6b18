"""Row 7: one run, one writer, whoever comes second and however the first one ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_support import (
    ARGUMENTS,
    START_SECONDS,
    STEPS,
    Launch,
    check_stopped,
    launch,
    nothing_left,  # noqa: F401
    script,
    steps_done,
    undisturbed,
    wait_until,
)

from harness.core.errors import CheckpointError
from harness.run_folder import RunLock
from tests.support.runs import ROOT, environment, metrics, wait_for_checkpoint, wait_for_step

pytestmark = pytest.mark.faults(7)

RACES = int(os.environ.get("FAULTS_RACES", "30"))
CONTENDERS = 4
# Takes the run's lock at every line it reads, says how that went, and lets go at the next.
CONTENDER = """
import sys
from pathlib import Path
from harness.run_folder import RunLock
from harness.core.errors import CheckpointError
print("ready", flush=True)
for line in sys.stdin:
    lock = RunLock(Path(line.strip()))
    try:
        lock.acquire()
        print("won", flush=True)
    except CheckpointError as error:
        print("lost", str(error).replace(chr(10), " "), flush=True)
    sys.stdin.readline()
    lock.release()
"""


def contender() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CONTENDER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert answer(process) == "ready"
    return process


def ask(process: subprocess.Popen[str], line: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_of_several_at_the_same_moment_exactly_one_wins(
    tmp_path: Path, figure: Callable[..., None]
) -> None:
    racers = [contender() for _ in range(CONTENDERS)]
    winners: set[int] = set()
    for race in range(RACES):
        for racer in racers:
            ask(racer, str(tmp_path / f"run-{race}"))
        results = {racer.pid: answer(racer) for racer in racers}
        won = [pid for pid, result in results.items() if result == "won"]
        assert len(won) == 1, results
        winners |= set(won)
        # The winner may not have signed yet when it is looked at; nobody else is ever named.
        named = {
            pid for result in results.values() for pid in re.findall(r"process (\d+) ", result)
        }
        assert named <= {str(won[0])}, results
        assert json.loads((tmp_path / f"run-{race}" / "lock").read_text())["pid"] == won[0]
        for racer in racers:
            ask(racer)
    end(*racers)
    figure(
        7,
        f"{CONTENDERS} processes at one lock at the same moment: exactly one wins",
        (RACES, RACES),
    )


def test_a_frozen_owner_is_an_owner_and_a_killed_one_is_none(tmp_path: Path) -> None:
    owner = contender()
    ask(owner, str(tmp_path))
    assert answer(owner) == "won"
    owner.send_signal(signal.SIGSTOP)
    with pytest.raises(
        CheckpointError, match=f"process {owner.pid} on {socket.gethostname()} since 20"
    ):
        RunLock(tmp_path).acquire()
    end(owner)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == owner.pid
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    "left",
    ['{"pid": PID, "host": "HOST", "started": "2026-01-01T00:00:00+0000"}', "", "\x00\xff{["],
    ids=["dead owner", "died unsigned", "damaged"],
)
def test_a_file_that_nobody_holds_means_nothing(tmp_path: Path, left: str) -> None:
    # The dead owner's process number is another program's now.
    (tmp_path / "lock").write_text(
        left.replace("PID", str(os.getppid())).replace("HOST", socket.gethostname())
    )
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def refused(job: Launch, owner: int) -> None:
    """The start ended with 2 and named the owner."""
    assert job.process.wait(timeout=120) == 2, job.output()
    assert f"process {owner} on {socket.gethostname()} since 20" in job.output(), job.output()
    assert "another --name" in job.output()
    job.ended(10)


@pytest.mark.nightly
@pytest.mark.dist
def test_a_frozen_owner_keeps_its_run_and_finishes_it_undisturbed(tmp_path: Path) -> None:
    owner = launch(tmp_path, *ARGUMENTS)
    wait_for_checkpoint(owner.run, 10, owner.process, START_SECONDS)
    owner.process.send_signal(signal.SIGSTOP)
    steps = steps_done(owner.run)
    before = {path.name: path.read_bytes() for path in owner.run.iterdir() if path.is_file()}
    refused(launch(tmp_path, *ARGUMENTS), owner.process.pid)
    refused(script(tmp_path, "torchrun"), owner.process.pid)
    for tool in ("inspect", "verify", "explain", "report", "sync"):
        line = [sys.executable, "-m", "harness.cli", tool, "runs/r"]
        variables = environment(PYTHONPATH=str(ROOT))
        done = subprocess.run(
            line, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (tool, done.stdout, done.stderr)
    after = {name: (owner.run / name).read_bytes() for name in before}
    assert after == before, "neither the refused nor the tools touched what is the owner's"
    assert owner.process.poll() is None
    owner.process.send_signal(signal.SIGCONT)
    assert owner.process.wait(timeout=120) == 0, owner.output()
    assert 0 < steps < STEPS
    assert (metrics(owner.run), metrics(owner.run, "val/loss")) == undisturbed()


@pytest.mark.nightly
def test_two_starts_at_once_train_one_run(tmp_path: Path, figure: Callable[..., None]) -> None:
    starts = max(1, RACES // 15)
    for _ in range(starts):
        jobs = [
            launch(tmp_path, "--name", "r", "train.steps=100000", "checkpoint.every=0")
            for _ in range(2)
        ]
        wait_until(
            lambda jobs=jobs: any(job.process.poll() is not None for job in jobs),
            "one of two ends",
            120,
        )
        loser, winner = sorted(jobs, key=lambda job: job.process.poll() is None)
        refused(loser, winner.process.pid)
        wait_for_step(winner.run, steps_done(winner.run) + 1, winner.process)
        winner.process.send_signal(signal.SIGTERM)
        assert winner.process.wait(timeout=60) == 75
        check_stopped(winner.run, "SIGTERM")
    figure(
        7,
        "two starts of one run at once: one trains, one ends with 2",
        (starts, starts),
    )
