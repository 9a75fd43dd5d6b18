"""Where a start of `harness train` begins: the run folder, whether the run goes on there, and the checkpoint it loads.

`--resume auto` goes on from the newest valid checkpoint in the run's own folder. `never` begins a new run. A path
begins a new run from a checkpoint of another one, which is called the `source` here.

Ranks that read their own disks could come to different answers. Rank 0 reads and broadcasts where that matters.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from harness.build import ENGINES, Worker, open_store
from harness.checkpoint.policy import load_ledger
from harness.checkpoint.recovery import fallback_folders, move_from_fallback
from harness.checkpoint.store import Store
from harness.checkpoint.together import newest_valid_together
from harness.core.config import RunConfig, load_config
from harness.core.errors import CheckpointError, ConfigError, Problem, number_of
from harness.core.files import step_name
from harness.core.state import RunLedger, lost_ledger, unrelated_ledger
from harness.engines.parts import OptimizerPart
from harness.optim.schedule import Schedule, lr_jump
from harness.run import Run
from harness.run_folder import (
    RUNS,
    Resumed,
    adopt_vocab,
    base_name,
    check_bound,
    check_resumable,
    choose_folder,
    is_checkpoint_name,
    is_finished,
    read_outcome,
    read_source,
    same_data_order,
)
from harness.tools.agreement import agree_on_run
from harness.tools.start import Request
from harness.tracking.journal import JOURNAL, read_rows


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The run that this start is about.

    folder: its folder.
    config: as asked for, with the vocabulary of the run in `origin`.
    source: the checkpoint of another run that --resume names.
    origin: folder of the run whose weights are loaded, this one's or that of `source`; None for initial weights.
    resumed: what this start changes in a run that goes on; None for a new run.
    """

    folder: Path
    config: RunConfig
    source: Path | None
    origin: Path | None
    resumed: Resumed | None

    @property
    def resuming(self) -> bool:
        """Whether the run goes on; else it is new."""
        return self.resumed is not None


@dataclass(frozen=True, slots=True)
class InitialState:
    """What the state is loaded from before the first step; with neither, training begins with initial weights.

    step: of a checkpoint in the run's own folder.
    source: a checkpoint of another run.
    """

    step: int | None
    source: Path | None


def find_source(resume: str, name: str | None) -> Path | None:
    """The checkpoint that --resume names; None for auto and never. Raises CheckpointError if it cannot be one.

    A run that began from this checkpoint may be resumed with the same command after the checkpoint is gone.
    """
    if resume in ("auto", "never"):
        return None
    path = Path(resume)
    try:
        usable = (path / "manifest.json").is_file()
        if not usable and name is not None:
            usable = read_source(RUNS / name) == path.resolve()
    except OSError:  # such as a name that is too long
        usable = False
    if not usable or not is_checkpoint_name(path):
        fix = "give auto, never, or a folder runs/<run>/checkpoints/step-<number>"
        raise CheckpointError(Problem("is no checkpoint", f"--resume {resume}", fix=fix))
    return path


def agree_on_folder(request: Request, source: Path | None, worker: Worker) -> Path:
    """The run folder that the command means, the same on every rank. Collective.

    Raises ConfigError on rank 0 as `choose_folder` does.
    """
    # Only rank 0 looks: another rank could find the folder that rank 0 has just made, and take the next number.
    found = None
    if worker.is_lead:
        found = str(_find_folder(request, source))
    return Path(worker.group.broadcast(found))


def _find_folder(request: Request, source: Path | None) -> Path:
    """With --resume PATH a new folder, or that of the run that began from there and has not finished."""
    config_name = request.config_name
    recipe = request.config.recipe
    steps = request.config.train.steps
    if source is None:
        return choose_folder(config_name, recipe, request.name, request.resume, steps)

    # The same command again goes on with the run that it began, instead of beginning another one. Without --name that
    # run has the usual name, or this name with a number.
    if request.name is not None:
        candidates = [RUNS / request.name]
    else:
        base = base_name(config_name, recipe)
        prefix = f"{base}-"
        folders = sorted(RUNS.glob("*"))
        numbered = [each for each in folders if each.name.removeprefix(prefix).isdecimal()]
        same_name = [RUNS / base, *numbered]
        candidates = [folder for folder in same_name if not is_finished(folder, steps)]
    for folder in candidates:
        began_there = read_source(folder) == source.resolve()
        if began_there and (folder / "config.yaml").exists():
            return folder

    return choose_folder(config_name, recipe, request.name, "never", steps)


