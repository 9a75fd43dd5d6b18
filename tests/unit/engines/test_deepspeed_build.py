"""The lock of DeepSpeed's build: taken away from the dead, waited for from the living, and never for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.core.errors import MachineError
from harness.engines import deepspeed_setup
from harness.engines.deepspeed_setup import free_build_lock

ROOT = Path(__file__).resolve().parents[3]
LONG_AGO = time.time() - 3600
# What torch does with the lock of a build, by a process that can be killed.
OWNER = """
import sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("has it", flush=True)
time.sleep(float(sys.argv[2]))
baton.release()
"""


def owner(lock: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(lock), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "has it\n"
    return process


def age(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.mark.slow
def test_what_a_killed_build_leaves_is_taken_away_and_said(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with owner(lock, 300) as process:
        process.kill()
    assert lock.exists(), "the fault: nobody takes it away"
    age(tmp_path)
    said: list[str] = []
    free_build_lock(lock, 5, said.append)
    assert not lock.exists()
    assert said == [f"{lock} was left behind by a process that is gone, and is deleted"]


def test_one_that_changed_just_now_may_be_another_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setattr(deepspeed_setup, "_SILENT", 0.0)
    said: list[str] = []
    with pytest.raises(MachineError, match=r"no process of this machine, perhaps one of another"):
        free_build_lock(lock, 0.5, said.append)
    assert lock.exists()
    assert said[0].startswith("waiting for at most ")
    monkeypatch.setattr(deepspeed_setup, "QUIET", 0.5)
    free_build_lock(lock, 300, said.append)
    assert not lock.exists()


@pytest.mark.nightly
def test_a_living_owner_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock"
    monkeypatch.setattr(deepspeed_setup, "_SILENT", 0.0)
    with owner(lock, 1.5) as process:
        age(tmp_path)
        said: list[str] = []
        free_build_lock(lock, 300, said.append)
        assert process.wait(timeout=60) == 0, "it took its lock away itself"
    assert f"process {process.pid} ({sys.executable}" in said[0]
    with owner(lock, 300) as process:
        age(tmp_path)
        with pytest.raises(MachineError, match=f"process {process.pid}.*") as caught:
            free_build_lock(lock, 0.5, said.append)
        process.kill()
    assert caught.value.exit_code == 4
    assert lock.exists()
    assert f"delete {lock}" in str(caught.value)


# A rank that compiles DeepSpeed's kernel, as one that starts does.
RANK = """
from harness.cli import _guarded
from harness.engines.deepspeed_setup import build_kernel
from harness.stop import stop_while_starting
stop_while_starting()
_guarded(lambda: build_kernel(print))
"""
# A compiler that never ends, once it has left its process number.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo 'g++ (GCC) 13.2.0'; exit 0; }
case "$*" in *-dumpversion*) echo 13; exit 0;; *-dumpfullversion*) echo 13.2.0; exit 0;; esac
echo $$ >> "$COMPILERS"
sleep 100000
"""


def living(numbers: Path) -> list[int]:
    """Those of the processes in the file that are there and no zombies."""
    states = {}
    for number in map(int, numbers.read_text().split()):
        status = Path(f"/proc/{number}/stat")
        if status.exists():
            states[number] = status.read_text().rpartition(")")[2].split()[0]
    return [number for number, state in states.items() if state not in "ZX"]


def wait_for(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 540  # a busy machine
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def compiling(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A rank whose compiler never ends, and the file with the compiler's process."""
    compiler, numbers = folder / "c++", folder / "numbers"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    numbers.touch()
    variables = {
        "CXX": str(compiler),
        "COMPILERS": str(numbers),
        "TORCH_EXTENSIONS_DIR": str(folder / "cache"),
    }
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), **variables}
    environment["RANK"] = "0"
    with subprocess.Popen(
        [sys.executable, "-c", RANK], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_for(
                lambda: numbers.read_text() or process.poll() is not None, "the compiler starts"
            )
            assert process.poll() is None, process.communicate()[1]
            yield process, numbers
        finally:
            process.kill()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_ends_the_compilers(tmp_path: Path, number: signal.Signals) -> None:
    with compiling(tmp_path) as (process, numbers):
        process.send_signal(number)
        told = process.communicate(timeout=300)[1]
        assert process.returncode == 75, told
        assert f"{number.name}: stopped before training began" in told
        wait_for(lambda: not living(numbers), "the compilers end")
    assert not list(tmp_path.glob("cache/*/lock")), (
        "the next start need not find out that nobody has it"
    )


@pytest.mark.nightly
def test_a_killed_rank_ends_its_compilers(tmp_path: Path) -> None:
    with compiling(tmp_path) as (process, numbers):
        process.kill()
        wait_for(lambda: not living(numbers), "the compilers end")
