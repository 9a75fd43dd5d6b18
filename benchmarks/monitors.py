"""What the guard costs: the gradient health pass against a tutorial's loop, and a step with the guard on and off.

    python -m benchmarks.monitors [--sizes 25 125] [--rounds 5] [--threads N] [--out FILE]

Pass: gradients shaped like those of the shipped GPT with so many million parameters. The tutorial's loop reads, for
each parameter, the norm and whether all is finite (and, in a loop of its own, the number of zeros); ours is
`grad_health`, without and with the shares. `with zeros, on average` is what a run under a loss scale pays: the norm
at every step, the shares at every 10th. Contenders take turns within each round; a ratio is the median over rounds,
with the smallest and the largest.

Step: two runs of a 25M-parameter GPT at 2,048 tokens a step, bf16 under autocast, guard.enabled true and false, take
their steps in turn, with the monitors, snapshots in memory and journal of such a run. A round is 20 steps of each, so
that every measurement and one snapshot fall into it. Processor time is more reliable than wall time where other
programs share the machine. Scalar reads are counted by torch's profiler over 10 more steps.
"""

from __future__ import annotations

import argparse
import gc
import io
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.rollback import seconds
from harness.build import (
    build_data,
    build_plan,
    build_run,
    join_worker,
    open_store,
    open_telemetry,
    read_ledger,
)
from harness.core.config import GuardConfig, RunConfig
from harness.core.files import write_json
from harness.core.health import grad_health
from harness.models.gpt import build
from harness.precision.recipe import load_recipe
from harness.run import Run, next_step
from harness.tracking.console import Console

# Millions of parameters -> sizes of the shipped GPT.
GPTS = {
    1: {"dim": 128, "layers": 4, "heads": 4, "tied": False},
    25: {"dim": 512, "layers": 8, "heads": 8, "tied": False},
    125: {"dim": 1024, "layers": 10, "heads": 16, "tied": False},
}
EVERY = GuardConfig().measure_every
READS = ("aten::_local_scalar_dense", "aten::nonzero")


