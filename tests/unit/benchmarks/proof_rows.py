"""Rows of a proof that behave badly, and some that do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.proof.registry import Answer, NotHere, Task


class OutOfMemoryError(RuntimeError):
    """As torch's, by name."""


def fine(task: Task) -> Answer:
    """Nothing wrong."""
    (task.keep / "kept.json").write_text('{"here": 1}')
    return Answer("all is well", {"number": 1, "told": sorted(task.earlier)})


def wrong(task: Task) -> Answer:
    return Answer("looked at", {"number": 1}, "it is not what it should be")


def absent(task: Task) -> Answer:
    raise NotHere("this machine has no such thing")


def raises(task: Task) -> Answer:
    raise ValueError("two lines\nof text, from " + str(Path.home()))


def memory(task: Task) -> Answer:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def hangs(task: Task) -> Answer:
    """With a child in its process group, and one in a session of its own; their ids go into PROOF_PIDS."""
    task.note({"so far": 3})
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    pids = Path(os.environ["PROOF_PIDS"])
    pids.with_suffix(".tmp").write_text(
        " ".join(str(each) for each in (os.getpid(), *(c.pid for c in children)))
    )
    pids.with_suffix(".tmp").rename(pids)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def waits(task: Task) -> Answer:
    """For ever, after its id went into PROOF_PIDS."""
    pids = Path(os.environ["PROOF_PIDS"])
    pids.with_suffix(".tmp").write_text(str(os.getpid()))
    pids.with_suffix(".tmp").rename(pids)
    while True:
        time.sleep(1)


def rubbish(task: Task) -> Answer:
    """Prints what no terminal should see, and leaves a result that is none."""
    sys.stdout.buffer.write(b"\x00\xff\x1b[2Jrubbish\n" * 1000)
    sys.stdout.flush()
    (task.folder / "result.json").write_bytes(b'{"status": "passed", \xff')
    os._exit(0)


def lies(task: Task) -> Answer:
    """A result of another form."""
    (task.folder / "result.json").write_text('{"status": "wonderful", "figures": []}')
    os._exit(0)


def not_an_answer(task: Task) -> dict[str, int]:
    return {"passed": 1}


def infinite(task: Task) -> Answer:
    return Answer("fast", {"flops": float("inf")})


def dies(task: Task) -> Answer:
    task.note({"so far": 2})
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def leaves(task: Task) -> Answer:
    """Ends well, and leaves a process behind that has left its group."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleep, start_new_session=True)
    Path(os.environ["PROOF_PIDS"]).write_text(str(child.pid))
    return Answer("well", {})
