"""The main job, end to end: worker, folder, data, plan, state, loop, report.

`train` tells the whole story; its pieces follow in the order in which it needs them. What decides where a run starts is
in resume.py, what refuses a job that cannot come to its end in preflight.py.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from harness.build import (
    ENGINES,
    RunData,
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
from harness.checkpoint.store import Store
from harness.core.collectives import gather_texts
from harness.core.config import (
    RunConfig,
    data_doubts,
    flat,
    left_out,
    snapshot_plan,
    unwatched,
    warmup_doubt,
)
from harness.core.errors import (
    CheckpointError,
    ExitCode,
    LostRankError,
    Problem,
    number_of,
    tell_wrapper,
)
from harness.core.facts import Outcome
from harness.core.state import RunLedger
from harness.data.source import source_changes
from harness.engines.deterministic import NOT_SET, knobs
from harness.engines.process_group import lost_rank_named
from harness.models import Task, check_vocab
from harness.models.huggingface import PREFIX, has_stored_weights, tokenizer_of
from harness.precision.plan import Plan
from harness.profiling.recorder import profiler_of
from harness.replay.proof import prove
from harness.report.inspect import trained_on
from harness.run import Run
from harness.run import train as train_run
from harness.run_folder import (
    RunLock,
    bound,
    fit_vocab,
    forget_outcome,
    forget_run,
    read_plan,
    run_identity,
    write_config,
    write_plan,
    write_source,
)
from harness.telemetry import Telemetry
from harness.tools.agreement import agree_on_job, agree_on_start, versions
from harness.tools.preflight import (
    check_delivery,
    check_first_rung,
    check_memory,
    check_room,
    check_shared,
)
from harness.tools.resume import (
    InitialState,
    StartingPoint,
    agree_on_folder,
    check_ledger,
    check_own_ledger,
    choose_state,
    find_source,
    find_start,
    finished_text,
    load_state,
    log_changes,
    take_back,
)
from harness.tools.start import Request
from harness.tracking.console import Console, plan_table
from harness.tracking.history import BYTES


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, found to be possible here.

    config: the final one, with the vocabulary of the data.
    data: opened and checked.
    plan: what every layer computes in.
    model: with its initial weights, not converted yet.
    task: the loss adapter, tried on a sample.
    unit_warning: text if the loss is not in the unit that the data promise; else empty.
    """

    config: RunConfig
    data: RunData
    plan: Plan
    model: nn.Module
    task: Task
    unit_warning: str


@lost_rank_named()
def train(request: Request) -> int:
    """Run the job on this rank; returns its exit code. Raises HarnessError before any work starts."""
    config, source, worker = meet(request)

    # One folder for all ranks. Its lock keeps other processes out until this one has ended.
    folder = agree_on_folder(request, source, worker)
    with RunLock(folder) if worker.is_lead else nullcontext():
        # A run goes on only with the settings that it began with. One that has finished is left as it is.
        start = find_start(request, config, folder, source)
        stream = None if worker.is_lead else open(os.devnull, "w")  # noqa: SIM115
        console = Console(config.train.steps, stream=stream)
        if text := finished_text(folder, config.train.steps):
            console.say(text)
            return ExitCode.DONE

        # Data, plan and model come before the run's own files: a job that cannot run here must not become a run.
        job = prepare(request, start, worker)
        console.say(headline(request, worker, folder))
        console.say(plan_table(job.plan.as_dict()))

        # The folder becomes this run's, and its checkpoints decide which state training begins with.
        taken_back = _begin_folder(start, job, worker) if worker.is_lead else []
        store = open_store(folder, worker)
        ledger = read_ledger(folder, worker, store)
        initial = choose_state(start, worker, store)
        check_own_ledger(worker, ledger, initial, store)

        # The journal begins before the run is built, as building it may already have something to log.
        first_step = (initial.step or 0) + 1 if start.resuming else None
        telemetry = open_telemetry(job.config, folder, worker, console, ledger.attempt, first_step)
        with ExitStack() as journal_closed, telemetry:
            check_ledger(worker, folder, ledger.attempt, telemetry.journal.existing_attempt)
            facts = {**job.data.facts(), "unit": job.task.unit}
            _announce(request, start, initial, job, worker, telemetry, facts)

            # The run, still in its initial state. Its checkpoints will load only with this config, recipe and data.
            run = _build(request, job, folder, worker, telemetry, ledger, store)
            run.recovery.bound = bound(job.config, request.recipe.sha256(), facts)
            # A new run gets its identity here. One that goes on has it from its checkpoint.
            if initial.step is None:
                ledger.begin(run_identity(folder, run.recovery.bound))

            with closing(run.engine):
                # A checkpoint that does not load leaves a resumed run as it was, and no trace of a new one.
                try:
                    load_state(run, start, initial, taken_back, request.accepted)
                except CheckpointError:
                    if worker.is_lead and not start.resuming:
                        journal_closed.callback(forget_run, folder)
                    raise
                log_changes(run, start, initial)
                if worker.is_lead:
                    _go_on_in_folder(start, job)

                # Train. MLflow gets the journal from here on.
                _profile(run, worker)
                telemetry.ship()
                outcome = _drive(run)
                _finish(run, job.plan, outcome)

        # Everything is on disk: a signal may end the process at once, while it waits for MLflow.
        run.stop.uninstall(outcome.exit_code)
        telemetry.farewell()
        return int(outcome.exit_code)


