"""Composition root of `harness train`: builds a Run from a config.

Here the concrete engine, data, optimizer and files of a run are chosen. Two choices are made from lists elsewhere:
monitors (monitors/registry.py) and precision backends (precision/backends/registry.py). For a loop of the user's own,
precision/prepared.py puts the parts together instead.

In the order of a start: `join_worker`, `build_data`, `build_plan` (with the model), `build_task`, `open_store`,
`read_ledger`, `open_telemetry`, `build_run`. tools/train.py calls them.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.capability.cards import Card, card_named, check_usable
from harness.capability.probe import MachineFacts, probe
from harness.checkpoint.policy import Retention, RollbackTargets, load_ledger, save_ledger
from harness.checkpoint.recovery import Recovery, fallback_folder, finish_rollback
from harness.checkpoint.saver import Saver
from harness.checkpoint.snapshots import Snapshots, room_for_snapshots
from harness.checkpoint.staging import Staging
from harness.checkpoint.store import Store
from harness.core.collectives import ForwardClock, RankComparison, gather_texts, ranks_here
from harness.core.config import RunConfig
from harness.core.deferred import CannotDeferError, try_model
from harness.core.errors import ConfigError, MachineError, Problem
from harness.core.facts import NO_LABEL, RungVerdict
from harness.core.files import harness_version
from harness.core.health import check_batch
from harness.core.memory import free_memory
from harness.core.protocols import Batches, Engine, Monitor, PrecisionBackend, Stateful
from harness.core.state import RandomState, RunLedger, TrainState, seed_everything, state_bytes
from harness.data.batches import TokenBatches, check_world
from harness.data.dataset import DatasetBatches, open_dataset
from harness.data.mixture import Mixture, prepare_mixture
from harness.data.prefetch import Prefetched, Watch
from harness.data.tokens import TokenData, prepare
from harness.engines.deepspeed import DeepSpeedEngine
from harness.engines.deterministic import choose_deterministic
from harness.engines.fsdp import FsdpEngine
from harness.engines.process_group import Launch, ProcessGroup, choose_device, join, read_launch
from harness.engines.torch_engine import TorchEngine
from harness.guard import Guard
from harness.models import Task, build_deferred, build_model, recompute_setting
from harness.models.task import has_lazy, training_flops
from harness.monitors.base import MonitorContext
from harness.monitors.registry import MonitorsPart, build_monitors
from harness.monitors.responder import Judge
from harness.optim.optimizers import build_optimizer, optimizer_bytes, refused_by, waits_for
from harness.optim.schedule import Schedule, too_high
from harness.precision import sharding
from harness.precision.backend_choice import Trial, choose_backend
from harness.precision.compile_cache import cache_dir, remove_unfinished
from harness.precision.compiling import EagerWatch, choose_compiling, compile_blocks
from harness.precision.convert import (
    autocast_dtype,
    build_backend,
    check_half_weights,
    monitor_context,
)
from harness.precision.loss_scale import LossScale, build_loss_scale
from harness.precision.plan import Plan, agree_on_rung, make_plan, take_rung
from harness.precision.recipe import Recipe, Rung
from harness.precision.shape_probe import probe_layers
from harness.replay.flight import Environment, FlightRecorder
from harness.run import RUNG, Run
from harness.stop import StopRequest
from harness.telemetry import Telemetry
from harness.tracking.console import Console
from harness.tracking.journal import JOURNAL, Journal

ENGINES: dict[str, type[Engine]] = {
    "single": TorchEngine,
    "ddp": TorchEngine,
    "fsdp": FsdpEngine,
    "deepspeed": DeepSpeedEngine,
}
"""Engines by their names in `engine.name`. Each class declares what the engine needs and can do."""


RunData = TokenBatches | Prefetched | DatasetBatches
"""What `build_data` gives; all of them are `core.protocols.Batches`."""


def choose_engine(name: str, launcher: str, launch: Launch) -> str:
    """The key in ENGINES for `engine.name`.

    auto: DeepSpeed under its own launcher, DDP for several ranks, else one process.
    launcher: "python", "torchrun" or "deepspeed".

    Raises ConfigError if `name` does not fit the processes that were started.
    """
    if name == "auto":
        if launcher == "deepspeed":
            return "deepspeed"
        return "ddp" if launch.world_size > 1 else "single"

    # An engine that was named must fit the processes that are there.
    where = f"engine.name={name}"
    if name == "single" and launch.world_size > 1:
        what = f"{launch.world_size} ranks were started"
        why = "each of them would train a model of its own"
        fix = "set engine.name to auto, or start one process"
        raise ConfigError(Problem(what, where, why, fix))
    if name != "single" and not launch.launched:
        what = "no launcher started this process"
        why = "it has nobody to share work with"
        fix = "torchrun --nproc-per-node N launch/train.py ..., or engine.name=auto"
        raise ConfigError(Problem(what, where, why, fix))
    return name


def refusals(
    name: str, config: RunConfig, recipe: Recipe, rung: Rung, device: str
) -> list[Problem]:
    """Why the engine `name` cannot train the run on `rung`, whatever its model is; empty if it can.

    docs/reference/engines.md is made of these answers.

    name: its key in ENGINES.
    device: "cpu" or "cuda".
    """
    engine = ENGINES[name]
    problems = engine.refusals(config.engine, rung.precision, device)
    if engine.owns_loss_scale:
        problems += check_half_weights(recipe, rung)
    if not engine.any_optimizer:
        problems += refused_by(name, config.train)
    return problems


@dataclass(frozen=True, slots=True)
class Worker:
    """This process among the other ranks, and on its machine.

    launch: what the launcher says of this process.
    engine: its key in ENGINES.
    device: where it trains.
    facts: cards and libraries of this machine.
    group: this rank of the process group.
    """

    launch: Launch
    engine: str
    device: torch.device
    facts: MachineFacts
    group: ProcessGroup

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, the only one that writes the run's files and speaks on the screen."""
        return self.group.rank == 0


