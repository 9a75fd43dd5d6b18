"""Starts a test file as several ranks, and has the training step that the tests of all engines share."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.config import TrainConfig
from harness.core.facts import Limits
from harness.core.protocols import NO_LIMITS, Engine
from harness.engines.deepspeed import DeepSpeedEngine
from harness.engines.fsdp import FsdpEngine
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from tests.support import warm
from tests.support.updates import finish

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SCHEDULE = Schedule(0.02, 2, 20, 0.1)
SAMPLES, MICRO = 8, 2
# Ranks share the cores of a machine that may be busy.
LIMIT_SECONDS = warm.PATIENCE


def make_fsdp(model: nn.Module, **settings: Any) -> FsdpEngine:
    """An engine that shards `model`, with the default AdamW. settings: more arguments of FsdpEngine."""
    config = TrainConfig.model_validate({})
    return FsdpEngine(
        model,
        lambda weights: build_optimizer(model, config, CPU, weights),
        SCHEDULE,
        0.3,
        device=CPU,
        timeout_seconds=60,
        **settings,
    )


def run_ranks(script: str, folder: Path, ranks: int) -> list[Any]:
    """Run `script` (a test file) as `ranks` programs with the argument `folder`, in warm processes.

    Returns what each rank wrote to `folder/<rank>.json`. The first failure ends all ranks, and none outlives the call.
    Raises AssertionError with the output of the failed ranks.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    alike = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": warm.THREADS, "CUDA_VISIBLE_DEVICES": ""}
    processes: list[warm.Process] = []
    try:
        for rank in range(ranks):
            environment = {
                **os.environ,
                **launch,
                **alike,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            }
            with (folder / f"{rank}.log").open("wb") as log:
                command = [str(Path(script).resolve()), str(folder)]
                processes.append(
                    warm.start(command, folder, environment, log.fileno(), log.fileno())
                )
        deadline = time.monotonic() + LIMIT_SECONDS
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            assert time.monotonic() < deadline, f"ranks still run after {LIMIT_SECONDS} s"
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(folder / f"{rank}.log").read_text(errors="replace")[-3000:] for rank in range(ranks)]
    assert not any(codes), "\n".join(log for log, code in zip(logs, codes, strict=True) if code)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def make_engine(
    model: nn.Module, stage: int | None, dtype: torch.dtype | None = None, **settings: object
) -> TorchEngine | DeepSpeedEngine:
    """A fresh engine for `train` on this rank.

    stage: the ZeRO stage of DeepSpeed's engine; None for torch's.
    dtype: the dtype of DeepSpeed's autocast.
    settings: keys of the section train, such as those of the optimizer.
    """
    optimizer = build_optimizer(model, TrainConfig.model_validate(settings), CPU)
    if stage is None:
        return TorchEngine(model, optimizer, SCHEDULE, 0.3, device=CPU, timeout_seconds=60)
    return DeepSpeedEngine(
        model,
        optimizer,
        SCHEDULE,
        0.3,
        zero_stage=stage,
        micro_batch=SAMPLES // MICRO // int(os.environ["WORLD_SIZE"]),
        accumulation=MICRO,
        autocast_dtype=dtype,
        device=CPU,
        timeout_seconds=60,
    )


def backward_of_a_step(engine: Any, step: int, poison: float = 1.0, spoilt: float = 1.0) -> None:
    """Forward and backward of `train` on this rank's share."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(MICRO, SAMPLES // MICRO, 6, generator=generator)
    targets = torch.randn(MICRO, SAMPLES // MICRO, 3, generator=generator) * 3
    here = slice(engine.rank, None, engine.world_size)
    faulty = engine.rank == engine.world_size - 1
    for index in range(MICRO):
        with engine.micro_batch(index == MICRO - 1):
            spoils = spoilt if faulty and index == 0 else 1.0
            loss = engine.module(inputs[index, here] * spoils, targets[index, here]) / MICRO
            engine.backward(loss * poison if faulty and index == 0 else loss)


def train(
    engine: Engine,
    step: int,
    poison: float = 1.0,
    flag: float = 0.0,
    limits: Limits = NO_LIMITS,
    spoilt: float = 1.0,
) -> dict[str, Any]:
    """One step on this rank's share of the same SAMPLES samples. A fault is on the last rank alone.

    poison: factor of the last rank's first loss.
    spoilt: factor of its first inputs.
    flag: how many of its samples could not be read.
    """
    backward_of_a_step(engine, step, poison, spoilt)
    faulty = engine.rank == engine.world_size - 1
    figures = finish(
        engine,
        limits,
        bad_data=int(flag) if faulty else 0,
        forward_fastest=float(engine.rank),
        forward_slowest=float(engine.rank),
        param_norm=torch.tensor(math.nan if faulty else 1.0),
    )
    return {
        "norm": figures["grad_norm"].item(),
        "skipped": 1.0 - figures["applied"].item(),
        "applied": figures["applied_steps"].item(),
        "lr": figures["lr"].item(),
        "agreed": [
            figures[name].item()
            for name in ("bad_data", "forward_fastest", "forward_slowest", "param_norm")
        ],
    }


def own_collectives(engine: Engine) -> dict[str, int]:
    """The harness's own collectives in a step after the first, by the functions of torch.distributed that it calls.

    The library's own are not counted: DDP's, FSDP2's and DeepSpeed's exchange of gradients, weights and norms.
    """
    train(engine, 0)
    counts: dict[str, int] = {}

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "harness" in str(sys._getframe(1).f_globals.get("__name__")):
                counts[name] = counts.get(name, 0) + 1
            return real(*args, **kwargs)

        return call

    names = ("all_reduce", "all_gather", "broadcast", "all_gather_object", "broadcast_object_list")
    real = {name: getattr(dist, name) for name in (*names, "barrier")}
    for name, function in real.items():
        setattr(dist, name, counting(name, function))
    try:
        train(engine, 1)
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    return counts


def bytes_of_the_guide(engine: str, ranks: int) -> list[float]:
    """Bytes of weights, gradients and moments for a parameter, by the table of docs/guide/engines.md.

    engine: the first cell of its row. ranks: the N of the table.
    """
    for line in (ROOT / "docs" / "guide" / "engines.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == engine and len(cells) == 5:
            return [sum(_number(term, ranks) for term in cell.split("+")) for cell in cells[1:4]]
    raise AssertionError(f"the table has no row {engine!r}")


def _number(term: str, ranks: int) -> float:
    """4 for "4", 4 / ranks for "4 / N"."""
    bytes_, shared, _ = term.partition("/ N")
    return float(bytes_) / (ranks if shared else 1)


def group_threads() -> list[str]:
    """Names of this process's threads that serve a gloo group. Some live as long as anything refers to the group."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]
