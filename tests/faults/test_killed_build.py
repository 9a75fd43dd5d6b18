"""A run that is killed while DeepSpeed compiles its kernel does not block the next: the stale lock of row 7."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest
from launch_support import (
    ARGUMENTS,
    START_SECONDS,
    launch,
    nothing_left,  # noqa: F401
    wait_until,
)


@pytest.mark.slow
@pytest.mark.attack  # it compiles twice: minutes
@pytest.mark.dist
@pytest.mark.faults(7)
def test_a_run_killed_while_deepspeed_compiles_does_not_block_the_next(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    variables = {"TORCH_EXTENSIONS_DIR": str(cache)}
    killed = launch(tmp_path, *ARGUMENTS, kind="deepspeed", ranks=2, variables=variables)
    wait_until(
        lambda: list(cache.glob("*/lock")) and list(cache.glob("*/build.ninja")),
        "the build",
        START_SECONDS,
    )
    killed.kill()
    (lock,) = cache.glob("*/lock")
    assert not list(cache.glob("*/*.so")), "killed before it was ready"
    job = launch(
        tmp_path, *ARGUMENTS, "train.steps=3", kind="deepspeed", ranks=2, variables=variables
    )
    assert job.process.wait(timeout=2 * START_SECONDS) == 0, job.output()
    job.ended(10)
    # Whichever came first: the lock was taken away, or a compiler that outlived its parent ended and let it go.
    assert not lock.exists()
    assert list(cache.glob("*/*.so")), "the kernel was built"


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.faults(7)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_request_to_stop_ends_the_wait_for_anothers_build(tmp_path: Path, name: str) -> None:
    """The other's build, whose lock is held here, never ends."""
    folder = tmp_path / "cache" / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    with (folder / ".building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        building.write(str(os.getpid()))
        building.flush()
        variables = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")}
        job = launch(tmp_path, *ARGUMENTS, kind="deepspeed", ranks=2, variables=variables)
        waits = f"DeepSpeed's kernel is being compiled by process {os.getpid()}"
        wait_until(
            lambda: waits in job.output() or job.process.poll() is not None,
            "it waits",
            START_SECONDS,
        )
        for rank in (job.rank(0), job.rank(1)):
            os.kill(rank, signal.Signals[name])
        job.ended(START_SECONDS)
        # Held to the end: nobody got to build.
        with (folder / ".building").open() as theirs, pytest.raises(BlockingIOError):
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert job.process.wait(START_SECONDS) == 75, job.output()
    assert (
        f"{name}: stopped before training began; the same command starts it again" in job.output()
    )
    assert "Traceback" not in job.output()
    assert not list(folder.glob("*.so"))
