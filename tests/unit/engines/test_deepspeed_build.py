"""The lock of DeepSpeed's build: taken away from the dead, waited for from the living, and never for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.core.errors import MachineError
from harness.engines import deepspeed_setup
from harness.engines.deepspeed_setup import free_build_lock

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


def test_what_a_killed_build_leaves_is_taken_away_and_said(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with owner(lock, 300) as process:
        process.kill()
    assert lock.exists(), "the fault: nobody takes it away"
    age(tmp_path)
    said: list[str] = []
    free_build_lock(lock, 5, said.append)
    assert not lock.exists()
    assert said == [f"{lock} was left behind by a process that is gone, and is taken away"]


def test_one_that_changed_just_now_may_be_another_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_living_owner_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
