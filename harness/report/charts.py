"""The curves of a page: a run's figures by step, decimated so that no extreme is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.core.config import FallbackConfig
from harness.core.errors import clipped, shown
from harness.core.facts import ROLES
from harness.core.metrics import MFU, OF_LAYERS
from harness.report.decimate import Floats, Ints, extremes, not_finite, rounded
from harness.tracking.existing import LOSS, VAL_LOSS
from harness.tracking.figures import Points
from harness.tracking.history import MAX_TEXT, RunHistory

MOST_POINTS = 1000
MOST_MARKS = 300
SETTLED = FallbackConfig().warmup_steps + 1
"""The first step whose FP8 scales are those of its tensors."""
MOST_OTHERS = 24
"""Charts of metrics that this project does not write itself."""
BEYOND = 1e100
"""Figures over this are not drawn, like those that are not finite: the axis would have no finite width."""
_LOSS_SCALE = "train/loss_scale"
_APPLIED = "train/step_applied"
# Beginnings of metrics that have a chart, or are in a table: of slots, or of layers.
_OURS = ("train/", "guard/", "fp8", "Loss/", "val/", f"{OF_LAYERS.key}/")


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart.

    id: of the same chart in every run. title, unit: for readers; the unit is empty for a count or a share.
    series: metric -> its label.
    log: base of the axis at first, 2 or 10; 0: linear.
    stepped: whether a value holds until the next one.
    settled: the axis is at first that of the steps from this one on; 0: of all.
    """

    id: str
    title: str
    unit: str
    series: dict[str, str]
    log: int = 0
    stepped: bool = False
    settled: int = 0


def drawable(points: Points) -> tuple[Ints, Floats]:
    """Steps and figures of what a curve can show."""
    drawn = np.abs(points.figures) < BEYOND
    return points.steps[drawn], points.figures[drawn]


def shipped(history: RunHistory) -> list[Chart]:
    """The charts of the metrics that this project writes, in the order of the page."""
    counted = str(history.run["data"].get("counted", "tokens"))
    unit = "" if history.unit == "loss" else history.unit
    saturation = {f"fp8/{role}/saturation_max": role for role in ROLES}
    return [
        Chart("loss", "Loss", unit, {LOSS: "training", VAL_LOSS: "validation"}),
        Chart("accuracy", "Validation accuracy", "", {"val/accuracy": "validation"}),
        Chart("lr", "Learning rate", "", {"train/lr": "learning rate"}),
        Chart(
            "grad_norm", "Gradient norm before clipping", "", {"train/grad_norm": "gradient"}, 10
        ),
        Chart("param_norm", "Parameter norm", "", {"train/param_norm": "parameters"}),
        Chart("loss_scale", "Loss scale", "", {_LOSS_SCALE: "loss scale"}, 2, stepped=True),
        Chart(
            "saturation",
            "FP8 saturation, largest over the layers",
            "",
            saturation,
            2,
            settled=SETTLED,
        ),
        Chart("demoted", "Layers in BF16", "", {"guard/demoted_layers": "layers"}, stepped=True),
        Chart("rate", "Throughput", f"{counted} / s", {"train/tokens_per_second": counted}),
        Chart("mfu", "Model FLOPs utilisation", "", {MFU: "MFU"}),
        Chart("memory", "Peak memory so far", "GiB", {"train/peak_memory_gib": "memory"}),
    ]


def charts(history: RunHistory) -> list[dict[str, Any]]:
    """The charts that have data, each with its series, for the page's script."""
    # The project's own charts come first. Of metrics that somebody else logged only so many are drawn.
    wanted = shipped(history)
    others: list[Chart] = []
    for name in history.rows.names():
        if not name.startswith(_OURS):
            # Its name is somebody else's: only `series` needs it as it is.
            title = shown(clipped(name, MAX_TEXT))
            others.append(Chart(f"own:{title}", title, "", {name: title}))
    found: list[dict[str, Any]] = []
    for chart in [*wanted, *others[:MOST_OTHERS]]:
        series = list(_series(history, chart))
        if not series:
            continue
        made = {
            "id": chart.id,
            "title": chart.title,
            "unit": chart.unit,
            "log": chart.log,
            "stepped": chart.stepped,
            "settled": chart.settled,
            "series": series,
        }
        if chart.id == "loss":
            made |= _of_loss(history)
        found.append(made)
    return found


