"""A rank is killed or frozen while the ranks meet, or while they build the run: the other names it, and ends."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core.errors import ExitCode
from tests.support.matrix import rest_nightly
from tests.support.runs import (
    ROOT,
    command,
    environment,
    rank_logs,
    start_ranks,
    train,
    train_ranks,
)

pytestmark = [pytest.mark.dist, pytest.mark.faults(20)]

SHORT, LONG = 10, 120
"""engine.timeout_seconds: of what is noticed when it is over, and of what must be noticed before."""
PATIENCE = 300
"""Seconds for two ranks to start on a busy machine and end; one that waits for ever fails the test."""
# launch/train.py, one rank of which sends itself a signal when all have come to STAGE. The others wait until it has, so
# that nothing depends on which of them is faster.
FAULTY = """
import os, signal, sys, time
from importlib import import_module
from pathlib import Path
sys.path.insert(0, {root!r})
from harness import build
module, _, name = os.environ["STAGE"].rpartition(".")
rank, ranks = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
def wait_for(*names):
    while not all(map(os.path.exists, names)):
        time.sleep(0.05)
def together(*given, real=build.join):
    Path("here-" + rank).touch()
    wait_for(*("here-" + str(each) for each in range(ranks)))
    return real(*given)
def fire(*given, **named):
    Path("at-" + rank).touch()
    if rank == os.environ["VICTIM"]:
        wait_for(*("at-" + str(each) for each in range(ranks)))
        Path("fired").touch()
        os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])
    wait_for("fired")
    return real(*given, **named)
build.join = together
owner = import_module(module)
real = getattr(owner, name)
setattr(owner, name, fire)
from harness.cli import train_main
train_main()
"""
STAGES = {
    "store": "harness.engines.process_group._store",
    "group": "torch.distributed.init_process_group",
    "build_data": "harness.tools.train.build_data",
    "build_plan": "harness.tools.train.build_plan",
    "build_model": "harness.build.build_model",
    "build_run": "harness.tools.train.build_run",
}


def lose(folder: Path, stage: str, name: str, victim: int) -> str:
    """What the other rank of two said when `victim` was lost at `stage`, its process replaced by PID."""
    (folder / "start.py").write_text(FAULTY.format(root=str(ROOT)))
    seconds = LONG if name == "SIGKILL" and stage != "store" else SHORT
    arguments = [
        "--name",
        "r",
        "--recipe",
        "fp32",
        "train.steps=2",
        f"engine.timeout_seconds={seconds}",
    ]
    line = [str(folder / "start.py"), *command(*arguments)[2:]]
    # The launcher is not there, as it would end the other rank.
    processes = start_ranks(
        folder, 2, line, STAGE=STAGES[stage], SIGNAL=name, VICTIM=str(victim), LOCAL_WORLD_SIZE="2"
    )
    try:
        code = processes[1 - victim].wait(PATIENCE)
        assert processes[victim].poll() == (-9 if name == "SIGKILL" else None)
    finally:
        for each in processes:
            each.kill()
    told = rank_logs(folder, 2)[1 - victim].read_text(errors="replace")
    assert code == ExitCode.FAILED, told
    assert "Traceback" not in told
    return told.replace(str(processes[victim].pid), "PID")


def test_a_port_that_another_process_has_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = train(
            tmp_path,
            "train.steps=2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            WORLD_SIZE="2",
            RANK="0",
            LOCAL_RANK="0",
        )
    assert done.returncode == ExitCode.FAILED, done.stdout
    assert f"port {port} of 127.0.0.1 is taken, and the ranks were to meet there" in done.stdout
    assert "or give another: MASTER_PORT" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_nightly(["SIGKILL", "SIGSTOP"], "SIGKILL"))
def test_the_host_of_the_rendezvous_that_does_not_come_is_named(tmp_path: Path, name: str) -> None:
    told = lose(tmp_path, "store", name, 0)
    assert "error on rank 1: rank 1: the rendezvous at 127.0.0.1:" in told
    assert "which rank 0 hosts, does not answer" in told
    assert "engine.timeout_seconds" in told


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_nightly(["SIGKILL", "SIGSTOP"], "SIGSTOP"))
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, name: str) -> None:
    assert "error: rank 0: waited in vain for rank 1 of 2 ranks; there: rank 0" in lose(
        tmp_path, "store", name, 1
    )


LOSSES = [("group", name, victim) for name in ("SIGKILL", "SIGSTOP") for victim in (0, 1)]
LOSSES += [
    (stage, "SIGKILL", 1) for stage in ("build_data", "build_plan", "build_model", "build_run")
]
LOSSES += [(stage, "SIGSTOP", 0) for stage in ("build_data", "build_run")]
# While ranks meet, and while they build; the others are nightly.
MARKS: dict[tuple[str, str, int], tuple[pytest.MarkDecorator, ...]] = {
    ("group", "SIGKILL", 1): (),
    ("build_plan", "SIGKILL", 1): (),
    ("group", "SIGSTOP", 0): (pytest.mark.slow,),
    ("build_run", "SIGKILL", 1): (pytest.mark.slow,),
}


@pytest.mark.parametrize(
    ("stage", "name", "victim"),
    [
        pytest.param(
            *loss, id="-".join(map(str, loss)), marks=MARKS.get(loss, (pytest.mark.nightly,))
        )
        for loss in LOSSES
    ],
)
def test_a_rank_that_is_lost_while_the_others_meet_or_build_is_named(
    tmp_path: Path, stage: str, name: str, victim: int
) -> None:
    told = lose(tmp_path, stage, name, victim)
    state = {"SIGKILL": "gone", "SIGSTOP": "stopped by a signal"}[name]
    assert f"lost rank {victim} (process PID, {state})" in told
    if (stage, name, victim) == ("group", "SIGKILL", 1):
        assert "why: it ended while the ranks met" in told, "and not when the timeout was over"


@pytest.mark.slow
def test_the_same_command_begins_again(tmp_path: Path) -> None:
    lose(tmp_path, "build_run", "SIGKILL", 1)
    done = train_ranks(tmp_path, 2, "--name", "r", "--recipe", "fp32", "train.steps=2")
    assert done.returncode == ExitCode.DONE, done.stdout


# The first start ends with one rank killed after the meeting; torchrun's store has what its ranks left there.
RESTARTED = """
import os, time
import torch
from harness.engines.process_group import join, read_launch
launch = read_launch()
join(launch, torch.device("cpu"), 300.0)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if launch.rank == 1:
        os._exit(7)
    time.sleep(600)
print("met again", launch.rank, flush=True)
"""


@pytest.mark.nightly
def test_ranks_that_torchrun_starts_again_meet_each_other(tmp_path: Path) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    done = subprocess.run(
        [*torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script)],
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "exitcode: 7" in done.stderr, "the first start failed"
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["met again 0", "met again 1"]