def meet(request: Request) -> tuple[RunConfig, Path | None, Worker]:
    """Meet the other ranks. Returns the config, the checkpoint that --resume names, and this rank. Collective.

    Raises HarnessError. What a rank can refuse alone is refused before the others wait for it.
    """
    config = with_own_tokenizer(request.config)
    source = find_source(request.resume, request.name)
    worker = join_worker(config, request.launcher)
    agree_on_start(request, config, worker)
    check_delivery(config, worker)
    return config, source, worker


def with_own_tokenizer(config: RunConfig) -> RunConfig:
    """`config` with the tokenizer.json beside a Hugging Face model, where the user names no tokenizer.

    Such a model knows only the tokens of its own tokenizer. Without it bytes would be read as its first 256 tokens.
    """
    if config.data.tokenizer is not None or config.data.target is not None:
        return config
    found = tokenizer_of(config.model.target)
    if found is None:
        return config
    data = config.data.model_copy(update={"tokenizer": str(found)})
    return config.model_copy(update={"data": data})


def prepare(request: Request, start: StartingPoint, worker: Worker) -> Job:
    """Data, plan, model and loss, and whether this machine can train them to the end. Collective.

    Raises HarnessError for whatever does not fit together. In the folder only the data are written.
    """
    # The layers of an earlier plan keep their kernels. What a start left that was killed before it was a run goes away.
    earlier = None
    if worker.is_lead and start.origin:
        earlier = read_plan(start.origin)
    earlier = worker.group.broadcast(earlier)
    if worker.is_lead and not start.resuming:
        forget_run(start.folder)
    check_shared(start.folder, start.config, worker)

    # The data come first, as they say how large the model's vocabulary must be.
    data = build_data(start.config, start.folder, worker)
    config = fit_vocab(start.config, data.ids, data.vocab)
    plan, model = build_plan(config, request.recipe, worker, earlier, request.strict, data)
    if config.guard.enabled and ENGINES[worker.engine].snapshots:
        snapshots = snapshot_plan(config.guard, config.train.steps)
        plan = replace(plan, notes=(*plan.notes, snapshots))

    # Ranks that made something else of the same config must not train together.
    agree_on_job(data.facts(), plan, model)

    # Refuse now what would end the run later.
    check_vocab(model, data.ids, config.model.target)
    if request.strict:
        check_first_rung(plan, request.recipe.name)
    check_room(start.folder, model, config, worker)
    check_memory(model, config, worker)
    task, unit_warning = build_task(config, plan, model, data)
    return Job(config, data, plan, model, task, unit_warning)


def headline(request: Request, worker: Worker, folder: Path) -> str:
    """Which run this is, how it was launched and on what."""
    launch = request.launcher
    if request.config.engine.name != "auto":
        launch += f", engine {worker.engine}"
    ranks = number_of(worker.group.world_size, "rank")
    return f"run {folder}  ({launch}, {ranks} on {worker.device.type})"


def _begin_folder(start: StartingPoint, job: Job, worker: Worker) -> list[int]:
    """The files of a new run, or the last save of a resumed one taken back; returns what `take_back` does. Rank 0 only.

    A resumed run's config.yaml stays until its state is loaded, see `_go_on_in_folder`.
    """
    taken_back = take_back(start, worker)
    with _writing(start.folder):
        if not start.resuming:
            if start.source:
                write_source(start.folder, start.source)
            write_config(start.folder, job.config)
            write_plan(start.folder, job.plan.as_dict())
    return taken_back


