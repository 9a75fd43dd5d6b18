"""Requests to stop: signals, a time limit, a launcher that is gone. Looked at on step boundaries only."""

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
_FORCE_AFTER = 3


def _launchers() -> tuple[int, int]:
    """Parent, and grandparent if it is the deepspeed launcher (else 0)."""
    parent = os.getppid()
    grandparent = parent_of(parent)
    return parent, grandparent if "deepspeed" in command_of(grandparent) else 0


# Looked up as early as can be: a launcher may die while its ranks start, and then another process is their parent.
_PARENT, _GRANDPARENT = _launchers()


class StoppedEarly(BaseException):
    """A signal (its name is the argument) while the run starts. No Exception, which imports may swallow."""


NOTHING_YET = "stopped before training began; the same command starts it again"
# Seconds between looks at the launcher while a rank starts.
_LOOK = 0.5


class _StartUp:
    """What signals meant before the run began to start, and the first one that came since. over: it has started."""

    def __init__(self) -> None:
        self.before: dict[signal.Signals, Any] = {}
        self.reason = ""
        self.over = threading.Event()

    def take_over(self, handler: Any) -> None:
        self.before = _take_over(handler) | self.before

    def at_once(self, number: int, frame: FrameType | None) -> None:
        _end_early(signal.Signals(number).name)

    def watch_launcher(self) -> None:
        """On a thread: a rank may wait in the rendezvous, out of reach of signals, for a launcher that is gone."""
        while not self.over.wait(_LOOK):
            if _launcher_gone(_PARENT, _GRANDPARENT):
                _end_early("the launcher is gone")

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        raise StoppedEarly(self.reason)


_start_up = _StartUp()


def end_while_importing() -> None:
    """From the first line of a program on: a signal ends it at once with 75, and a word; there is nothing to undo."""
    _start_up.take_over(_start_up.at_once)


def stop_while_starting() -> None:
    """Until `StopRequest.install` a signal raises StoppedEarly in the main thread: there is nothing to save yet. A rank
    whose launcher goes away meanwhile ends with 75 too.
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
    """Set `handler` for the signals that ask to stop; returns what was set. What nohup ignores stays ignored."""
    wanted = [
        each
        for each in _SIGNALS
        if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN
    ]
    return {number: signal.signal(number, handler) for number in wanted}


class StopRequest:
    """Turns the first signal, the end of the rental or the loss of the launcher into one request to save and stop.

    Launchers do not forward every signal to their ranks, so a rank watches its parent, and its grandparent where that
    is a launcher too. A third Ctrl-C interrupts at once.
    """

    def __init__(self, max_minutes: float = 0.0, launched: bool = False) -> None:
        self.reason = ""
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes else None
        self._parent, self._grandparent = (_PARENT, _GRANDPARENT) if launched else (0, 0)

    def install(self) -> None:
        """Take over SIGTERM, SIGINT, SIGUSR1 and SIGHUP. Call it in the main thread."""
        _start_up.over.set()
        self._before = _take_over(self._on_signal) | _start_up.before
        self.reason = self.reason or _start_up.reason  # one whose exception something has swallowed
        _start_up.before, _start_up.reason = {}, ""

    def uninstall(self, exit_code: int | None = None) -> None:
        """Nothing is left to save: signals mean again what they meant before.

        With `exit_code`, how the run has ended, they end the process at once and with that code instead: launchers
        and impatient people signal twice.
        """
        if exit_code is not None:
            end_at_a_signal(exit_code)
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether this process was asked to stop; `reason` then says by what."""
        if not self.reason:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self.reason = "train.max_minutes is over"
            elif _launcher_gone(self._parent, self._grandparent):
                self.reason = "the launcher is gone"
        return bool(self.reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.reason:
            self.reason = signal.Signals(number).name
            with suppress(OSError):  # a log on a full disk: the save does not hang on the word
                os.write(2, f"\n{self.reason}: saving after this step, then stopping\n".encode())
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= _FORCE_AFTER:
                raise KeyboardInterrupt


def end_at_a_signal(exit_code: int) -> None:
    """From now on a signal ends the process at once, with the code that it is about to end with."""
    _take_over(lambda number, frame: _end_at_once(exit_code))


def _end_at_once(exit_code: int) -> None:
    with suppress(
        OSError, RuntimeError, ValueError
    ):  # the signal may have come in the middle of a print
        sys.stdout.flush()
    os._exit(exit_code)
