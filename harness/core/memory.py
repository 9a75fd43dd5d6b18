"""The memory that processes here may use, as the kernel and the container (cgroup v2) report it. Torch-free."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")
_CLEAR = Path("/proc/self/clear_refs")
# What proc(5) has for "reset the peak resident set size, and nothing else".
_PEAK_ALONE = "5"


def free_memory(swap: bool = False) -> int:
    """Bytes that can be allocated now on this machine and in this container. swap: free swap space counts, too."""
    machine = _sizes(_MEMINFO)

    # The container may allow less than the machine has. Memory that caches files is free: the kernel gives it back.
    free = machine.get("MemAvailable", 0)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        free = min(free, max(limit - used + _cached(), 0))
    if not swap:
        return free

    free_swap = machine.get("SwapFree", 0)
    limit, used = _cgroup("memory.swap.max"), _cgroup("memory.swap.current")
    if limit is not None and used is not None:
        free_swap = min(free_swap, max(limit - used, 0))
    return free + free_swap


def all_memory() -> int:
    """Bytes of memory and swap that all processes of this machine or container can have together; 0: not known."""
    machine = _sizes(_MEMINFO)
    limits = {"MemTotal": _cgroup("memory.max"), "SwapTotal": _cgroup("memory.swap.max")}
    total = 0
    for name, limit in limits.items():
        size = machine.get(name, 0)
        total += size if limit is None else min(size, limit)
    return total


def process_room() -> int | None:
    """Bytes that this process may still take by its own limits (`ulimit -v`, `ulimit -d`); None: it has none."""
    used = _sizes(_STATUS)
    room: int | None = None
    # Each limit with the line of /proc/self/status that counts against it.
    limits = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
    for limit, name in limits:
        most, _ = resource.getrlimit(limit)
        if most == resource.RLIM_INFINITY or name not in used:
            continue
        left = max(most - used[name], 0)
        room = left if room is None else min(room, left)
    return room


def restart_peak() -> None:
    """Let the peak of `peak_resident` begin anew, where the kernel allows that."""
    with suppress(OSError):
        _CLEAR.write_text(_PEAK_ALONE)


def peak_resident() -> int:
    """Most bytes that this process had in memory since `restart_peak`, or since its start; 0 if it is not known."""
    return _sizes(_STATUS).get("VmHWM", 0)


def size_text(count: int) -> str:
    """Bytes as people read them: `300 B`, `1.5 GiB`."""
    if count < 1024:
        return f"{count} B"
    size = count / 1024
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} PiB"


def _sizes(path: Path) -> dict[str, int]:
    """Bytes by name; empty where there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        # "MemTotal:  8056364 kB". A few lines, such as HugePages_Total, are counts without a unit.
        if words[2:] == ["kB"]:
            sizes[words[0].rstrip(":")] = int(words[1]) * 1024
    return sizes


def _cgroup(name: str) -> int | None:
    """Bytes; None without a container, or in one without that limit."""
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):
        return None


def _cached() -> int:
    """Bytes of the container's memory that only cache files; 0 where it is not known."""
    try:
        text = (_CGROUP / "memory.stat").read_text()
        counts = dict(line.split() for line in text.splitlines())
        return int(counts["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0
