"""Saving, resuming and rolling back on all ranks: the TrainState on its way to and from the checkpoint store.

Rank 0 decides and writes. Every rank calls the same methods in the same order, as gathering and loading the state are
collective. No rank waits long inside one collective: where training must wait for a disk, the ranks look again and
again, in rounds that are shorter than any timeout.

Where ranks share the state (`engine.sharded`), every rank has a saver and writes its own rows as well. The save
is that of rank 0: it counts if rank 0 has committed it, and a rank that failed is named in its log. All ranks read a
checkpoint together: each verifies its share of the files, and then loads its own rows.

When a disk keeps failing, `checkpoint.on_failure` decides: train on, wait on all ranks until there is free space, or
end. A save that fails by anything else, such as a defect or too little memory, ends the run on all ranks: no wait would
mend it (`failures.py`).

A run that ends and cannot save in its own folder saves in a fallback folder, if checkpoint.emergency_path names a place
for one. The next start moves that checkpoint back.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.checkpoint.failures import CannotSaveError
from harness.checkpoint.meeting import Meeting, Writers
from harness.checkpoint.policy import RollbackTargets
from harness.checkpoint.saver import Saved, Saver
from harness.checkpoint.store import Store
from harness.checkpoint.together import (
    ROUND,
    different_copies,
    in_rounds,
    on_any_ranks,
    verify_together,
)
from harness.core.config import CheckpointConfig
from harness.core.errors import (
    CheckpointError,
    ConfigError,
    ExitCode,
    LostRankError,
    Problem,
    clock,
)
from harness.core.progress import saving
from harness.core.protocols import Engine, Meta, Tensors, Tracker
from harness.core.schema import read_yaml
from harness.core.state import RunLedger, TrainState

# Failures in a row that are all logged. After them only those whose number is a power of two are.
_LOGGED_SINGLY = 3


@dataclass(frozen=True, slots=True)
class Kept:
    """The result of `Recovery.keep`, the same on every rank.

    safe: the state is verified on a disk, or a save in the background is under way.
    note: for the outcome: where the state is, if elsewhere, or which steps are lost. Empty: nothing to say.
    asked: some rank was asked to stop while the run waited for free space.
    halts: whether the run must end, because saves keep failing.
    """

    safe: bool = True
    note: str = ""
    asked: bool = False
    halts: bool = False


@dataclass
class Recovery:
    """Saves, loads and rolls back one run.

    state: the TrainState.
    engine: the ranks, and their collectives.
    tracker: where events are logged.
    store: the run's checkpoints.
    good: which of them a rollback may return to.
    saver: writes them in the background.
    keep_ledger: writes the ledger, which a rollback must not undo.
    config: when to save, and what to do if saves fail.
    asked: whether this rank was asked to stop.
    fallback_folder: for the last save of a run whose own folder has no space; None: no such save.
    bound: settings that must stay the same during a run; recorded in each checkpoint.
    wait_seconds: how long rank 0 waits for the parts of other ranks in a save. Less than the ranks' own timeout.
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
    fallback_folder: Path | None = None
    bound: Mapping[str, Any] = field(default_factory=dict)
    wait_seconds: float = 300.0
    _writers: Writers | None = None
    _failures: int = 0
    _defect: CannotSaveError | None = None
    _since: float = 0.0
    _newest_saved: int | None = None

    def load(self, step: int, check: Callable[[Meta], None] = lambda meta: None) -> Meta:
        """Restore the TrainState of `step`, as a resume (see `TrainState.resume`). Collective; returns the meta data.

        check: called with the meta data before anything changes on disk. It may raise.
        """
        tensors, meta = self.read(step)
        self.state.resume(tensors, meta)
        check(meta)
        self.store.set_aside()
        self._newest_saved = step
        if self.engine.rank == 0:
            self._update_marks(step, lambda: self.good.resumed(step, meta["waiting"]))
        return meta

    def keep(self, metrics: Mapping[str, float], last: Literal["", "stop", "end"] = "") -> Kept:
        """Save the present state, usually while training goes on. Collective.

        A save that fails is logged, and older checkpoints stay. After `config.max_failures` failures in a row
        `config.on_failure` decides. "pause" makes every rank wait here until there is free space.

        Raises CannotSaveError on every rank if this save, or the one before it, failed by something else than the disk.

        metrics: recorded in the checkpoint.
        last: why no step follows: "stop" (asked to stop), "end" (all steps done), or empty. Training then waits for the
          save, which is verified.
        """
        failures = self._failures_so_far()
        config = self.config

        # The usual save, in the background. One more failure would have no consequences.
        harmless = (
            config.on_failure == "continue" or not failures or failures + 1 < config.max_failures
        )
        if harmless and not last:
            self._write(self._own_saver, metrics, blocking=False)
            return Kept()

        # A save that matters. A last one is tried twice, before anything is given up.
        saved = self.save_and_verify(metrics)
        if last and not saved:
            saved = self.save_and_verify(metrics)
        if saved:
            return Kept()

        # Wait for free space. A stop request ends the wait, and one more try follows it.
        asked = False
        if config.on_failure == "pause" and last != "stop":
            if self._wait_for_space(lambda: self.save_and_verify(metrics)):
                return Kept()
            asked = True
            if self.save_and_verify(metrics):
                return Kept(asked=True)

        return self._save_elsewhere(metrics, asked, halts=not last and config.on_failure == "halt")

    def save_and_verify(self, metrics: Mapping[str, float]) -> bool:
        """Save the state, and wait until it is verified on disk. Collective; returns whether it succeeded.

        Raises CannotSaveError as `keep`.
        """
        self.wait()
        saved = self._write(self._own_saver, metrics, blocking=True)
        self.wait()
        if not saved:
            self._raise_defect()
        return saved

    @property
    def _together(self) -> bool:
        """Whether every rank writes and reads its own rows of a checkpoint."""
        return self.engine.sharded and self.engine.world_size > 1

    @property
    def _own_saver(self) -> Saver | None:
        """The saver of this rank; None on a rank that writes nothing."""
        return self.saver if self.engine.rank == 0 or self._together else None

    def _write(self, saver: Saver | None, metrics: Mapping[str, float], *, blocking: bool) -> bool:
        """Let `saver` write the state. Collective; returns whether it succeeded, or True if it is not waited for.

        saver: None on ranks that write nothing, and where the store could not be opened.
        blocking: wait for the end, and verify what was written.
        """
        # Gathering the state is collective under ZeRO: every rank takes part.
        tensors, meta = self.state.state_dict()
        step, lead = self.state.step, self.engine.rank == 0
        meeting = self._next_try() if self._together else None
        if saver is not None:
            # The journal must not be behind a checkpoint, or a resume would miss rows.
            self.tracker.flush()
            # `waiting`: the checkpoints that are not good yet, with their healthy steps so far. A resume counts on.
            complete = {**meta, "waiting": self.good.waiting(), "bound": self.bound}
            rows = self.state.rows() if meeting is not None else None
            saver.begin(
                step, tensors, complete, metrics, blocking=blocking, rows=rows, meeting=meeting
            )
            # From here on this checkpoint waits to become good, too: it still needs healthy steps after it, and its
            # save has only begun. Not in the fallback folder, to which no rollback returns.
            if saver is self.saver and lead:
                self._update_marks(step, lambda: self.good.saved(step))

        if not blocking:
            # A rank without memory for a copy writes the state itself, which must not change meanwhile.
            if meeting is not None and self._on_any_rank(saver is not None and not saver.copied):
                self._until_idle(saver)
            return True

        self._until_idle(saver)
        return self._on_any_rank(lead and saver is not None and saver.committed(step) is True)

    def _next_try(self) -> Meeting:
        """The next try of a save by all ranks. Collective, and in the same order on every rank."""
        if self._writers is None:
            # A random name: a rank that is left of an earlier start must not get into the saves of this one.
            start = self.engine.broadcast(secrets.token_hex(4))
            rank, ranks = self.engine.rank, self.engine.world_size
            self._writers = Writers(rank, ranks, start, self.wait_seconds)
        return self._writers.next_try()

    def _until_idle(self, saver: Saver | None) -> None:
        """Wait on every rank until no rank's `saver` is at work. Collective.

        Ranks that save together learn here that one of them has ended without the others.
        """
        try:
            if self._together:
                self._until_all_idle(saver)
                return
            while self._on_any_rank(self._busy(saver)):
                pass
        finally:
            saving.rest()

    def _busy(self, saver: Saver | None) -> bool:
        """Whether this rank's `saver` is at work, after waiting for a round. Else the rank waits for another one."""
        if saver is not None and saver.busy(ROUND):
            return True
        if saving.resting:
            saving.enter("waits for a save", self.state.step, waits=True)
        return False

    def _until_all_idle(self, saver: Saver | None) -> None:
        """As `_until_idle`, where ranks save together.

        Raises LostRankError on every rank, naming the ranks that are still at work long after the save has failed.
        """
        rank, ranks = self.engine.rank, self.engine.world_size
        until = math.inf
        while True:
            busy = self._busy(saver)
            failed = saver is not None and saver.failed()
            own = [each == rank for each in range(ranks)]
            flags = self._on_any_ranks(
                time.monotonic() > until,
                *(busy and here for here in own),
                *(failed and here for here in own),
            )
            late, at_work, lost = flags[0], flags[1 : 1 + ranks], flags[1 + ranks :]
            if not any(at_work):
                return

            # The save has ended on rank 0, or cannot succeed: nobody has a reason to be at work for long.
            over = not at_work[0] or any(lost)
            if over and until == math.inf:
                until = time.monotonic() + 2 * self.wait_seconds
            if over and late:
                raise LostRankError(self._hangs(at_work))
            if saver is None:
                continue
            if not at_work[0]:
                saver.give_up("rank 0 has ended this save")
            elif any(lost):
                named = ", ".join(str(each) for each in range(ranks) if lost[each])
                saver.give_up(f"rank {named} could not write its part, nor say why")

    def _hangs(self, at_work: Sequence[bool]) -> Problem:
        """Which ranks hang in a save that has ended for the others."""
        named = ", ".join(str(rank) for rank, busy in enumerate(at_work) if busy)
        what = f"lost rank {named}: it hangs in a save that has ended for the other ranks"
        why = f"it has not returned within {2 * self.wait_seconds:g} s; every rank's log shows in what it hangs"
        fix = "start the same command again; if its disk is only slow: a higher engine.timeout_seconds"
        return Problem(what, f"rank {self.engine.rank}", why, fix)

    def _wait_for_space(self, attempt: Callable[[], bool]) -> bool:
        """Wait on every rank and try again, until `attempt` succeeds. Collective.

        Returns False as soon as some rank is asked to stop.

        attempt: collective; writes what could not be written, and returns whether it succeeded.
        """
        began = time.monotonic()
        config, step = self.config, self.state.step
        if self.engine.rank == 0:
            place = "; checkpoint.emergency_path would name another place"
            if self.fallback_folder is not None:
                place = f", then saves in {self.fallback_folder}"
            pause = f"{config.retry_seconds:g} s"
            text = f"training waits for free space: it tries again every {pause} and goes on by itself. "
            text += f"Asked to stop, it tries once more{place}"
            self.tracker.tell(step, "checkpoint.paused", text)

        while True:
            # Between two attempts, ask all ranks about a stop request again and again.
            until = time.monotonic() + config.retry_seconds
            while True:
                # The longest wait of any rank counts: their clocks began at different moments.
                asked, waits = self._on_any_ranks(self.asked(), time.monotonic() < until)
                if asked:
                    return False
                if not waits:
                    break
                time.sleep(min(ROUND, config.retry_seconds))

            if attempt():
                if self.engine.rank == 0:
                    waited = clock(time.monotonic() - began)
                    text = f"there was space after {waited}: training goes on"
                    self.tracker.tell(step, "checkpoint.saved_again", text)
                return True

    def _save_elsewhere(self, metrics: Mapping[str, float], asked: bool, halts: bool) -> Kept:
        """The run ends, and its own folder takes no checkpoint: save in the fallback folder, or say what is lost.

        Collective. asked, halts: for the result.
        """
        lead = self.engine.rank == 0
        step = self.state.step
        error = ""
        if self.fallback_folder is not None:
            # A store that cannot be opened on rank 0 counts as a failed save on every rank.
            saver: Saver | None = None
            try:
                saver = Saver(Store(self.fallback_folder), lambda good: []) if lead else None
            except CheckpointError as failure:
                error = str(failure)
            if self._together and self.engine.broadcast(saver is not None) and not lead:
                saver = Saver(Store(self.fallback_folder, readonly=True), lambda good: [])
            if self._write(saver, metrics, blocking=True):
                place = self.fallback_folder / self.store.path(step).name
                note = f"saved in {place}, as the run's own folder has no space; the same command moves it back"
                return Kept(True, note, asked, halts)
            if saver is not None:
                error = "; ".join(saved.error for saved in saver.finished())
        if lead and error:
            self.tracker.tell(step, "checkpoint.failed", error)

        # Rank 0 reads what is left on disk; the others get its answer.
        lost = self.engine.broadcast(self._lost_steps(step) if lead else "")
        return Kept(False, lost, asked, halts)

    def _lost_steps(self, step: int) -> str:
        """Which steps are lost if the state of `step` cannot be saved, and the checkpoint that remains; for people."""
        newest = 0
        for each in reversed(self.store.steps()):
            if self.store.is_whole(each):
                newest = each
                break

        what = "there is no checkpoint"
        if newest:
            what = f"the newest checkpoint that verifies is of step {newest}"
        if newest >= step:  # the run went back, and trained these steps again
            lost = f"what was trained up to step {step} is lost"
        elif newest + 1 < step:
            lost = f"steps {newest + 1} to {step} are lost"
        else:
            lost = f"step {step} is lost"
        return f"{lost}: the state could not be saved, and {what}"

    def _failures_so_far(self) -> int:
        """How many saves in a row have failed, the present one included; the same on every rank. Collective.

        Raises CannotSaveError as `keep`.
        """
        self.wait()
        failures, defect = self.engine.broadcast((self._failures, self._defect is not None))
        if defect:
            self._raise_defect()
        return int(failures)

    def _raise_defect(self) -> None:
        """Raise rank 0's CannotSaveError on every rank, if it has one. Collective."""
        own = self._defect
        problems = [] if own is None else [astuple(problem) for problem in own.problems]
        found = self.engine.broadcast(problems)
        if own is not None:
            raise own
        if found:
            raise CannotSaveError([Problem(*problem) for problem in found])

    def wait(self) -> None:
        """Wait on every rank until no save is under way, and log its result. Collective."""
        self._until_idle(self._own_saver)
        if self.engine.rank == 0:
            self._update_marks(self.state.step, self.good.settled)
        elif self._together:
            self.saver.finished()  # rank 0 logs the result

    def _on_any_rank(self, mine: bool) -> bool:
        """Whether it is true on any rank. Collective."""
        return self._on_any_ranks(mine)[0]

    def _on_any_ranks(self, *mine: bool) -> list[bool]:
        """For each of `mine`, whether it is true on any rank. Collective."""
        return on_any_ranks(self.engine, *mine)

    def settle(self, lost: str = "") -> None:
        """Wait until this rank writes nothing, and log the result of the save on rank 0. Not collective.

        lost: says that a rank is lost, for which a save by all ranks then waits no longer.
        """
        if self._own_saver is not None:
            if lost and self._together:
                self.saver.give_up(lost)
                # This rank's own disk may be what hangs. The process ends all the same.
                if self.saver.busy(self.wait_seconds):
                    return
            self.saver.wait()
        if self.engine.rank == 0:
            self._update_marks(self.state.step, self.good.settled)

    def observe(self, step: int, healthy: bool) -> None:
        """Count a judged step: checkpoints before it come closer to being good, or start again."""
        if self.engine.rank == 0:
            self._update_marks(step, lambda: self.good.observe(step, healthy))

    def newest_good(self) -> int | None:
        """Step of the newest good checkpoint, after waiting for a save under way; None if there is none. Collective.

        Newer good checkpoints that do not verify are logged by name.
        """
        if self._together:
            self.wait()
            return self._newest_good_together()
        self.settle()
        newest: int | None = None
        if self.engine.rank == 0:
            newest = self.good.newest_good()
            for step in self.good.damaged_good(newest):
                self._log_skipped(step, self.store.verify(step))
        return self.engine.broadcast(newest)

    def _newest_good_together(self) -> int | None:
        """As `newest_good`: all ranks verify each candidate together."""
        for step in self.engine.broadcast(self.good.marked() if self.engine.rank == 0 else []):
            problems = verify_together(self.engine, self.store, step)
            if not problems:
                return step
            if self.engine.rank == 0:
                self._log_skipped(step, problems)
        return None

    def _log_skipped(self, step: int, problems: Sequence[Problem]) -> None:
        listed = "; ".join(map(str, problems))
        text = (
            f"a rollback skips the good checkpoint of step {step}, which does not verify: {listed}"
        )
        self.tracker.tell(self.state.step, "checkpoint.quarantined", text)

    def commit(self, target: int) -> None:
        """Write that the run goes back to `target`, and rename the checkpoints after it. Collective.

        The ledger, incidents.json, is the commit point. A run that is killed before it is written decides again. One
        that is killed later finishes the rollback at the next start (`finish_rollback`). If `target` was a snapshot in
        memory, the steps from the checkpoint before it run once more.

        Raises CheckpointError if it cannot be written.
        """
        ledger = self.state.ledger
        ledger.return_to = target
        later: list[int] = []
        if self.engine.rank == 0:
            self.tracker.flush()
            later = [each for each in self.store.steps() if each > target]

        # One try, then the wait for free space, then one try more: a stop request has ended the wait.
        error = self._write_rollback(target)
        pause = self.config.on_failure == "pause"
        if error and pause and self._wait_for_space(lambda: not self._write_rollback(target)):
            error = ""
        if error:
            error = self._write_rollback(target)
        if error:
            what = f"the rollback to step {target} could not be written"
            fix = "free space, and give the same command again"
            failed = CheckpointError(Problem(what, why=error, fix=fix))
            failed.exit_code = ExitCode.FAILED
            raise failed

        if self.engine.rank == 0:
            self._log_state("rolled back", later)
        ledger.return_to = 0
        if self._newest_saved is not None:
            self._newest_saved = min(self._newest_saved, target)
        self.good.rolled_back(target)

    def _write_rollback(self, target: int) -> str:
        """Write the ledger, and rename the checkpoints after `target`. Collective; returns the error, the same on every
        rank, or an empty text.
        """
        ledger = self.state.ledger
        error = ""
        if self.engine.rank == 0:
            try:
                self.keep_ledger(ledger)
                finish_rollback(ledger, self.store, self.keep_ledger)
            except CheckpointError as failure:
                ledger.return_to = target
                error = str(failure)
                text = f"the rollback to step {target}: {error}"
                self.tracker.tell(self.state.step, "checkpoint.failed", text)
        return self.engine.broadcast(error)

    def read(self, step: int, source: Store | None = None) -> tuple[Tensors, Meta]:
        """Tensors and meta data of the checkpoint of `step`: whole ones, or this rank's own rows. Collective.

        Raises CheckpointError on every rank if any rank cannot read it, or if ranks read different ones.

        source: another run's store; None: this run's.
        """
        store = self.store if source is None else source
        if self._together:
            return self._read_together(store, step)

        # A rank that cannot read it goes on to the comparison, which the others wait in.
        tensors: Tensors = {}
        meta: Meta = {}
        mine = ""
        problems: list[Problem] = []
        try:
            tensors, meta = store.load(step)
            mine = store.manifest_sha256(step)
        except CheckpointError as error:
            problems = list(error.problems)

        # Machines may have different folders of the same name. Each copy verifies, and still they differ.
        if self.engine.world_size > 1:
            differs = mine != self.engine.broadcast(mine)
            differ, unread = self._on_any_ranks(differs, bool(problems))
            if differ and not problems:
                problems = [different_copies(self.engine, step, unread)]

        if problems:
            raise CheckpointError(problems)
        return tensors, meta

    def _read_together(self, store: Store, step: int) -> tuple[Tensors, Meta]:
        """As `read`: all ranks verify the files together, and each loads its own rows."""
        if problems := verify_together(self.engine, store, step):
            raise CheckpointError(problems)

        tensors: Tensors = {}
        meta: Meta = {}
        rows = self.state.rows()
        try:
            tensors, meta = in_rounds(
                self.engine, lambda: store.load(step, rows=rows, verified=True)
            )
        except CheckpointError as error:
            problems = list(error.problems)
        if self._on_any_rank(bool(problems)):
            raise CheckpointError(problems or [different_copies(self.engine, step, unread=True)])
        return tensors, meta

    def _update_marks(self, step: int, update: Callable[[], list[int]]) -> None:
        """Call `update`, and log finished saves and the checkpoints that it marked good. Rank 0 only.

        update: one of the methods of `good`; returns the steps that it marked.
        """
        marked: list[int] = []
        try:
            marked = update()
        except CheckpointError as error:
            self.tracker.event(step, "checkpoint.failed", text=str(error))

        # A reader of the journal must see that a checkpoint was saved before it sees that it is good.
        self._log_saves()
        self._log_state("good", marked)

    def _log_saves(self) -> None:
        """Log the results of the saves that have ended."""
        for saved in self.saver.finished():
            self._defect = self._defect or saved.defect
            if saved.uncopied:
                text = f"no memory for a copy of the state ({saved.uncopied}): training waits for every save"
                self.tracker.event(saved.step, "checkpoint.waits", text=text)
            if saved.pageable:
                text = f"no pinned memory for saves ({saved.pageable}): training waits for each of their copies"
                self.tracker.event(saved.step, "checkpoint.pageable", text=text)
            if saved.path is None:
                self._log_failure(saved)
                continue
            self._failures = 0
            self._since = 0.0
            self._newest_saved = saved.step
            self._log_state(
                "saved",
                [saved.step],
                path=str(saved.path.resolve()),
                metrics=saved.metrics,
                seconds=saved.seconds,
            )
            # The checkpoint was written; older ones could not be deleted.
            if saved.error:
                self.tracker.event(saved.step, "checkpoint.failed", text=saved.error)
            self._log_state("deleted", saved.deleted)

    def _log_failure(self, saved: Saved) -> None:
        """Log a failed save: why, for how long saves have failed, what a crash would lose, and what follows."""
        self._failures += 1
        self._since = self._since or time.monotonic()
        count, config = self._failures, self.config
        # The first ones are logged each, then ever fewer: a disk that stays full must not fill the log.
        power_of_two = count & (count - 1) == 0
        if count > _LOGGED_SINGLY and not power_of_two:
            return

        what = "1 save in a row failed"
        if count > 1:
            what = f"{count} saves in a row failed, for {clock(time.monotonic() - self._since)}"

        # What a crash would cost now.
        newest = "no checkpoint is there"
        if self._newest_saved is not None:
            newest = f"the newest checkpoint is of step {self._newest_saved}"
        text = f"{saved.error}\n    {what}; {newest}, and a crash would lose what came after it"
        # What follows: only a defect of ours ends the run at once.
        if saved.defect is not None:
            text += "; the run ends at its next save"
        elif count < config.max_failures and config.on_failure != "continue":
            then = (
                "training waits for free space" if config.on_failure == "pause" else "the run ends"
            )
            text += f"; after {max(config.max_failures, 2)} {then}"
        self.tracker.tell(saved.step, "checkpoint.failed", text, failures=count)

    def _log_state(self, state: str, steps: Iterable[int], **fields: Any) -> None:
        """Write one row for each of `steps`: its checkpoint is now in `state`, such as "saved" or "good"."""
        for step in steps:
            self.tracker.note("checkpoint", step=step, state=state, **fields)


