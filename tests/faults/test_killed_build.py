"""A run that is killed while DeepSpeed compiles its kernel does not block the next: the stale lock of row 7."""

from __future__ import annotations

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
    wait_until(lambda: list(cache.glob("*/lock")) and list(cache.glob("*/build.ninja")), "the build", START_SECONDS)
    killed.kill()
    (lock,) = cache.glob("*/lock")
    assert not list(cache.glob("*/*.so")), "killed before it was ready"
    job = launch(tmp_path, *ARGUMENTS, "train.steps=3", kind="deepspeed", ranks=2, variables=variables)
    assert job.process.wait(timeout=2 * START_SECONDS) == 0, job.output()
    job.ended(10)
    # Whichever came first: the lock was taken away, or a compiler that outlived its parent ended and let it go.
    assert not lock.exists()
    assert list(cache.glob("*/*.so")), "the kernel was built"
