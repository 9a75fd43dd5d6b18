"""The memory that processes here may have, as the kernel and the container (cgroup v2) tell it. Torch-free."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory(swap: bool = False) -> int:
    """Bytes that can be allocated now on this machine and in this container. swap: what can be swapped out counts."""
    known = _meminfo()
    free, swapped = known.get("MemAvailable", 0), known.get("SwapFree", 0)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        cached = _cached()  # of files: the kernel gives it back when it is needed
        free = min(free, max(limit - used + cached, 0))
    most, used = _cgroup("memory.swap.max"), _cgroup("memory.swap.current")
    if most is not None and used is not None:
        swapped = min(swapped, max(most - used, 0))
    return free + swapped if swap else free


def all_memory() -> int:
    """Bytes that the processes of this machine, or of this container, can ever have together, swap included; 0: not
    known."""
    known = _meminfo()
    limits = {"MemTotal": _cgroup("memory.max"), "SwapTotal": _cgroup("memory.swap.max")}
    return sum(
        min(known.get(name, 0), known.get(name, 0) if most is None else most)
        for name, most in limits.items()
    )


def size_text(count: int) -> str:
    """Bytes as people read them: `1.5 GiB`."""
    size = count / 2**20
    for unit in ("MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} PiB"


def _meminfo() -> dict[str, int]:
    """Bytes by name; empty where there is no such file."""
    try:
        lines = [line.split() for line in _MEMINFO.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def _cgroup(name: str) -> int | None:
    """Bytes; None without a container, or in one without that limit."""
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):
        return None


def _cached() -> int:
    try:
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return int(counts["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0
