"""The kernel that DeepSpeed compiles for itself on a CPU, when it first starts: built by one process at a time.

torch's own lock of a build is a file that only its maker takes away: who is killed while it compiles leaves it, and
whoever comes after waits for ever without a word. Ours is the kernel's, which goes with its owner; holding it, we take
away a file whose maker is gone, and wait for one that lives, in plain words and not for ever.

`python -m harness.engines.deepspeed_build` builds it beforehand, as `make setup` does.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError, MachineError, Problem
from harness.engines.deepspeed_config import find_tools_of_this_python, preflight

QUIET = 30.0
"""Seconds in which nothing changes in a build that no process of this machine is at: one of another machine, with a
folder that both see, would have written something by then."""
_LOOK = 0.2
# Seconds of waiting that are not worth a word: what is compiled already is loaded sooner.
_SILENT = 3.0
_SHOWN = 200


def build_kernel(say: Callable[[str], None], seconds: float = 900.0) -> bool:
    """Compile the kernel if it is not there, while no other process does; False where DeepSpeed has no use for one.

    say: takes a line of text. Raises MachineError naming who is still waited for after `seconds`.
    """
    find_tools_of_this_python()
    with redirect_stdout(sys.stderr):  # its banners and its log do not belong into our lines
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from torch.utils.cpp_extension import _get_build_directory

        accelerator: Any = get_accelerator()
        builder = accelerator.create_op_builder("ShareMemCommBuilder")
        if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
            return False
        folder = Path(_get_build_directory(builder.NAME, False))  # torch has no public name for it
        with _alone(folder, seconds, say):
            builder.load()
    return True


@contextmanager
def _alone(folder: Path, seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """While no other process builds in `folder`, nor will one wait for what a dead one has left there."""
    began = time.monotonic()
    with (folder / ".building").open("a+") as ours:
        told = ""
        while True:
            try:
                fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                ours.seek(0)
                told = _waits(f"process {ours.read(20) or '(not known)'}", folder, began, seconds, told, say)
        ours.truncate(0)
        ours.write(str(os.getpid()))
        ours.flush()
        free_build_lock(folder / "lock", seconds, say)
        yield


def free_build_lock(lock: Path, seconds: float, say: Callable[[str], None]) -> None:
    """Until torch's lock of a build is gone: a dead maker's is taken away, a live one's is waited for. Raises
    MachineError naming who has it after `seconds`.
    """
    told, began = "", time.monotonic()
    while (found := _identity(lock)) is not None:
        owner = _at_work(lock)
        if not owner and _unchanged(lock.parent) >= QUIET:
            if found == _identity(lock):
                say(f"{lock} was left behind by a process that is gone, and is taken away")
                lock.unlink(missing_ok=True)
            continue
        who = owner or f"no process of this machine, perhaps one of another: {QUIET:.0f} s without a change will tell"
        told = _waits(who, lock.parent, began, seconds, told, say)


def _waits(who: str, folder: Path, began: float, seconds: float, told: str, say: Callable[[str], None]) -> str:
    """Wait a moment for `who`, saying so once; what was said. Raises MachineError `seconds` after `began`."""
    waited = time.monotonic() - began
    what = f"DeepSpeed's kernel is being compiled by {who}"
    if waited > seconds:
        fix = f"end that process, or if there is none, delete {folder / 'lock'}; or start with torchrun"
        raise MachineError(Problem(what, str(folder), why=f"it was waited for for {seconds:.0f} s", fix=fix))
    if what != told and waited > _SILENT:
        say(f"waiting for at most {seconds - waited:.0f} s: {what} (in {folder})")
        told = what
    time.sleep(_LOOK)
    return told


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _unchanged(folder: Path) -> float:
    """Seconds since anything changed in `folder`."""
    times = [folder.stat().st_mtime]
    for each in os.scandir(folder):
        with suppress(FileNotFoundError):
            if each.name != ".building":
                times.append(each.stat(follow_symlinks=False).st_mtime)
    return time.time() - max(times)


def _at_work(lock: Path) -> str:
    """A process of this machine that has the lock open, else one that works in its folder, as compilers do; or none."""
    places = {str(lock.resolve()): 0, str(lock.parent.resolve()): 1}
    found: list[tuple[int, str]] = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        links = [process / "cwd"]
        with suppress(OSError):
            links += (process / "fd").iterdir()
        for link in links:
            with suppress(OSError):  # gone, or another user's
                if (rank := places.get(os.readlink(link))) is not None:
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append((rank, f"process {process.name} ({words[:_SHOWN].strip()})"))
    return min(found, default=(0, ""))[1]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Build the kernel where DeepSpeed would when it first trains; what hinders it then is no error here."""
    if problems := preflight():
        _say("\n".join(map(str, problems)))
        return 1
    try:
        built = build_kernel(_say)
    except (HarnessError, RuntimeError, ImportError, OSError) as error:
        _say(str(error))
        return 1
    _say("DeepSpeed's kernel is there" if built else "DeepSpeed needs no kernel here")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