def parameters(millions: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Parameters of a GPT with normal gradients of size 1e-3; their own values are never touched."""
    with torch.device("meta"):
        shapes = [param.shape for param in build(**GPTS[millions]).parameters()]  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.empty(param.shape, dtype=dtype).normal_(0.0, 1e-3, generator=generator)
    return params


def tutorial(params: Iterable[nn.Parameter], zeros: bool) -> tuple[float, bool, int]:
    """Norm, whether all is finite, number of exact zeros: one read of the device for each, parameter by parameter."""
    squares, finite, exact_zeros = 0.0, True, 0
    for param in params:
        assert param.grad is not None
        squares += param.grad.norm().item() ** 2
        finite = bool(torch.isfinite(param.grad).all().item()) and finite
        if zeros:
            exact_zeros += int((param.grad == 0).sum().item())
    return math.sqrt(squares), finite, exact_zeros


def spread(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """ours / theirs, round by round: the median, with the smallest and the largest."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}


def measure_pass(millions: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Milliseconds of each contender and how many times faster ours is, at one size and precision."""
    params = parameters(millions, dtype)
    turns: dict[str, Callable[[], object]] = {
        "loop": lambda: tutorial(params, zeros=False),
        "pass": lambda: grad_health(params, scaled=False),
        "loop with zeros": lambda: tutorial(params, zeros=True),
        "pass with zeros": lambda: grad_health(params, scaled=True),
    }
    # The first call of each allocates and loads kernels.
    for turn in turns.values():
        turn()
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            times[name].append(min(seconds(turn) for _ in range(3)))

    # A run under a loss scale measures the shares in one of EVERY steps.
    average: list[float] = []
    for usual, with_zeros in zip(times["pass"], times["pass with zeros"], strict=True):
        average.append(((EVERY - 1) * usual + with_zeros) / EVERY)

    # How far our norm is from that in float64.
    squares = 0.0
    for param in params:
        assert param.grad is not None
        squares += param.grad.double().square().sum().item()
    exact = math.sqrt(squares)
    norm = grad_health(params, scaled=False).norm.item()
    return {
        "parameters": sum(param.numel() for param in params),
        "tensors": len(params),
        "milliseconds": {name: 1e3 * median(each) for name, each in times.items()},
        "faster": {
            "without zeros": spread(times["loop"], times["pass"]),
            "with zeros, on average": spread(times["loop with zeros"], average),
            "with zeros, in their step": spread(times["loop with zeros"], times["pass with zeros"]),
        },
        "norm_error": abs(norm / exact - 1),
    }


def start(
    stack: ExitStack,
    folder: Path,
    size: Mapping[str, Any],
    tokens: int,
    guard: bool,
    recipe: str = "bf16",
) -> Run:
    """A run that is ready for its first step; closed with `stack`."""
    folder.mkdir()
    text = folder / "text.txt"
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(32, 127, (300_000,), generator=generator)
    text.write_bytes(bytes(letters.tolist()))
    context = min(256, tokens)
    batch = tokens // context
    config = RunConfig.model_validate(
        {
            "recipe": recipe,
            "train": {
                "steps": 10**6,
                "global_batch": batch,
                "micro_batch": batch,
                "threads": torch.get_num_threads(),
            },
            "data": {"path": str(text), "context": context, "val_samples": 1},
            "model": {"args": dict(size)},
            "checkpoint": {"every": 0},
            "guard": {"enabled": guard},
        }
    )
    loaded = load_recipe(recipe)
    worker = join_worker(config, "python")
    plan, model = build_plan(config, loaded, worker)
    data = build_data(config, folder, worker)
    store = open_store(folder, worker)
    ledger = read_ledger(folder, worker, store)
    quiet = Console(config.train.steps, stream=io.StringIO())
    telemetry = stack.enter_context(open_telemetry(config, folder, worker, quiet, ledger.attempt))
    run = build_run(config, loaded, folder, worker, plan, model, data, telemetry, ledger, store)
    stack.callback(run.stop.uninstall)
    return run


def step(run: Run) -> None:
    """One step of the loop, judged at once, with the snapshot that may follow it."""
    run.guard.observe(next_step(run).facts())
    if run.guard.snapshot_due():
        run.guard.snapshot()


def reads(run: Run, steps: int) -> int:
    """Scalar reads of torch in so many steps."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step(run)
    return sum(event.count for event in profiler.key_averages() if event.key in READS)


def measure_step(millions: int, tokens: int, rounds: int, steps: int = 20) -> dict[str, Any]:
    """Seconds of a step with the guard on and off, on over off, and the scalar reads that the guard adds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = {
            name: start(stack, folder / name, GPTS[millions], tokens, name == "on")
            for name in ("on", "off")
        }
        for run in runs.values():
            for _ in range(2):
                step(run)
        clocks = {"wall": time.perf_counter, "processor": time.process_time}
        times: dict[str, dict[str, list[float]]] = {
            clock: {name: [] for name in runs} for clock in clocks
        }
        for _ in range(rounds):
            taken = {clock: dict.fromkeys(runs, 0.0) for clock in clocks}
            for turn in range(steps):
                # Whoever comes second finds a warmer machine: take turns at that too.
                for name in ("on", "off") if turn % 2 else ("off", "on"):
                    began = {clock: read() for clock, read in clocks.items()}
                    step(runs[name])
                    for clock, read in clocks.items():
                        taken[clock][name] += read() - began[clock]
            for clock, totals in taken.items():
                for name, total in totals.items():
                    times[clock][name].append(total / steps)
        counts = {name: reads(run, EVERY) for name, run in runs.items()}
        monitors = [type(monitor).__name__ for monitor in runs["on"].guard.judge.monitors]
    return {
        "tokens": tokens,
        "steps_per_round": steps,
        **{
            clock: {
                "seconds": {name: median(each) for name, each in rows.items()},
                "on_over_off": spread(rows["on"], rows["off"]),
                "on_over_off_of_all_steps": sum(rows["on"]) / sum(rows["off"]),
            }
            for clock, rows in times.items()
        },
        "scalar_reads": {"steps": EVERY, **counts, "added": counts["on"] - counts["off"]},
        "monitors": monitors,
    }


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def table(results: Mapping[str, Any]) -> str:
    """The figures as lines of text."""
    lines = []
    for name, row in results["pass"].items():
        for what, ratio in row["faster"].items():
            span = f"{ratio['ratio']:6.1f}x  ({ratio['ratio_min']:.1f} - {ratio['ratio_max']:.1f})"
            lines.append(f"pass  {name:14s} {what:26s} {span}  norm error {row['norm_error']:.1e}")
        taken = ", ".join(f"{what} {ms:.1f}" for what, ms in row["milliseconds"].items())
        lines.append(f"      {name:14s} ms: {taken}")
    for clock in ("wall", "processor"):
        row = results["step"][clock]
        ratio = row["on_over_off"]
        span = f"{ratio['ratio']:.4f} ({ratio['ratio_min']:.4f} - {ratio['ratio_max']:.4f})"
        lines.append(
            f"step  guard on / off, {clock} time: {span}, {row['seconds']['off']:.3f} s a step"
        )
    lines.append(
        f"step  scalar reads added in {EVERY} steps: {results['step']['scalar_reads']['added']}"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 125], choices=sorted(GPTS))
    parser.add_argument("--step-size", type=int, default=25, choices=sorted(GPTS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads (default: torch's own choice)"
    )
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    about = machine()
    passes = {}
    for millions in options.sizes:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{millions}M {str(dtype).removeprefix('torch.')}"
            passes[name] = measure_pass(millions, dtype, options.rounds)
            gc.collect()
    steps = measure_step(options.step_size, options.tokens, options.rounds, options.steps)
    results = {"pass": passes, "step": steps}
    about["load_average_after"] = list(os.getloadavg())
    print(table(results))
    if options.out:
        words = sys.argv[1:] if arguments is None else arguments
        command = " ".join(["python -m benchmarks.monitors", *words])
        record = {"command": command, "machine": about, "rounds": options.rounds, **results}
        write_json(options.out, record)


if __name__ == "__main__":
    main()
