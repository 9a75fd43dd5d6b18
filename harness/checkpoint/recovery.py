"""Saving, resuming and rolling back: the TrainState on its way to and from the checkpoint store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.checkpoint.policy import Goodness
from harness.checkpoint.saver import Saver
from harness.checkpoint.snapshot import Snapshots
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError, Problem
from harness.core.facts import Rollback
from harness.core.protocols import Engine, Meta, Tensors, Tracker
from harness.core.state import Incidents, TrainState, state_hash


@dataclass
class Recovery:
    """Rank 0 decides and writes; every rank saves and loads together.

    keep_incidents writes what a rollback must not undo. memory: None where no snapshots are taken.
    """

    state: TrainState
    engine: Engine
    tracker: Tracker
    store: Store
    good: Goodness
    saver: Saver
    keep_incidents: Callable[[Incidents], None]
    memory: Snapshots | None = None

    def load(self, step: int) -> Meta:
        """Restore the TrainState of `step`, as a resume. Collective.

        Steps after the checkpoint run again and spend their budgets again, so those are taken from the checkpoint,
        unless a rollback came in between: what it wrote stands.
        """
        tensors, meta = self._read(step)
        self.state.load_state_dict(tensors, meta)
        incidents, budgets = self.state.incidents, meta["budgets"]
        if budgets["attempt"] == incidents.attempt:
            incidents.skips, incidents.switches = budgets["skips"], budgets["switches"]
            incidents.lowered = budgets["lowered"]
        else:
            self._fall_at_once()
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
            self.saver.begin(self.state.step, tensors, {**meta, "waiting": self.good.waiting()}, metrics)
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

    def snapshot(self) -> None:
        """Keep the state in memory. Collective."""
        if self.memory is not None:
            self.memory.take(self.state.step, *self.state.state_dict())

    def observe(self, step: int, healthy: bool) -> None:
        """One judged step: checkpoints and snapshots before it come closer to being good, or start again."""
        if self.memory is not None:
            self.memory.observe(step, healthy)
        if self.engine.rank == 0:
            self._mark(step, lambda: self.good.observe(step, healthy))

    def rollback(self, step: int, action: Rollback) -> int | None:
        """Go back to the newest good state, in memory or on disk, and pass over the bad windows; its step, or None.

        Collective. incidents.json is the commit point: killed before it, the run decides again; killed after it,
        `finish_rollback` completes the rest at the next start, and the steps from the checkpoint to a snapshot run
        once more. The event comes first, as saying it twice is harmless.
        """
        self.settle()
        incidents = self.state.incidents
        on_disk = self.engine.broadcast(self.good.newest_good() if self.engine.rank == 0 else None)
        in_memory = self.memory.good if self.memory is not None and not action.from_disk else None
        target = max((each for each in (on_disk, in_memory) if each is not None), default=None)
        if target is None:
            return None
        from_memory = self.memory is not None and target == in_memory
        bad = list(action.bad)
        self.tracker.event(
            step, "guard.rollback", reason=action.reason, to_step=target, passed_over=bad,
            source="memory" if from_memory else "disk",
        )  # fmt: skip
        incidents.attempt += 1
        incidents.skipped_windows = sorted({*incidents.skipped_windows, *bad})
        incidents.returned_to = [*(min(earlier, target) for earlier in incidents.returned_to), target]
        incidents.return_to = target
        if self.engine.rank == 0:
            self.tracker.flush()
            self.keep_incidents(incidents)
            later = [each for each in self.store.steps() if each > target]
            finish_rollback(incidents, self.store, self.keep_incidents)
            self._note("rolled back", later)
        incidents.return_to = 0
        self.good.rolled_back(target)
        self.engine.barrier()
        if self.memory is not None and from_memory:
            self.state.load_state_dict(*self.memory.load())
        else:
            self.state.load_state_dict(*self._read(target))
            if self.memory is not None:
                self.memory.clear()
        self._fall_at_once()
        return target

    def _read(self, step: int) -> tuple[Tensors, Meta]:
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

    def _fall_at_once(self) -> None:
        """A fall of the whole run that was on its way when the checkpoint was written has been decided long since."""
        self.state.switches = [switch for switch in self.state.switches if not switch[3]]

    @staticmethod
    def nothing_to_return_to(step: int, reason: str) -> Problem:
        """Why a rollback could not be done, for the post-mortem."""
        return Problem(
            f"step {step}: {reason}; and no checkpoint is good yet",
            "guard",
            why="a checkpoint is good once checkpoint.healthy_steps healthy steps followed it",
            fix="lower train.lr, lengthen train.warmup_steps, or save more often (checkpoint.every)",
        )


def finish_rollback(incidents: Incidents, store: Store, keep_incidents: Callable[[Incidents], None]) -> None:
    """Carry out a rollback that incidents.json has committed; nothing to do if there is none. Rank 0 only."""
    if incidents.return_to:
        store.discard_after(incidents.return_to)
        incidents.return_to = 0
        keep_incidents(incidents)
