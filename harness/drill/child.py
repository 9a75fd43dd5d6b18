"""A process that the drill starts: its screen, its end, and the signals that it gets. Torch-free.

Every process of a drill, and whatever it starts, inherits a mark in its environment. So all of them are found and ended
when the drill ends, whichever session they are in.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from harness.core.processes import state_of
from harness.drill.judge import code_text

MARK = "HARNESS_DRILL"
# Seconds between two looks: for an event of a run, and for one that lasts milliseconds.
_LOOK, _SHORT_LOOK = 0.02, 0.001
# How often processes are looked for and killed, at most: one that waits for a disk ends later.
_SWEEPS = 500
# Characters of a screen that are kept in memory; all are in the log.
_KEPT = 1 << 20


class Missed(Exception):
    """An event that an exercise waits for did not come; the text says which, and what came instead."""


class Child:
    """A started process, with a session of its own: Ctrl-C in the drill's terminal does not reach it.

    log: gets what the process prints.
    separate_stderr: keep stderr out of `screen`; it goes only to the log.
    """

    def __init__(
        self,
        line: Sequence[str],
        folder: Path,
        variables: Mapping[str, str],
        log: Path,
        separate_stderr: bool = False,
    ) -> None:
        self.log = log
        self._text = ""
        log.parent.mkdir(parents=True, exist_ok=True)
        # The screen comes through a pipe. A file of the process's own could not grow while its disk is "full".
        self._stream = log.open("ab")
        self.process = subprocess.Popen(
            line,
            cwd=folder,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stream if separate_stderr else subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="screen", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as screen, self._stream as log:
            while chunk := os.read(screen.fileno(), 1 << 16):
                log.write(chunk)
                log.flush()
                self._text = (self._text + chunk.decode(errors="replace"))[-_KEPT:]

    @property
    def screen(self) -> str:
        """What it has printed so far."""
        return self._text

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def finish(self, patience: float) -> int:
        """Wait for its end; returns the exit code. Raises Missed after `patience` seconds."""
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired as error:
            raise Missed(f"not ended after {patience:.0f} s, see {self.log}") from error
        # What it printed last may still be in the pipe. A process that it left behind may hold that open.
        self._reader.join(5.0)
        return code

    def until(self, there: Callable[[], bool], what: str, patience: float) -> None:
        """Wait until `there()` is true. Raises Missed if the process ends first, or after `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            # Looked at before the check, so that what the process did last still counts.
            ended = self.ended
            if there():
                return
            if ended:
                how = code_text(self.process.returncode)
                raise Missed(f"the process ended before {what} ({how}), see {self.log}")
            if time.monotonic() > deadline:
                raise Missed(f"no {what} in {patience:.0f} s, see {self.log}")
            time.sleep(_LOOK)

    def freeze_at(self, there: Callable[[], bool], patience: float) -> bool:
        """Stop the process at a moment when `there()` is true. False if it ended first, or after `patience` seconds.

        The moment may be over before the signal arrives. So it is looked at again once the process stands still; if it
        is over, the process goes on until the next.
        """
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not self.ended:
            if not there():
                time.sleep(_SHORT_LOOK)
                continue
            self._signal_all(signal.SIGSTOP)
            while not self.ended and state_of(self.process.pid) not in ("T", "Z", ""):
                time.sleep(_SHORT_LOOK)
            if not self.ended and there():
                return True
            self.let_go()
        return False

    def let_go(self) -> None:
        """Let a frozen process go on."""
        self._signal_all(signal.SIGCONT)

    def kill(self) -> int:
        """SIGKILL it, with all of its session; returns the exit code."""
        self._signal_all(signal.SIGKILL)
        return self.process.wait()

    def _signal_all(self, number: int) -> None:
        # An ended process is not waited for before `poll`, so its number cannot belong to another one.
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def marked(mark: str) -> list[int]:
    """Every process of this user that has `mark` in its environment, except this one. Zombies have no environment."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        if wanted in variables:
            found.append(int(entry))
    return found


def end_marked(mark: str) -> None:
    """SIGKILL all that `marked` finds, and whatever they start meanwhile; then wait until they have ended."""
    for _ in range(_SWEEPS):
        left = marked(mark)
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK)
