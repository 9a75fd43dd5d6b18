"""Which checkpoints to keep, which have earned to be rolled back to, and what a rollback must not undo.

The last is `incidents.json`, which therefore lives beside the checkpoints and not in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from harness.checkpoint import manifest
from harness.checkpoint.manifest import failed
from harness.checkpoint.store import LEDGER, Store
from harness.core.errors import CheckpointError, Problem
from harness.core.files import read_json, write_json
from harness.core.state import RunLedger

_AT_LEAST = 2


class RollbackTargets:
    """The checkpoints to roll back to: one is good once `healthy_steps` healthy steps in a row have followed it.

    An unhealthy step starts the count of every waiting checkpoint again. Marks are on disk, the counts (`waiting`) in
    the checkpoints: after a resume, call `resumed` with those of the checkpoint that was loaded. committed: asked
    before a mark is given, whether that checkpoint was written; while that is not known (None), its mark waits, and
    training does not: `settled` gives it at the latest, before anything is decided by marks.
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
        """The checkpoint of `step` (taken before that step ran) is on its way and waits to be earned; see `observe`."""
        if step in manifest.read_marks(self._store.root):
            return []
        self._waiting[step] = 0
        return self._promote()

    def observe(self, step: int, healthy: bool) -> list[int]:
        """Step `step` was judged: the steps of the checkpoints that are good by it.

        Raises CheckpointError if a mark cannot be written; it is tried again next time.
        """
        for waiting, count in self._waiting.items():
            if waiting <= step and count < self._healthy_steps:  # what is earned stays so
                self._waiting[waiting] = count + 1 if healthy else 0
        return self._promote()

    def settled(self) -> list[int]:
        """No save is under way any more: the steps of the checkpoints whose marks waited for that. As `observe`."""
        return self._promote()

    def waiting(self) -> dict[str, int]:
        """Healthy steps so far, by step of the checkpoint that waits; JSON-able."""
        return {str(step): count for step, count in self._waiting.items()}

    def resumed(self, step: int, waiting: Mapping[str, int]) -> list[int]:
        """The run goes on from the checkpoint of `step`, at whose save `waiting` was as given. Later marks are of
        what is gone, and are taken away. Else as `saved`.
        """
        marked = manifest.read_marks(self._store.root)
        counts = {
            int(each): count
            for each, count in waiting.items()
            if each.isdecimal() and type(count) is int
        }
        there = self._store.steps()
        self._waiting = {
            each: count for each, count in counts.items() if each in there and each not in marked
        }
        good = self.saved(step)
        try:
            manifest.forget_after(self._store.root, step)
        except OSError as error:
            raise failed(
                "marks of checkpoints that are gone cannot be taken away", self._store.root, error
            ) from error
        return good

    def newest_good(self) -> int | None:
        """Step of the newest good checkpoint that is there and verifies."""
        return newest_good(self._store)

    def damaged_good(self, newest: int | None) -> list[int]:
        """Steps of good checkpoints after `newest` (all, if None): they are there and do not verify."""
        marked = set(manifest.read_marks(self._store.root)).intersection(self._store.steps())
        return sorted(step for step in marked if newest is None or step > newest)

    def rolled_back(self, step: int) -> None:
        """The run went back to `step`: newer checkpoints are gone, and none of them waits any longer."""
        self._waiting = {
            waiting: count for waiting, count in self._waiting.items() if waiting <= step
        }

    def _promote(self) -> list[int]:
        there = {
            step: self._committed(step)
            for step, count in self._waiting.items()
            if count >= self._healthy_steps
        }
        for step in (step for step, known in there.items() if known is False):
            del self._waiting[step]
        earned = [step for step, known in there.items() if known]
        for step in earned:
            try:
                manifest.add_mark(self._store.root, step)
            except OSError as error:
                raise failed(
                    "a checkpoint cannot be marked good", self._store.root, error
                ) from error
            del self._waiting[step]
        return earned


class Retention:
    """Keeps the newest `keep` checkpoints (at least 2), the newest good one, and the best by `metric` (empty: none)."""

    def __init__(self, store: Store, keep: int, metric: str = "") -> None:
        self._store = store
        self._keep = max(keep, _AT_LEAST)
        self._metric = metric

    def prune(self, good_steps: Sequence[int] | None = None) -> list[int]:
        """Delete older checkpoints and return their steps, oldest first. good_steps: default, those marked on disk.

        Only when the newest verifies, and never so that fewer than two that verify would remain. What has verified
        once is not read again while its files stay the same. Raises CheckpointError.
        """
        steps = self._store.steps()
        old, kept = steps[: -self._keep], steps[-self._keep :]
        if not old or not self._store.is_whole(steps[-1]):
            return []
        marked = manifest.read_marks(self._store.root) if good_steps is None else good_steps
        spared = {newest_good(self._store, marked, settled=False), best(self._store, self._metric)}
        missing = _AT_LEAST - sum(self._store.is_whole(step) for step in kept)
        removed: list[int] = []
        for step in reversed(old):
            if step in spared:
                continue
            if missing > 0:
                missing -= self._store.is_whole(step)
                continue
            self._store.remove(step)
            removed.append(step)
        return removed[::-1]


def best(store: Store, metric: str) -> int | None:
    """Step of the checkpoint whose `metric` is the lowest (the newest of equals); None if none has it."""
    known = (
        [(store.metrics(step).get(metric, math.nan), -step) for step in store.steps()]
        if metric
        else []
    )
    ranked = sorted(pair for pair in known if math.isfinite(pair[0]))
    return -ranked[0][1] if ranked else None


def newest_good(
    store: Store, marked: Sequence[int] | None = None, settled: bool = True
) -> int | None:
    """Step of the newest checkpoint of `store` that is marked good (default: on disk) and verifies.

    settled: as for `Store.is_whole`.
    """
    marked = manifest.read_marks(store.root) if marked is None else marked
    there = sorted(set(store.steps()).intersection(marked), reverse=True)
    return next((step for step in there if store.is_whole(step, settled)), None)


def save_ledger(run_dir: Path, ledger: RunLedger) -> None:
    """Replace the run's ledger. Raises CheckpointError if it cannot be written."""
    try:
        write_json(run_dir / LEDGER, asdict(ledger))
    except OSError as error:
        raise failed("cannot be written", run_dir / LEDGER, error) from error


def load_ledger(run_dir: Path) -> RunLedger:
    """The run's ledger; a new one if it has none. Raises CheckpointError if it cannot be read as such."""
    path = run_dir / LEDGER
    try:
        return RunLedger.from_json(read_json(path))
    except FileNotFoundError:
        return RunLedger()
    except (OSError, ValueError) as error:
        without = "without it, skipped data would be trained on and budgets forgotten"
        fix = f"restore it from another copy of the run; {without}"
        raise CheckpointError(Problem("cannot be read", str(path), str(error), fix)) from error
