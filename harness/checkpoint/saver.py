"""Saves in the background: training waits while the state is copied in memory, and a thread writes the copy.

Where ranks share the state, each has a saver for its own rows, and they meet in files (`Store.save_piece`). The result
of the save is that of rank 0. The savers of other ranks only say whether their own part was done.

No decision of training may depend on how fast the disk is, or a resume would not repeat the run. So a save begins with
everything that it needs, such as the list of good steps, and its result is read only after waiting for it.
"""

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
from harness.checkpoint.failures import CannotSaveError, cannot_save, is_of_the_disk
from harness.checkpoint.meeting import Meeting
from harness.checkpoint.staging import Staging
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError, one_line
from harness.core.progress import saving
from harness.core.protocols import Meta, Tensors
from harness.core.shards import ShardedRows

# Added to the nice level of the writing thread. Each level divides its CPU share by about 1.25. Three let training go
# first. Many more would starve the save, and the next save waits for it.
_NICENESS = 3


@dataclass
class Saved:
    """The result of one save.

    step: of the state that was saved.
    metrics: as given to `Saver.begin`.
    path: the checkpoint's folder; None if the save failed. On other ranks than 0: their part of it.
    error: why it failed; with a path, why older checkpoints could not be deleted. Empty: no error.
    defect: the error as well, if it was not of the disk: the run must end. None: every other case.
    deleted: steps of older checkpoints that retention deleted.
    seconds: how long it took, without the copy.
    uncopied: why training waits for this save and all later ones; empty if it does not, or did before.
    pageable: why training waits for the copies; empty if it does not, or did before.
    """

    step: int
    metrics: Mapping[str, float]
    path: Path | None = None
    error: str = ""
    defect: CannotSaveError | None = None
    deleted: Sequence[int] = field(default_factory=list)
    seconds: float = 0.0
    uncopied: str = ""
    pageable: str = ""


