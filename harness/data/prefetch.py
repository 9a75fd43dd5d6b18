"""A thread reads the next window while this one is trained on; a read that takes long is reported with its file."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.core.facts import Window
from harness.core.protocols import Batch, Batches
from harness.data.arrays import Ints

FIRST_REPORT = 10.0
"""Seconds that a window may be waited for before this is reported; then twice as many, and so on."""

_Key = tuple[int, int, int]
"""(window, rank, world size)."""


class Source(Batches, Protocol):
    """Batches of tokens: `TokenBatches` or `Mixture`."""

    ids: int
    vocab: int
    n_samples: int

    @property
    def available(self) -> int: ...

    def batch(self, split: str, samples: Ints) -> Batch: ...

    def facts(self) -> dict[str, Any]: ...


class Watch:
    """Which file is being read, and since when. Every file of a run gets it as `reading` (`blocks.CheckedFile`)."""

    def __init__(self) -> None:
        self._reading: dict[int, tuple[str, float]] = {}

    def __call__(self, path: str | None) -> None:
        """The calling thread begins to read `path`; None: it has ended."""
        if path is None:
            self._reading.pop(threading.get_ident(), None)
        else:
            self._reading[threading.get_ident()] = (path, time.monotonic())

    def longest(self) -> str:
        """The file that has been read for longest, and for how long; empty if none is being read."""
        now = time.monotonic()
        # A copy: the thread that reads changes it meanwhile.
        reading = list(self._reading.values())
        if not reading:
            return ""
        path, since = min(reading, key=lambda each: each[1])
        return f"{path}, for {now - since:.0f} s"


@dataclass(slots=True)
class _Job:
    """A window to be read.

    window: None: the source is asked for it.
    done: set when batches or error are there.
    """

    key: _Key
    window: Window | None = None
    done: threading.Event = field(default_factory=threading.Event)
    batches: list[Batch] = field(default_factory=list)
    error: BaseException | None = None


class Prefetched:
    """A source whose next window is being read; everything else is as of the source itself.

    waited: seconds that `micro_batches` has taken in all.
    report: is called with a text if a read takes long.
    first_report: see FIRST_REPORT.
    """

    def __init__(self, source: Source, watch: Watch) -> None:
        self.source, self._watch = source, watch
        self.name = source.name
        self.tokens_per_sample, self.masked = source.tokens_per_sample, source.masked
        self.ids, self.vocab, self.unit = source.ids, source.vocab, source.unit
        self.n_samples, self.available = source.n_samples, source.available
        self.waited = 0.0
        self.report: Callable[[str], None] = lambda text: None
        self.first_report = FIRST_REPORT
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()

        # The window that is read ahead, and the last one that was asked for in place of it.
        self._ahead: _Job | None = None
        self._missed: _Key | None = None
        self._thread: threading.Thread | None = None

    def window(self, index: int) -> Window:
        """As the source's."""
        return self.source.window(index)

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        """As the source's; begins to read the window after this one."""
        begin = time.monotonic()
        key = (window.index, rank, world_size)
        job = self._ahead
        if job is not None and job.key == key:
            read_ahead = True
            self._missed = None
        else:
            # A look back at one window must not discard the one that is read ahead. After two in a row (a rollback),
            # the next of these is the one to read ahead.
            before = (window.index - 1, rank, world_size)
            read_ahead = self._ahead is None or self._missed == before
            job = self._start(_Job(key, window))
            self._missed = key
        self._wait(job)
        if read_ahead:
            following = (window.index + 1, rank, world_size)
            self._ahead = self._start(_Job(following))
        self.waited += time.monotonic() - begin

        # An error of the thread belongs to whoever asked for that window.
        if job.error is not None:
            raise job.error
        return job.batches

    def validation(self, rank: int, world_size: int) -> Any:
        """As the source's."""
        return self.source.validation(rank, world_size)

    def batch(self, split: str, samples: Ints) -> Batch:
        """As the source's."""
        return self.source.batch(split, samples)

    def facts(self) -> dict[str, Any]:
        """As the source's."""
        return self.source.facts()

    def _start(self, job: _Job) -> _Job:
        """Give a job to the thread. A process that was forked has none, and starts its own."""
        if self._thread is None or not self._thread.is_alive():
            args = (self._jobs,)
            self._thread = threading.Thread(target=self._read, args=args, daemon=True, name="data")
            self._thread.start()
        self._jobs.put(job)
        return job

    def _wait(self, job: _Job) -> None:
        patience = self.first_report
        begin = time.monotonic()
        # A network file system may hang for minutes: the report says which file, and reading goes on.
        while not job.done.wait(patience):
            reading = self._watch.longest() or "nothing: the source itself is busy"
            waited = time.monotonic() - begin
            text = f"window {job.key[0]} has been waited for {waited:.0f} s; being read: {reading}"
            self.report(text)
            patience *= 2

    def _read(self, jobs: queue.SimpleQueue[_Job]) -> None:
        """The thread: one job after the other."""
        while True:
            job = jobs.get()
            try:
                index, rank, world_size = job.key
                window = job.window or self.source.window(index)
                job.batches = list(self.source.micro_batches(window, rank, world_size))
            except BaseException as error:
                job.error = error
            job.done.set()
