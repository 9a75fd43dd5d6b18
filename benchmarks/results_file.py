"""How a benchmark's figures are kept: with the command that gave them, and where."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def write_results(
    path: Path, module: str, arguments: Sequence[str] | None, threads: int, results: Any
) -> None:
    """Write `results` (JSON-able) of `python -m <module> <arguments>`; arguments: default, those of this process."""
    record = {
        "command": " ".join(
            ["python -m", module, *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "machine": f"{platform.machine()}, {threads} thread(s)",
        "torch": str(torch.__version__),
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
