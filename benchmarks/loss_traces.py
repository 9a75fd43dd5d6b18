"""Loss and gradient norm of recorded runs, and longer clean runs made from them by block bootstrap."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.core.errors import DataError, Problem
from harness.core.files import write_json
from harness.tracking.journal import read_rows

SETTLED = 60
"""Steps after which the recorded quickstart is taken as stationary about its trend: warm-up is over at 40."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded run: loss in nats and gradient norm before clipping, float64 [steps] each."""

    seed: int
    loss: npt.NDArray[np.float64]
    norm: npt.NDArray[np.float64]


def read_run(folder: Path) -> Trace:
    """The trace in a run's journal. Raises DataError unless it holds steps 1, 2, ... once each, all applied."""
    journal = list(read_rows(folder / "journal.jsonl"))
    rows = [row for row in journal if "train/loss" in row.get("metrics", {})]
    steps, values = [row["step"] for row in rows], [row["metrics"] for row in rows]
    if (
        not steps
        or steps != list(range(1, len(steps) + 1))
        or any(v["train/step_applied"] != 1.0 for v in values)
    ):
        fix = "train it in one piece with guard.enabled=false, so that nothing is rolled back or skipped"
        raise DataError(
            Problem("does not hold every step once", str(folder), f"{len(steps)} steps", fix)
        )
    columns = [
        np.array([value[name] for value in values]) for name in ("train/loss", "train/grad_norm")
    ]
    params = next(row for row in journal if row["kind"] == "run")["params"]
    return Trace(int(params["train.seed"]), *columns)


def write_traces(path: Path, traces: Sequence[Trace], command: str) -> None:
    """Seven significant digits: what float32 holds."""
    compact = [
        {
            "seed": t.seed,
            **{name: [float(f"{v:.7g}") for v in getattr(t, name)] for name in ("loss", "norm")},
        }
        for t in traces
    ]
    write_json(path, {"command": command, "traces": compact})


def read_traces(path: Path) -> list[Trace]:
    """What `write_traces` wrote."""
    return [
        Trace(t["seed"], np.array(t["loss"]), np.array(t["norm"]))
        for t in json.loads(path.read_text())["traces"]
    ]


def synthetic(
    trace: Trace, steps: int, block: int, rng: np.random.Generator
) -> tuple[list[float], list[float]]:
    """Loss and norm of a clean run of any length, made from one recorded run by a block bootstrap of residuals.

    The first SETTLED steps are the recorded ones. From there on log loss and log norm follow the run's own trend, a
    power law of the step (a line in log-log by Theil and Sen's estimator), plus residuals about it: blocks of
    successive ones from random places, loss and norm from the same, the series taken as a circle (Politis and Romano,
    1992). Residuals rather than values, so that a block's end has no jump that comes from where it was cut out; what is
    left at a joint (the trend's misfit, and noise that no longer follows its predecessor) makes the run rougher than a
    real one. What no recorded run had does not occur: the figure is about these runs' noise, not about rarer events.
    """
    place = np.arange(SETTLED, len(trace.loss))
    count = max(0, steps - SETTLED)
    starts = rng.integers(0, len(place), -(-count // block))
    order = ((starts[:, None] + np.arange(block)) % len(place)).reshape(-1)[:count]
    later = np.log(np.arange(SETTLED, SETTLED + count) + 1.0)
    series: list[list[float]] = []
    for values in (trace.loss, trace.norm):
        x, y = np.log(place + 1.0), np.log(values[SETTLED:])
        first, second = np.triu_indices(len(x), 1)
        slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
        residual = y - slope * x
        series.append(
            [
                *values[: min(SETTLED, steps)].tolist(),
                *np.exp(slope * later + residual[order]).tolist(),
            ]
        )
    return series[0], series[1]
