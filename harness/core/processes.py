"""Processes of this machine, as /proc shows them. Torch-free."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def state_of(pid: int) -> str:
    """The kernel's letter for a process's state, such as "Z" for a zombie; empty if there is no such process."""
    return _stat(pid, 0)


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if it is not known (the process is gone, or there is no /proc)."""
    return int(_stat(pid, 1) or 0)


def command_of(pid: int) -> str:
    """A process's command line; empty if it is gone, or another user's."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return arguments.replace(b"\0", b" ").decode(errors="replace")


def _stat(pid: int, place: int) -> str:
    """A field of /proc/PID/stat, counted from the one after the name; the name may itself hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[place]
    except (OSError, IndexError):
        return ""


def find_compiler() -> str | None:
    """Path of the C++ compiler that builds take: $CXX, else g++, c++ or clang++. None if there is none."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        found = shutil.which(name)
        if found:
            return found
    return None
