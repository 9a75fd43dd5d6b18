"""A launcher's process keeps its exit code, whatever the interpreter's finalisation would do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A command whose remains abort the process when the interpreter takes them down, as a group's threads can.
SCRIPT = """
import atexit, os, sys
from harness import cli
from harness.core.errors import LostRankError, MachineError, Problem
from harness.stop import StoppedEarly
class Remains:
    def __del__(self, abort=os.abort):
        abort()
sys.remains = Remains()
atexit.register(print, "exit functions ran")
def action():
    print("work done")
    held = Remains()  # which the error's traceback keeps
    sys.held = held if sys.argv[1].isdecimal() else None
    if sys.argv[1] == "refuse":
        raise MachineError(Problem("no such card", "machine"))
    if sys.argv[1] == "lose":
        raise LostRankError(Problem("lost rank 0", "rank 1"))
    if sys.argv[1] == "stop":
        raise StoppedEarly("SIGTERM")
    if sys.argv[1] == "raise":
        raise RuntimeError("no such luck")
    return int(sys.argv[1])
cli._guarded(action)
"""


def end(code: str, **launch: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "RANK"} | launch
    command = [sys.executable, "-c", SCRIPT, code]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_ends_with_the_code_of_its_work(code: int) -> None:
    done = end(str(code), RANK="1")
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == ["work done", "exit functions ran"]


def test_a_rank_that_crashes_says_why() -> None:
    done = end("raise", RANK="1")
    assert done.returncode == 1
    assert "RuntimeError: no such luck" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("lose", 1), ("refuse", 4), ("stop", 75), ("raise", 1)])
def test_what_an_error_holds_on_to_is_not_taken_down(how: str, code: int) -> None:
    done = end(how, RANK="1")
    assert done.returncode == code, done.stderr


def test_the_remains_abort_a_process_that_is_finalised() -> None:
    assert end("0").returncode == -signal.SIGABRT


@pytest.mark.slow
def test_an_error_that_one_rank_alone_has_is_told() -> None:
    done = end("refuse", RANK="1")
    assert done.returncode == 4
    assert "error on rank 1: machine: no such card" in done.stderr
    assert "error: machine: no such card" in end("refuse", RANK="0").stderr


def test_a_rank_that_its_launcher_ends_while_another_speaks_keeps_its_code() -> None:
    environment = {**os.environ, "RANK": "1"}
    command = [sys.executable, "-u", "-c", SCRIPT, "refuse"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"work done\n"
    time.sleep(0.5)  # it has 5 s to speak in
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 4
    assert b"Traceback" not in told
