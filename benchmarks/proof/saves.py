"""The row about checkpoints: how much a save in the background slows down the steps beside it."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.proof.registry import Answer, NotHere, Task
from benchmarks.proof.training import TOY, best, llama, recipe_of, start, warm
from harness.core.memory import free_memory
from harness.core.timing import spread

# 277M parameters, 3.3 GB of state: large enough to be seen, small enough to be written several times.
SIZE = llama(1280, 512, layers=12)
CHECKPOINT_BYTES = 12


def saves(task: Task) -> Answer:
    """Seconds that a save adds to the steps beside it, and seconds of the call alone.

    The first is the time of a turn that begins with a save, minus that of a turn without one.
    """
    size = TOY if task.rehearsal else SIZE
    state = CHECKPOINT_BYTES * size.parameters
    disk, memory = shutil.disk_usage(task.folder).free, free_memory()
    if disk < 4 * state or memory < 5 * state:
        have = f"{disk / 1e9:.0f} GB of disk in the temporary folder and {memory / 1e9:.0f} GB of memory are free"
        raise NotHere(
            f"a save of {state / 1e9:.1f} GB needs four times that on disk and five times in memory; {have}"
        )
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
