"""The process that delivers the journal to MLflow, so that no training step ever waits for a server.

The trainer calls `start` once, and `drain` at its end. `sync` delivers later what could not be delivered in time.

`mlflow.Sink` decides what is sent, and how far. This file is the process around it. It calls `Sink.carry` until the run
has ended, and makes a new Sink after an error. It ignores the signals that end the trainer, but ends at most `GRACE`
seconds after the trainer.

The address of the store is in the process's environment, because everybody on the machine can read command lines.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

from harness.core.errors import shown
from harness.core.files import with_this_package
from harness.core.secrets import scrubbed
from harness.tracking.journal import (
    CHUNK,
    JOURNAL,
    Position,
    delivered,
    finished_size,
    require_run,
    rows_after,
    tracking_uri,
)
from harness.tracking.store import URI, Choice, Destination, choose

if TYPE_CHECKING:
    from harness.tracking.mlflow import Sink
    from harness.tracking.mlflow_machine import MachineWatch

GRACE = 30.0
"""Seconds that the process may go on after its trainer has ended."""
POLL = 0.5
LONGEST_BACKOFF = 10.0
PROGRESS = 10.0
"""Seconds between two lines on the progress of a `sync`."""
NICENESS = 10
# So many failures are logged one by one. Of later ones only those that the next try did not cure.
SAID = 100
# MLflow's client must not retry by itself. Where only the answer was lost, it would create a second run; `Sink` looks
# for the first one. And it would wait as long as a server asks it to, be it a day.
FIXED = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
# Seconds enough for a thousand metrics on a busy server. A request that is given up goes on there, and slows the next.
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@dataclass(frozen=True)
class ShipperHandle:
    """The trainer's end of a running shipper.

    copy_of: the folder that the run's folder is a copy of, if it was one; else empty.
    """

    run_dir: Path
    process: subprocess.Popen[bytes]
    choice: Choice
    copy_of: str = ""

    @property
    def announcement(self) -> str:
        """Where figures go, in a line without secrets; printed when a run starts."""
        if not self.copy_of:
            return self.choice.announcement
        return f"{self.choice.announcement}, as a run of its own: the folder is a copy of {self.copy_of}"

    def drain(self, seconds: float) -> bool:
        """Wait up to `seconds` until MLflow has all of the journal; whether it has."""
        deadline = time.monotonic() + seconds
        while not delivered(self.run_dir):
            if self.process.poll() is not None or time.monotonic() >= deadline:
                return delivered(self.run_dir)
            time.sleep(0.05)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(1.0, deadline - time.monotonic()))
        return True


def start(run_dir: Path, experiment: str, system_seconds: float = 0.0) -> ShipperHandle:
    """Start the shipper of `run_dir`. Call it after the journal's "run" row is written.

    Its output goes to `<run_dir>/shipper.log`. If another shipper still holds the run, it waits for its turn. `choose`
    decides where it delivers; `store.json` keeps that.

    system_seconds: seconds between figures of this machine and its GPUs, which are sent too; 0: none.
    """
    # Rows that are there already belong to an earlier process: its "end" row does not end this one's delivery.
    journal = run_dir / JOURNAL
    size = journal.stat().st_size if journal.exists() else 0
    command = [*_command(run_dir, experiment), "--pid", str(os.getpid()), "--from", str(size)]
    command += ["--system-seconds", str(system_seconds)]

    # A session of its own: Ctrl-C in the terminal ends the trainer, and the shipper delivers the rest.
    choice = choose(run_dir)
    choice.destination.save(run_dir)
    copy_of = _leave_original(run_dir)
    with _log(run_dir) as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=_environment(choice),
        )
    return ShipperHandle(run_dir, process, choice, copy_of)


def _leave_original(run_dir: Path) -> str:
    """Give a folder that was copied a run of its own in MLflow; returns the original folder, or an empty text.

    Two folders would else write the same steps into one run. A folder that was moved, or is mounted at a second place,
    keeps its run.
    """
    position = Position.load(run_dir)
    here = str(run_dir.resolve())
    if position.folder == here:
        return ""
    original = position.folder or ""
    is_there = bool(original) and Path(original).is_dir() and not run_dir.samefile(original)
    if is_there and Position.load(Path(original)).key == position.key:
        position = Position()
    else:
        original = ""
    position.folder = here
    position.save(run_dir)
    return original


def sync(
    run_dir: Path,
    experiment: str,
    patience: float = 60.0,
    choice: Choice | None = None,
    said: Callable[[str], None] = lambda _: None,
) -> bool:
    """Deliver all of the journal now; whether MLflow has it at the end. Raises ConfigError if `run_dir` is no run.

    patience: seconds without success after which it gives up.
    choice: where to deliver; by default as `start`.
    said: takes the first error as soon as it comes, and a progress line every PROGRESS seconds. All errors go to
        `<run_dir>/shipper.log`.
    """
    command = [*_command(require_run(run_dir), experiment), "--patience", str(patience)]
    choice = choice or choose(run_dir)
    choice.destination.save(run_dir)

    # The first error goes to the terminal at once, through a pipe: the log has all of them.
    receiving, sending = os.pipe()
    command += ["--first-error", str(sending)]

    def report_first_error() -> None:
        # The pipe ends without a line if the process met no error.
        with open(receiving, encoding="utf-8", errors="replace") as errors:
            if error := errors.readline().strip():
                end = f"trying again, until {patience:g} s have passed without success"
                said(f"! {choice.destination.uri}: {error}; {end}")

    reader = threading.Thread(target=report_first_error, name="first-error", daemon=True)
    with _log(run_dir) as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(choice),
                pass_fds=(sending,),
            )
        finally:
            os.close(sending)
        reader.start()
        try:
            code = _wait(process, run_dir, said)
        except BaseException:
            process.kill()
            process.wait()
            raise
    reader.join()
    return code == 0 and delivered(run_dir)


def _wait(
    process: subprocess.Popen[bytes],
    run_dir: Path,
    said: Callable[[str], None],
) -> int:
    """Wait for a delivery; its exit code. Reports on the way how far it is, and the time left at its rate so far."""
    first: int | None = None
    last: int | None = None
    began = 0.0
    while True:
        try:
            return process.wait(PROGRESS)
        except subprocess.TimeoutExpired:
            pass
        offset = Position.load(run_dir).offset
        size = finished_size(run_dir / JOURNAL)
        now = time.monotonic()

        # The rate is measured from the first look on. A smaller offset means another store, which begins anew.
        if first is None or offset < first:
            first, began = offset, now
        if offset == last:
            continue
        last = offset
        left = ""
        if offset > first:
            seconds = (size - offset) / (offset - first) * (now - began)
            left = f", about {math.ceil(seconds / 60)} min left"
        said(f"{portion(offset, size)}{left}")


def portion(offset: int, size: int) -> str:
    """How much of a journal MLflow has, in words; both in bytes."""
    share = offset / max(size, 1)
    megabytes = f"{offset / 1e6:,.1f} of {size / 1e6:,.1f} MB"
    return f"{share:.1%} of the journal delivered ({megabytes})"


@contextmanager
def _log(run_dir: Path) -> Iterator[BinaryIO]:
    """The shipper's log. Only its owner may read it: libraries write there, too."""

    def opened(path: str, flags: int) -> int:
        return os.open(path, flags, 0o600)

    with open(run_dir / "shipper.log", "ab", opener=opened) as log:
        with suppress(OSError):  # one that somebody else owns
            os.fchmod(log.fileno(), 0o600)
        yield log


