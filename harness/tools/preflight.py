"""What `harness train` checks before its first step: delivery, the recipe's first rung, disk and memory.

A job that cannot come to its end is refused now, on every rank, and not after hours of training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from harness.build import ENGINES, Worker
from harness.capability.cards import GIB
from harness.checkpoint.shared_folder import check_shared_folder
from harness.checkpoint.store import Store, lacks_room
from harness.core.collectives import gather_texts
from harness.core.config import RunConfig
from harness.core.errors import CheckpointError, MachineError, Problem
from harness.core.memory import all_memory, process_room, size_text
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
    """For --strict: raises MachineError if the plan is not that of the recipe's first rung.

    A rung that fp8.backend=auto has taken in its place computes by the same rule. It was the faster one, unless the
    first rung failed while it was timed.
    """
    first = plan.rungs[0]
    chosen = plan.backend_choice or {}
    failed = first.rung in chosen.get("failed", ())
    if first.taken or (first.rung in chosen.get("candidates", ()) and not failed):
        return
    what = f"--strict: the recipe's first rung, {first.rung}, cannot run here"
    why = chosen["why"] if failed else first.reason
    fix = "run on another machine, or drop --strict to take the next rung"
    raise MachineError(Problem(what, f"recipe {recipe}", why, fix))


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


def check_room(
    folder: Path,
    model: nn.Module,
    config: RunConfig,
    worker: Worker,
) -> None:
    """Raises CheckpointError if the checkpoints of the run in `folder` do not fit or cannot be written. Collective."""
    optimizer = optimizer_bytes(model, config.train)
    size = state_bytes(model, optimizer)
    # Where the engine shards the state, every rank writes its part of it.
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
    """Raises MachineError if training takes more memory than any rank has, see `lacks_memory`. Collective."""
    optimizer = optimizer_bytes(model, config.train)
    problem = lacks_memory(model, optimizer, worker, _waits_whole(config, worker))

    # Ranks may have different limits. All refuse together, with the words of the first.
    texts = gather_texts(json.dumps(asdict(problem)) if problem else "")
    found = [text for text in texts if text]
    if found:
        first = json.loads(found[0])
        raise MachineError(Problem(**first))


def _waits_whole(config: RunConfig, worker: Worker) -> bool:
    """Whether a gradient stays whole until the window's last micro-batch, though the engine shards it."""
    rows = config.train.micro_batch * worker.launch.world_size
    micro_batches = config.train.global_batch // rows
    return micro_batches > 1 and config.engine.gradient_sync == "window"


def memory_text(model: nn.Module, config: RunConfig, worker: Worker) -> str:
    """One line on what a rank's weights, gradients and optimizer take; of DeepSpeed, which divides them, the whole."""
    engine = ENGINES[worker.engine]
    sharers = worker.group.world_size if engine.sharded else 1
    whole = not engine.sharded or _waits_whole(config, worker)
    optimizer = optimizer_bytes(model, config.train)
    needs = _needs(model, optimizer, sharers, whole)
    parts = [
        f"weights {size_text(needs.weights)}",
        f"gradients {size_text(needs.gradients)}",
        f"optimizer {size_text(needs.optimizer)}",
    ]
    # An engine without snapshots, DeepSpeed, divides the state by itself.
    of = "a rank" if engine.snapshots else "the whole model"
    text = f"memory: {size_text(needs.total)} of {of} ({', '.join(parts)}); activations come on top"
    return f"{text}, see harness estimate"


@dataclass(frozen=True, slots=True)
class _Needs:
    """Bytes that one rank needs at least: whatever its activations take comes on top.

    here: how many of them are taken already.
    """

    weights: int
    gradients: int
    optimizer: int
    here: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        text = f"weights {self.weights / GIB:,.1f}, gradients {self.gradients / GIB:,.1f}, "
        return text + f"optimizer {self.optimizer / GIB:,.1f} GiB"


def _needs(
    model: nn.Module,
    optimizer: int,
    ranks: int,
    whole_gradients: bool,
) -> _Needs:
    """What one of `ranks` ranks needs that share the state of `model`. optimizer: bytes of its whole state."""
    weights = gradients = here = 0
    for parameter in model.parameters():
        weights += parameter.nbytes
        if parameter.requires_grad:
            gradients += parameter.nbytes
        if parameter.device.type != "meta":
            here += parameter.nbytes
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    # Gradients are divided as the rest is, unless the engine keeps them whole.
    if not whole_gradients:
        gradients //= ranks
    return _Needs(weights // ranks + buffers, gradients, optimizer // ranks, here)


def lacks_memory(
    model: nn.Module, optimizer: int, worker: Worker, whole_gradients: bool = False
) -> Problem | None:
    """Why the weights, gradients and optimizer state of all ranks here take more memory than there is.

    optimizer: bytes of the optimizer's state of the whole model.
    whole_gradients: an engine that shards the state keeps whole gradients for a while.

    None unless it is certain that they do: activations are not counted. A GPU's memory is looked at only for an engine
    that shards the state, which builds the model without memory.
    """
    # An engine without snapshots, DeepSpeed, shards the optimizer's state alone.
    engine = ENGINES[worker.engine]
    on_cpu = worker.device.type == "cpu"
    if not engine.snapshots or not (on_cpu or engine.sharded):
        return None
    sharers = worker.group.world_size if engine.sharded else 1
    needs = _needs(model, optimizer, sharers, whole_gradients or not engine.sharded)
    parameters = sum(parameter.numel() for parameter in model.parameters())

    # Every rank of this machine takes as much; a rank's own limit, and its GPU, are for it alone.
    ranks = worker.launch.local_world_size
    place = _Place("on the CPU", "this machine has", all_memory(), ", swap included", ranks)
    if not on_cpu:
        # What the model takes there already is part of what it needs.
        free = _free_on(worker.device) + needs.here
        place = _Place("on the GPU", f"{worker.device} has", free, " free", 1)

    # A process may be allowed less than the machine has.
    room = process_room()
    if on_cpu and room is not None:
        limited = room + needs.here
        share = place.bytes / ranks
        if not place.bytes or limited < share:
            place = _Place("on the CPU", "this process may take", limited, " more (ulimit)", 1)
    if not place.bytes or place.ranks * needs.total <= place.bytes:
        return None

    why = f"{place.where}: {needs}"
    if place.ranks > 1:
        why += f", on each of {ranks} ranks"
    fix = "train a smaller model, take an optimizer with less state, or a GPU that holds it (see harness estimate)"
    if engine.sharded:
        why += f"; each of {sharers} ranks holds its part of the state"
        fix = "start more ranks, which share it, or train a smaller model (see harness estimate)"
    needed = size_text(place.ranks * needs.total)
    have = f"{place.has} {size_text(place.bytes)}{place.unit}"
    what = f"needs at least {needed} to be trained, and {have}"
    return Problem(what, f"model of {parameters:,} parameters", why, fix)


@dataclass(frozen=True, slots=True)
class _Place:
    """A memory, and how a message speaks of it. bytes: 0 if not known; ranks: how many share it."""

    where: str
    has: str
    bytes: int
    unit: str
    ranks: int


def _free_on(device: torch.device) -> int:
    """Bytes of a GPU's memory that nobody has taken."""
    return torch.cuda.mem_get_info(device)[0]


def _on_every_rank(worker: Worker, problems: Sequence[Problem]) -> list[Problem]:
    """Rank 0's problems, on every rank: then all refuse together, with the same words. Collective."""
    plain = worker.group.broadcast([asdict(problem) for problem in problems])
    return [Problem(**fields) for fields in plain]
