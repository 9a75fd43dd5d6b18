"""One run, one writer: the second is refused by name, and a killed owner's lock is free at once."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness import run_folder
from harness.core.errors import CheckpointError, ExitCode
from harness.run_folder import RunLock

HOLDER = """
import sys, time
from pathlib import Path
from harness.run_folder import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_with_the_owner_until_that_dies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(CheckpointError) as caught:
                RunLock(run).acquire()
            message = str(caught.value)
            assert f"process {holder.pid} on {socket.gethostname()} since 20" in message
            assert "--name" in message
            assert caught.value.exit_code is ExitCode.USAGE
        finally:
            holder.kill()
    assert holder.returncode == -signal.SIGKILL
    assert (run / "lock").exists()
    with RunLock(run):
        assert str(os.getpid()) in (run / "lock").read_text()


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    with first, pytest.raises(CheckpointError):
        second.acquire()
    first.release()
    with second:
        pass


def test_an_owner_that_has_not_signed_yet_is_still_an_owner(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        (tmp_path / "lock").write_bytes(b"")
        with pytest.raises(CheckpointError, match="owner not known"):
            RunLock(tmp_path).acquire()


def test_a_folder_that_cannot_be_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be locked"):
        RunLock(tmp_path / "run").acquire()


@pytest.mark.parametrize(
    ("number", "fix"), [(errno.EACCES, "permissions"), (errno.EROFS, "on a writable disk")]
)
def test_the_fix_is_for_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder, "_lock", refuse)
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        RunLock(tmp_path).acquire()
    assert fix in str(caught.value)
    assert ("another --name" in str(caught.value)) == (number == errno.EACCES)


@pytest.mark.parametrize("planted", ["link", "folder"])
def test_what_is_in_its_place_is_named(tmp_path: Path, planted: str) -> None:
    place = tmp_path / "lock"
    place.symlink_to(tmp_path / "elsewhere") if planted == "link" else place.mkdir()
    with pytest.raises(CheckpointError, match=re.escape(str(place))) as caught:
        RunLock(tmp_path).acquire()
    assert "move away what is there" in str(caught.value)
