"""Scenes are measured in processes of their own (see paper_driver), each once for all tests that ask for it.

So these tests may be collected together with any others, whether or not those have imported torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("paper_driver.py")
# A bound for a machine that is busy with other things, not a measure of speed.
_BOUND_SECONDS = 540

Scene = Callable[..., dict[str, Any]]


@cache
def _measured(name: str, argument: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(DRIVER), name, argument]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_BOUND_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def scene() -> Scene:
    """`scene(name, argument="")`: what the driver measured."""
    return lambda name, argument="": _measured(name, argument)
