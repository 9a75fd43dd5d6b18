"""Write a journal over and over, each time in a forked process whose disk fails at the next file call.

`python journal_driver.py <injector.so> <scratch>` prints JSON: for each mode and n, what the writer counted and how it
ended; the journals stay in `<scratch>/<mode>-<n>`. "torn:" is a disk that takes half a row and does not let go of it.
Run with the injector in LD_PRELOAD.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.tracking.journal import Journal

MODES = {"kill": 1, "full": 2, "once": 3}
IMPATIENT = "impatient-"
"""A journal that keeps nothing in memory for a disk that is full or fails once."""
AMID, AFTER = 6, 3


def step_of(journal: Journal, step: int) -> None:
    journal.metrics(step, {f"fp8_amax/slot{number}": step + number / 7 for number in range(20)})
    if step % 2 == 0:
        journal.event(step, "nonfinite.skip", window=step)
        journal.flush()


def swept(library: ctypes.CDLL, n: int, mode: str, journal: Journal) -> int:
    """Two good steps, AMID in which the n-th call fails, AFTER good ones; how many calls failed."""
    for step in (1, 2):
        step_of(journal, step)
    if mode.startswith(IMPATIENT):
        journal.patience = 0
    library.inject_arm(n, MODES[mode.removeprefix(IMPATIENT)])
    for step in range(3, 3 + AMID):
        step_of(journal, step)
    fired: int = library.inject_disarm()
    for step in range(3 + AMID, 3 + AMID + AFTER):
        step_of(journal, step)
    return fired


def torn(library: ctypes.CDLL, journal: Journal) -> int:
    """The disk takes 40 bytes of the third row, then fails the call that would cut them off again."""
    for step in (1, 2):
        step_of(journal, step)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size + 40, hard))
    library.inject_arm(2, MODES["once"])
    step_of(journal, 3)
    fired: int = library.inject_disarm()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert not journal.path.read_bytes().endswith(b"\n"), "half a row stands"
    for step in range(4, 7):
        step_of(journal, step)
    return fired


def in_fork(library: ctypes.CDLL, folder: Path, work: Callable[[Journal], int]) -> dict[str, Any]:
    """What a forked writer counted, and the status that waitpid returns."""
    folder.mkdir()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with Journal(folder / "journal.jsonl") as journal:
                fired = work(journal)
            counted = {"fired": fired, "dropped": journal.dropped}
            (folder / "counted").write_text(json.dumps(counted))
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    counted = folder / "counted"
    told = json.loads(counted.read_text()) if counted.exists() else {}
    return {"folder": str(folder), "status": status, "fired": 0, "dropped": 0, **told}


def main() -> None:
    library, scratch = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2])
    results: dict[str, list[dict[str, Any]]] = {
        "torn": [in_fork(library, scratch / "torn", lambda journal: torn(library, journal))],
    }
    for mode in (*MODES, f"{IMPATIENT}full", f"{IMPATIENT}once"):
        results[mode] = []
        for n in range(1, 1000):
            folder = scratch / f"{mode}-{n}"
            result = in_fork(
                library, folder, lambda journal, n=n, mode=mode: swept(library, n, mode, journal)
            )
            if result["status"] == 0 and not result["fired"]:
                break
            results[mode].append(result)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