def join_worker(config: RunConfig, launcher: str) -> Worker:
    """Look at the machine and join the process group.

    launcher: "python", "torchrun" or "deepspeed".

    Raises MachineError if torch cannot use the GPU that is here, or the engine cannot start; ConfigError if the engine
    does not fit the launcher, or the batch does not divide over the ranks.
    """
    # Everything that one process can find out alone.
    facts = probe()
    problems = check_usable(facts)
    launch = read_launch()
    check_world(config.train.global_batch, config.train.micro_batch, launch.world_size)
    engine = choose_engine(config.engine.name, launcher, launch)
    problems += ENGINES[engine].lacking("cuda" if facts.cuda_available else "cpu")
    if problems:
        raise MachineError(problems)

    # Settings of this process, before it computes anything.
    if config.engine.deterministic:
        choose_deterministic(config.engine.may_compile(facts.cuda_available))
    _set_threads(config.train.threads, launch)

    # Meet the other ranks.
    device = choose_device(launch)
    join(launch, device, config.engine.timeout_seconds)
    return Worker(launch, engine, device, facts, ProcessGroup(device))


def _set_threads(threads: int, launch: Launch) -> None:
    """Set the CPU threads of this rank. 0: an equal share of the cores, unless OMP_NUM_THREADS is set.

    Ranks that oversubscribe the cores they share are 10 times slower and more.
    """
    if threads == 0 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // launch.local_world_size)
    if threads:
        torch.set_num_threads(threads)


# ZeRO gives each rank a part of the gradients, so DeepSpeed measures them.
_DEEPSPEED_NORM = (
    "gradient norms are DeepSpeed's own: those of ranks are added in float32, not float64"
)


def kept_copies(config: RunConfig, engine: str, rung: Rung, model: nn.Module) -> str:
    """As `sharding.kept_copies`, for a run; empty if it shards nothing, or recomputes its blocks.

    model: not sharded yet.
    """
    setting = recompute_setting(config.model, model)
    if not ENGINES[engine].sharded or setting == "":
        return ""
    return sharding.kept_copies(rung.precision, model, setting)


