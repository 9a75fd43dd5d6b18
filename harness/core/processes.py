"""Processes of this machine, as /proc shows them. Torch-free."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """The letter that the kernel has for a process, such as "Z"; empty if there is none."""
    return _stat(pid, 0)


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if it cannot be told (the process is gone, or there is no /proc)."""
    return int(_stat(pid, 1) or 0)


def command_of(pid: int) -> str:
    """A process's command line; empty if it is gone, or another user's."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def _stat(pid: int, place: int) -> str:
    """A field of /proc/PID/stat, counted from the one after the name, which may itself hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[place]
    except (OSError, IndexError):
        return ""
