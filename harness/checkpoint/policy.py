"""Decisions about checkpoints: which ones a rollback may return to, and which ones are deleted.

Also the run's ledger, `incidents.json`: what a rollback must not undo, such as the windows to skip and the budgets
spent. A rollback restores everything that is in a checkpoint. So the ledger lies beside the checkpoints, not in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from harness.checkpoint import manifest
from harness.checkpoint.manifest import failed
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError, Problem
from harness.core.files import read_json, write_json
from harness.core.state import RunLedger

LEDGER = "incidents.json"
# Checkpoints that verify and are never deleted: if the newest turns out to be damaged, the run has another one.
_AT_LEAST = 2


class RollbackTargets:
    """The checkpoints that a rollback may return to.

    A checkpoint is good once `healthy_steps` healthy steps in a row have followed it. Until then it waits, and an
    unhealthy step sets the count of every waiting checkpoint to zero. The marks of good ones are on disk. The counts of
    waiting ones are saved in every checkpoint; after a resume, call `resumed` with them.

    store: where the checkpoints are.
    healthy_steps: steps in a row, from the step that the checkpoint was taken before.
    committed: whether the checkpoint of a step was written; None while its save is under way. A mark then waits for the
      save, and training does not. `settled` gives such a mark before anything is decided by marks.
    """

    def __init__(
        self,
        store: Store,
        healthy_steps: int,
        committed: Callable[[int], bool | None] = lambda step: True,
    ) -> None:
        self._store = store
        self._healthy_steps = healthy_steps
        self._committed = committed
        self._waiting: dict[int, int] = {}

    def saved(self, step: int) -> list[int]:
        """The save of `step` has begun: its checkpoint waits from now on. Returns and raises as `observe`."""
        if step in manifest.read_marks(self._store.root):
            return []
        self._waiting[step] = 0
        return self._promote()

    def observe(self, step: int, healthy: bool) -> list[int]:
        """Count a judged step; returns the steps of the checkpoints that have become good.

        Raises CheckpointError if a mark cannot be written. It is tried again next time.
        """
        for waiting, count in self._waiting.items():
            # A full count stays full: only the save is awaited then.
            if waiting <= step and count < self._healthy_steps:
                self._waiting[waiting] = count + 1 if healthy else 0
        return self._promote()

    def settled(self) -> list[int]:
        """No save is under way any more: give the marks that waited for one. Returns and raises as `observe`."""
        return self._promote()

    def waiting(self) -> dict[str, int]:
        """Healthy steps in a row so far, by step of the waiting checkpoint; JSON-able."""
        return {str(step): count for step, count in self._waiting.items()}

    def resumed(self, step: int, waiting: Mapping[str, int]) -> list[int]:
        """The run goes on from the checkpoint of `step`, which was saved with the counts `waiting`.

        Marks of later checkpoints are removed: new checkpoints will get their numbers. As `saved` otherwise.
        """
        marked = manifest.read_marks(self._store.root)
        existing = self._store.steps()
        self._waiting = {}
        for each, count in waiting.items():
            valid = each.isdecimal() and type(count) is int
            if valid and int(each) in existing and int(each) not in marked:
                self._waiting[int(each)] = count

        good = self.saved(step)
        try:
            manifest.forget_after(self._store.root, step)
        except OSError as error:
            what = "marks of checkpoints that are gone cannot be removed"
            raise failed(what, self._store.root, error) from error
        return good

    def newest_good(self) -> int | None:
        """Step of the newest good checkpoint that exists and verifies; None if there is none."""
        return newest_good(self._store)

    def marked(self) -> list[int]:
        """Steps of the good checkpoints that exist, newest first; not verified."""
        return sorted(_marked(self._store), reverse=True)

    def damaged_good(self, newest: int | None) -> list[int]:
        """Steps of good checkpoints that exist and do not verify: those after `newest`, or all if it is None."""
        return sorted(step for step in _marked(self._store) if newest is None or step > newest)

    def rolled_back(self, step: int) -> None:
        """The run went back to `step`: checkpoints after it are gone and no longer wait."""
        for waiting in list(self._waiting):
            if waiting > step:
                del self._waiting[waiting]

    def _promote(self) -> list[int]:
        """Mark every checkpoint whose count is full and whose save has succeeded; returns their steps."""
        # A save that failed left no checkpoint to mark. One under way (None) is asked again next time.
        earned: list[int] = []
        full = [step for step, count in self._waiting.items() if count >= self._healthy_steps]
        for step in full:
            committed = self._committed(step)
            if committed is False:
                del self._waiting[step]
            elif committed:
                earned.append(step)

        for step in earned:
            try:
                manifest.add_mark(self._store.root, step)
            except OSError as error:
                what = "a checkpoint cannot be marked good"
                raise failed(what, self._store.root, error) from error
            del self._waiting[step]
        return earned


def _marked(store: Store) -> set[int]:
    return set(manifest.read_marks(store.root)).intersection(store.steps())


class Retention:
    """Deletes old checkpoints.

    It keeps the newest ones, the newest good one and the best one.

    keep: how many of the newest to keep, at least 2.
    metric: of the best one, the lowest value counts; empty: none is kept for being the best.
    next_good: also keep the oldest one after the newest good one, which will be good next. Where `keep` newer ones come
        before healthy steps make one good, none would ever be.
    """

    def __init__(self, store: Store, keep: int, metric: str = "", next_good: bool = False) -> None:
        self._store = store
        self._keep = max(keep, _AT_LEAST)
        self._metric = metric
        self._next_good = next_good

    def prune(self, good_steps: Sequence[int] | None = None) -> list[int]:
        """Delete older checkpoints; returns their steps, oldest first. Raises CheckpointError.

        Nothing is deleted unless the newest checkpoint verifies. At least two that verify remain.

        good_steps: steps of good checkpoints; None: those marked on disk.
        """
        steps = self._store.steps()
        old, kept = steps[: -self._keep], steps[-self._keep :]
        if not old or not self._store.is_whole(steps[-1]):
            return []

        # Old checkpoints that have a use of their own.
        marked = manifest.read_marks(self._store.root) if good_steps is None else good_steps
        good = newest_good(self._store, marked, settled=False)
        useful = {good, best(self._store, self._metric)}
        if self._next_good:
            later = [step for step in old if good is None or step > good]
            whole = (step for step in later if self._store.is_whole(step, settled=False))
            useful.add(next(whole, None))

        # If damaged ones are among the newest, old ones that verify stay in their place.
        missing = _AT_LEAST - sum(self._store.is_whole(step) for step in kept)
        removed: list[int] = []
        for step in reversed(old):
            if step in useful:
                continue
            if missing > 0:
                missing -= self._store.is_whole(step)
                continue
            self._store.remove(step)
            removed.append(step)
        return removed[::-1]


def best(store: Store, metric: str) -> int | None:
    """Step of the checkpoint with the lowest `metric`, the newest of equals; None if none has it.

    metric: its name in the manifest; empty: None is returned.
    """
    if not metric:
        return None
    lowest, found = math.inf, None
    for step in store.steps():
        value = store.metrics(step).get(metric, math.nan)
        # Steps are in ascending order, so that the newest of equals comes last.
        if math.isfinite(value) and value <= lowest:
            lowest, found = value, step
    return found


def newest_good(
    store: Store, marked: Sequence[int] | None = None, settled: bool = True
) -> int | None:
    """Step of the newest checkpoint of `store` that is good and verifies; None if there is none.

    marked: steps of good checkpoints; None: those marked on disk.
    settled: as for `Store.is_whole`: read a checkpoint again if a change might not show in its files' times.
    """
    marked = manifest.read_marks(store.root) if marked is None else marked
    for step in sorted(set(store.steps()).intersection(marked), reverse=True):
        if store.is_whole(step, settled):
            return step
    return None


def save_ledger(run_dir: Path, ledger: RunLedger) -> None:
    """Replace the run's ledger. Raises CheckpointError if it cannot be written."""
    try:
        write_json(run_dir / LEDGER, asdict(ledger))
    except OSError as error:
        raise failed("cannot be written", run_dir / LEDGER, error) from error


def load_ledger(run_dir: Path) -> RunLedger:
    """The run's ledger; a new one if the file does not exist. Raises CheckpointError if it cannot be read."""
    path = run_dir / LEDGER
    try:
        return RunLedger.from_json(read_json(path))
    except FileNotFoundError:
        return RunLedger()
    except (OSError, ValueError) as error:
        without = "without it, skipped data would be trained on and budgets forgotten"
        fix = f"restore it from another copy of the run; {without}"
        raise CheckpointError(Problem("cannot be read", str(path), str(error), fix)) from error