def build_plan(
    config: RunConfig,
    recipe: Recipe,
    worker: Worker,
    earlier: Mapping[str, Any] | None = None,
    strict: bool = False,
    data: Batches | None = None,
) -> tuple[Plan, nn.Module]:
    """The plan, and the model that it is for, with its initial weights (a function of train.seed alone). Collective.

    earlier: plan.json of the run that is resumed.
    data: for `fp8.backend: auto`, which times a block on the first micro-batch; None: it times nothing.
    strict: take the rung that the ranks agree on, even if the model has nothing to run on it.

    Raises ConfigError if engine, optimizer or model do not fit the rung.
    """
    # The model, once it is built: for the first rung that is tried. Later rungs are tried with the same one.
    built: list[nn.Module] = []
    notes: list[str] = []
    if worker.engine == "deepspeed" and config.engine.zero_stage > 0:
        notes.append(_DEEPSPEED_NORM)

    def plan_for(rung: Rung, verdicts: list[RungVerdict]) -> Plan:
        # What does not fit the rung is refused before the model takes its time and memory.
        if problems := refusals(worker.engine, config, recipe, rung, worker.device.type):
            raise ConfigError(problems)

        # The next rung down is planned for the same model.
        if not built:
            model, why_whole = _new_model(config, worker)
            built.append(model)
            notes.extend(why_whole)
        model = built[0]
        fuse = recipe.layers.fuse
        compiling = choose_compiling(config.engine.compile, rung, model, worker.device, fuse)

        plan = make_plan(recipe, worker.facts, rung, verdicts, model)
        more = [*notes, compiling.note, kept_copies(config, worker.engine, rung, model)]
        plan = replace(
            plan,
            notes=(*plan.notes, *filter(None, more)),
            compiled=compiling.compiled,
            compile_failed=compiling.failed,
        )
        tokens = config.train.micro_batch * config.data.context
        return probe_layers(
            plan,
            recipe,
            worker.facts,
            worker.device,
            tokens,
            earlier,
            collective_timeout=config.engine.timeout_seconds,
        )

    def take(preferred: str) -> Plan:
        facts, device = worker.facts, worker.device
        if strict:
            return plan_for(*agree_on_rung(recipe, facts, device, preferred=preferred))
        return take_rung(recipe, facts, device, plan_for, preferred)

    def trial() -> Trial | str:
        if data is None:
            return "there are no data to call the model with"
        return _trial(config, worker, built[0], data)

    chosen = earlier.get("backend_choice") if earlier else None
    plan = choose_backend(recipe, take, trial, chosen)
    return plan, built[0]


def _trial(config: RunConfig, worker: Worker, model: nn.Module, data: Batches) -> Trial | str:
    """The model and a call of it on the first micro-batch, to time a block of it; or why it cannot be called yet."""
    if has_lazy(model):
        return "its lazy modules get their sizes in the first step"
    task = Task(model, config.model.target, data.unit)
    ranks = config.train.global_batch // config.train.micro_batch
    first = data.micro_batches(data.window(0), 0, ranks)[0]
    # An id out of range would end the process on a GPU. What is wrong is reported when the run checks its data.
    if check_batch(first, task.vocab_size, task.classes) & ~NO_LABEL:
        return "samples of the first micro-batch are unfit"
    batch = {name: each.to(worker.device) for name, each in first.items()}
    return Trial(model, lambda model: task.loss(model, batch), worker.device, worker.facts)


def _new_model(config: RunConfig, worker: Worker) -> tuple[nn.Module, list[str]]:
    """The model with its initial weights, on the worker's device; for an engine that shards it, without memory.

    Also returns a note for the plan if such an engine gets it whole all the same. Collective.

    Raises ConfigError on every rank if some rank cannot build it.
    """
    notes: list[str] = []
    if ENGINES[worker.engine].sharded:
        seed_everything(config.train.seed)
        model, why = None, ""
        with _refused_together(config):
            try:
                model = build_deferred(config.model, worker.device)
            except CannotDeferError as error:
                why = str(error)
        # A rank that has it whole would have nothing to compare with the others' rows.
        reasons = [each for each in gather_texts(why) if each]
        if model is not None and not reasons:
            return model, notes
        notes.append(f"every rank builds the whole model before it is sharded: {reasons[0]}")

    seed_everything(config.train.seed)
    with _refused_together(config):
        model = build_model(config.model).to(worker.device)
    return model, notes


