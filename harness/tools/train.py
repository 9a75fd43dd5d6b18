"""The main job, end to end: worker, folder, plan, data, engine, loop, report, summary."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from harness.build import (
    ENGINES,
    Worker,
    build_data,
    build_plan,
    build_run,
    build_task,
    join_worker,
    open_store,
    open_telemetry,
    read_ledger,
)
from harness.capability.cards import GIB
from harness.checkpoint.policy import load_ledger
from harness.checkpoint.recovery import bring_back, spare_folders
from harness.checkpoint.store import Store, check_unfinished, lacks_room
from harness.core.config import (
    RunConfig,
    data_doubts,
    flat,
    left_out,
    load_config,
    snapshot_plan,
    unwatched,
    warmup_doubt,
)
from harness.core.errors import CheckpointError, ConfigError, ExitCode, MachineError, Problem, tell_wrapper
from harness.core.facts import Outcome
from harness.core.files import step_name
from harness.core.memory import all_memory
from harness.core.state import lost_ledger, state_bytes
from harness.data.source import source_changes
from harness.engines.process_group import lost_rank_named
from harness.engines.torch_engine import OptimizerPart
from harness.models import check_vocab
from harness.models.huggingface import tokenizer_of
from harness.optim.optimizers import optimizer_bytes
from harness.optim.schedule import Schedule, lr_jump
from harness.precision.plan import Plan
from harness.report.inspect import trained_on
from harness.run import Run
from harness.run import train as train_run
from harness.run_folder import (
    RUNS,
    Resumed,
    RunLock,
    adopt_vocab,
    base_name,
    bound,
    check_bound,
    check_resumable,
    choose_folder,
    fit_vocab,
    forget_outcome,
    forget_run,
    is_checkpoint_name,
    is_finished,
    read_outcome,
    read_plan,
    read_source,
    same_data_order,
    write_config,
    write_plan,
    write_source,
)
from harness.telemetry import undeliverable
from harness.tools.start import Request
from harness.tracking.console import Console, plan_table
from harness.tracking.journal import JOURNAL, read_rows


@lost_rank_named()
def train(request: Request) -> int:
    """Run the job on this rank; returns its exit code. Raises HarnessError before any work starts."""
    config = _with_own_tokenizer(request.config)
    source = _find_source(request.resume, request.name)
    worker = join_worker(config, request.launcher)
    lead = worker.group.rank == 0
    problems = undeliverable(config.tracking, "tracking.mlflow=false") if lead else []
    if problems := worker.group.broadcast([asdict(each) for each in problems] if lead else None):
        raise MachineError([Problem(**each) for each in problems])
    folder = Path(worker.group.broadcast(str(_find_folder(request, source)) if lead else None))
    with RunLock(folder) if lead else nullcontext():
        resuming = (folder / "config.yaml").exists()
        resumed = None
        if resuming or source:
            config = adopt_vocab(folder if resuming or source is None else source.parent.parent, config)
        if resuming:
            resumed = check_resumable(folder, config, request.recipe.sha256(), request.accepted)
            check_unfinished(folder / "checkpoints", load_ledger(folder))
        console = Console(config.train.steps, stream=None if lead else open(os.devnull, "w"))  # noqa: SIM115
        if is_finished(folder, config.train.steps) and _end_is_saved(folder):
            console.say(f"{folder} has finished its {read_outcome(folder)['step']} steps; see harness inspect {folder}")
            return ExitCode.DONE
        origin = folder if resuming else source.parent.parent if source else None
        earlier = worker.group.broadcast(read_plan(origin) if lead and origin else None)
        if lead and not resuming:
            forget_run(folder)  # an earlier start may have been killed before it was a run
        data = build_data(config, folder, worker)
        config = fit_vocab(config, data.ids, data.vocab)
        plan, model = build_plan(config, request.recipe, worker, earlier, request.strict)
        if config.guard.enabled and ENGINES[worker.engine].snapshots:
            plan = replace(plan, notes=(*plan.notes, snapshot_plan(config.guard, config.train.steps)))
        check_vocab(model, data.ids, config.model.target)
        if request.strict and not plan.rungs[0].taken:
            raise MachineError(
                Problem(
                    f"--strict: the recipe's first rung, {plan.rungs[0].rung}, cannot run here",
                    f"recipe {request.recipe.name}",
                    why=plan.rungs[0].reason,
                    fix="run on another machine, or drop --strict to take the next rung",
                )
            )
        size = state_bytes(model, optimizer_bytes(model, config.train))
        if problems := worker.group.broadcast([asdict(each) for each in _room(folder, size)] if lead else None):
            raise CheckpointError([Problem(**each) for each in problems])
        if problem := _memory(model, optimizer_bytes(model, config.train), worker):
            raise MachineError(problem)
        task, doubt = build_task(config, plan, model, data)
        started = request.launcher if config.engine.name == "auto" else f"{request.launcher}, engine {worker.engine}"
        console.say(f"run {folder}  ({started}, {worker.group.world_size} rank(s) on {worker.device.type})")
        console.say(plan_table(plan.as_dict()))
        back: list[int] = []
        if lead:
            # Before config.yaml forgets where the last save of a run without room may be.
            for spare in spare_folders(folder, config.checkpoint.emergency_path) if resuming else ():
                back += filter(None, [bring_back(open_store(folder, worker), spare)])
            with _writing(folder):
                if source and not resuming:
                    write_source(folder, source)
                if not resuming:
                    write_config(folder, config)
                    write_plan(folder, plan.as_dict())
        store = open_store(folder, worker)
        ledger = read_ledger(folder, worker, store)
        start = worker.group.broadcast(store.newest_valid() if lead else None) if resuming else None
        if resuming and start is None:
            _check_not_lost(worker, folder)
        if resuming:  # a kill before the first save must not lose where the run was to start from
            source = (source or read_source(folder)) if start is None else None
        telemetry = open_telemetry(
            config, folder, worker, console, ledger.attempt, (start or 0) + 1 if resuming else None
        )
        with ExitStack() as closed, telemetry:
            _check_ledger(worker, folder, ledger.attempt, telemetry.journal.standing_attempt)
            facts = {**data.facts(), "unit": task.unit}
            for line in trained_on(facts, flat(config.model_dump(mode="json"))):
                console.say(f"data {line}")
            for line in data_doubts(config, facts):
                console.say(f"data note: {line}")
            in_fp8 = bool(plan.fp8_layers())
            stats_every = request.recipe.fp8.stats_every if in_fp8 else None
            if told := left_out(config, stats_every, worker.group.world_size):
                console.say(told)
            console.unit, console.counted = task.unit, facts.get("counted", "tokens")
            telemetry.begin(_tags(plan, worker), flat(config.model_dump(mode="json")), facts)
            if (text := warmup_doubt(config.train)) and (resumed is None or resumed.changes):
                telemetry.tell(start or 0, "train.warmup", text)
            if text := unwatched(config.guard.enabled, request.recipe.fallback.enabled, in_fp8):
                telemetry.tell(start or 0, "precision.unwatched", text)
            for text in worker.group.broadcast(source_changes(config.data, folder / "data") if lead else None):
                telemetry.tell(start or 0, "data.source", text)
            if doubt:
                telemetry.tell(start or 0, "loss.unit", doubt)
            run = build_run(config, request.recipe, folder, worker, plan, model, data, telemetry, ledger, store, task)
            run.recovery.bound = bound(config, request.recipe.sha256(), facts)
            try:
                if resuming and not start and not source:
                    telemetry.screen.say("no checkpoint was saved before the run ended: it starts over")
                for step in back:
                    telemetry.tell(step, "checkpoint.taken_back", f"the last save, made elsewhere, is in {folder} now")
                try:
                    _restore(run, source, start, request.accepted)
                except CheckpointError:
                    if lead and not resuming:
                        closed.callback(forget_run, folder)  # once the journal is closed
                    raise
                _tell_changes(run, resumed, source)
                if lead:  # what does not load changes nothing
                    with _writing(folder):
                        if resuming:
                            write_config(folder, config)
                            write_plan(folder, plan.as_dict())
                        forget_outcome(folder)
                telemetry.ship()
                outcome = _drive(run)
                _finish(run, plan, outcome)
            finally:
                run.engine.close()
        run.stop.uninstall(outcome.exit_code)
        telemetry.farewell()
        return int(outcome.exit_code)


def _with_own_tokenizer(config: RunConfig) -> RunConfig:
    """`config` with the tokenizer that lies beside a Hugging Face model, where the user names none: the model knows the
    tokens of no other, and bytes would be taken for its first 256."""
    found = tokenizer_of(config.model.target) if config.data.tokenizer is None and config.data.target is None else None
    if found is None:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": str(found)})})


def _find_source(resume: str, name: str | None) -> Path | None:
    """The checkpoint that --resume names; None for auto and never. Raises CheckpointError if it cannot be one.

    A run that has begun from it goes on, whether it is still there or not.
    """
    if resume in ("auto", "never"):
        return None
    path = Path(resume)
    try:
        there = (path / "manifest.json").is_file() or (name is not None and read_source(RUNS / name) == path.resolve())
    except OSError:  # such as a name that is too long
        there = False
    if not there or not is_checkpoint_name(path):
        fix = "give auto, never, or a folder runs/<run>/checkpoints/step-<number>"
        raise CheckpointError(Problem("is no checkpoint", f"--resume {resume}", fix=fix))
    return path


def _find_folder(request: Request, source: Path | None) -> Path:
    """The run folder that the command means: with --resume PATH a new one, or the one that has begun from there.

    Raises ConfigError as `choose_folder` does.
    """
    config_name, recipe, steps = request.config_name, request.config.recipe, request.config.train.steps
    if source is None:
        return choose_folder(config_name, recipe, request.name, request.resume, steps)
    if request.name is not None:
        begun = [RUNS / request.name]
    else:
        base = base_name(config_name, recipe)
        numbered = (folder for folder in RUNS.glob("*") if folder.name.removeprefix(f"{base}-").isdecimal())
        begun = [folder for folder in (RUNS / base, *sorted(numbered)) if not is_finished(folder, steps)]
    for folder in begun:
        if read_source(folder) == source.resolve() and (folder / "config.yaml").exists():
            return folder
    return choose_folder(config_name, recipe, request.name, "never", steps)


def _room(folder: Path, bytes_each: int) -> list[Problem]:
    """Why the checkpoints of the run in `folder` will not fit, or cannot be written; empty if nothing is wrong."""
    checkpoints = folder / "checkpoints"
    try:
        there = Store(checkpoints, readonly=True).steps()
    except OSError as error:
        fix = "move it away, or give the run another --name"
        return [Problem("the checkpoints cannot be looked at", str(checkpoints), str(error.strerror), fix)]
    return lacks_room(checkpoints if checkpoints.is_dir() else folder, bytes_each, len(there))


def _memory(model: nn.Module, optimizer: int, worker: Worker) -> Problem | None:
    """Why training on the CPU takes more than all memory, activations not counted; None where that is not plain.

    optimizer: bytes of its state. An engine that shards the state may hold less of it here.
    """
    if worker.device.type != "cpu" or not ENGINES[worker.engine].snapshots:
        return None
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    ranks, there = worker.launch.local_world_size, all_memory()
    needed = ranks * (weights + gradients + optimizer)
    if not there or needed <= there:
        return None
    parts = f"weights {weights / GIB:,.1f}, gradients {gradients / GIB:,.1f}, optimizer {optimizer / GIB:,.1f} GiB"
    return Problem(
        f"needs at least {needed / GIB:,.1f} GiB to be trained, and this machine has {there / GIB:,.1f}, swap included",
        f"model of {sum(parameter.numel() for parameter in model.parameters()):,} parameters",
        f"on the CPU: {parts}" + (f", on each of {ranks} ranks" if ranks > 1 else ""),
        "train a smaller model, take an optimizer with less state, or a GPU that holds it (see harness estimate)",
    )


def _end_is_saved(folder: Path) -> bool:
    """Whether there is a checkpoint of the step that outcome.json ends with: the file may be another run's."""
    return (folder / "checkpoints" / step_name(read_outcome(folder)["step"])).is_dir()


