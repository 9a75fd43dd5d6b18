"""Requests to stop: signals, a time limit, a launcher that is gone.

What a signal does depends on how far the process is:

1. **While it imports** (`end_while_importing`): the process ends at once. There is nothing to undo.
2. **While it starts** (`stop_while_starting`): StoppedEarly is raised in the main thread. There is nothing to save.
3. **While it trains** (`StopRequest`): the request is noted. The loop asks at the end of each step, saves and stops.
4. **When nothing is left to save** (`end_at_a_signal`): the process ends at once, with the code that it was about to
   end with.

In the first three the exit code is 75, by which wrappers and schedulers know that the same command goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from harness.core.errors import ExitCode, tell_wrapper
from harness.core.processes import command_of, parent_of

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# The Ctrl-C that interrupts at once.
_FORCE_AFTER = 3


def _launchers() -> tuple[int, int]:
    """The parent, and the grandparent if it is the deepspeed launcher (else 0)."""
    parent = os.getppid()
    grandparent = parent_of(parent)
    return parent, grandparent if "deepspeed" in command_of(grandparent) else 0


# Looked up as early as possible: a launcher may die while its ranks start, and then another process is their parent.
_PARENT, _GRANDPARENT = _launchers()


class StoppedEarly(BaseException):
    """A signal (its name is the argument) while the run starts. Not an Exception, as imports may swallow those."""


NOTHING_YET = "stopped before training began; the same command starts it again"
# Seconds between two looks at the launcher while a rank starts.
_LOOK = 0.5


class _StartUp:
    """State of a process that has not begun to train.

    before: the signal handlers that were set before ours.
    reason: the name of the first signal since; empty if none came.
    over: the run has started.
    """

    def __init__(self) -> None:
        self.before: dict[signal.Signals, Any] = {}
        self.reason = ""
        self.over = threading.Event()

    def take_over(self, handler: Any) -> None:
        # The handlers that the first call found win: those that a later one finds are ours.
        self.before = _take_over(handler) | self.before

    def at_once(self, number: int, frame: FrameType | None) -> None:
        _end_early(signal.Signals(number).name)

    def watch_launcher(self) -> None:
        """On a thread, as a rank may wait for a lost launcher in the rendezvous, where no signal handler runs."""
        while not self.over.wait(_LOOK):
            if _launcher_gone(_PARENT, _GRANDPARENT):
                _end_early("the launcher is gone")

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        raise StoppedEarly(self.reason)


_start_up = _StartUp()


def end_while_importing() -> None:
    """From now on a signal ends the process at once, with 75 and a message. For the first line of a program."""
    _start_up.take_over(_start_up.at_once)


def stop_while_starting() -> None:
    """From now on, until `StopRequest.install`, a signal raises StoppedEarly in the main thread.

    A rank whose launcher goes away meanwhile ends with 75, too.
    """
    _start_up.take_over(_start_up.on_signal)
    if "RANK" in os.environ:
        _start_up.over.clear()
        threading.Thread(target=_start_up.watch_launcher, name="launcher", daemon=True).start()


def _end_early(reason: str) -> None:
    with suppress(OSError):
        os.write(2, f"{reason}: {NOTHING_YET}\n".encode())
    tell_wrapper(ExitCode.STOPPED, starting=True)
    os._exit(ExitCode.STOPPED)


def _launcher_gone(parent: int, grandparent: int) -> bool:
    if parent and os.getppid() != parent:
        return True
    return bool(grandparent) and parent_of(parent) != grandparent


def _take_over(handler: Any) -> dict[signal.Signals, Any]:
    """Set `handler` for the signals that ask to stop; returns the handlers that were set before."""
    before: dict[signal.Signals, Any] = {}
    for number in _SIGNALS:
        # Under nohup hang-ups are ignored, and stay so.
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        before[number] = signal.signal(number, handler)
    return before


class StopRequest:
    """Turns the first signal, a time limit or the loss of the launcher into one request to save and stop.

    max_minutes: the time limit, from now; 0: none.
    launched: whether a launcher started this process. Launchers do not forward every signal to their ranks, so a rank
        watches its parent, and its grandparent where that is a launcher, too.

    A third Ctrl-C interrupts at once.
    """

    def __init__(self, max_minutes: float = 0.0, launched: bool = False) -> None:
        self.reason = ""
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes else None
        self._parent = _PARENT if launched else 0
        self._grandparent = _GRANDPARENT if launched else 0

    def install(self) -> None:
        """Take over SIGTERM, SIGINT, SIGUSR1 and SIGHUP. Call it in the main thread."""
        _start_up.over.set()
        self._before = _take_over(self._on_signal) | _start_up.before
        # An earlier signal whose exception some library has swallowed.
        self.reason = self.reason or _start_up.reason
        _start_up.before, _start_up.reason = {}, ""

    def uninstall(self, exit_code: int | None = None) -> None:
        """Nothing is left to save: signals have their earlier handlers again.

        exit_code: how the run has ended. Signals then end the process at once with that code instead, as launchers and
        impatient people signal twice.
        """
        if exit_code is not None:
            end_at_a_signal(exit_code)
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether this process was asked to stop; `reason` then says why."""
        if not self.reason:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self.reason = "train.max_minutes is over"
            elif _launcher_gone(self._parent, self._grandparent):
                self.reason = "the launcher is gone"
        return bool(self.reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.reason:
            self.reason = signal.Signals(number).name
            # The save must not fail because this line cannot be written, as in a log on a full disk.
            with suppress(OSError):
                os.write(2, f"\n{self.reason}: saving after this step, then stopping\n".encode())
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= _FORCE_AFTER:
                raise KeyboardInterrupt


def end_at_a_signal(exit_code: int, unsaid: str = "") -> None:
    """From now on a signal ends the process at once, with the code that it was about to end with.

    unsaid: why it ends, if stderr does not have it yet. A signal writes it first.
    """
    _take_over(lambda number, frame: _end_at_once(exit_code, unsaid))


def _end_at_once(exit_code: int, unsaid: str) -> None:
    # The signal may have come in the middle of a print.
    with suppress(OSError, RuntimeError, ValueError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, unsaid.encode(errors="replace"))
    os._exit(exit_code)
