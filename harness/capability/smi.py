"""Asks NVIDIA's own tool, `nvidia-smi`, about a card that torch uses. Imports torch only when it is asked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence


def nvidia_smi(fields: Sequence[str], index: int = 0) -> dict[str, str]:
    """Those of these fields that the tool reports for a card, without units.

    fields: as in `nvidia-smi --help-query-gpu`. One that the tool does not know makes it fail: then nothing is known.
    index: the card's number in torch.
    """
    import torch

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    identity = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    which = ["-i", f"GPU-{identity}"] if identity is not None else []
    command = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]

    # nvidia-smi does not know the identity of a MIG slice: then it is asked about all cards, and one must answer.
    for wanted in (which, []):
        try:
            done = subprocess.run([*command, *wanted], capture_output=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        rows = done.stdout.decode(errors="replace").strip().splitlines()
        if done.returncode == 0 and len(rows) == 1 and rows[0].count(",") == len(fields) - 1:
            return _known(fields, rows[0])
    return {}


def _known(fields: Sequence[str], row: str) -> dict[str, str]:
    """The values of a row by field, without those in brackets, such as [N/A]."""
    found: dict[str, str] = {}
    for name, text in zip(fields, row.split(","), strict=True):
        value = text.strip()
        if value and not value.startswith("["):
            found[name] = value
    return found
