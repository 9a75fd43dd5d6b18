"""One turn of one loop: it trains from the initial weights, then some of its steps are timed.

    python -m benchmarks.peers.turn LOOP SHAPE STEPS TIMED OUT

Each turn runs in a process of its own. So a library's changes to torch stay there, and no two models share a card.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.peers import shipped
from benchmarks.peers.loops import LOOPS, Job, Loop, Step, code_lines
from benchmarks.peers.shapes import LLAMA, SHAPES, Shape, as_gpt, run_config
from harness.build import build_data, build_plan, build_task, join_worker
from harness.core.config import RunConfig
from harness.core.protocols import Batch, Batches
from harness.core.timing import wait
from harness.models.gpt import build as build_gpt
from harness.models.task import Task, training_flops
from harness.precision.recipe import load_recipe

KIB = 1024


class Racer(Protocol):
    """A loop that is ready to train."""

    def losses(self, count: int) -> list[float]:
        """Train `count` steps and return their losses."""
        ...

    def seconds(self, count: int) -> float:
        """Seconds of `count` steps, with the wait for the last one."""
        ...


class Stepping:
    """A loop that is given one batch after another; the first one follows the last."""

    def __init__(self, step: Step, batches: Sequence[Batch], device: torch.device) -> None:
        self.step, self.batches, self.device = step, batches, device
        self.taken = 0

    def losses(self, count: int) -> list[float]:
        return [float(self._next()) for _ in range(count)]

    def seconds(self, count: int) -> float:
        wait(self.device)
        began = time.perf_counter()
        for _ in range(count):
            self._next()
        wait(self.device)
        return time.perf_counter() - began

    def _next(self) -> Tensor:
        batch = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        moved = {name: each.to(self.device, non_blocking=True) for name, each in batch.items()}
        return self.step(moved).detach()


def take_turn(loop: Loop, shape: Shape, steps: int, timed: int, folder: Path) -> dict[str, Any]:
    """What one turn gave: JSON-able.

    losses: of the first `steps` steps. seconds: of a step, the mean over `timed` steps after these.
    samples: a hash of what was trained on in the first `steps` steps. tokens: of a step.
    parameters: the number of trained ones, each counted once.
    peak_bytes: on a GPU of tensors, on a CPU of the process. flops: of the model in a step; None of `harness train`.
    lines: lines of user code; of `harness train` the lines of its config.

    folder: empty, for files. Raises whatever the loop raises.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = run_config(shape, "bf16" if loop.setup else loop.recipe, folder)
    flops = None
    with ExitStack() as stack:
        racer: Racer
        if loop.setup is None:
            racer = run = shipped.start(config, device, stack, folder)
            samples = hashed(batches_of(run.data, steps))
            model = run.model
            lines = shipped.config_lines(config)
        else:
            model, task, data = prepare(config, device, folder)
            batches = batches_of(data, steps + timed)
            samples = hashed(batches[:steps])
            flops = flops_of(shape, model, task, batches[0])
            lines = code_lines(loop.setup)
            step = loop.setup(Job(model, task.loss, shape.adamw, device))
            racer = Stepping(step, batches, device)
        # A setup may have replaced layers, and untied weights that were one.
        parameters = trained_parameters(model)
        losses = racer.losses(steps)
        seconds = racer.seconds(timed) / timed
    return {
        "losses": losses,
        "seconds": seconds,
        "samples": samples,
        "tokens": shape.batch * shape.tokens,
        "parameters": parameters,
        "peak_bytes": peak_bytes(device),
        "flops": flops,
        "lines": lines,
    }


def prepare(
    config: RunConfig, device: torch.device, folder: Path
) -> tuple[nn.Module, Task, Batches]:
    """The model with the weights that `harness train` begins with, its loss and its data."""
    worker = join_worker(config, "python")
    with torch.device(device):
        plan, model = build_plan(config, load_recipe(config.recipe), worker)
    data = build_data(config, folder, worker)
    task, _ = build_task(config, plan, model, data)
    return model, task, data


def flops_of(shape: Shape, model: nn.Module, task: Task, batch: Batch) -> float:
    """FLOPs of the model in a step. transformers' Llama reads values, so those of the same GPT are counted."""
    if shape.target == LLAMA:
        with torch.device("meta"):
            model = build_gpt(**as_gpt(shape.args))
        task = Task(model, shape.name)
    return training_flops(model, task, batch)


def trained_parameters(model: nn.Module) -> int:
    """Number of trained parameters; those of a tied weight count once."""
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def batches_of(data: Batches, count: int) -> list[Batch]:
    """The batch of each of the first `count` steps."""
    return [data.micro_batches(data.window(number), 0, 1)[0] for number in range(count)]


def hashed(batches: Sequence[Batch]) -> str:
    """SHA-256 of all tensors of the batches, in order."""
    digest = hashlib.sha256()
    for batch in batches:
        for name, each in batch.items():
            digest.update(f"{name} {each.dtype} {tuple(each.shape)}".encode())
            digest.update(each.contiguous().numpy().tobytes())
    return digest.hexdigest()


def peak_bytes(device: torch.device) -> int:
    """The most bytes of tensors on the GPU; on a CPU the most memory of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(arguments: Sequence[str]) -> None:
    loop, shape, steps, timed, out = arguments
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        turn = take_turn(LOOPS[loop], SHAPES[shape], int(steps), int(timed), Path(folder))
    Path(out).write_text(json.dumps(turn))


if __name__ == "__main__":
    main(sys.argv[1:])
