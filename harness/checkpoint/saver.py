"""Saves in the background: a thread writes a copy of the state while training goes on."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.checkpoint import manifest
from harness.checkpoint.staging import Staging
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError
from harness.core.protocols import Meta, Tensors

# Behind training, and no further: a core that is wanted elsewhere is shared by weights of 1.25 a level: a save
# that gets a tenth of it takes ten times as long, and the next one waits for it.
_NICENESS = 3


@dataclass
class Saved:
    """What became of the save of `step`. path: None and `error` if it failed. deleted: older ones, by retention."""

    step: int
    metrics: Mapping[str, float]
    path: Path | None = None
    error: str = ""
    deleted: Sequence[int] = field(default_factory=list)
    seconds: float = 0.0


class Saver:
    """Writes one checkpoint at a time to `store`, then lets `prune` delete older ones (given the good steps).

    With `staging`, training waits for one copy of the state in memory; a thread of low priority does the rest. Without,
    `begin` returns when all is done. Only the thread that made it may call it. Nothing that training decides depends
    on how fast the disk is: the steps that are good are read when the save begins, and `wait` comes before the store
    or its marks are read for a decision.
    """

    def __init__(
        self,
        store: Store,
        prune: Callable[[Sequence[int]], Sequence[int]],
        staging: Staging | None = None,
    ) -> None:
        self._store = store
        self._prune = prune
        self._staging = staging
        self._thread: threading.Thread | None = None
        self._now: Saved | None = None
        self._done: list[Saved] = []
        self._failed: set[int] = set()
        self._crash: BaseException | None = None

    def begin(
        self,
        step: int,
        tensors: Tensors,
        meta: Meta,
        metrics: Mapping[str, float],
        *,
        surely: bool = False,
    ) -> None:
        """Save the state of `step`. Waits for the save before it. metrics: what the checkpoint is known by.

        tensors and meta may change as soon as this returns (on a GPU: by what is queued on the current stream).
        surely: they do not change before `wait` or `busy` says that it is done, so no copy is needed, and what was
        written is verified before it counts.
        """
        self.wait()
        self._now = Saved(step, dict(metrics))
        good = manifest.read_marks(self._store.root)
        copies = tensors if surely else self._copied(tensors)
        if copies is None:
            self._work(self._now, tensors, meta, good)
            self.wait()
            return
        arguments = (self._now, copies, copy.deepcopy(meta), good, surely)
        self._thread = threading.Thread(
            target=self._in_background, args=arguments, name="checkpoint", daemon=True
        )
        self._thread.start()

    def busy(self, seconds: float) -> bool:
        """Whether something is still being written, after waiting for it for at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def finished(self) -> list[Saved]:
        """Saves that have ended since the last call; never waits."""
        if self._thread is None or not self._thread.is_alive():
            self.wait()
        done, self._done = self._done, []
        return done

    def wait(self) -> None:
        """Until nothing is being written. Raises what no save should raise."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._crash is not None:
            crash, self._crash, self._now = self._crash, None, None
            raise crash
        if self._now is not None:
            if self._now.path is None:
                self._failed.add(self._now.step)
            else:  # perhaps at another try
                self._failed.discard(self._now.step)
            self._done.append(self._now)
            self._now = None

    def committed(self, step: int) -> bool | None:
        """Whether the save of `step` went well; None while it is under way."""
        if self._now is not None and self._now.step == step:
            if self.busy(0.0):
                return None
            self.wait()
        return step not in self._failed

    def _copied(self, tensors: Tensors) -> Tensors | None:
        try:
            return self._staging.copy(tensors) if self._staging is not None else None
        except (OSError, MemoryError):
            self._staging = None  # no room: from now on training waits for the disk
            return None

    def _in_background(
        self, saved: Saved, tensors: Tensors, meta: Meta, good: Sequence[int], surely: bool
    ) -> None:
        try:
            # Of this thread alone, on Linux: where cores are scarce, training comes first.
            thread = threading.get_native_id()
            with suppress(OSError):
                if not surely:
                    os.setpriority(
                        os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
                    )
            self._work(saved, tensors, meta, good, surely)
        except BaseException as error:
            self._crash = error

    def _work(
        self, saved: Saved, tensors: Tensors, meta: Meta, good: Sequence[int], surely: bool = False
    ) -> None:
        began = time.monotonic()
        try:
            if self._staging is not None:
                self._staging.wait()
            path = self._store.save(saved.step, tensors, meta, saved.metrics)
            if surely and (problems := self._store.verify(saved.step)):
                raise CheckpointError(problems)
            saved.path = path
            saved.deleted = self._prune(good)
        except (CheckpointError, OSError, MemoryError) as error:
            saved.error = str(error) or type(error).__name__
        saved.seconds = time.monotonic() - began
