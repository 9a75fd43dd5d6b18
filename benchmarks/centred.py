"""What `fp8_centred_db` costs: a training step with its sums over the same step without them.

    python -m benchmarks.centred [--sizes tiny 12M] [--casts kernel torch] [--seconds 40] [--out FILE]

The loop of `harness train` (guard, journal, snapshots in memory) trains one shipped GPT under `fp8_hybrid`, on one
thread. Steps with the sums behind `fp8_centred_db` and steps without take turns, and the order changes every time. One
model runs both, so that both have the same memory. `casts`: the fused kernel, which is built a second time from its
source without the line that makes the sums, or torch operations, as on a machine without a compiler.

  sampled   every step is sampled; a turn is one step
  shipped   one step in ten is sampled, as the recipe says; a turn is ten steps

`ratio` is the median over rounds of the processor time with the sums over that without, with the 95% interval of that
median, by order, and the smallest and largest ratio. `casts` is the extra time of the casts of a sampled step, in ms
and as a share of the step. Only the casts are timed, so the rest of the step adds no noise.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor

from benchmarks.loop import SIZES
from benchmarks.monitors import start, step
from benchmarks.results_file import write_results
from harness.monitors.evidence import Evidence
from harness.monitors.growth import Floats
from harness.precision import scaling
from harness.precision.backends import native_kernel
from harness.precision.backends.slot_buffers import SlotBuffers
from harness.precision.recipe import load_recipe
from harness.run import Run

OUT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "centred_cpu.json"
SUMS_LINE = "  if (stats && n) add_channels(x, n, columns, scale, q, stats, threads);\n"
WARM_UP = 20
"""Steps before the first turn: scales settle, and the first steps are all sampled."""
Row = dict[str, Any]


def kernel_without(folder: Path) -> native_kernel.Kernel:
    """The fused kernel without the sums of centred_db, from the same source by the same compiler."""
    source = native_kernel._SOURCE.read_text()
    if source.count(SUMS_LINE) != 1:
        raise SystemExit(
            f"{native_kernel._SOURCE} has not the line that this benchmark takes out:\n{SUMS_LINE}"
        )
    changed = folder / "without.cpp"
    changed.write_text(source.replace(SUMS_LINE, ""))
    with mock.patch.object(native_kernel, "_SOURCE", changed):
        compiler = shutil.which("g++") or "c++"
        return native_kernel._bind(ctypes.CDLL(str(native_kernel._build(compiler))))


def no_sums(x: Tensor, quantized: Tensor, scale: Tensor | float) -> Tensor:
    """Replaces `scaling.channel_stats`."""
    return torch.zeros(scaling.CHANNEL_SUMS, dtype=torch.float64)


def no_rule(evidence: Evidence, values: Floats, limits: Floats) -> Floats:
    """Replaces `Evidence._common_mode`."""
    return values[-1]


class Contest:
    """A run whose next step makes the sums or not. spent: processor seconds in casts since it was set to 0."""

    def __init__(self, stack: ExitStack, size: str, casts: str) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        given, tokens, _ = SIZES[size]
        recipe = load_recipe("fp8_hybrid").model_dump(mode="json")
        # The text is random: rows stay alike where nothing can be learned, and a layer would leave after 200 steps.
        recipe["fallback"]["centred_steps"] = 10**9
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        self.run: Run = start(stack, folder / "run", given, tokens, guard=True, recipe=str(path))
        self.buffers: SlotBuffers = self.run.precision.slot_buffers  # pyright: ignore[reportAttributeAccessIssue]
        self.spent = 0.0
        self.sampled = 0
        self._with = self._without = None
        if casts == "kernel":
            if self.buffers.kernel is None:
                raise SystemExit(f"no kernel here: {self.buffers.kernel_note}")
            self._with, self._without = (
                self._timed(self.buffers.kernel),
                self._timed(kernel_without(folder)),
            )
        self._quantize = self._timed(self.buffers.quantize)

    def _timed(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            result = action(*given, **named)
            self.spent += time.process_time() - began
            return result

        return timed

    @contextmanager
    def casting(self, sums: bool) -> Iterator[None]:
        """Context in which steps make the sums, or do not."""
        with ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(self.buffers, "kernel", self._with if sums else self._without)
            )
            if self._with is None:
                stack.enter_context(mock.patch.object(self.buffers, "quantize", self._quantize))
            if not sums:
                stack.enter_context(mock.patch.object(scaling, "channel_stats", no_sums))
                stack.enter_context(mock.patch.object(Evidence, "_common_mode", no_rule))
            yield

    def take(self, sums: bool, steps: int) -> tuple[float, float]:
        """Processor seconds of a step, and of its casts."""
        self.spent = 0.0
        with self.casting(sums):
            began = time.process_time()
            for _ in range(steps):
                step(self.run)
                self.sampled += self.buffers.sampling
            return (time.process_time() - began) / steps, self.spent / steps


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the median: order statistics, by the normal approximation of the binomial."""
    ordered = sorted(values)
    middle, half = len(ordered) / 2, 0.98 * math.sqrt(len(ordered))
    return ordered[max(0, math.floor(middle - half))], ordered[
        min(len(ordered) - 1, math.ceil(middle + half))
    ]


def measure(contest: Contest, every: int, seconds: float) -> Row:
    """Both in turn for `seconds` of processor time, at least twice. A turn is `every` steps, one of them sampled."""
    contest.run.stats_every = every
    while contest.run.state.step % every or contest.run.state.step < WARM_UP:
        contest.take(True, 1)
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    sampled = {True: 0, False: 0}
    number, ends = 0, time.process_time() + seconds
    while number < 2 or time.process_time() < ends:
        number += 1
        for sums in (True, False) if number % 2 else (False, True):
            contest.sampled = 0
            times[sums].append(contest.take(sums, every))
            sampled[sums] += contest.sampled
    ratios = [a / b for (a, _), (b, _) in zip(times[True], times[False], strict=True)]
    more = [1e3 * (a - b) for (_, a), (_, b) in zip(times[True], times[False], strict=True)]
    without = 1e3 * median(whole for whole, _ in times[False])
    return {
        "rounds": number,
        "steps of a turn": every,
        "sampled with, without": [sampled[True], sampled[False]],
        "ms a step without": round(without, 3),
        "ratio": round(median(ratios), 4),
        "interval": [round(each, 4) for each in interval(ratios)],
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "ms more in casts": round(median(more), 4),
        "casts' share of the step": round(median(more) / without, 5),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each, and keep the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument(
        "--casts", nargs="+", choices=("kernel", "torch"), default=["kernel", "torch"]
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="processor time for each line")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: list[Row] = []
    for size in given.sizes:
        for casts in given.casts:
            with ExitStack() as stack:
                contest = Contest(stack, size, casts)
                for name, every in (("sampled", 1), ("shipped", contest.run.stats_every)):
                    row = {"size": size, "casts": casts, "steps": name} | measure(
                        contest, every, given.seconds
                    )
                    results.append(row)
                    print(row, flush=True)
    write_results(given.out, "benchmarks.centred", arguments, 1, results)


if __name__ == "__main__":
    main()
