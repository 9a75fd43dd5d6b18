"""How much memory is free, within the limits of the machine and of its container. Torch-free."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that can be allocated without swapping, on this machine and in this container (cgroup v2)."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024  # from kibibytes
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = int(counts["inactive_file"])  # of files: the kernel gives it back when it is needed
    except (OSError, ValueError, KeyError):  # no container, or one without a limit
        return free
    return min(free, max(limit - used + cached, 0))
