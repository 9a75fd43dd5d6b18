"""Where this process is in its work, and what its threads are doing: looked at only when a rank hangs. Torch-free.

Each phase of the work calls `enter`, which costs two assignments and an addition. All ranks go through the same phases,
so the rank that has entered fewer of them is behind.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

# Innermost calls that are shown of a thread: at most, and whatever they are.
_DEPTH = 10
_ALWAYS = 2
_TORCH = "/site-packages/torch/"
_WAITING = ("threading.py", "queue.py", "selectors.py")


@dataclass
class Progress:
    """One line of work of this process.

    phase: a word for what is being done.
    step: of training, from 1; 0 before the first.
    entered: how many phases have been entered so far.
    since: when the present one was, by `time.monotonic`; infinite while there is nothing to do.
    waits: whether the phase itself is a wait for other ranks.
    """

    phase: str = "start"
    step: int = 0
    entered: int = 0
    since: float = field(default_factory=time.monotonic)
    waits: bool = False

    def enter(self, phase: str, step: int | None = None, waits: bool = False) -> None:
        """A new phase begins. step: None: as before."""
        self.phase = phase
        if step is not None:
            self.step = step
        self.waits = waits
        self.entered += 1
        self.since = time.monotonic()

    def again(self) -> None:
        """The phase goes on, and has got further."""
        self.entered += 1
        self.since = time.monotonic()

    def rest(self) -> None:
        """There is nothing to do."""
        self.since = math.inf

    @property
    def resting(self) -> bool:
        """Whether there is nothing to do."""
        return self.since == math.inf


training = Progress()
"""The main thread."""
saving = Progress(since=math.inf)
"""The thread that writes a checkpoint; on a rank whose own part is done, the wait for the others."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What a thread is doing.

    thread: its name.
    calls: `file:line in function`, innermost last.
    """

    thread: str
    calls: tuple[str, ...]

    @property
    def innermost(self) -> str:
        """The innermost call; empty if there is none."""
        return self.calls[-1] if self.calls else ""

    @property
    def idle(self) -> bool:
        """Whether the thread waits for another one of this process."""
        return Path(self.innermost.partition(":")[0]).name in _WAITING


def stacks() -> list[Stack]:
    """What every thread is doing but the calling one: the main thread first. Reads no file, which might hang too."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found: list[Stack] = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        calls: list[str] = []
        place = frame
        while place is not None and len(calls) < _DEPTH:
            # Of the calls inside of torch the innermost ones say what is waited for.
            code = place.f_code
            if len(calls) < _ALWAYS or _TORCH not in code.co_filename:
                calls.append(f"{code.co_filename}:{place.f_lineno} in {code.co_name}")
            place = place.f_back
        # A thread that ended just now has no name any more.
        stack = Stack(names.get(ident, "thread"), tuple(reversed(calls)))
        if ident == main:
            found.insert(0, stack)
        else:
            found.append(stack)
    return found