def _go_on_in_folder(start: StartingPoint, job: Job) -> None:
    """The state is loaded: a resumed run has the present config and plan, and no run has an outcome. Rank 0 only."""
    with _writing(start.folder):
        if start.resuming:
            write_config(start.folder, job.config)
            write_plan(start.folder, job.plan.as_dict())
        forget_outcome(start.folder)


# Parameters of a model that trains in minutes on any CPU.
_FIRST_TRY = 1_000_000
_REPLACED = ("config.yaml", "plan.json", "outcome.json")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Around writes of the run's files: raises CheckpointError, with a fix, for one that cannot be written.

    A folder in the place of such a file is found before anything is written, as a refused start changes nothing.
    """
    try:
        for name in _REPLACED:
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder / name))
        yield
    except OSError as error:
        where = error.filename2 or error.filename or folder
        fix = "move away what is there, or make room"
        why = error.strerror or str(error)
        raise CheckpointError(Problem("cannot be written", str(where), why, fix)) from error


def _announce(
    request: Request,
    start: StartingPoint,
    initial: InitialState,
    job: Job,
    worker: Worker,
    telemetry: Telemetry,
    facts: Mapping[str, Any],
) -> None:
    """Say what the run is, and warn of what its user may not expect. Collective. facts: of the data."""
    params = flat(job.config.model_dump(mode="json"))
    screen = telemetry.screen
    step = initial.step
    for line in first_lines(request, job, worker, facts):
        screen.say(line)
    screen.unit = job.task.unit
    screen.counted = facts.get("counted", "tokens")

    # The journal's first row says what the run is; events come after it.
    telemetry.begin(_tags(job.plan, worker), params, facts)
    for code, text in doubts(request, start, job, worker):
        telemetry.tell(step or 0, code, text)


def first_lines(request: Request, job: Job, worker: Worker, facts: Mapping[str, Any]) -> list[str]:
    """For the screen: the data, and settings that this run is too short to use. facts: of the data."""
    config = job.config
    params = flat(config.model_dump(mode="json"))
    lines = [f"data {line}" for line in trained_on(facts, params)]
    lines += [f"data note: {line}" for line in data_doubts(config, facts)]
    model = config.model
    if model.target.startswith(PREFIX) and not has_stored_weights(model.target, model.args):
        lines.append(f"model {model.target}: new weights, from train.seed")
    stats_every = request.recipe.fp8.stats_every if job.plan.fp8_layers() else None
    if text := left_out(config, stats_every, worker.group.world_size):
        lines.append(text)
    size = sum(parameter.numel() for parameter in job.model.parameters())
    large_on_cpu = worker.device.type == "cpu" and size > _FIRST_TRY
    if large_on_cpu and _slow_products(job.plan, worker):
        lines.append(
            "this CPU has no bf16 instructions, so a step takes several times as long as in float32: "
            "for a first try take --config tiny, or --recipe fp32"
        )
    return lines


def _slow_products(plan: Plan, worker: Worker) -> bool:
    """Whether the layers multiply in a precision for which this CPU has no instructions."""
    return plan.rung.precision in ("bf16", "fp8") and not worker.facts.cpu_bf16_isa


class Doubt(NamedTuple):
    """A warning of a start. code: of its event."""

    code: str
    text: str


def doubts(request: Request, start: StartingPoint, job: Job, worker: Worker) -> list[Doubt]:
    """Warnings, which the journal keeps. Collective."""
    config = job.config
    found: list[Doubt] = []
    # A resume that changes nothing has been warned of its warm-up already.
    text = warmup_doubt(config.train)
    if text and (start.resumed is None or start.resumed.changes):
        found.append(Doubt("train.warmup", text))
    in_fp8 = bool(job.plan.fp8_layers())
    if text := unwatched(config.guard.enabled, request.recipe.fallback.enabled, in_fp8):
        found.append(Doubt("precision.unwatched", text))
    changed = None
    if worker.is_lead:
        changed = source_changes(config.data, start.folder / "data")
    found += [Doubt("data.source", text) for text in worker.group.broadcast(changed)]
    if job.data.facts().get("joined"):
        text = (
            "the tokenizer names no token that ends a document, so the model never sees where one ends: save its "
            "eos_token in tokenizer_config.json beside tokenizer.json, and prepare the data again"
        )
        found.append(Doubt("data.joined", text))
    if text := bytes_doubt(job):
        found.append(Doubt("data.bytes", text))
    if job.unit_warning:
        found.append(Doubt("loss.unit", job.unit_warning))
    return found


def bytes_doubt(job: Job) -> str:
    """A warning of weights that were trained with another tokenizer than the data have, which is none; else empty."""
    model = job.config.model
    if not has_stored_weights(model.target, model.args):
        return ""
    size = job.task.vocab_size
    if job.task.unit != BYTES or size is None or size <= job.data.ids:
        return ""
    return (
        f"a token is a byte, and {model.target} has stored weights of a vocabulary of {size:,}: its own tokens mean "
        "something else. Put its tokenizer.json into the folder (AutoTokenizer.from_pretrained(...).save_pretrained "
        "writes one), or set data.tokenizer"
    )


def _tags(plan: Plan, worker: Worker) -> dict[str, str]:
    """Tags of the run. Versions and card are for `harness compare`: they can change a run's bits, and its speed."""
    installed = {f"version.{name}": text for name, text in versions(worker.facts).items() if text}
    devices = worker.facts.devices
    card: dict[str, str] = {}
    if devices and plan.tier != "CPU":
        card["card"] = devices[0].name
    return {
        **installed,
        **card,
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
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _build(
    request: Request,
    job: Job,
    folder: Path,
    worker: Worker,
    telemetry: Telemetry,
    ledger: RunLedger,
    store: Store,
) -> Run:
    """The run, with every part in its initial state. Collective."""
    return build_run(
        job.config,
        request.recipe,
        folder,
        worker,
        job.plan,
        job.model,
        job.data,
        telemetry,
        ledger,
        store,
        job.task,
    )


def _profile(run: Run, worker: Worker) -> None:
    """Profile the steps of train.profile_steps on this rank; warn if this start comes too late for them."""
    train = run.config.train
    next_step = run.state.step + 1
    profiler = profiler_of(
        run.folder, train.profile_steps, worker.device, worker.group.rank, train.profile_ranks
    )
    run.telemetry.profiler = profiler
    if profiler is not None and profiler.missed(next_step):
        steps = list(train.profile_steps or ())
        text = f"train.profile_steps {steps} were done before this start, without a profile"
        text = f"{text}; the next step is {next_step}"
        run.telemetry.tell(run.state.step, "profile.missed", text)


def _drive(run: Run) -> Outcome:
    """The loop under signal handlers; whatever ends it becomes an outcome."""
    run.stop.install()
    if run.engine.rank == 0:
        # Counts until the outcome overrules it. Without a code, a wrapper that was signalled would report a stop before
        # training.
        tell_wrapper(ExitCode.FAILED)
    try:
        try:
            if run.config.engine.deterministic:
                _log_knobs(run)
                prove(run)
            return train_run(run)
        finally:
            run.telemetry.close_profile(run.state.step)
    except BaseException as error:
        _settle(run, error)
        run.telemetry.failed(run.state.step, error)
        raise
    finally:
        run.telemetry.screen.close()


def _log_knobs(run: Run) -> None:
    """Log every setting on which the bits of a step depend, and ranks with other settings than rank 0's. Collective."""
    settings = knobs(run.config.train.seed)
    own = json.dumps(settings)
    texts = gather_texts(own)
    others = [rank for rank, text in enumerate(texts) if text != own]
    set_ones = [f"{name} {value}" for name, value in settings.items() if value != NOT_SET]
    text = ", ".join(set_ones)
    fields: dict[str, Any] = {"text": text, "knobs": settings}
    if others:
        fields["differ_on_ranks"] = others
    run.telemetry.event(run.state.step, "deterministic.knobs", **fields)
    run.telemetry.screen.say(f"engine.deterministic: {text}")


def _settle(run: Run, error: BaseException) -> None:
    """Wait for the save that is being written; a forced interrupt (no Exception) does not wait for the disk."""
    if not isinstance(error, Exception):
        return
    try:
        # A save by all ranks cannot succeed without the lost one.
        why = "a rank is lost" if isinstance(error, LostRankError) else ""
        run.recovery.settle(why)
    except Exception as another:  # the same fault may cause both, and the caller reports the first
        text = f"{type(another).__name__}: {another}"
        run.telemetry.event(run.state.step, "checkpoint.failed", text=text)


def _finish(run: Run, plan: Plan, outcome: Outcome) -> None:
    """Write the outcome, the precision that every layer really ran in, plots and report."""
    if run.engine.rank == 0:
        run.telemetry.end(outcome, plan.as_it_ran(run.precision), ("config.yaml",))