class Saver:
    """Writes one checkpoint at a time. Only the thread that made it may call its methods.

    Call `wait` before the store or its marks are read for a decision.

    store: where checkpoints are written.
    prune: deletes older checkpoints after each save, given the good steps as of its beginning; returns their steps.
    staging: memory for the copy, which a thread of low priority then writes. None: `begin` returns when all is written;
        where ranks save together the caller waits for that.
    copied: whether the newest save writes a copy, so that the state may change meanwhile.
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
        self.copied = False
        self._meeting: Meeting | None = None
        self._rows: ShardedRows = {}
        self._now: Saved | None = None
        self._last_failed = False
        self._done: list[Saved] = []
        self._failed: set[int] = set()
        self._pageable = False
        self._crash: BaseException | None = None

    def begin(
        self,
        step: int,
        tensors: Tensors,
        meta: Meta,
        metrics: Mapping[str, float],
        *,
        blocking: bool = False,
        rows: ShardedRows | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """Begin to save the state of `step`, after waiting for the save before it.

        tensors: by part and name. They may change once this returns; on a GPU, by work queued on the current stream.
        meta: JSON-able. It may change once this returns.
        metrics: recorded in the manifest.
        blocking: the caller waits for the end before it changes the state. So no copy is made, and the thread has full
          priority. The checkpoint is verified before the save counts as done.
        rows: which tensors are sharded, and the rows that are here; with `meeting`.
        meeting: this try of a save that every rank writes its own rows of; None: this process writes all.
        """
        self.wait()
        self._now = Saved(step, dict(metrics))
        self._meeting, self._rows = meeting, rows or {}
        good = manifest.read_marks(self._store.root)
        copies = tensors if blocking else self._copied(self._now, tensors)

        # No memory for a copy: training waits for the disk.
        self.copied = copies is not None and not blocking
        if copies is None and meeting is None:
            self._work(self._now, tensors, meta, good)
            self.wait()
            return

        # Where ranks save together, their callers wait in rounds: a rank may fail before the others have begun.
        source = tensors if copies is None else copies
        arguments = (self._now, source, copy.deepcopy(meta), good, not self.copied)
        self._thread = threading.Thread(
            target=self._in_background, args=arguments, name="checkpoint", daemon=True
        )
        self._thread.start()

    def busy(self, seconds: float) -> bool:
        """Whether a save is still under way, after waiting at most `seconds` for it."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def failed(self) -> bool:
        """Whether the newest save has ended, and failed. On other ranks than 0: their part of it. Never waits."""
        if self._now is None:
            return self._last_failed
        return not self.busy(0.0) and self._now.path is None

    def give_up(self, why: str) -> None:
        """End this rank's wait for other ranks in the save under way, which fails. why: for people."""
        if self._meeting is not None:
            self._meeting.give_up(why)

    def finished(self) -> list[Saved]:
        """Results of the saves that have ended since the last call. Never waits."""
        if self._thread is None or not self._thread.is_alive():
            self.wait()
        done, self._done = self._done, []
        return done

    def wait(self) -> None:
        """Wait until no save is under way.

        A save that failed does not raise: see `Saved.error` and `Saved.defect`. Only what is no Exception is raised
        here.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._crash is not None:
            crash = self._crash
            self._crash = None
            self._now = None
            self._last_failed = True
            raise crash

        # File the result. A step that failed before may have been saved at another try.
        if self._now is not None:
            self._last_failed = self._now.path is None
            if self._last_failed:
                self._failed.add(self._now.step)
            else:
                self._failed.discard(self._now.step)
            self._done.append(self._now)
            self._now = None

    def committed(self, step: int) -> bool | None:
        """Whether the save of `step` succeeded; None while it is under way."""
        if self._now is not None and self._now.step == step:
            if self.busy(0.0):
                return None
            self.wait()
        return step not in self._failed

    def _copied(self, saved: Saved, tensors: Tensors) -> Tensors | None:
        """Copies of `tensors`; None where there is no memory for them. Notes in `saved` what is slow from now on."""
        if self._staging is None:
            return None
        try:
            copies = self._staging.copy(tensors)
        except (OSError, MemoryError) as error:
            # From now on training waits for the disk.
            self._staging = None
            saved.uncopied = one_line(error)
            return None
        if not self._pageable:
            saved.pageable = self._staging.pageable
            self._pageable = bool(saved.pageable)
        return copies

    def _in_background(
        self, saved: Saved, tensors: Tensors, meta: Meta, good: Sequence[int], blocking: bool
    ) -> None:
        saving.enter("save", saved.step)
        try:
            # On Linux a priority can be set for one thread: where cores are scarce, training goes first.
            if not blocking:
                with suppress(OSError):
                    thread = threading.get_native_id()
                    present = os.getpriority(os.PRIO_PROCESS, thread)
                    os.setpriority(os.PRIO_PROCESS, thread, present + _NICENESS)
            self._work(saved, tensors, meta, good, blocking)
        except BaseException as error:
            self._crash = error
        finally:
            saving.rest()

    def _work(
        self,
        saved: Saved,
        tensors: Tensors,
        meta: Meta,
        good: Sequence[int],
        blocking: bool = False,
    ) -> None:
        """Write, verify and prune; the result goes into `saved`. Raises no Exception."""
        began = time.monotonic()
        try:
            # Copies from a GPU may still be under way.
            if self._staging is not None:
                self._staging.wait()
            if self._meeting is None:
                path = self._store.save(saved.step, tensors, meta, saved.metrics)
                if blocking and (problems := self._store.verify(saved.step)):
                    raise CheckpointError(problems)
            else:
                # All ranks together verify it before it is committed, whether they wait for it or not.
                path = self._store.save_piece(
                    saved.step, tensors, self._rows, self._meeting, meta, saved.metrics
                )
            saved.path = path
            if self._meeting is None or self._meeting.rank == 0:
                saved.deleted = self._prune(good)
        except Exception as error:
            if not is_of_the_disk(error):
                saved.defect = cannot_save(self._store.path(saved.step), error)
            saved.error = str(saved.defect or error)
        saved.seconds = time.monotonic() - began