def _environment(choice: Choice) -> dict[str, str]:
    return {**with_this_package(), URI: choice.uri}


def _command(run_dir: Path, experiment: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "harness.tracking.shipper",
        str(run_dir.resolve()),
        "--experiment",
        experiment,
    ]


@dataclass
class _Follower:
    """The shipper's own side.

    pid: the trainer's; None under `sync`.
    born: size of the journal at the start. An "end" row before it belongs to an earlier process.
    patience: seconds without success after which `sync` gives up.
    system_seconds: seconds between figures of the machine; 0: none.
    first_error: file descriptor that takes the first error; None if nobody reads it.
    """

    run_dir: Path
    experiment: str
    pid: int | None
    born: int
    patience: float
    system_seconds: float = 0.0
    first_error: int | None = None
    _machine: MachineWatch | None = None
    _look_again: float = 0.0
    _failures: int = 0

    def run(self) -> int:
        """Follow until the end; 0 if all is delivered."""
        lock = self._lock()
        if lock is None:
            _say("another shipper holds this run")
            return 1
        with lock:
            try:
                return self._follow()
            finally:
                if self._machine is not None:
                    self._machine.finish()

    def trainer_gone(self) -> bool:
        """Whether the trainer has ended. It is our parent: once it is gone, even as a zombie, we have another one.

        (Its pid alone would not show it: pids are used again.)
        """
        return self.pid is not None and os.getppid() != self.pid

    def _lock(self) -> TextIO | None:
        file = (self.run_dir / "shipper.lock").open("a")
        deadline = time.monotonic() + self.patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except OSError:
                if self.pid is None and time.monotonic() > deadline:
                    file.close()
                    return None
                time.sleep(0.1)

    def _follow(self) -> int:
        position = Position.load(self.run_dir)
        sink: Sink | None = None
        ended = False
        backoff = POLL
        success = time.monotonic()
        while True:
            # Asked before reading, so that everything that the trainer wrote before it went is read.
            gone = self.trainer_gone()
            try:
                if sink is None:
                    sink = self._connect(position)
                    ended = self._ended(position.offset)
                    if self.pid is not None and not ended:
                        sink.resumed()
                if not (gone or ended):
                    self._watch_machine(sink)

                # Deliver. While there is more, nothing else is due.
                last = sink.carry()
                if last is not None:
                    ended = position.offset > self.born and last == "end"
                    backoff = POLL
                    success = time.monotonic()
                    continue

                sink.caught_up()
                if gone and not ended:
                    sink.lost()
            except Exception as error:
                # A new connection goes on at the position on disk, so that nothing half done is counted twice.
                sink = None
                position = Position.load(self.run_dir)
                _say(_described(error))
                self._report_first(error)
                if self.pid is None and time.monotonic() - success > self.patience:
                    return 1
                time.sleep(backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF)
                continue
            if ended or gone or self.pid is None:
                return 0
            time.sleep(POLL)

    def _watch_machine(self, sink: Sink) -> None:
        """Send figures of the machine while the trainer trains. Begins again if an outage ended that."""
        if not self.system_seconds or self.pid is None or time.monotonic() < self._look_again:
            return
        self._look_again = time.monotonic() + 3 * self.system_seconds
        if self._machine is None or not self._machine.alive:
            try:
                self._machine = sink.watch_machine(self.system_seconds)
            except ImportError as error:
                self.system_seconds = 0.0
                _say(f"no figures of the machine: {error}")

    def _ended(self, offset: int) -> bool:
        """Whether what is delivered ends with our trainer's end; another shipper may have come that far."""
        if offset <= self.born:
            return False
        before = max(0, offset - CHUNK)
        rows, *_ = rows_after(self.run_dir / JOURNAL, before, offset)
        if not rows:
            return False
        last, _ = rows[-1]
        return last["kind"] == "end"

    def _connect(self, position: Position) -> Sink:
        from harness.tracking.mlflow import Sink
        from harness.tracking.retry import Retry, listen_to_answers

        listen_to_answers()
        retry = Retry(self.patience if self.pid is None else None, self._failed)
        uri = tracking_uri()
        # The position remembers the store without passwords: it is a file that others may read.
        store = Destination.of(uri).uri
        return Sink(uri, self.run_dir, self.experiment, position, retry, store)

    def _failed(self, error: Exception, times: int) -> None:
        """Log a request that is tried again."""
        self._failures += 1
        if times > 1 or self._failures <= SAID:
            _say(_described(error))
        self._report_first(error)

    def _report_first(self, error: Exception) -> None:
        if self.first_error is None:
            return
        with open(self.first_error, "w", encoding="utf-8") as reader:
            reader.write(f"{_cause(error)}\n")
        self.first_error = None


