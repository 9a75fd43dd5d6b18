"""Scenes are measured in processes of their own (see paper_driver), each once for all tests that ask for it.

So these tests may be collected together with any others, whether or not those have imported torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import paper, runs

DRIVER = Path(__file__).with_name("paper_driver.py")

Scene = Callable[..., dict[str, Any]]


@cache
def _measured(name: str, argument: str) -> dict[str, Any]:
    if name == "memory":
        # Its tensors are on the CPU: no card may be in the process.
        done = runs.program(DRIVER, runs.ROOT, name, argument, options=("-W", "ignore"))
        return json.loads(done.stdout.splitlines()[-1])
    return paper.measured([str(DRIVER), name, argument])


@pytest.fixture(scope="session")
def scene() -> Scene:
    """`scene(name, argument="")`: what the driver measured."""
    return lambda name, argument="": _measured(name, argument)