def fallback_folder(path: str | None, folder: Path) -> Path | None:
    """The folder for the last save of the run in `folder`, if its own has no space. None without a path.

    Its name has a hash of the run's own path, so that another run of the same name gets another one.

    path: checkpoint.emergency_path.
    """
    if path is None:
        return None
    here = str(folder.resolve())
    digest = hashlib.sha256(os.fsencode(here)).hexdigest()[:8]
    return Path(path).resolve() / f"{folder.name}-{digest}"


def fallback_folders(folder: Path, path: str | None) -> list[Path]:
    """The fallback folders in which the run in `folder` may have saved: of its last start, and of this one.

    path: checkpoint.emergency_path of this start. The one of the last start is in the run's config.yaml.
    """
    try:
        earlier = read_yaml(folder / "config.yaml").get("checkpoint", {}).get("emergency_path")
    except (ConfigError, OSError, AttributeError):
        earlier = None

    found: list[Path] = []
    for each in (earlier, path):
        fallback = fallback_folder(each, folder) if isinstance(each, str) else None
        if fallback is not None and fallback not in found:
            found.append(fallback)
    return found


def move_from_fallback(store: Store, fallback: Path) -> int | None:
    """Move the last save of a run from its `fallback` folder into `store`; returns its step.

    None if there is none, or if `store` has a newer checkpoint. For rank 0, before the newest checkpoint is chosen.
    Raises CheckpointError, and changes nothing, if the save cannot be read or there is no space for it.
    """
    if not fallback.is_dir():
        return None
    source = Store(fallback)
    try:
        step = source.newest_valid()
        newest = max((each for each in store.steps() if store.is_whole(each)), default=0)

        # A damaged last save: an older one beside it must not replace it without the user's consent.
        unreadable: list[Problem] = []
        for each, problems in source.damaged.items():
            if each > newest:
                unreadable += problems
        if unreadable:
            raise CheckpointError(unreadable)

        moved = step is not None and step > newest
        if step is not None and moved:
            store.take_over(step, source)
    except CheckpointError as error:
        what = (
            "the last save of this run, which its own folder had no space for, cannot be moved back"
        )
        fix = f"repair it, or delete {fallback} to go on from an older checkpoint"
        raise CheckpointError([Problem(what, str(fallback), fix=fix), *error.problems]) from error
    shutil.rmtree(fallback, ignore_errors=True)
    return step if moved else None


def finish_rollback(
    ledger: RunLedger, store: Store, keep_ledger: Callable[[RunLedger], None]
) -> None:
    """Carry out the rollback that incidents.json has committed; nothing to do if there is none. Rank 0 only.

    `return_to` is cleared last: a kill before that leaves it on disk, and the next start does everything again.
    """
    if ledger.return_to:
        store.discard_after(ledger.return_to)
        ledger.return_to = 0
        keep_ledger(ledger)
