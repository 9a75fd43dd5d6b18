"""The row of profiles: what kind of work a step's time goes to, for each way to train the same model.

Each contender is alone on the card. After its first steps it trains some steps that are timed as they are, then three
under torch's profiler. The profiler is that of `train.profile_steps`, and the kinds are those of `harness profile`.
Profiled steps take longer. So both times are recorded, and gaps may be larger in the profile than without it.
"""

from __future__ import annotations

import gc
import gzip
import json
import time
import traceback
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.proof.card import SMI_LOAD
from benchmarks.proof.registry import Answer, NotHere, Task, lacking
from benchmarks.proof.training import (
    NEVER,
    Size,
    not_as_named,
    recipe_of,
    sizes,
    start,
    warm,
)
from harness.capability.smi import nvidia_smi
from harness.core.errors import one_line
from harness.measure.contender import Contender
from harness.precision.backends.registry import BACKENDS
from harness.profiling.kinds import GAPS, WAITS
from harness.profiling.recorder import StepProfiler
from harness.profiling.report import Profile
from harness.profiling.report import profiles as profiles_of
from harness.tracking.journal import JOURNAL, read_rows

STEPS = 3
"""Profiled steps."""
# The guard measures the parameters in steps 1, 11 and 21. Usual steps are timed and profiled: 12 to 15, and 16 to 18.
FIRST = 16
TIMED = 4
# Kernels of a contender in the record, and characters of their names.
LARGEST = 20
NAME = 80
_ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")
# The state of one contender, and its activations.
COPIES = 1.3


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to train the model.

    backend, fuse: as for `recipe_of`.
    compile: `engine.compile`.
    needs: names in NEEDS.
    """

    backend: str
    fuse: bool = False
    compile: str = "none"
    needs: tuple[str, ...] = ()


_TE = ("fp8", "transformer_engine")
# If time runs out, the last ones are missing. Eager bf16 and torchao are the least asked for.
SETUPS: dict[str, Setup] = {
    "bf16 compiled": Setup("16 bit", compile="blocks", needs=("compiling",)),
    "te fused": Setup("transformer_engine", fuse=True, needs=_TE),
    "native compiled": Setup("native", compile="blocks", needs=("fp8", "compiling")),
    "native fused compiled": Setup("native", True, "blocks", ("fp8", "compiling")),
    "te": Setup("transformer_engine", needs=_TE),
    "native": Setup("native", needs=("fp8",)),
    "bf16": Setup("16 bit"),
    "torchao compiled": Setup("torchao", False, "blocks", ("fp8", "torchao", "compiling")),
}


def profiles(task: Task) -> Answer:
    """Profile each of SETUPS. One that fails or is not here is named with its reason, and the others still run."""
    size = sizes(task, COPIES)[0]
    contenders: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    figures: dict[str, Any] = {
        "size": size.name,
        "model": {**size.args, "context": size.context, "parameters": size.parameters},
        "steps": STEPS,
        "contenders": contenders,
        "reasons": reasons,
    }
    wrong: list[str] = []
    longest = 0.0
    for name, setup in SETUPS.items():
        if reason := lacking(setup.needs, task.earlier["machine"]):
            reasons[name] = reason
            continue
        if task.left() < longest:
            reasons[name] = "no time left"
            wrong.append(f"{name}: no time left")
            continue

        began = time.monotonic()
        try:
            contenders[name] = profiled(task, name, size, setup)
        except NotHere as error:
            reasons[name] = str(error)
        except Exception as error:
            traceback.print_exc()
            reasons[name] = one_line(error)
            wrong.append(f"{name}: {reasons[name]}")
        _let_go(task)
        longest = max(longest, time.monotonic() - began)
        task.note(figures)

    told: list[str] = []
    for name, found in contenders.items():
        told.append(f"{name} {found['profiled_ms']:.4g} ({found['idle_ms']:.3g})")
    summary = f"ms of a profiled step (idle): {', '.join(told) or 'none'}; {size.name}"
    return Answer(summary, figures, "; ".join([*wrong, *not_as_named(contenders)]))


def profiled(task: Task, name: str, size: Size, setup: Setup) -> dict[str, Any]:
    """Figures of one contender. Raises NotHere if the machine or the plan has no such thing; RuntimeError.

    step_ms, profiled_ms: of a step without and with the profiler.
    kinds: milliseconds a step, calls a step, and the name that took most, by kind.
    idle_ms: time of a step in which nothing runs (gaps), or the host waits for an idle card.
    kernels: a step's kernels and copies; on a CPU its operations.
    largest: the kernels that took most; none on a CPU.
    under_load: clock and power while steps run.
    """
    first, timed = (4, 1) if task.rehearsal else (FIRST, TIMED)
    # Sampled statistics, as in one of ten steps, would make one of the profiled steps unusual.
    recipe = recipe_of(setup.backend, fuse=setup.fuse, stats_every=NEVER)
    with ExitStack() as stack:
        over = {"engine": {"compile": setup.compile}}
        contender = start(stack, task, name, size, recipe, over)
        # Native has no blocks to count: its note in the record says who casts.
        if setup.fuse and BACKENDS[setup.backend].fuses and not contender.fused:
            raise RuntimeError("nothing was fused")
        run = contender.run
        run.telemetry.profiler = StepProfiler(
            run.folder, first, first + STEPS - 1, run.engine.device
        )
        facts = warm(contender, first - timed - 2)
        facts["step_ms"] = 1e3 * contender.steps(timed) / timed
        contender.steps(STEPS)
        run.telemetry.flush()
        facts |= of_profile(profile_in(run.folder, run.engine.device.type))
        facts["largest"] = largest_kernels(next(run.folder.glob("profile/*.json.gz")))
        facts["under_load"] = _under_load(contender, facts["step_ms"] / 1e3)
        facts |= contender.last_step()
        return {**facts, "compiled": run.watch is not None, "fused": contender.fused}


def of_profile(made: Profile) -> dict[str, Any]:
    """A profile's figures for one step, as `profiled` describes them."""
    steps = len(made.steps)
    kinds: dict[str, dict[str, Any]] = {}
    idle = 0.0
    for kind, seconds, calls, mostly in made.rows:
        milliseconds = 1e3 * seconds / steps
        kinds[kind] = {"ms": milliseconds, "calls": calls / steps, "mostly": mostly}
        if kind in (GAPS, WAITS):
            idle += milliseconds
    return {
        "profiled_ms": 1e3 * made.step_seconds,
        "kinds": kinds,
        "idle_ms": idle,
        "kernels": sum(row["calls"] for row in kinds.values()),
        "host_waits": made.waits / steps,
        "cut": made.cut,
    }