@contextmanager
def _refused_together(config: RunConfig) -> Iterator[None]:
    """Context around building the model: if it raises ConfigError on some ranks, it does so on all. Collective.

    Without it the others would wait for those ranks, and report them as lost.
    """
    refused: ConfigError | None = None
    try:
        yield
    except ConfigError as error:
        refused = error
    texts = gather_texts("" if refused is None else str(refused))
    if refused is not None:
        raise refused
    problems: list[Problem] = []
    for rank, text in enumerate(texts):
        if text:
            what = f"rank {rank} cannot build the model: {' '.join(text.split())}"
            fix = "give every machine the same files"
            problems.append(Problem(what, f"model.target {config.model.target!r}", fix=fix))
    if problems:
        raise ConfigError(problems)


def build_data(
    config: RunConfig,
    folder: Path,
    worker: Worker,
    read_only: bool = False,
) -> RunData:
    """The run's data, opened and checked. Collective.

    Rank 0 prepares them and writes their description into `folder`; then the other ranks open what it describes.

    read_only: for a folder that has the description already: nothing is written. What is read is still checked.
    """
    train, wanted, watch = config.train, config.data, Watch()
    lead = worker.is_lead and not read_only

    # A data set of the user's own: every rank calls its constructor, and all must get the same samples.
    if wanted.target is not None:
        own = open_dataset(config, folder) if lead else None
        worker.group.barrier()
        # What ranks have is compared later, by all of them together (tools/agreement.py).
        return own or open_dataset(config, folder, read_only=True, compare=worker.is_lead)

    # Tokens, of one source or of a mixture.
    def read(lead: bool) -> list[TokenData]:
        if wanted.mixture:
            return prepare_mixture(wanted, folder, lead, watch)
        return [prepare(wanted, folder, train.global_batch, lead, watch)]

    data = read(lead=True) if lead else []
    worker.group.barrier()
    data = data or read(lead=False)

    sizes = (train.global_batch, train.micro_batch, wanted.val_samples)
    by_documents = wanted.packing == "documents"
    parts: list[TokenBatches] = []
    for each in data:
        part = TokenBatches(each, train.seed, wanted.context, *sizes, by_documents)
        parts.append(part)
    if wanted.mixture:
        weights = [part.weight for part in wanted.mixture]
        return Prefetched(Mixture(parts, weights, train.seed, *sizes), watch)
    # A snapshot of text is small and reads at the speed of memory: nothing to prefetch.
    if data[0].is_snapshot:
        return parts[0]
    return Prefetched(parts[0], watch)


_MASK_SEARCH = 8
"""Micro-batches of the first window that are searched for labels of -100."""


def build_task(
    config: RunConfig,
    plan: Plan,
    model: nn.Module,
    data: Batches,
) -> tuple[Task, str]:
    """The model's loss, tried on one sample of the data before anything is converted.

    Also returns a warning: that the loss is not in the unit that the data promise. Empty if it is.

    Raises ConfigError as `Task.try_on`, and if labels of -100 in the first micro-batches would be trained on.
    """
    # Ask as if there were one rank for each micro-batch: each then has a single one. So only the micro-batches that are
    # looked at are read.
    ranks = config.train.global_batch // config.train.micro_batch
    window = data.window(0)
    searched = range(min(ranks, _MASK_SEARCH))
    autocast = autocast_dtype(plan)
    tasks: list[Task] = []

    def trial() -> str:
        # A second trial begins with nothing that the first one has learnt.
        task = Task(model, config.model.target, data.unit)
        tasks.append(task)
        batches = (data.micro_batches(window, rank, ranks)[0] for rank in searched)
        first = next(batches)
        if data.masked:
            task.try_masks(model, chain([first], batches), autocast)
        return task.try_on(model, first, autocast)

    warning = try_model(model, trial)
    return tasks[-1], warning


