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
    steps = [row["step"] for row in rows]
    metrics = [row["metrics"] for row in rows]
    whole = bool(steps) and steps == list(range(1, len(steps) + 1))
    if not whole or any(each["train/step_applied"] != 1.0 for each in metrics):
        what = "does not hold every step once"
        fix = "train it in one piece with guard.enabled=false, so that nothing is rolled back or skipped"
        raise DataError(Problem(what, str(folder), f"{len(steps)} steps", fix))

    loss = np.array([each["train/loss"] for each in metrics])
    norm = np.array([each["train/grad_norm"] for each in metrics])
    params = next(row for row in journal if row["kind"] == "run")["params"]
    return Trace(int(params["train.seed"]), loss, norm)


def write_traces(path: Path, traces: Sequence[Trace], command: str) -> None:
    """Seven significant digits: what float32 holds."""
    compact: list[dict[str, object]] = []
    for trace in traces:
        loss = [float(f"{value:.7g}") for value in trace.loss]
        norm = [float(f"{value:.7g}") for value in trace.norm]
        compact.append({"seed": trace.seed, "loss": loss, "norm": norm})
    write_json(path, {"command": command, "traces": compact})


def read_traces(path: Path) -> list[Trace]:
    """What `write_traces` wrote."""
    traces = json.loads(path.read_text())["traces"]
    return [Trace(each["seed"], np.array(each["loss"]), np.array(each["norm"])) for each in traces]


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
    # Which residuals follow each other: blocks from random places of the circle.
    place = np.arange(SETTLED, len(trace.loss))
    count = max(0, steps - SETTLED)
    starts = rng.integers(0, len(place), -(-count // block))
    order = ((starts[:, None] + np.arange(block)) % len(place)).reshape(-1)[:count]
    later = np.log(np.arange(SETTLED, SETTLED + count) + 1.0)

    series: list[list[float]] = []
    for values in (trace.loss, trace.norm):
        # Theil and Sen: the median of the slopes through all pairs of points.
        x, y = np.log(place + 1.0), np.log(values[SETTLED:])
        first, second = np.triu_indices(len(x), 1)
        slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
        residual = y - slope * x

        recorded = values[: min(SETTLED, steps)].tolist()
        made = np.exp(slope * later + residual[order]).tolist()
        series.append([*recorded, *made])
    return series[0], series[1]
