"""The next window is read while this one is trained on, by a thread; and a read that hangs is named."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from harness.core.facts import Window
from harness.core.protocols import Batch, Batches

FIRST_TOLD = 10.0
"""Seconds that a window may be waited for before it is told; then twice as many, and so on."""


class Source(Batches, Protocol):
    """Token data as a run has them."""

    ids: int
    vocab: int
    n_samples: int

    @property
    def available(self) -> int: ...

    def batch(self, split: str, samples: npt.NDArray[np.int64]) -> Batch: ...

    def facts(self) -> dict[str, Any]: ...


class Watch:
    """Which file is being read, and since when. Given to every file of a run (`blocks.CheckedFile`)."""

    def __init__(self) -> None:
        self._reading: dict[int, tuple[str, float]] = {}

    def __call__(self, path: str | None) -> None:
        """A thread begins to read `path`, or has ended."""
        if path is None:
            self._reading.pop(threading.get_ident(), None)
        else:
            self._reading[threading.get_ident()] = (path, time.monotonic())

    def longest(self) -> str:
        """The file that is read for longest, and for how long; empty if none is."""
        now = time.monotonic()
        current = sorted(self._reading.values(), key=lambda each: each[1])
        return f"{current[0][0]}, for {now - current[0][1]:.0f} s" if current else ""


@dataclass(slots=True)
class _Job:
    key: tuple[int, int, int]
    window: Window | None = None
    done: threading.Event = field(default_factory=threading.Event)
    batches: list[Batch] = field(default_factory=list)
    error: BaseException | None = None


class Prefetched:
    """A data source whose next window is being read; it says whatever the source itself says.

    waited: seconds that `micro_batches` has taken in all. tell: is told of reads that take long.
    """

    def __init__(self, source: Source, watch: Watch) -> None:
        self.source, self._watch = source, watch
        self.name, self.tokens_per_sample, self.masked = source.name, source.tokens_per_sample, source.masked
        self.ids, self.vocab, self.unit = source.ids, source.vocab, source.unit
        self.n_samples, self.available = source.n_samples, source.available
        self.waited = 0.0
        self.tell: Callable[[str], None] = lambda text: None
        self.first_told = FIRST_TOLD
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._ahead: _Job | None = None
        self._missed: tuple[int, int, int] | None = None
        self._thread: threading.Thread | None = None

    def window(self, index: int) -> Window:
        """As the source's."""
        return self.source.window(index)

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        """As the source's, and begins to read the window after this one."""
        begin = time.monotonic()
        key = (window.index, rank, world_size)
        job, ahead = self._ahead, self._ahead is None
        if job is not None and job.key == key:
            ahead, self._missed = True, None
        else:
            # Who looks back at a window must not undo what is read ahead; who goes on from there is to have it again.
            ahead |= self._missed == (window.index - 1, rank, world_size)
            job, self._missed = self._start(_Job(key, window)), key
        self._wait(job)
        if ahead:
            self._ahead = self._start(_Job((window.index + 1, rank, world_size)))
        self.waited += time.monotonic() - begin
        if job.error is not None:
            raise job.error
        return job.batches

    def validation(self, rank: int, world_size: int) -> Any:
        """As the source's."""
        return self.source.validation(rank, world_size)

    def batch(self, split: str, samples: npt.NDArray[np.int64]) -> Batch:
        """As the source's."""
        return self.source.batch(split, samples)

    def facts(self) -> dict[str, Any]:
        """As the source's."""
        return self.source.facts()

    def _start(self, job: _Job) -> _Job:
        if self._thread is None or not self._thread.is_alive():  # not alive: this process was forked
            self._thread = threading.Thread(target=self._read, args=(self._jobs,), daemon=True, name="data")
            self._thread.start()
        self._jobs.put(job)
        return job

    def _wait(self, job: _Job) -> None:
        patience = self.first_told
        begin = time.monotonic()
        while not job.done.wait(patience):
            reading = self._watch.longest() or "nothing: the source itself is busy"
            waited = time.monotonic() - begin
            self.tell(f"window {job.key[0]} is waited for since {waited:.0f} s; being read: {reading}")
            patience *= 2

    def _read(self, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            job = jobs.get()
            try:
                index, rank, world_size = job.key
                window = job.window or self.source.window(index)
                job.batches = list(self.source.micro_batches(window, rank, world_size))
            except BaseException as error:
                job.error = error
            job.done.set()
