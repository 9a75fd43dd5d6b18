"""Saving, resuming and rolling back: the TrainState on its way to and from the checkpoint store."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from harness.checkpoint.policy import RollbackTargets
from harness.checkpoint.saver import Saved, Saver
from harness.checkpoint.store import Store
from harness.core.config import CheckpointConfig
from harness.core.errors import CheckpointError, ConfigError, ExitCode, Problem, clock
from harness.core.protocols import Engine, Meta, Tensors, Tracker
from harness.core.schema import read_yaml
from harness.core.state import RunLedger, TrainState, state_hash

# Seconds between looks at a save that training waits for. No rank then waits long in a collective, which gives up.
_ROUND = 0.5
# Failures in a row that are told one by one; of later ones every power of two is.
_TOLD = 3


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of the state that was to be saved, the same on every rank.

    safe: it is on a disk, verified, or on its way there in the background. note: what else there is to say: where it
    is, or which steps are lost. asked: some rank was asked to stop while the run waited for room. halts: the run is to
    end for it.
    """

    safe: bool = True
    note: str = ""
    asked: bool = False
    halts: bool = False


@dataclass
class Recovery:
    """Rank 0 decides and writes; every rank saves and loads together.

    keep_ledger writes what a rollback must not undo. config: what to do where saves fail. asked: whether this rank was
    asked to stop. spare: folder for the last save of a run whose own takes none. bound: what the run must not change
    between its checkpoints, kept in each of them.
    """

    state: TrainState
    engine: Engine
    tracker: Tracker
    store: Store
    good: RollbackTargets
    saver: Saver
    keep_ledger: Callable[[RunLedger], None]
    config: CheckpointConfig = field(default_factory=CheckpointConfig)
    asked: Callable[[], bool] = lambda: False
    spare: Path | None = None
    bound: Mapping[str, Any] = field(default_factory=dict)
    _failures: int = 0
    _since: float = 0.0
    _stands: int | None = None

    def load(self, step: int, check: Callable[[Meta], None] = lambda meta: None) -> Meta:
        """Restore the TrainState of `step`, as a resume (see `TrainState.resume`). Collective. check: asked before
        anything is changed on disk, and may raise.
        """
        tensors, meta = self.read(step)
        self.state.resume(tensors, meta)
        check(meta)
        self.store.set_aside()
        self._stands = step
        if self.engine.rank == 0:
            self._mark(step, lambda: self.good.resumed(step, meta["waiting"]))
        return meta

    def keep(self, metrics: Mapping[str, float], last: Literal["", "stop", "end"] = "") -> Kept:
        """Save the state as it is now, usually while training goes on. Collective.

        A save that fails is told; the older checkpoints stand, and `config` says what follows: to wait for room means
        that every rank waits here, and goes on by itself. metrics: what the checkpoint is known by. last: nothing comes
        after this save, as the run was asked to stop or is at its end, so training waits for it and it is verified.
        """
        failures, config = self._failures_so_far(), self.config
        if not last and (
            config.on_failure == "continue" or not failures or failures + 1 < config.max_failures
        ):
            self._write(self.saver if self.engine.rank == 0 else None, metrics, surely=False)
            return Kept()
        # What failed once is tried once more before anything is given up for it.
        if self.save_surely(metrics) or (last and self.save_surely(metrics)):
            return Kept()
        asked = False
        if config.on_failure == "pause" and last != "stop":
            if self._held(lambda: self.save_surely(metrics)):
                return Kept()
            asked = True
            if self.save_surely(metrics):
                return Kept(asked=True)
        return self._give_way(metrics, asked, halts=not last and config.on_failure == "halt")

    def save_surely(self, metrics: Mapping[str, float]) -> bool:
        """Save the state and wait until it is verified on disk; whether that went well. Collective."""
        self._until_idle()
        saved = self._write(self.saver if self.engine.rank == 0 else None, metrics, surely=True)
        self._until_idle()
        return saved

    def _write(self, saver: Saver | None, metrics: Mapping[str, float], *, surely: bool) -> bool:
        """Let `saver`, None on ranks other than 0, write the state; surely: wait for it. Whether that went well."""
        tensors, meta = self.state.state_dict()
        step = self.state.step
        if saver is not None:
            self.tracker.flush()
            known = {**meta, "waiting": self.good.waiting(), "bound": self.bound}
            saver.begin(step, tensors, known, metrics, surely=surely)
            if saver is self.saver:
                self._mark(step, lambda: self.good.saved(step))
        if not surely:
            return True
        while self._agreed(saver is not None and saver.busy(_ROUND)):
            pass
        return self._agreed(saver is not None and saver.committed(step) is True)

    def _held(self, done: Callable[[], bool]) -> bool:
        """Wait on every rank, trying again what could not be written; False once some rank is asked to stop."""
        began = time.monotonic()
        config, step = self.config, self.state.step
        if self.engine.rank == 0:
            text = f"training waits for room and tries again every {config.retry_seconds:g} s; it goes on by itself. "
            place = (
                f", then in {self.spare}"
                if self.spare
                else "; checkpoint.emergency_path would name another place"
            )
            text += f"Asked to stop, it tries once more{place}"
            self.tracker.tell(step, "checkpoint.paused", text)
        while True:
            until = time.monotonic() + config.retry_seconds
            while True:
                # The longest wait of any rank counts: their clocks began at different moments.
                asked, waits = self._all_agreed(self.asked(), time.monotonic() < until)
                if asked:
                    return False
                if not waits:
                    break
                time.sleep(min(_ROUND, config.retry_seconds))
            if done():
                if self.engine.rank == 0:
                    text = (
                        f"there was room after {clock(time.monotonic() - began)}: training goes on"
                    )
                    self.tracker.tell(step, "checkpoint.saved_again", text)
                return True

    def _give_way(self, metrics: Mapping[str, float], asked: bool, halts: bool) -> Kept:
        """The run ends and its own folder takes no checkpoint: the spare place, or what is lost by it."""
        lead = self.engine.rank == 0
        step, error = self.state.step, ""
        if self.spare is not None:
            saver: Saver | None = None
            try:
                saver = Saver(Store(self.spare), lambda good: []) if lead else None
            except CheckpointError as failure:
                error = str(failure)
            if self._write(saver, metrics, surely=True):
                place = self.spare / self.store.path(step).name
                note = f"saved in {place}, as the run's own folder takes no more; the same command takes it back"
                return Kept(True, note, asked, halts)
            if saver is not None:
                error = "; ".join(saved.error for saved in saver.finished())
        if lead and error:
            self.tracker.tell(step, "checkpoint.failed", error)
        stands = (
            next((each for each in reversed(self.store.steps()) if self.store.is_whole(each)), 0)
            if lead
            else 0
        )
        lost = (
            f"steps {stands + 1} to {step} are lost"
            if stands + 1 < step
            else f"step {step} is lost"
        )
        if stands >= step:  # gone back to and trained on again
            lost = f"what was trained up to step {step} is lost"
        what = (
            f"the newest checkpoint that verifies is of step {stands}"
            if stands
            else "there is no checkpoint"
        )
        return Kept(
            False,
            self.engine.broadcast(f"{lost}: the state could not be saved, and {what}"),
            asked,
            halts,
        )

    def _failures_so_far(self) -> int:
        """Saves in a row that have failed, after what is being saved now; the same on every rank."""
        self._until_idle()
        return int(self.engine.broadcast(self._failures))

    def _until_idle(self) -> None:
        """Until nothing is being written, and what became of it is told. Collective."""
        while self._agreed(self.engine.rank == 0 and self.saver.busy(_ROUND)):
            pass
        if self.engine.rank == 0:
            self._mark(self.state.step, self.good.settled)

    def _agreed(self, mine: bool) -> bool:
        """Whether it holds on any rank."""
        return self._all_agreed(mine)[0]

    def _all_agreed(self, *mine: bool) -> list[bool]:
        if self.engine.world_size == 1:
            return list(mine)
        flags = torch.tensor([float(each) for each in mine], device=self.engine.device)
        return [bool(each) for each in self.engine.max(flags).tolist()]

    def settle(self) -> None:
        """Until what is being saved is on disk, or has failed; on ranks other than 0 there is nothing to wait for."""
        if self.engine.rank == 0:
            self.saver.wait()
            self._mark(self.state.step, self.good.settled)

    def observe(self, step: int, healthy: bool) -> None:
        """One judged step: checkpoints before it come closer to being good, or start again."""
        if self.engine.rank == 0:
            self._mark(step, lambda: self.good.observe(step, healthy))

    def newest_good(self) -> int | None:
        """Step of the newest checkpoint that may be gone back to, after what is being saved. Collective."""
        self.settle()
        newest = self.good.newest_good() if self.engine.rank == 0 else None
        for step in self.good.damaged_good(newest) if self.engine.rank == 0 else ():
            text = f"a rollback passes over the good checkpoint of step {step}, which does not verify: "
            text += "; ".join(map(str, self.store.verify(step)))
            self.tracker.tell(self.state.step, "checkpoint.quarantined", text)
        return self.engine.broadcast(newest)

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
        later = (
            [each for each in self.store.steps() if each > target] if self.engine.rank == 0 else []
        )

        def written() -> bool:
            error = ""
            if self.engine.rank == 0:
                try:
                    self.keep_ledger(ledger)
                    finish_rollback(ledger, self.store, self.keep_ledger)
                except CheckpointError as failure:
                    ledger.return_to, error = target, str(failure)
                    self.tracker.tell(
                        self.state.step,
                        "checkpoint.failed",
                        f"the way back to step {target}: {error}",
                    )
            errors.append(self.engine.broadcast(error))
            return not errors[-1]

        errors: list[str] = []
        if not (
            written() or (self.config.on_failure == "pause" and self._held(written)) or written()
        ):
            what = f"the way back to step {target} could not be written"
            failed = CheckpointError(
                Problem(what, why=errors[-1], fix="make room, and give the same command again")
            )
            failed.exit_code = ExitCode.FAILED
            raise failed
        if self.engine.rank == 0:
            self._note("rolled back", later)
        ledger.return_to = 0
        self._stands = None if self._stands is None else min(self._stands, target)
        self.good.rolled_back(target)

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
            agreed = self.engine.max(
                torch.tensor([differs, float(bool(problems))], device=self.engine.device)
            )
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
                self._tell_failure(saved)
                continue
            self._failures, self._since, self._stands = 0, 0.0, saved.step
            self._note(
                "saved",
                [saved.step],
                path=str(saved.path.resolve()),
                metrics=saved.metrics,
                seconds=saved.seconds,
            )
            if saved.error:  # written, but what was to be deleted could not be
                self.tracker.event(saved.step, "checkpoint.failed", text=saved.error)
            self._note("deleted", saved.deleted)

    def _tell_failure(self, saved: Saved) -> None:
        """What failed, for how long that has been so, and what it means."""
        self._failures += 1
        self._since = self._since or time.monotonic()
        count, config = self._failures, self.config
        if count > _TOLD and count & (count - 1):
            return
        since = f", for {clock(time.monotonic() - self._since)}" if count > 1 else ""
        what = f"{count} save{'s' if count > 1 else ''} in a row failed{since}"
        stands = (
            "none stands"
            if self._stands is None
            else f"the newest that stands is of step {self._stands}"
        )
        text = f"{saved.error}\n    {what}; {stands}, and a crash would lose what came after it"
        if count < config.max_failures and config.on_failure != "continue":
            then = "training waits for room" if config.on_failure == "pause" else "the run ends"
            text += f"; after {max(config.max_failures, 2)} {then}"
        self.tracker.tell(saved.step, "checkpoint.failed", text, failures=count)

    def _note(self, state: str, steps: Iterable[int], **fields: Any) -> None:
        """For the tracker: what became of the checkpoints of `steps`."""
        for step in steps:
            self.tracker.note("checkpoint", step=step, state=state, **fields)