def profile_in(folder: Path, device: str) -> Profile:
    """The profile in a run's folder. device: where the run trains.

    Raises RuntimeError with the journal's reason if there is none, or if it has no kernel although a card computed.
    """
    made = profiles_of(folder)
    if not made:
        for row in read_rows(folder / JOURNAL, metrics=False):
            if row["kind"] == "event" and row["code"] == "profile.failed":
                raise RuntimeError(row["text"])
        raise RuntimeError("the profile has no whole step")
    found = made[0][1]
    # Without the right to read the card's counters, torch's profiler records the host alone.
    if found.device != device:
        raise RuntimeError(
            "the profiler saw no kernel of the card: it may lack the right to (CUPTI)"
        )
    return found


def largest_kernels(trace: Path) -> list[dict[str, Any]]:
    """The kernels and copies in a trace that took most of the card's time, for one of STEPS steps.

    Those of the same name, launched by the same operation with operands of the same sizes, are one entry.
    """
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    operations: dict[int, tuple[str, str]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            given = event.get("args", {})
            shapes = [dims for dims in given.get("Input Dims", ()) if dims]
            operations[given.get("External id")] = event["name"], str(shapes[:3])

    seconds: dict[tuple[str, str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str, str], int] = defaultdict(int)
    for event in events:
        if event.get("cat") in _ON_CARD:
            operation = operations.get(event.get("args", {}).get("External id"), ("", ""))
            key = (event["name"][:NAME], operation[0][:NAME], operation[1][:NAME])
            seconds[key] += event["dur"] / 1e6
            calls[key] += 1

    found: list[dict[str, Any]] = []
    for key in sorted(seconds, key=lambda key: -seconds[key])[:LARGEST]:
        row = {"name": key[0], "by": key[1], "shapes": key[2]}
        found.append({**row, "ms": 1e3 * seconds[key] / STEPS, "calls": calls[key] / STEPS})
    return found


def _under_load(contender: Contender, seconds: float) -> dict[str, str]:
    """Clock and power in the middle of about two seconds of steps; empty on a CPU. seconds: of a step."""
    if contender.run.engine.device.type == "cpu":
        return {}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(nvidia_smi, SMI_LOAD)
        contender.steps(max(1, min(100, round(2.0 / seconds))))
        return asked.result()


def _let_go(task: Task) -> None:
    """Free what the last contender held, and its compiled code: it must not count as a variant of the next one's."""
    torch.compiler.reset()
    gc.collect()
    if task.device.type == "cuda":
        torch.cuda.empty_cache()