def find_start(
    request: Request, config: RunConfig, folder: Path, source: Path | None
) -> StartingPoint:
    """Whether the run in `folder` goes on, and with which config. Changes nothing on disk. Collective.

    Raises CheckpointError for a resume that changes what must stay, for files of different runs in one folder, and on
    every rank if only some of them have the run.
    """
    resuming = (folder / "config.yaml").exists()
    agree_on_run(folder, resuming)
    origin = None
    if resuming:
        origin = folder
    elif source is not None:
        origin = source.parent.parent
    # The vocabulary is that of the run whose state is loaded.
    if origin is not None:
        config = adopt_vocab(origin, config)
    resumed = None
    if resuming:
        sha256 = request.recipe.sha256()
        resumed = check_resumable(folder, config, sha256, request.accepted)
        # A ledger that cannot be read is refused here, before anything is written.
        load_ledger(folder)
    return StartingPoint(folder, config, source, origin, resumed)


def finished_text(folder: Path, steps: int) -> str:
    """What to say of a run that ended with at least `steps` steps done, and has the checkpoint of its last; else ""."""
    if not is_finished(folder, steps):
        return ""
    # Without that checkpoint, outcome.json may have been copied from another run.
    last = read_outcome(folder)["step"]
    if not (folder / "checkpoints" / step_name(last)).is_dir():
        return ""
    return f"{folder} has finished its {number_of(last, 'step')}; see harness inspect {shlex.quote(str(folder))}"


def take_back(start: StartingPoint, worker: Worker) -> list[int]:
    """Move the run's last save from its fallback folder into its own, if the last start had to save there.

    Returns the steps of what was moved. For rank 0, before config.yaml is written again: the folder is named there.
    """
    steps: list[int] = []
    if not start.resuming:
        return steps
    for fallback in fallback_folders(start.folder, start.config.checkpoint.emergency_path):
        step = move_from_fallback(open_store(start.folder, worker), fallback)
        if step:
            steps.append(step)
    return steps


def choose_state(start: StartingPoint, worker: Worker, store: Store) -> InitialState:
    """What to load before the first step. Collective. Raises CheckpointError if the run's checkpoints were lost."""
    if not start.resuming:
        return InitialState(None, start.source)
    if ENGINES[worker.engine].sharded and worker.group.world_size > 1:
        newest = newest_valid_together(worker.group, store)
    else:
        # Rank 0 alone reads the checkpoints to verify them: once, not once for each rank.
        found = store.newest_valid() if worker.is_lead else None
        newest = worker.group.broadcast(found)
    if newest is not None:
        return InitialState(newest, None)
    _check_not_lost(worker, start.folder)
    # A run that was killed before its first save begins again where it began.
    return InitialState(None, start.source or read_source(start.folder))


def _check_not_lost(worker: Worker, folder: Path) -> None:
    """Refuse to start over a run that has saved checkpoints and has none left. Raises CheckpointError on every rank."""
    lost = _lost_checkpoint(folder) if worker.is_lead else 0
    if step := worker.group.broadcast(lost):
        what = f"the journal says that the checkpoint of step {step} was saved, and none is there"
        fix = "restore them from a copy of this run, or begin again: --resume never, with another --name or with none"
        raise CheckpointError(Problem(what, str(folder / "checkpoints"), fix=fix))


def _lost_checkpoint(folder: Path) -> int:
    """Step of the newest checkpoint that the journal reports as saved; 0 if there is none.

    Also 0 while any checkpoint is there, even one that was set aside as damaged.
    """
    journal = folder / JOURNAL
    checkpoints = (folder / "checkpoints").glob("*step-*")
    if any(checkpoints) or not journal.is_file():
        return 0
    newest = 0
    for row in read_rows(journal, metrics=False):
        if row["kind"] == "checkpoint" and row["state"] == "saved":
            newest = max(newest, row["step"])
    return newest


def check_own_ledger(
    worker: Worker, ledger: RunLedger, initial: InitialState, store: Store
) -> None:
    """Refuse another run's ledger before anything is written under its attempt. Collective.

    Raises CheckpointError on every rank. `TrainState.resume` checks the same when the state is loaded. By then rows of
    the ledger's attempt are in the journal, and the run's own ledger would be refused as older than those. Rows of
    attempt 1 do no such harm.
    """
    step = initial.step
    if step is None or ledger.attempt == 1:
        return
    related = True
    if worker.is_lead:
        _, meta = store.load(step, parts=())
        # A damaged value is refused where the state is loaded.
        saved = meta.get("ledger")
        related = not isinstance(saved, str) or ledger.continues(saved)
    if not worker.group.broadcast(related):
        raise CheckpointError(unrelated_ledger(step, ledger.attempt))


def check_ledger(worker: Worker, folder: Path, attempt: int, journaled: int) -> None:
    """Refuse a ledger that is older than the journal. Collective. Raises CheckpointError on every rank.

    attempt: of the ledger. journaled: the newest attempt that has rows in the journal.
    """
    if lost := worker.group.broadcast(journaled if journaled > attempt else 0):
        why = f"the journal has steps of attempt {lost}; incidents.json knows of {attempt}"
        raise CheckpointError(lost_ledger(str(folder / "incidents.json"), why))


