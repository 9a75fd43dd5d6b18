"""launch/train.py in a process that may take only so many bytes more: ROOM, on top of what torch and the harness take."""

from __future__ import annotations

import os
import resource
import runpy
from pathlib import Path

import harness.tools.train  # noqa: F401  before the limit: its libraries are not what is measured
from tests.support.runs import TRAIN


def limit(room: int) -> None:
    """Let this process take `room` bytes more than it has."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            used = int(line.split()[1]) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (used + room, resource.RLIM_INFINITY))


if __name__ == "__main__":
    if room := os.environ.get("ROOM"):
        limit(int(room))
    runpy.run_path(str(TRAIN), run_name="__main__")