def spare_folder(path: str | None, folder: Path) -> Path | None:
    """Where the last save of the run in `folder` goes, of checkpoint.emergency_path; another run's is never taken for
    it, whatever its name. None without a path.
    """
    if path is None:
        return None
    here = str(folder.resolve())
    return (
        Path(path).resolve() / f"{folder.name}-{hashlib.sha256(os.fsencode(here)).hexdigest()[:8]}"
    )


def spare_folders(folder: Path, path: str | None) -> list[Path]:
    """The same, of the run's last start, and of a start with emergency_path `path`."""
    try:
        earlier = read_yaml(folder / "config.yaml").get("checkpoint", {}).get("emergency_path")
    except (ConfigError, OSError, AttributeError):
        earlier = None
    paths = [each for each in (earlier, path) if isinstance(each, str)]
    return [
        each
        for each in (spare_folder(name, folder) for name in dict.fromkeys(paths))
        if each is not None
    ]


def bring_back(store: Store, spare: Path) -> int | None:
    """Take over what a last save has left in `spare`: its step, if it is newer than all that `store` has, else None.

    On rank 0, before the newest checkpoint is chosen. Raises CheckpointError, and changes nothing, where it cannot be
    read or does not fit in.
    """
    if not spare.is_dir():
        return None
    away = Store(spare)
    fix = f"repair it, or delete {spare} to go on from an older checkpoint"
    try:
        step = away.newest_valid()
        newest = max((each for each in store.steps() if store.is_whole(each)), default=0)
        found = step is not None and step > newest
        if lost := [
            problem for each, told in away.damaged.items() if each > newest for problem in told
        ]:
            raise CheckpointError(
                lost
            )  # the last save itself: an older one beside it must not stand for it unasked
        if step is not None and found:
            store.save(step, *away.load(step), away.metrics(step))
            if problems := store.verify(step):
                raise CheckpointError(problems)
    except CheckpointError as error:
        what = (
            "the last save of this run, which its own folder had no room for, cannot be taken back"
        )
        raise CheckpointError([Problem(what, str(spare), fix=fix), *error.problems]) from error
    shutil.rmtree(spare, ignore_errors=True)
    return step if found else None


def finish_rollback(
    ledger: RunLedger, store: Store, keep_ledger: Callable[[RunLedger], None]
) -> None:
    """Carry out a rollback that incidents.json has committed; nothing to do if there is none. Rank 0 only."""
    if ledger.return_to:
        store.discard_after(ledger.return_to)
        ledger.return_to = 0
        keep_ledger(ledger)