def build_run(
    config: RunConfig,
    recipe: Recipe,
    folder: Path,
    worker: Worker,
    plan: Plan,
    model: nn.Module,
    data: Batches,
    telemetry: Telemetry,
    ledger: RunLedger,
    store: Store,
    task: Task | None = None,
) -> Run:
    """Wire every room together. Collective. Parameters keep their identity from `model` to the optimizer.

    task: of `build_task`; None: one that was not tried on the data.
    """
    # What depends on the model as it was built, before it is converted.
    card = _card(worker)
    task = task or Task(model, config.model.target)
    flops = _flops(config, worker, card, model, task, data)
    fp8_weights = plan.fp8_weights(model)

    # Convert the model to compute as planned, and give its update to an engine.
    loss_scale = build_loss_scale(plan, recipe, worker.device)
    backend = build_backend(plan, recipe, model, worker.device, loss_scale)
    watch = _compile(config, plan, model, telemetry)
    fp8_names = plan.names_of(fp8_weights, model)
    del fp8_weights
    engine = _build_engine(config, worker, plan, model, loss_scale, telemetry)
    if engine.sharded:
        backend.gather_weights()
    # Ranks that share a model can look at its initial weights only now.
    _report_high_rate(config, model, telemetry)
    held = dict(model.named_parameters())

    # Monitors watch the run; the state is everything that a resume needs, theirs included.
    own_scale = None if engine.owns_loss_scale else loss_scale
    context = monitor_context(
        recipe,
        backend,
        worker.facts,
        worker.device,
        loss_scale is not None,
        leaves_fp16=own_scale is not None,
    )
    monitors = build_monitors(_with_run(context, config, data, task))
    state = TrainState(_parts(engine, backend, monitors, own_scale), ledger)
    if isinstance(data, Prefetched):
        data.report = lambda text: telemetry.tell(state.step, "data.slow", text)
    telemetry.layers = len(backend.layers)
    telemetry.watch(recipe.fallback)

    # Saving, stopping, judging and rolling back.
    stop = StopRequest(config.train.max_minutes, launched=worker.launch.launched)
    staging = _staging(config, engine, model, telemetry)
    recovery = _recovery(config, folder, state, engine, telemetry, store, staging, stop)
    # Ranks that hold different rows have nothing to compare.
    comparison = None
    if not engine.sharded:
        comparison = RankComparison.of(config.guard, model, engine.device)
    judge = Judge(
        config.guard,
        state,
        backend,
        monitors,
        comparison=comparison,
        seed=config.train.seed,
    )
    snapshots = _snapshots(config, engine, model, telemetry)
    fp8_weights = {layer: held[name] for layer, name in fp8_names.items()}
    # One bundle of a bad step is enough: its samples are those of all ranks.
    keep_flight = None
    if engine.rank == 0:
        environment = environment_of(config, worker, engine)
        keep_flight = FlightRecorder(folder, store, environment).keep
    return Run(
        config=config,
        folder=folder,
        engine=engine,
        precision=backend,
        task=task,
        data=data,
        state=state,
        guard=Guard(judge, telemetry, snapshots, recovery),
        telemetry=telemetry,
        recovery=recovery,
        stop=stop,
        forward_clock=ForwardClock(worker.device),
        stats_every=recipe.fp8.stats_every,
        watch=watch,
        keep_flight=keep_flight,
        ideal=_ideal(flops, worker, card, plan),
        fp8_weights=fp8_weights,
    )


def _report_high_rate(config: RunConfig, model: nn.Module, telemetry: Telemetry) -> None:
    """Report a learning rate that is high for this model."""
    if text := too_high(model, config.train):
        telemetry.event(0, "train.lr_high", text=text)
        telemetry.screen.event(f"train.lr_high: {text}")


def _compile(
    config: RunConfig, plan: Plan, model: nn.Module, telemetry: Telemetry
) -> EagerWatch | None:
    """Have the blocks compiled in the first step, if the plan says so. Returns the watch for blocks that are not."""
    if plan.compiled:
        if text := remove_unfinished():
            telemetry.tell(0, "compile.cache", text)
        watch = compile_blocks(model, may_fall_back=config.engine.compile == "auto")
        telemetry.screen.say(
            f"the first step waits for torch.compile; its code is kept in {cache_dir()}"
        )
        return watch
    if plan.compile_failed:
        telemetry.tell(0, "compile.eager", f"blocks run eager: {plan.compile_failed}")
    return None


