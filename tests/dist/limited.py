"""launch/train.py in a process that may take only ROOM bytes more from where it has its data and begins with the model.

So neither torch's libraries nor the threads of a process group count.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import harness.tools.train as training
from harness.core import deferred
from tests.support.runs import TRAIN


def limit(room: int) -> None:
    """Let this process take `room` bytes more than it has."""
    # Tensors get memory of their own from the kernel. In the heap, holes between them would count, too.
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 20)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            used = int(line.split()[1]) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (used + room, resource.RLIM_INFINITY))


if __name__ == "__main__":
    real: Any = training.build_plan
    room = os.environ.get("ROOM")

    def build_plan(*args: Any) -> Any:
        if room:
            # The first model without memory imports a good part of torch.
            deferred.build(lambda: nn.Linear(100, 100), torch.device("cpu"))
            limit(int(room))
        return real(*args)

    training.build_plan = build_plan
    runpy.run_path(str(TRAIN), run_name="__main__")
