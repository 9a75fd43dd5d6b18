"""The picture of docs/images/demotion.png: one layer leaves FP8 at run time, and that saves the run.

    python -m benchmarks.demotion --seeds 0 1 2

The fault is constructed: `growing` of `benchmarks.fallback`, in which one input channel of one Linear doubles every
four steps. bf16 does not notice it, to the last bit. Runs of the real command line from the same weights, on the same
data in the same order:

    bf16        what the model can reach
    plain       FP8, the recipe's `fallback.enabled: false`, and the guard off, which would end the run
    fallback    fp8_hybrid as shipped
    guard       as plain, with the guard on: when and why it ends the run (not in the picture)

The picture has the training loss of the first three, and the statistic behind the decision: the share of the layer's
input that FP8 flushes to zero. Once the layer is in BF16 the FP8 values are still measured, but not used.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.fallback import KINDS, ROOT, SCENARIOS, prepare, read, settings, start, train
from benchmarks.results_file import write_results
from harness.core.config import FallbackConfig
from harness.core.files import atomic_file
from harness.run_folder import read_outcome
from harness.tracking.journal import read_rows

PICTURE = ROOT / "docs" / "images" / "demotion.png"
OUT = ROOT / "benchmarks" / "results" / "demotion_cpu.json"
CASE = SCENARIOS[0]
HALTED = 3
"""The exit code of a run that the guard ended."""
LOOKS = {
    "plain": ("#cb181d", "-", "FP8, no fallback"),
    "fallback": ("#2c7fb8", "-", "FP8 with the fallback, as shipped"),
    "bf16": ("#222222", ":", "bf16"),
}
"""Colour, line and name of each run, in the order in which they are drawn."""


def series(run: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric in the journal of a run folder, without steps at which it was not measured."""
    points: list[tuple[int, float]] = []
    for row in read_rows(run / "journal.jsonl"):
        if row["kind"] != "metrics" or name not in row["metrics"]:
            continue
        value = float(row["metrics"][name])
        if np.isfinite(value):
            points.append((row["step"], value))
    return points


def look(run: Path) -> dict[str, Any]:
    """`benchmarks.fallback.read` of a run, with loss (nats per byte) and underflow (share) as (step, value)."""
    return {
        **read(run),
        "loss": series(run, "train/loss"),
        "underflow": series(run, f"fp8_underflow/{CASE.guilty}"),
    }


def guard_alone(work: Path, seed: int) -> dict[str, Any]:
    """Plain FP8 with the guard on: step and reason of its end. Ends the program if the guard lets it go on."""
    overrides = [value for value in settings(CASE, "plain", seed) if value != "guard.enabled=false"]
    name = f"{CASE.target}-guard-{seed}"
    done = start(work, name, KINDS["plain"][0], overrides)
    if done.returncode != HALTED:
        raise SystemExit(
            f"{name} ended with {done.returncode}, not {HALTED}:\n{done.stdout}\n{done.stderr}"
        )
    outcome = read_outcome(work / "runs" / name)
    return {"step": outcome["step"], "reason": outcome["reason"]}