def _recovery(
    config: RunConfig,
    folder: Path,
    state: TrainState,
    engine: Engine,
    telemetry: Telemetry,
    store: Store,
    staging: Staging | None,
    stop: StopRequest,
) -> Recovery:
    """What saves the run and returns to a save."""
    keep = config.checkpoint
    # The newest ones would all be too young to be good.
    too_fast = keep.keep * keep.every < keep.healthy_steps
    retention = Retention(store, keep.keep, keep.best, next_good=too_fast)
    saver = Saver(store, retention.prune, staging)
    return Recovery(
        state=state,
        engine=engine,
        tracker=telemetry,
        store=store,
        good=RollbackTargets(store, keep.healthy_steps, saver.committed),
        saver=saver,
        keep_ledger=lambda current: save_ledger(folder, current),
        config=keep,
        asked=stop.requested,
        fallback_folder=fallback_folder(keep.emergency_path, folder),
        # A save that gives up on a rank must end before the collectives do.
        wait_seconds=config.engine.timeout_seconds / 2,
    )


def build_quiet_run(
    config: RunConfig,
    recipe: Recipe,
    folder: Path,
    worker: Worker,
    plan: Plan,
    model: nn.Module,
    data: Batches,
    ledger: RunLedger,
    task: Task,
) -> Run:
    """`build_run` for steps that are looked at, timed or tried: no screen, no copies of the state, no repro bundles.

    folder: for its journal. The caller closes the run's telemetry.
    """
    # Snapshots and saves in the background would take memory for copies of the state.
    without_copies = {
        "checkpoint": config.checkpoint.model_copy(update={"background": False}),
        "guard": config.guard.model_copy(update={"snapshot_every": 0}),
    }
    config = config.model_copy(update=without_copies)
    screen = Console(config.train.steps, stream=io.StringIO())
    with ExitStack() as stack:
        telemetry = open_telemetry(config, folder, worker, screen, ledger.attempt)
        stack.enter_context(telemetry)
        store = open_store(folder, worker)
        run = build_run(
            config, recipe, folder, worker, plan, model, data, telemetry, ledger, store, task
        )
        # It is built, so its telemetry stays open.
        stack.pop_all()
    run.keep_flight = None
    return run


def _with_run(
    context: MonitorContext, config: RunConfig, data: Batches, task: Task
) -> MonitorContext:
    """`context`, which describes the model, with what monitors may ask about the run."""
    return replace(
        context,
        guard=config.guard,
        max_grad_norm=config.train.max_grad_norm,
        warmup_steps=config.train.warmup_steps,
        data=data,
        bad_data=config.data.bad,
        vocab_size=task.vocab_size,
        classes=task.classes,
    )


def _parts(
    engine: Engine,
    backend: PrecisionBackend,
    monitors: Sequence[Monitor],
    loss_scale: LossScale | None,
) -> dict[str, Stateful]:
    """The parts of the TrainState. loss_scale: None where there is none, or the engine keeps its own."""
    parts: dict[str, Stateful] = {
        **engine.parts(),
        "fp8": backend,
        "rng": RandomState(),
        "monitors": MonitorsPart(monitors),
    }
    if loss_scale is not None:
        parts["loss_scale"] = loss_scale
    return parts


def _flops(
    config: RunConfig,
    worker: Worker,
    card: Card | None,
    model: nn.Module,
    task: Task,
    data: Batches,
) -> float:
    """FLOPs of training on one sample; NaN without a card whose peak they could be compared with.

    model: as it was built, not converted: the count must not depend on the precision.
    """
    if card is None:
        return math.nan
    launch = worker.launch
    batches = data.micro_batches(data.window(0), launch.rank, launch.world_size)
    return training_flops(model, task, batches[0]) / config.train.micro_batch


def _card(worker: Worker) -> Card | None:
    """The datasheet of the card that all ranks have; None if there is none, or they have different ones. Collective."""
    here = ""
    if worker.device.type == "cuda":
        here = worker.facts.card(worker.device.index)
    names = set(gather_texts(here))
    if len(names) > 1:
        return None
    return card_named(names.pop())


def _ideal(
    flops: float,
    worker: Worker,
    card: Card | None,
    plan: Plan,
) -> dict[str, float]:
    """Seconds that one sample would take at the cards' peak, for each kind of precision. Empty if no peak is known.

    flops: of training on one sample. Call it after the backend is built, which sets whether float32 products may use
    TF32. See `Run.ideal`.
    """
    if card is None or not math.isfinite(flops):
        return {}
    peaks = card.peaks(tf32=torch.get_float32_matmul_precision() != "highest")
    peaks[RUNG] = peaks[plan.rung.precision]
    # A step's samples are shared by all ranks.
    each_rank = flops / worker.launch.world_size
    return {kind: each_rank / peak for kind, peak in peaks.items() if peak}


