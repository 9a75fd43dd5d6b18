"""Runs each row in a process of its own, so that a crash stays there, and cleans up after it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.proof.registry import Row

ROOT = Path(__file__).resolve().parents[2]
STATUSES = ("passed", "failed", "not run")
LOG_LINES = 40
# A row is given a deadline that is this much earlier than the time at which it is killed.
MARGIN = 4.0
FIRST = 60.0
"""Seconds that the first row has at least: the first `import torch` from a slow disk may take most of it."""
LEAST = 6.0
"""Seconds under which starting a row is of no use: importing torch alone takes that long."""

_PR_SET_CHILD_SUBREAPER = 36
# Variables of launchers and of debugging. With them the row would measure something else.
_DROPPED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "GROUP_RANK",
    "CUDA_LAUNCH_BLOCKING",
)
_DROPPED_PREFIXES = ("MASTER_", "TORCHELASTIC_", "PYTEST_")


def environment(work: Path, rehearsal: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of every row: at most one card, caches and temporary files inside `work`, UTF-8, no colour."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    cache, temporary = work / "cache", work / "tmp"
    for folder in (cache, temporary):
        folder.mkdir(parents=True, exist_ok=True)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return kept | {
        "CUDA_VISIBLE_DEVICES": ""
        if rehearsal
        else "0"
        if visible is None
        else visible.split(",")[0].strip(),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")])),
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
        "LC_ALL": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "TMPDIR": str(temporary),
        "XDG_CACHE_HOME": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends, so that they can be found (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def run_row(
    row: Row,
    seconds: float,
    work: Path,
    *,
    rehearsal: bool,
    environ: Mapping[str, str],
    earlier: Mapping[str, Mapping[str, Any]],
    keep: Path,
) -> dict[str, Any]:
    """Run the row. Returns its outcome: status, reason, summary, figures, seconds, log (last lines, if it failed).

    seconds: the time after which the row's process group is killed.
    No failure of the row raises here. If this process is interrupted, the row is killed too.
    """
    folder = work / "rows" / row.name
    folder.mkdir(parents=True)
    request = {
        "target": row.target,
        "seconds": max(1.0, seconds - MARGIN),
        "rehearsal": rehearsal,
        "folder": str(folder),
        "keep": str(keep),
        "earlier": earlier,
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    began, before = time.monotonic(), children_of(os.getpid())
    with (folder / "log").open("wb") as log:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.proof.child", str(folder)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=dict(environ), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            failed = {
                "status": "failed",
                "reason": f"no process could be started: {error}",
                "summary": "",
            }
            return (
                asdict(row)
                | failed
                | {"figures": {}, "log": [], "seconds": 0.0, "limit": round(seconds, 1)}
            )
        try:
            child.wait(timeout=seconds)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end(child, before)
    outcome = _outcome(folder, child.returncode, late, seconds)
    if outcome["status"] == "failed":
        outcome["log"] = _tail(folder / "log")
    return (
        asdict(row)
        | outcome
        | {"seconds": round(time.monotonic() - began, 1), "limit": round(seconds, 1)}
    )


def end(child: subprocess.Popen[bytes], others: Set[int]) -> None:
    """Kill the child's process group and its descendants outside of the group, and reap all of them.

    others: children of this process that do not belong to the row.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for _ in range(100):  # children of a killed process become ours
        orphans = children_of(os.getpid()) - others
        if not orphans:
            return
        for orphan in orphans:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(orphan, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(orphan, 0)


def children_of(parent: int) -> set[int]:
    """Ids of the children of process `parent`; none without /proc."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.add(int(path.parent.name))
    return found


def _outcome(folder: Path, code: int, late: bool, seconds: float) -> dict[str, Any]:
    result = _read(folder / "result.json")
    if (
        isinstance(result, dict)
        and result.get("status") in STATUSES
        and isinstance(result.get("figures"), dict)
    ):
        return result
    if late:
        reason = f"stopped after its {seconds:.0f} s"
    elif code < 0:
        reason = f"its process was ended by {_signal_name(-code)}"
    else:
        reason = f"its process ended with code {code} and left no readable result"
    partial = _read(folder / "partial.json")
    figures = partial if isinstance(partial, dict) else {}
    return {"status": "failed", "reason": reason, "summary": "", "figures": figures}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(path: Path) -> list[str]:
    try:
        text = path.read_bytes()[-20_000:].decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = ["".join(c for c in line if c.isprintable())[:300] for line in text.splitlines()]
    return [line for line in lines if line.strip()][-LOG_LINES:]
