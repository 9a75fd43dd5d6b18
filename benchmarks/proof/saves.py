"""The rows about checkpoints: what a save costs the steps beside it, and how long it takes to get a state back."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from benchmarks.proof.registry import Answer, NotHere, Task
from benchmarks.proof.training import GIB, NEVER, TOY, Size, best, llama, recipe_of, start, warm
from harness.checkpoint.copy_stream import CudaCopyStream
from harness.checkpoint.overlapped import Copier
from harness.core.memory import free_memory
from harness.core.timing import spread, wait
from harness.run import Run

# 277M parameters, 3.3 GB of state: large enough to be seen, small enough to be written several times.
SIZE = llama(1280, 512, layers=12)
CHECKPOINT_BYTES = 12


def saves(task: Task) -> Answer:
    """Seconds that a save adds to the steps beside it, and seconds of the call alone.

    The first is the time of a turn that begins with a save, minus that of a turn without one.
    """
    size = TOY if task.rehearsal else SIZE
    state = _bytes_with_room(task, size)
    with ExitStack() as stack:
        over = {"checkpoint": {"every": 0, "background": True, "keep": 2}}
        contender = start(stack, task, "saves", size, recipe_of(best(task)), over)
        stack.callback(contender.run.recovery.settle)
        warm(contender, 2)
        count = 2 if task.rehearsal else 20
        begins: list[float] = []
        asked: list[int] = []

        def save() -> None:
            began = time.perf_counter()
            contender.run.recovery.keep({})
            begins.append(time.perf_counter() - began)
            asked.append(contender.run.state.step)

        plain, stalls, written = [], [], []
        figures: dict[str, Any] = {}
        for number in range(6):
            plain.append(contender.steps(count))
            stalls.append(contender.steps(count, before=save) - plain[-1])
            began = time.perf_counter()
            contender.run.recovery.settle()
            written.append(time.perf_counter() - began)
            figures = {
                "bytes": state,
                "size": size.name,
                "first_stall_seconds": stalls[0],
                "stall_seconds": spread(stalls[1:] or stalls),
                "begin_seconds": spread(begins[1:] or begins),
                "step_seconds": median(plain) / count,
                "saves": len(stalls),
            }
            task.note(figures)
            if number and task.left() < 2 * (plain[-1] + stalls[-1] + plain[-1] + written[-1]):
                break
        steps = contender.run.recovery.store.steps()
    if steps[-1:] != asked[-1:]:
        raise RuntimeError(f"saves were asked for at steps {asked}, on disk are those of {steps}")
    stall, begin = figures["stall_seconds"], figures["begin_seconds"]
    summary = (
        f"{stall['median']:.3f} s ({stall['min']:.3f}-{stall['max']:.3f}) for {state / 1e9:.2f} GB, the call alone "
        f"{begin['median']:.3f} s; the first save {stalls[0]:.3f} s"
    )
    return Answer(summary, figures)


def copies(task: Task) -> Answer:
    """Seconds that the host waits for a few numbers of the card while a snapshot is on its way to the host.

    The numbers stand for the figures of a step. They are asked for alone, behind the part of the snapshot that one step
    queues (`OnItsWay`), and behind all of it.
    """
    device = task.device
    # The state, its copy on the card, and as much again that stays free.
    size = min(8 * GIB, torch.cuda.mem_get_info(device)[0] // 4)
    state = torch.zeros(size, dtype=torch.uint8, device=device)
    block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    numbers = torch.ones(64, device=device)
    arrived = torch.empty(64, pin_memory=True)
    copier = Copier(CudaCopyStream(device), lambda *_, **__: None)
    copier.decide(0, {"state": {"state": state}})

    def asked() -> float:
        began = time.perf_counter()
        arrived.copy_(numbers, non_blocking=True)
        torch.cuda.current_stream(device).record_event().synchronize()
        return time.perf_counter() - began

    waits: dict[str, list[float]] = {"alone": [], "a part": [], "all": []}
    rates: list[float] = []
    for _ in range(5):
        waits["alone"].append(asked())
        way = copier.copy_to(block, [block], [state])
        waits["a part"].append(asked())
        way.synchronize()

        way = copier.copy_to(block, [block], [state])
        wait(device)
        began = time.perf_counter()
        way.queued()
        waits["all"].append(asked())
        way.synchronize()
        rates.append(size / (time.perf_counter() - began))
    seconds = {name: spread(found) for name, found in waits.items()}
    told = ", ".join(f"{name} {1e3 * each['median']:.3g}" for name, each in seconds.items())
    rate = spread(rates)
    summary = (
        f"ms until numbers arrive: {told}; {size / GIB:.1f} GiB, {rate['median'] / 1e9:.3g} GB/s"
    )
    return Answer(summary, {"bytes": size, "seconds": seconds, "rate": rate})


def recovery(task: Task) -> Answer:
    """Wall seconds of a save, of a rollback to a snapshot in memory, and of a resume.

    save: until the checkpoint is verified on disk; training waits.
    rollback: until the state is on the card again.
    resume: from building the run to the end of its first step, without the start of Python.
    """
    size = TOY if task.rehearsal else SIZE
    state = _bytes_with_room(task, size)
    recipe = recipe_of(best(task))
    # There is memory for snapshots, and none is due: they are taken here.
    over = {"guard": {"snapshot_every": NEVER}}
    seconds: dict[str, list[float]] = {"save": [], "rollback": [], "resume": []}
    figures: dict[str, Any] = {}
    for number in range(3):
        began = time.perf_counter()
        with ExitStack() as stack:
            contender = start(stack, task, "recovery", size, recipe, over)
            run = contender.run
            stack.callback(run.recovery.settle)
            if number:
                run.recovery.load(run.recovery.store.steps()[-1])
            contender.steps(1)
            if number:
                seconds["resume"].append(time.perf_counter() - began)

            contender.steps(2)
            seconds["save"].append(_timed(task, lambda run=run: _save(run)))
            if run.guard.memory is None:
                raise NotHere(f"no memory for two copies of {state / 1e9:.1f} GB")
            step = run.state.step
            _snapshot(run)
            contender.steps(2)
            seconds["rollback"].append(_timed(task, lambda run=run: _roll_back(run)))
            if run.state.step != step:
                raise RuntimeError(f"rolled back to step {run.state.step}, not to {step}")
        spreads = {name: spread(values) for name, values in seconds.items() if values}
        figures = {"bytes": state, "size": size.name, "seconds": spreads}
        task.note(figures)
    told: list[str] = []
    for name, found in figures["seconds"].items():
        told.append(f"{name} {found['median']:.3f} s ({found['min']:.3f}-{found['max']:.3f})")
    return Answer(f"{', '.join(told)}, of {state / 1e9:.2f} GB", figures)


def _timed(task: Task, action: Callable[[], None]) -> float:
    """Seconds of `action`, on the device as well."""
    wait(task.device)
    began = time.perf_counter()
    action()
    wait(task.device)
    return time.perf_counter() - began


def _save(run: Run) -> None:
    if not run.recovery.save_and_verify({}):
        raise RuntimeError(f"the save of step {run.state.step} failed: see its journal")


def _snapshot(run: Run) -> None:
    """Take a snapshot, and count the healthy steps that make it good."""
    memory = run.guard.memory
    assert memory is not None
    memory.take(run.state.step, *run.state.state_dict())
    for step in range(run.config.checkpoint.healthy_steps):
        memory.observe(run.state.step + step, True)


def _roll_back(run: Run) -> None:
    memory = run.guard.memory
    assert memory is not None
    memory.newest_good()
    run.state.load_state_dict(*memory.load())


def _bytes_with_room(task: Task, size: Size) -> int:
    """Bytes of a checkpoint. Raises NotHere if disk or memory lack room for what these rows do with it."""
    state = CHECKPOINT_BYTES * size.parameters
    disk, memory = shutil.disk_usage(task.folder).free, free_memory()
    if disk < 4 * state or memory < 5 * state:
        have = f"{disk / 1e9:.0f} GB of disk in the temporary folder and {memory / 1e9:.0f} GB of memory are free"
        raise NotHere(
            f"a save of {state / 1e9:.1f} GB needs four times that on disk and five times in memory; {have}"
        )
    return state
