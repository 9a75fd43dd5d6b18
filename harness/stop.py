"""Requests to stop: signals, a time limit, a launcher that is gone. Looked at on step boundaries only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_FORCE_AFTER = 3


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
        self._parent = os.getppid() if launched else 0
        grandparent = _parent_of(self._parent) if launched else 0
        self._grandparent = grandparent if grandparent and "deepspeed" in _command_of(grandparent) else 0

    def install(self) -> None:
        """Take over SIGTERM, SIGINT and SIGUSR1. Call it in the main thread."""
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def uninstall(self) -> None:
        """Signals mean again what they meant before: nothing is left to save."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether this process was asked to stop; `reason` then says by what."""
        if not self.reason:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self.reason = "train.max_minutes is over"
            elif self._launcher_gone():
                self.reason = "the launcher is gone"
        return bool(self.reason)

    def _launcher_gone(self) -> bool:
        if self._parent and os.getppid() != self._parent:
            return True
        return bool(self._grandparent) and _parent_of(self._parent) != self._grandparent

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.reason:
            self.reason = signal.Signals(number).name
            os.write(2, f"\n{self.reason}: saving after this step, then stopping\n".encode())
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= _FORCE_AFTER:
                raise KeyboardInterrupt


def _parent_of(pid: int) -> int:
    """Parent of a process, 0 if it cannot be told (the process is gone, or there is no /proc)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