_REPLACED = ("config.yaml", "plan.json", "outcome.json")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises CheckpointError for a file of the run that cannot be written; for one in whose place there is a folder
    before any is, as what is refused changes nothing.
    """
    try:
        for name in _REPLACED:
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder / name))
        yield
    except OSError as error:
        where = error.filename2 or error.filename or folder
        fix = "move away what is there, or make room"
        raise CheckpointError(Problem("cannot be written", str(where), error.strerror or str(error), fix)) from error


def _check_ledger(worker: Worker, folder: Path, attempt: int, journaled: int) -> None:
    """Refuse a ledger that is older than what the journal has. Raises CheckpointError on every rank."""
    if lost := worker.group.broadcast(journaled if journaled > attempt else 0):
        why = f"the journal has steps of attempt {lost}; incidents.json knows of {attempt}"
        raise CheckpointError(lost_ledger(str(folder / "incidents.json"), why))


def _check_not_lost(worker: Worker, folder: Path) -> None:
    """Refuse to start over a run that has saved checkpoints and has none left. Raises CheckpointError on every rank."""
    if step := worker.group.broadcast(_lost_checkpoint(folder) if worker.group.rank == 0 else 0):
        what = f"the journal says that the checkpoint of step {step} was saved, and none is there"
        fix = "put them back from a copy of this run, or begin anew: --resume never, with another --name or with none"
        raise CheckpointError(Problem(what, str(folder / "checkpoints"), fix=fix))


def _lost_checkpoint(folder: Path) -> int:
    """The newest step that the journal has as saved; 0 if there is none, or if the run set its checkpoints aside."""
    if any((folder / "checkpoints").glob("*step-*")) or not (folder / JOURNAL).is_file():
        return 0
    rows = read_rows(folder / JOURNAL, metrics=False)
    return max((row["step"] for row in rows if row["kind"] == "checkpoint" and row["state"] == "saved"), default=0)


def _restore(run: Run, source: Path | None, start: int | None, accepted: Sequence[str]) -> None:
    """Load the newest valid checkpoint of this run, or the one that --resume PATH named."""
    telemetry = run.telemetry
    if source is not None:
        step = int(source.name.removeprefix("step-"))
        run.state.load_state_dict(*Store(source.parent, readonly=True).load(step))
        theirs = source.parent.parent
        if same_data_order(run.folder, theirs):
            ledger = run.state.ledger
            ledger.inherit(load_ledger(theirs).skipped_windows)
            if run.engine.rank == 0:
                run.recovery.keep_ledger(ledger)
        telemetry.event(step, "run.started_from", path=str(source))
        telemetry.screen.event(f"started from {source}")
        run.recovery.save_surely({})  # a kill before the first periodic save must not lose where the run started
    elif start is not None:
        bound_to = run.recovery.bound
        run.recovery.load(start, lambda meta: check_bound(start, meta.get("bound"), bound_to, accepted))
        for problem in run.recovery.store.quarantined:
            telemetry.event(start, "checkpoint.quarantined", text=str(problem))
            telemetry.screen.event(f"set aside: {problem}")
        applied = int(cast(OptimizerPart, run.state.parts["optimizer"]).applied)
        telemetry.count(start, applied, run.state.ledger)
        telemetry.event(start, "run.resumed")
        telemetry.screen.event(f"resumed at step {start}")


def _tell_changes(run: Run, resumed: Resumed | None, source: Path | None) -> None:
    """What this resume changes, and where the learning rate goes by that, before the first update.

    source: the checkpoint of another run that this one starts from.
    """
    saved = resumed.saved if resumed is not None else _config_of(source)
    if resumed is not None and resumed.changes:
        opened = [change.key for change in resumed.changes if change.key in resumed.accepted]
        run.telemetry.tell(
            run.state.step,
            "run.changed",
            "; ".join(map(str, resumed.changes)),
            changes=[[change.key, change.old, change.new] for change in resumed.changes],
            accepted=opened,
            config=resumed.saved.model_dump(mode="json"),
        )
    if saved is None or Schedule.of(saved.train) == Schedule.of(run.config.train):
        return
    applied = int(cast(OptimizerPart, run.state.parts["optimizer"]).applied)
    if jump := lr_jump(saved.train, run.config.train, applied, run.guard.judge.lr_factor):
        run.telemetry.tell(run.state.step, "train.lr_jump", jump.text, last=jump.last, next=jump.next)


def _config_of(source: Path | None) -> RunConfig | None:
    """The config of the run that the checkpoint `source` is of; None if it cannot be known."""
    try:
        return None if source is None else load_config(str(source.resolve().parent.parent / "config.yaml"))
    except ConfigError:
        return None


def _drive(run: Run) -> Outcome:
    """The loop under signal handlers; whatever ends it becomes an outcome."""
    run.stop.install()
    if run.engine.rank == 0:
        tell_wrapper(ExitCode.FAILED)  # until there is an outcome: without a word, a wrapper knows that none was lost
    try:
        return train_run(run)
    except BaseException as error:
        _settle(run, error)
        run.telemetry.failed(run.state.step, error)
        raise
    finally:
        run.telemetry.screen.close()


def _settle(run: Run, error: BaseException) -> None:
    """Let what is being saved come to its end; a forced interrupt does not wait for the disk."""
    if not isinstance(error, Exception):
        return
    try:
        run.recovery.settle()
    except Exception as also:  # the same fault may have met both: the first is the one to tell
        run.telemetry.event(run.state.step, "checkpoint.failed", text=f"{type(also).__name__}: {also}")


def _finish(run: Run, plan: Plan, outcome: Outcome) -> None:
    """Outcome, effective precision, plots and report."""
    if run.engine.rank == 0:
        run.telemetry.end(outcome, plan.as_it_ran(run.precision), ("config.yaml",))


def _tags(plan: Plan, worker: Worker) -> dict[str, str]:
    return {
        "precision.requested": plan.requested,
        "precision.resolved": plan.resolved,
        "tier": plan.tier,
        "engine": worker.engine,
        "ranks": str(worker.group.world_size),
        "recipe.sha256": plan.recipe_sha256,
        "git.commit": _git_commit(),
        "torch": torch.__version__,
        "command": " ".join(sys.argv)[:4000],
    }


def _git_commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"
