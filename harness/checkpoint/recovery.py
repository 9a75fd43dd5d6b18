"""Saving, resuming and rolling back: the TrainState on its way to and from the checkpoint store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.checkpoint.policy import RollbackTargets
from harness.checkpoint.saver import Saver
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError, Problem
from harness.core.protocols import Engine, Meta, Tensors, Tracker
from harness.core.state import RunLedger, TrainState, state_hash


@dataclass
class Recovery:
    """Rank 0 decides and writes; every rank saves and loads together.

    keep_ledger writes what a rollback must not undo. bound: what the run must not change between its checkpoints, kept
    in each of them.
    """

    state: TrainState
    engine: Engine
    tracker: Tracker
    store: Store
    good: RollbackTargets
    saver: Saver
    keep_ledger: Callable[[RunLedger], None]
    bound: Mapping[str, Any] = field(default_factory=dict)

    def load(self, step: int) -> Meta:
        """Restore the TrainState of `step`, as a resume (see `TrainState.resume`). Collective."""
        tensors, meta = self.read(step)
        self.state.resume(tensors, meta)
        if self.engine.rank == 0:
            waiting = meta.get("waiting")
            self._mark(step, lambda: self.good.resumed(step, waiting if isinstance(waiting, dict) else {}))
        return meta

    def save(self, metrics: Mapping[str, float], *, wait: bool = False) -> None:
        """Save the state as it is now, perhaps while training goes on; with `wait`, until it is on disk. Collective.

        A failed write is an event, not the end: the older checkpoints stand. metrics: what the checkpoint is known by.
        """
        tensors, meta = self.state.state_dict()
        if self.engine.rank == 0:
            self.tracker.flush()
            self.saver.begin(
                self.state.step, tensors, {**meta, "waiting": self.good.waiting(), "bound": self.bound}, metrics
            )
            self._mark(self.state.step, lambda: self.good.saved(self.state.step))
            if wait:
                self.settle()
        if wait:
            self.engine.barrier()

    def settle(self) -> None:
        """Until what is being saved is on disk, or has failed; on ranks other than 0 there is nothing to wait for."""
        if self.engine.rank == 0:
            self.saver.wait()
            self._tell_saves()

    def observe(self, step: int, healthy: bool) -> None:
        """One judged step: checkpoints before it come closer to being good, or start again."""
        if self.engine.rank == 0:
            self._mark(step, lambda: self.good.observe(step, healthy))

    def newest_good(self) -> int | None:
        """Step of the newest checkpoint that may be gone back to, after what is being saved. Collective."""
        self.settle()
        return self.engine.broadcast(self.good.newest_good() if self.engine.rank == 0 else None)

    def commit(self, target: int) -> None:
        """Write that the run goes back to `target`, and delete what comes after it. Collective.

        incidents.json is the commit point: killed before it, the run decides again; killed after it,
        `finish_rollback` completes the rest at the next start, and the steps from the checkpoint to a snapshot run
        once more.
        """
        ledger = self.state.ledger
        ledger.return_to = target
        if self.engine.rank == 0:
            self.tracker.flush()
            self.keep_ledger(ledger)
            later = [each for each in self.store.steps() if each > target]
            finish_rollback(ledger, self.store, self.keep_ledger)
            self._note("rolled back", later)
        ledger.return_to = 0
        self.good.rolled_back(target)
        self.engine.barrier()

    def read(self, step: int) -> tuple[Tensors, Meta]:
        """The checkpoint of `step`, the same on every rank. Raises CheckpointError on every rank if one cannot."""
        tensors: Tensors = {}
        meta: Meta = {}
        problems: list[Problem] = []
        try:
            tensors, meta = self.store.load(step)
        except CheckpointError as error:
            problems = list(error.problems)
        if self.engine.world_size > 1:
            mine = state_hash(tensors, meta)
            differs = float(mine != self.engine.broadcast(mine))
            agreed = self.engine.max(torch.tensor([differs, float(bool(problems))], device=self.engine.device))
            found, unread = (bool(flag) for flag in agreed.tolist())
            if found and not problems:
                what = f"the ranks read different checkpoints of step {step}"
                why = "each of them verifies, so the run folder is not the same folder on every machine"
                if unread:
                    what = f"another rank cannot read the checkpoint of step {step}"
                    why = "its copy is damaged or missing: it says which file"
                fix = "put the run folder on a disk that all machines share"
                problems = [Problem(what, f"rank {self.engine.rank}", why=why, fix=fix)]
        if problems:
            raise CheckpointError(problems)
        return tensors, meta

    def _mark(self, step: int, earned: Callable[[], list[int]]) -> None:
        steps: list[int] = []
        try:
            steps = earned()
        except CheckpointError as error:
            self.tracker.event(step, "checkpoint.failed", text=str(error))
        self._tell_saves()  # first that it was saved, then that it is good
        self._note("good", steps)

    def _tell_saves(self) -> None:
        for saved in self.saver.finished():
            if saved.path is None:
                self.tracker.event(saved.step, "checkpoint.failed", text=saved.error)
                continue
            self._note(
                "saved", [saved.step], path=str(saved.path.resolve()), metrics=saved.metrics, seconds=saved.seconds
            )
            if saved.error:  # written, but what was to be deleted could not be
                self.tracker.event(saved.step, "checkpoint.failed", text=saved.error)
            self._note("deleted", saved.deleted)

    def _note(self, state: str, steps: Iterable[int], **fields: Any) -> None:
        """For the tracker: what became of the checkpoints of `steps`."""
        for step in steps:
            self.tracker.note("checkpoint", step=step, state=state, **fields)


def finish_rollback(ledger: RunLedger, store: Store, keep_ledger: Callable[[RunLedger], None]) -> None:
    """Carry out a rollback that incidents.json has committed; nothing to do if there is none. Rank 0 only."""
    if ledger.return_to:
        store.discard_after(ledger.return_to)
        ledger.return_to = 0
        keep_ledger(ledger)
