"""What `harness doctor --config` finds in a config: its data, model, optimizer, engine, and the room that they take.

Everything is opened and built as `harness train` does, in one process and without a run folder. The model has no memory
where that is possible. An error that would end the start is a finding here, and the rest is looked at all the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from harness.build import ENGINES, RunData, Worker, build_data, join_worker, refusals
from harness.capability.probe import MachineFacts
from harness.capability.versions import Setup, bad_pairs, installed_versions
from harness.checkpoint.store import lacks_room
from harness.core.config import RunConfig
from harness.core.deferred import CannotDeferError
from harness.core.errors import CheckpointError, HarnessError, MachineError, Problem
from harness.core.facts import RungVerdict
from harness.core.findings import Finding, refused
from harness.core.protocols import Batch, Batches
from harness.core.state import seed_everything, state_bytes
from harness.data.lints import lint_data
from harness.models import Task, build_deferred, build_model, check_vocab
from harness.models.huggingface import has_stored_weights
from harness.optim.lints import epsilon_finding
from harness.optim.optimizers import optimizer_bytes
from harness.precision.compiling import check_compile
from harness.precision.lints.graph import Graph
from harness.precision.lints.model import lint_model
from harness.precision.plan import Plan, make_plan, resolve, take_rung
from harness.precision.recipe import Recipe, Rung
from harness.run_folder import fit_vocab, place_of_runs
from harness.telemetry import undeliverable
from harness.tools.preflight import lacks_memory


@dataclass(slots=True)
class Examined:
    """What was found on a run.

    resolved: the precision that the model takes, `backend:precision`; empty if none could be planned.
    resolved_why: why it is not the one that this machine takes; empty if it is.
    """

    findings: list[Finding] = field(default_factory=list[Finding])
    resolved: str = ""
    resolved_why: str = ""


def examine(config: RunConfig, recipe: Recipe, facts: MachineFacts) -> Examined:
    """Look at everything that `config` and `recipe` name. Raises nothing that a start would raise."""
    examined = Examined()
    found = examined.findings
    rung, _ = resolve(recipe, facts)
    found += _versions(config, rung, facts)
    silent = undeliverable(config.tracking, "tracking.mlflow=false")
    found += refused("machine.mlflow", silent)
    scale = None
    if rung is not None and rung.precision == "fp16":
        scale = recipe.loss_scale.init
    if finding := epsilon_finding(config.train, scale):
        found.append(finding)
    if rung is None:
        return examined

    # One process stands for all ranks, whatever the engine: it is asked what it refuses.
    with _reported(found, "config.engine"):
        found += _engine(config, recipe, rung, facts)
    alone = config.engine.model_copy(update={"name": "auto"})
    config = config.model_copy(update={"engine": alone})
    worker: Worker | None = None
    with _reported(found, "config.batch"):
        worker = join_worker(config, "python")
    if worker is None:
        return examined

    # The data come before the model, as they say how large its vocabulary must be.
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        data: RunData | None = None
        with _reported(found, "data.refused"):
            data = build_data(config, Path(folder), worker)
        if data is not None:
            with _reported(found, "model.vocabulary"):
                config = fit_vocab(config, data.ids, data.vocab)
        _model(examined, config, recipe, worker, data)
    return examined


@contextmanager
def _reported(found: list[Finding], code: str) -> Iterator[None]:
    """An error that ends this context becomes findings of `code`; one of the machine has a code of its own."""
    try:
        yield
    except MachineError as error:
        found += refused("machine.refused", error.problems)
    except CheckpointError as error:
        found += refused("machine.disk", error.problems)
    except HarnessError as error:
        found += refused(code, error.problems)


def _versions(config: RunConfig, rung: Rung | None, facts: MachineFacts) -> list[Finding]:
    compiles = config.engine.may_compile(facts.cuda_available)
    fp8 = rung is not None and rung.precision == "fp8"
    setup = Setup(installed_versions(), facts.torch_cuda, compiles, fp8)
    return bad_pairs(setup)


def _engine(config: RunConfig, recipe: Recipe, rung: Rung, facts: MachineFacts) -> list[Finding]:
    """What the engine that the config names lacks here, and what it refuses."""
    name = "single" if config.engine.name == "auto" else config.engine.name
    device = "cuda" if facts.cuda_available else "cpu"
    lacking = refused("machine.engine", ENGINES[name].lacking(device))
    problems = refusals(name, config, recipe, rung, device)
    return [*lacking, *refused("config.engine", problems)]


def _model(
    examined: Examined,
    config: RunConfig,
    recipe: Recipe,
    worker: Worker,
    data: RunData | None,
) -> None:
    """Build the model, and add the findings on it, on its room and on the data."""
    found = examined.findings
    model: nn.Module | None = None
    with _reported(found, "model.refused"):
        # What is refused ends up among the findings. Without a model there is nothing more to look at.
        model = _without_memory(config) or _built(config)
    if model is None:
        return
    with _reported(found, "config.optimizer"):
        found += _room(config, model, worker)
    if data is not None:
        with _reported(found, "model.vocabulary"):
            check_vocab(model, data.ids, config.model.target)

    # What a lint says of a layer depends on the precision that the plan gives it.
    plan: Plan | None = None
    with _reported(found, "config.recipe"):
        plan = _planned(recipe, worker, model)
    if plan is None:
        return
    examined.resolved = plan.resolved
    rung, _ = resolve(recipe, worker.facts)
    if rung is not None and rung.name != plan.resolved:
        reasons = {verdict.rung: verdict.reason for verdict in plan.rungs}
        examined.resolved_why = f"not {rung.name}: {reasons[rung.name]}"
    if config.engine.compile == "blocks":
        fuse = recipe.layers.fuse
        problems = check_compile(plan.rung, model, worker.device, fuse)
        found += refused("config.engine", problems)
    task = Task(model, config.model.target, data.unit if data else "loss")
    found += lint_run(config, recipe, plan, model, task, data)


def lint_run(
    config: RunConfig,
    recipe: Recipe,
    plan: Plan,
    model: nn.Module,
    task: Task,
    data: RunData | None,
) -> list[Finding]:
    """The lints of model and data. They build and read once more what they need, and leave all as it was.

    model: not converted; it may be without memory.
    data: None if they could not be opened.
    """
    found: list[Finding] = []
    batch = _first_batch(config, data)
    graph = Graph()
    if batch is not None:
        with _reported(found, "model.refused"):
            lints, graph = lint_model(model, task.loss, batch, recipe, plan.rung, plan)
            # Such a model may be traced if it has values.
            if graph.error and _is_meta(model):
                whole = _built(config)
                task = Task(whole, config.model.target, task.unit)
                lints, graph = lint_model(whole, task.loss, batch, recipe, plan.rung, plan)
            found += lints
    if data is not None:
        with _reported(found, "data.refused"):
            found += _data(data, task, graph, config)
    return found


def _without_memory(config: RunConfig) -> nn.Module | None:
    """The model on the meta device: no memory. None if it cannot be built there.

    Raises ConfigError for a Hugging Face folder whose weights are not the model's.
    """
    if has_stored_weights(config.model.target, config.model.args):
        # transformers compares what is stored with the model, and reads no values.
        with suppress(CannotDeferError):
            return build_deferred(config.model, torch.device("cpu"), tried=False)
    try:
        with torch.device("meta"):
            return build_model(config.model)
    except Exception:
        # An error of the model's own comes again when it is built whole.
        return None


def _built(config: RunConfig) -> nn.Module:
    """The model with its initial weights, on the CPU."""
    seed_everything(config.train.seed)
    return build_model(config.model)


def _is_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _planned(recipe: Recipe, worker: Worker, model: nn.Module) -> Plan:
    def plan_for(rung: Rung, verdicts: list[RungVerdict]) -> Plan:
        return make_plan(recipe, worker.facts, rung, verdicts, model)

    return take_rung(recipe, worker.facts, worker.device, plan_for)


def _room(config: RunConfig, model: nn.Module, worker: Worker) -> list[Finding]:
    """Errors if the run's checkpoints or its state do not fit here."""
    optimizer = optimizer_bytes(model, config.train)
    # A run that has not begun has saved no checkpoint yet.
    full = lacks_room(place_of_runs(), state_bytes(model, optimizer), 0)
    found = refused("machine.disk", full)
    problem = lacks_memory(model, optimizer, worker)
    problems: Sequence[Problem] = [problem] if problem else []
    return [*found, *refused("machine.memory", problems)]


def _first_batch(config: RunConfig, data: Batches | None) -> Batch | None:
    """The first micro-batch. Without data: one of zeros, if the run is one of tokens; else None."""
    if data is not None:
        try:
            return data.micro_batches(data.window(0), 0, 1)[0]
        except HarnessError:
            # Reading the data again reports it.
            return None
    if config.data.target is not None:
        return None
    shape = (config.train.micro_batch, config.data.context)
    zeros = torch.zeros(shape, dtype=torch.int64, device="cpu")
    return {"inputs": zeros, "targets": zeros}


def _data(data: RunData, task: Task, graph: Graph, config: RunConfig) -> list[Finding]:
    """The lints of the data, within the bounds that the model says or shows."""
    vocab = task.vocab_size
    if vocab is None:
        vocab = graph.embedded
    classes = task.classes
    if classes is None and task.vocab_size is None:
        classes = graph.classes
    return lint_data(data, vocab, classes, config.data.bad)