def _described(error: BaseException) -> str:
    text = " ".join(scrubbed(str(error)).split())
    return f"{type(error).__name__}: {text[:500]}"


def _cause(error: BaseException) -> str:
    """What a chain of exceptions began with, such as `Connection refused`. Libraries wrap it in text of their own."""
    first = error
    while (earlier := first.__cause__ or first.__context__) is not None:
        first = earlier
    if isinstance(first, OSError) and first.strerror:
        return shown(scrubbed(first.strerror))
    return shown(_described(error))


def _bound_life(follower: _Follower) -> None:
    """End the process GRACE seconds after its trainer, whatever call it then hangs in."""
    while not follower.trainer_gone():
        time.sleep(POLL)
    time.sleep(GRACE)
    _say(f"not all delivered within {GRACE:.0f} s of the trainer's end")
    os._exit(1)


def _say(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), shown(scrubbed(text)), flush=True)


class _Scrubbing(io.TextIOBase):
    """A stream without secrets: warnings and tracebacks of libraries go to the log, too.

    It writes whole lines, so that a secret in two parts is seen.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Take text; it is written up to its last newline."""
        with self._lock:
            whole, newline, self._begun = (self._begun + text).rpartition("\n")
            if newline:
                self._stream.write(scrubbed(whole) + newline)
        return len(text)

    def flush(self) -> None:
        """Flush the stream. A line without its end stays here."""
        self._stream.flush()

    def writable(self) -> bool:
        """True."""
        return True


def main() -> int:
    """Entry point of `python -m harness.tracking.shipper`."""
    parser = argparse.ArgumentParser(description="Deliver a run's journal to MLflow.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--experiment", required=True)
    parser.add_argument(
        "--pid",
        type=int,
        help="the trainer to follow, our parent; without it: deliver once and end",
    )
    parser.add_argument(
        "--from", dest="born", type=int, default=0, help="journal bytes older than the trainer"
    )
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds without success before giving up"
    )
    parser.add_argument(
        "--system-seconds", type=float, default=0.0, help="between figures of the machine; 0: none"
    )
    parser.add_argument(
        "--first-error", type=int, help="file descriptor that takes the first error"
    )
    options = parser.parse_args()

    # Before mlflow is imported, which reads them. What the user set counts, except for FIXED.
    os.environ.update(DEFAULTS | dict(os.environ) | FIXED)
    follower = _Follower(
        options.run_dir,
        options.experiment,
        options.pid,
        options.born,
        options.patience,
        options.system_seconds,
        options.first_error,
    )

    # Behind a trainer: signals that end the trainer are not for this process, which bounds its life by itself.
    if follower.pid is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.nice(NICENESS)
        threading.Thread(target=_bound_life, args=(follower,), daemon=True).start()
    with redirect_stdout(_Scrubbing(sys.stdout)), redirect_stderr(_Scrubbing(sys.stderr)):
        return follower.run()


if __name__ == "__main__":
    sys.exit(main())