def study(work: Path, seed: int) -> dict[str, Any]:
    """Trains all runs of one seed in `work`: `look` of each drawn run by its name, `guard_alone` as guard."""
    return {
        "seed": seed,
        "runs": {kind: look(train(work, CASE, kind, seed)) for kind in LOOKS},
        "guard": guard_alone(work, seed),
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A table: two lines of heading, then one line for each seed."""
    lines = [
        "seed  bf16    FP8, no fallback   FP8 with fallback  left FP8, at step           guard alone halts",
        "      (validation, nats per byte; differences to bf16 of the same seed)         after step",
    ]
    for result in results:
        runs = result["runs"]
        bf16 = runs["bf16"]["val_loss"]
        plain = runs["plain"]["val_loss"]
        fallback = runs["fallback"]["val_loss"]

        moves: list[str] = []
        for switch in runs["fallback"]["switches"]:
            moves += [f"{layer}, {switch['step']}" for layer in switch["demote"]]
        left = ", ".join(moves) or "-"

        lines.append(
            f"{result['seed']:>4}  {bf16:.4f}  {plain:.4f} {plain / bf16 - 1:+8.2%}    {fallback:.4f} "
            f"{fallback / bf16 - 1:+7.2%}    {left:<26}  {result['guard']['step']}"
        )
    return "\n".join(lines)


def picture(results: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss above, underflow below, by step: each seed thin, their mean thick, demotions as vertical lines."""
    figure = Figure(figsize=(8.0, 5.4), dpi=200, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 3])

    # The loss of all three kinds of runs.
    for kind, (colour, line, name) in LOOKS.items():
        _lines(above, [result["runs"][kind]["loss"] for result in results], colour, line, name)

    # The underflow. Behind the demotion it is measured and no longer used, and drawn dashed.
    colour, line, name = LOOKS["plain"]
    _lines(below, [result["runs"]["plain"]["underflow"] for result in results], colour, line, name)
    fallback = [result["runs"]["fallback"] for result in results]
    colour, line, name = LOOKS["fallback"]
    used = [_until(run["underflow"], _demotion(run)) for run in fallback]
    _lines(below, used, colour, line, name)
    unused = [run["underflow"][len(part) - 1 :] for run, part in zip(fallback, used, strict=True)]
    _lines(below, unused, colour, "--", "the same, measured but not used")

    # Where the layer left FP8.
    steps = sorted(_demotion(run) for run in fallback if _demotion(run) < math.inf)
    for step in set(steps):
        for axes in (above, below):
            axes.axvline(step, color=colour, linestyle="--", linewidth=1.0)
    if steps:
        above.annotate(
            f"step {_listed(sorted(set(steps)))}: {CASE.layer}\nleaves FP8 for BF16",
            (steps[-1], 0.82),
            xytext=(8, 0),
            xycoords=above.get_xaxis_transform(),
            textcoords="offset points",
            color=colour,
            fontsize=10,
        )

    # Limit, titles and axes.
    limit = FallbackConfig().underflow
    below.axhline(limit, color="#737373", linewidth=1.0, zorder=1)
    below.text(2, limit + 0.03, f"limit {limit:g}", color="#737373")
    factor = 1 / CASE.args["per_window"]
    above.set_title(
        f"A constructed fault: one input channel of {CASE.layer} doubles every {factor:g} steps",
        loc="left",
        fontsize=10.5,
    )
    below.set_title(f"Share of {CASE.guilty} that FP8 flushes to zero", loc="left", fontsize=10.5)
    above.set_ylabel("training loss, nats per byte")
    below.set_ylabel("share")
    below.set_xlabel("step")
    below.set_ylim(0, 1.05)
    below.set_xlim(left=0)
    for axes, place in ((above, "upper right"), (below, "center right")):
        axes.grid(color="#e5e5e5", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9.5, loc=place)
    return figure


def _demotion(run: Mapping[str, Any]) -> float:
    """The step from which the layer was in BF16; infinity if it never was."""
    steps = [switch["step"] for switch in run["switches"] if CASE.layer in switch["demote"]]
    return min(steps, default=math.inf)


def _listed(steps: Sequence[float]) -> str:
    *others, last = (f"{step:g}" for step in steps)
    return f"{', '.join(others)} or {last}" if others else last


def _until(points: Sequence[tuple[int, float]], step: float) -> list[tuple[int, float]]:
    return [point for point in points if point[0] <= step]


def _lines(
    axes: Axes, runs: Sequence[Sequence[tuple[int, float]]], colour: str, line: str, name: str
) -> None:
    """Draws every run's values thin, and the mean over the runs thick, where all of them have values.

    Seeds draw the sampled steps. Between two samples a run's value is interpolated.
    """
    known = [np.array(run, dtype=np.float64).T for run in runs if run]
    for steps, values in known:
        axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35)
    if not known:
        return

    first = max(steps[0] for steps, _ in known)
    last = min(steps[-1] for steps, _ in known)
    steps = np.arange(first, last + 1)
    means = np.mean([np.interp(steps, each[0], each[1]) for each in known], axis=0)
    axes.plot(steps, means, line, color=colour, linewidth=1.8, label=name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything, print the table, draw the picture, write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        results = [study(Path(folder), seed) for seed in options.seeds]
    print(table(results))
    for result in results:
        verdicts = result["runs"]["fallback"]["verdicts"]
        print("\n".join(f"seed {result['seed']}: {row['text']}" for row in verdicts))

    with atomic_file(options.picture) as stream:
        picture(results).savefig(stream, format="png", facecolor="white")

    # The picture has the series; the record keeps the figures of the table.
    for result in results:
        for run in result["runs"].values():
            del run["loss"], run["underflow"]
    write_results(options.out, "benchmarks.demotion", arguments, 1, results)


if __name__ == "__main__":
    main()
