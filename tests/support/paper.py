"""Runs programs that play a card that is not there, in warm processes that have the card already."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import runs, warm

# The device stands first: torch asks once whether there is CUDA, as it is imported.
_LOADED = ("tests.support.paper_device", "harness.estimate.comparison", "harness.models.gpt")


def run(
    program: Sequence[str], folder: Path = runs.ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python *program` to its end, with stdout and stderr apart.

    The program may import the tests.
    """
    variables = runs.environment(**{"PYTHONPATH": str(runs.ROOT), **environment})
    return warm.run(program, folder, variables, apart=True, modules=_LOADED)


def estimate(
    *arguments: str, folder: Path = runs.ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`harness estimate` with these arguments."""
    return run(["-m", "harness.cli", "estimate", *arguments], folder, **environment)


def measured(program: Sequence[str], folder: Path = runs.ROOT) -> dict[str, Any]:
    """What a program that must succeed prints as its last line, in JSON."""
    done = run(program, folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