def load_state(
    run: Run,
    start: StartingPoint,
    initial: InitialState,
    taken_back: Sequence[int],
    accepted: Sequence[str],
) -> None:
    """Load what `choose_state` chose and log it. Collective. Raises CheckpointError for a checkpoint that does not fit.

    taken_back: what `take_back` returned.
    accepted: keys of --accept-changed.
    """
    if start.resuming and not initial.step and not initial.source:
        run.telemetry.screen.say("no checkpoint was saved before the run ended: it starts over")
    for step in taken_back:
        text = f"the last save, made elsewhere, is in {run.folder} now"
        run.telemetry.tell(step, "checkpoint.taken_back", text)
    if initial.source is not None:
        _load_source(run, initial.source)
    elif initial.step is not None:
        _load_own(run, initial.step, accepted)


def _load_source(run: Run, source: Path) -> None:
    """Begin with the state in a checkpoint of another run."""
    telemetry = run.telemetry
    step = int(source.name.removeprefix("step-"))
    store = Store(source.parent, readonly=True)
    tensors, meta = run.recovery.read(step, store)
    run.state.load_state_dict(tensors, meta)

    # Windows that were bad for the other run are bad for this one, if it reads the same data in the same order.
    theirs = source.parent.parent
    if same_data_order(run.folder, theirs):
        ledger = run.state.ledger
        ledger.inherit(load_ledger(theirs).skipped_windows)
        if run.engine.rank == 0:
            run.recovery.keep_ledger(ledger)
    telemetry.event(step, "run.started_from", path=str(source))
    telemetry.screen.event(f"started from {source}")

    # A kill before the first periodic save must not lose where the run started.
    run.recovery.save_and_verify({})


def _load_own(run: Run, step: int, accepted: Sequence[str]) -> None:
    """Go on from this run's checkpoint of `step`."""
    telemetry = run.telemetry
    bound_to = run.recovery.bound
    run.recovery.load(step, lambda meta: check_bound(step, meta.get("bound"), bound_to, accepted))
    for problem in run.recovery.store.quarantined:
        telemetry.event(step, "checkpoint.quarantined", text=str(problem))
        telemetry.screen.event(f"set aside: {problem}")
    telemetry.count(step, _applied_updates(run), run.state.ledger)
    telemetry.event(step, "run.resumed")
    telemetry.screen.event(f"resumed at step {step}")


def _applied_updates(run: Run) -> int:
    """Updates that the loaded optimizer has applied: steps without those that were skipped."""
    return int(cast(OptimizerPart, run.state.parts["optimizer"]).applied)


def log_changes(run: Run, start: StartingPoint, initial: InitialState) -> None:
    """Log which keys this start changes, and a jump of the learning rate that follows, before the first update."""
    resumed = start.resumed
    if resumed is not None and resumed.changes:
        text = "; ".join(map(str, resumed.changes))
        text += _other_samples(resumed.saved, run)
        changes: list[list[Any]] = []
        accepted: list[str] = []
        for change in resumed.changes:
            changes.append([change.key, change.old, change.new])
            if change.key in resumed.accepted:
                accepted.append(change.key)
        run.telemetry.tell(
            run.state.step,
            "run.changed",
            text,
            changes=changes,
            accepted=accepted,
            config=resumed.saved.model_dump(mode="json"),
        )

    # Weights of another run may begin this one: its schedule is compared as well.
    before = resumed.saved if resumed is not None else _config_of(initial.source)
    if before is None or Schedule.of(before.train) == Schedule.of(run.config.train):
        return
    applied = _applied_updates(run)
    factor = run.guard.judge.lr_factor
    if jump := lr_jump(before.train, run.config.train, applied, factor):
        step = run.state.step
        run.telemetry.tell(step, "train.lr_jump", jump.text, last=jump.last, next=jump.next)


def _other_samples(before: RunConfig, run: Run) -> str:
    """Which part of the order of samples another global batch skips, or trains on again; empty if it is the same."""
    window = run.guard.window
    then, now = window * before.train.global_batch, window * run.config.train.global_batch
    if now > then:
        return f"; samples {then} to {now - 1} of the order of all epochs are skipped"
    if now < then:
        return f"; samples {now} to {then - 1} of the order of all epochs are trained on again"
    return ""


def _config_of(source: Path | None) -> RunConfig | None:
    """The config of the run that saved the checkpoint `source`; None without one, or if it cannot be read."""
    if source is None:
        return None
    folder = source.resolve().parent.parent
    try:
        return load_config(str(folder / "config.yaml"))
    except ConfigError:
        return None