def _series(history: RunHistory, chart: Chart) -> Iterator[dict[str, Any]]:
    for name, text in chart.series.items():
        points = history.points(name)
        # A loss scale of 1 throughout is none.
        is_none = name == _LOSS_SCALE and bool((points.figures == 1.0).all())
        if not points or is_none:
            continue
        yield {"label": text, "dashed": False, **_decimated(points)}
        if name == LOSS and (abandoned := history.abandoned.get(name)):
            yield {"label": "thrown away by a rollback", "dashed": True, **_decimated(abandoned)}


def _decimated(points: Points) -> dict[str, Any]:
    """A series as the page draws it.

    steps, values: of at most MOST_POINTS points.
    marks: (step, what) of values that are not drawn.
    summary: of all points.
    """
    drawn = np.abs(points.figures) < BEYOND
    figures = np.where(drawn, points.figures, np.nan)
    places = extremes(figures, MOST_POINTS)
    odd = not_finite(figures, MOST_MARKS)
    reasons = map(_not_drawn, points.figures[odd].tolist())
    return {
        "steps": points.steps[places].tolist(),
        "values": rounded(figures[places]),
        "marks": list(zip(points.steps[odd].tolist(), reasons, strict=True)),
        "summary": _summary(points.steps[drawn], figures[drawn], len(points)),
    }


def _not_drawn(value: float) -> str:
    """Why a value has no place on the axis."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite"
    return f"over {BEYOND:g}"


def _summary(steps: Ints, values: Floats, count: int) -> dict[str, Any]:
    """Of the steps that can be drawn, of `count`: [step, value] of the first, last, least and largest."""
    found: dict[str, Any] = {"count": count, "not_drawn": count - len(steps)}
    if len(steps):
        at = {
            "first": 0,
            "last": -1,
            "least": int(values.argmin()),
            "largest": int(values.argmax()),
        }
        for name, place in at.items():
            found[name] = [int(steps[place]), float(f"{values[place]:.6g}")]
    return found


def _of_loss(history: RunHistory) -> dict[str, Any]:
    """What the loss chart has besides: skipped updates, the unigram line, and where its axis ends at first.

    A spike must not flatten the curve, so the axis ends a little over the start or the unigram line.
    """
    applied = history.points(_APPLIED)
    skipped = applied.steps[applied.figures == 0]
    # Of very many skipped steps evenly spread ones are marked.
    spread = max(1, -(-len(skipped) // MOST_MARKS))
    made: dict[str, Any] = {"skipped": skipped[::spread].tolist()}
    nats = history.unigram_nats
    if nats is not None:
        made["line"] = [float(f"{nats:.6g}"), f"unigram entropy, {nats:.3g} {history.unit}"]

    values = history.points(LOSS).figures
    values = values[np.abs(values) < BEYOND]
    if len(values):
        usual = max(float(values[0]), nats or 0.0)
        if values.max() > 1.3 * usual > 0:
            made["top"] = float(f"{1.15 * usual:.6g}")
    return made


def marks_of_scale(history: RunHistory) -> Iterator[tuple[int, str]]:
    """(step, what) of changes of the loss scale, at most MOST_MARKS, the first ones."""
    points = history.points(_LOSS_SCALE)
    before, after = points.figures[:-1], points.figures[1:]
    changes = np.flatnonzero(before != after)[:MOST_MARKS]
    for place in changes.tolist():
        old, new = float(before[place]), float(after[place])
        what = "growth" if new > old else "backoff"
        yield int(points.steps[place + 1]), f"{what}: {old:g} to {new:g}"
