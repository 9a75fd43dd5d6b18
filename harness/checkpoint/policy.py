"""Which checkpoints to keep, and which have earned to be rolled back to."""

from __future__ import annotations

from harness.checkpoint import marks
from harness.checkpoint.failures import failed
from harness.checkpoint.store import Store

_AT_LEAST = 2


class Goodness:
    """A checkpoint is good once `healthy_steps` healthy steps in a row have followed it.

    An unhealthy step starts the count of every waiting checkpoint again. Marks are on disk; the counts are not: after
    a resume, call `saved` for the checkpoint that was loaded.
    """

    def __init__(self, store: Store, healthy_steps: int) -> None:
        self._store = store
        self._healthy_steps = healthy_steps
        self._waiting: dict[int, int] = {}

    def saved(self, step: int) -> list[int]:
        """The checkpoint of `step` (taken before that step ran) is on disk and waits to be earned; see `observe`."""
        if step in marks.read_marks(self._store.root):
            return []
        self._waiting[step] = 0
        return self._promote()

    def observe(self, step: int, healthy: bool) -> list[int]:
        """Step `step` was judged: the steps of the checkpoints that are good by it.

        Raises CheckpointError if a mark cannot be written; it is tried again next time.
        """
        for waiting in self._waiting:
            if waiting <= step:
                self._waiting[waiting] = self._waiting[waiting] + 1 if healthy else 0
        return self._promote()

    def newest_good(self) -> int | None:
        """Step of the newest good checkpoint that is there and verifies."""
        return newest_good(self._store)

    def rolled_back(self, step: int) -> None:
        """The run went back to `step`: newer checkpoints are gone, and none of them waits any longer."""
        self._waiting = {waiting: count for waiting, count in self._waiting.items() if waiting <= step}

    def _promote(self) -> list[int]:
        earned = [step for step, count in self._waiting.items() if count >= self._healthy_steps]
        for step in earned:
            try:
                marks.add_mark(self._store.root, step)
            except OSError as error:
                raise failed("a checkpoint cannot be marked good", self._store.root, error) from error
            del self._waiting[step]
        return earned


class Retention:
    """Keeps the newest `keep` checkpoints (at least 2) and the newest good one."""

    def __init__(self, store: Store, keep: int) -> None:
        self._store = store
        self._keep = max(keep, _AT_LEAST)

    def prune(self) -> list[int]:
        """Delete older checkpoints and return their steps, oldest first.

        Only when the newest verifies, and never so that fewer than two that verify would remain.
        Raises CheckpointError.
        """
        steps = self._store.steps()
        old, kept = steps[: -self._keep], steps[-self._keep :]
        if not old or self._store.verify(steps[-1]):
            return []
        good = newest_good(self._store)
        missing = _AT_LEAST - sum(not self._store.verify(step) for step in kept)
        removed: list[int] = []
        for step in reversed(old):
            if step == good:
                continue
            if missing > 0:
                missing -= not self._store.verify(step)
                continue
            self._store.remove(step)
            removed.append(step)
        return removed[::-1]


def newest_good(store: Store) -> int | None:
    """Step of the newest checkpoint of `store` that is marked good and verifies."""
    present = set(store.steps())
    for step in reversed(marks.read_marks(store.root)):
        if step in present and not store.verify(step):
            return step
    return None
