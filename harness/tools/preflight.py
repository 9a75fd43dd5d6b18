"""What `harness train` checks before its first step: delivery, the recipe's first rung, disk and memory.

A job that cannot come to its end is refused now, on every rank, and not after hours of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torch import nn

from harness.build import ENGINES, Worker
from harness.capability.cards import GIB
from harness.checkpoint.shared_folder import check_shared_folder
from harness.checkpoint.store import Store, lacks_room
from harness.core.config import RunConfig
from harness.core.errors import CheckpointError, MachineError, Problem
from harness.core.memory import all_memory
from harness.core.state import state_bytes
from harness.optim.optimizers import optimizer_bytes
from harness.precision.plan import Plan
from harness.telemetry import undeliverable


def check_delivery(config: RunConfig, worker: Worker) -> None:
    """Raises MachineError if MLflow is wanted and rank 0 cannot deliver to it. Collective."""
    # Only rank 0 delivers, so only its problems count.
    problems: list[Problem] = []
    if worker.is_lead:
        problems = undeliverable(config.tracking, "tracking.mlflow=false")
    if problems := _on_every_rank(worker, problems):
        raise MachineError(problems)


def check_first_rung(plan: Plan, recipe: str) -> None:
    """For --strict: raises MachineError if the plan is not that of the recipe's first rung."""
    first = plan.rungs[0]
    if first.taken:
        return
    raise MachineError(
        Problem(
            f"--strict: the recipe's first rung, {first.rung}, cannot run here",
            f"recipe {recipe}",
            why=first.reason,
            fix="run on another machine, or drop --strict to take the next rung",
        )
    )


def check_shared(folder: Path, config: RunConfig, worker: Worker) -> None:
    """Raises CheckpointError unless all ranks see the same run folder, where each writes its own rows. Collective.

    The folder for a last save, checkpoint.emergency_path, is looked at too if it is there.
    """
    if not ENGINES[worker.engine].sharded or worker.group.world_size == 1:
        return
    seconds = config.engine.timeout_seconds / 2
    places = [folder]
    if config.checkpoint.emergency_path is not None:
        elsewhere = Path(config.checkpoint.emergency_path)
        if worker.group.broadcast(elsewhere.is_dir()):
            places.append(elsewhere)
    for place in places:
        check_shared_folder(place, worker.group.rank, worker.group.broadcast, seconds)


def check_room(folder: Path, model: nn.Module, config: RunConfig, worker: Worker) -> None:
    """Raises CheckpointError if the checkpoints of the run in `folder` do not fit or cannot be written. Collective."""
    size = state_bytes(model, optimizer_bytes(model, config.train))
    ranks = worker.group.world_size if ENGINES[worker.engine].sharded else 1
    problems = _room(folder, size, ranks) if worker.is_lead else []
    if problems := _on_every_rank(worker, problems):
        raise CheckpointError(problems)


def _room(folder: Path, bytes_each: int, ranks: int) -> list[Problem]:
    """Why checkpoints of `bytes_each` that `ranks` ranks write together do not fit; empty if nothing is wrong."""
    checkpoints = folder / "checkpoints"
    try:
        steps = Store(checkpoints, readonly=True).steps()
    except OSError as error:
        what = "the checkpoints cannot be looked at"
        fix = "move it away, or give the run another --name"
        return [Problem(what, str(checkpoints), str(error.strerror), fix)]

    # A new run has no such folder yet; the one above it is on the same disk. A link may lead to another disk.
    place = checkpoints if checkpoints.is_dir() else folder
    return lacks_room(place, bytes_each, len(steps), ranks)


def check_memory(model: nn.Module, config: RunConfig, worker: Worker) -> None:
    """Raises MachineError if training on the CPU takes more than all memory, see `lacks_memory`."""
    if problem := lacks_memory(model, optimizer_bytes(model, config.train), worker):
        raise MachineError(problem)


def lacks_memory(model: nn.Module, optimizer: int, worker: Worker) -> Problem | None:
    """Why the weights, gradients and optimizer state of all ranks here take more than the machine's memory.

    optimizer: bytes of the optimizer's state on one rank.

    None unless it is certain that they do: activations are not counted, an engine that shards the state keeps less of
    it here, and a GPU has memory of its own.
    """
    # An engine without snapshots, DeepSpeed, shards the optimizer's state.
    engine = ENGINES[worker.engine]
    if worker.device.type != "cpu" or engine.sharded or not engine.snapshots:
        return None
    parameters = weights = gradients = 0
    for parameter in model.parameters():
        parameters += parameter.numel()
        weights += parameter.nbytes
        if parameter.requires_grad:
            gradients += parameter.nbytes
    weights += sum(buffer.nbytes for buffer in model.buffers())

    # Every rank of this machine has all of it.
    ranks = worker.launch.local_world_size
    needed = ranks * (weights + gradients + optimizer)
    available = all_memory()
    if not available or needed <= available:
        return None

    why = f"on the CPU: weights {weights / GIB:,.1f}, gradients {gradients / GIB:,.1f}, "
    why += f"optimizer {optimizer / GIB:,.1f} GiB"
    if ranks > 1:
        why += f", on each of {ranks} ranks"
    have = f"this machine has {available / GIB:,.1f}, swap included"
    return Problem(
        f"needs at least {needed / GIB:,.1f} GiB to be trained, and {have}",
        f"model of {parameters:,} parameters",
        why,
        "train a smaller model, take an optimizer with less state, or a GPU that holds it (see harness estimate)",
    )


def _on_every_rank(worker: Worker, problems: Sequence[Problem]) -> list[Problem]:
    """Rank 0's problems, on every rank: then all refuse together, with the same words. Collective."""
    plain = worker.group.broadcast([asdict(problem) for problem in problems])
    return [Problem(**fields) for fields in plain]