def environment_of(config: RunConfig, worker: Worker, engine: Engine) -> Environment:
    """Recipe, ranks, engine and card of a run: part of every repro bundle."""
    card = "cpu"
    if worker.device.type == "cuda":
        card = worker.facts.card(worker.device.index)
    return Environment(config.recipe, engine.world_size, engine.name, card)


def open_store(folder: Path, worker: Worker) -> Store:
    """The store of the run's checkpoints; only rank 0 may write."""
    return Store(
        folder / "checkpoints",
        {"torch": str(torch.__version__), "hopper-harness": harness_version()},
        readonly=not worker.is_lead,
    )


def open_telemetry(
    config: RunConfig,
    folder: Path,
    worker: Worker,
    screen: Console,
    attempt: int = 1,
    resume_step: int | None = None,
) -> Telemetry:
    """The run's telemetry: journal and screen on rank 0, nothing on other ranks.

    attempt: of the ledger.
    resume_step: first step of a resume; None for a new run.
    """
    if worker.is_lead:
        journal = Journal(folder / JOURNAL, attempt, resume_step)
        return Telemetry(folder, journal, screen, config.tracking)
    journal = Journal(Path(os.devnull), attempt, None)
    return Telemetry(None, journal, screen, config.tracking)


def read_ledger(folder: Path, worker: Worker, store: Store) -> RunLedger:
    """What earlier rollbacks of this run decided. Completes a rollback that a kill interrupted. Collective."""
    # Every rank reads the ledger before rank 0 changes it.
    ledger = load_ledger(folder)
    worker.group.barrier()
    if worker.is_lead:
        finish_rollback(ledger, store, lambda current: save_ledger(folder, current))
    ledger.return_to = 0
    return ledger


def _state_size(config: RunConfig, engine: Engine, model: nn.Module) -> int:
    """About how many bytes of the state this rank holds."""
    whole = state_bytes(model, optimizer_bytes(model, config.train))
    return -(-whole // engine.world_size) if engine.sharded else whole


def _staging(
    config: RunConfig, engine: Engine, model: nn.Module, telemetry: Telemetry
) -> Staging | None:
    """Memory that background saves copy the state to. None on ranks that do not save, and if the copies of this
    machine's ranks would take more than a quarter of the free memory. Collective."""
    saves = engine.rank == 0 or engine.sharded
    if not saves or not config.checkpoint.background:
        return None
    size = _state_size(config, engine, model)
    # Of ranks that share the state each copies its own part.
    together = size * ranks_here() if engine.sharded else size
    if together > free_memory() / 4:
        text = "a copy of the state would take over a quarter of the free memory: training waits for every save"
        telemetry.event(0, "checkpoint.waits", text=text)
        return None
    staging = Staging(pinned=engine.device.type == "cuda")
    staging.reserve(size)
    return staging


def _snapshots(
    config: RunConfig, engine: Engine, model: nn.Module, telemetry: Telemetry
) -> Snapshots | None:
    """Snapshots in memory; None if the guard takes none, or a rank has no room for them. Collective."""
    if not (config.guard.enabled and config.guard.snapshot_every and engine.snapshots):
        return None
    size = _state_size(config, engine, model)
    healthy = config.checkpoint.healthy_steps
    overlapped = config.guard.snapshot_copy == "overlapped"
    return room_for_snapshots(size, healthy, engine.device, telemetry, overlapped)


def _build_engine(
    config: RunConfig,
    worker: Worker,
    plan: Plan,
    model: nn.Module,
    loss_scale: LossScale | None,
    telemetry: Telemetry,
) -> Engine:
    train = config.train

    # The engine calls it, as it alone knows the weights that it trains.
    def make_optimizer(weights: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = build_optimizer(model, train, worker.device, weights)
        if text := waits_for(optimizer):
            telemetry.tell(0, "train.optimizer_waits", text)
        return optimizer

    return ENGINES[worker.engine].build(
        config,
        model,
        make_optimizer,
        Schedule.of(train),
        loss_scale,
        autocast_dtype(plan),
        worker.device,
    )
