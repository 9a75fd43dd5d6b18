"""The picture of `harness compare`: the losses of both sides, their gap, and what happened, by step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.report import label
from harness.report.charts import BEYOND, drawable
from harness.report.decimate import Floats, Ints
from harness.report.fp8_pictures import GRID, INK, save
from harness.report.sides import Side, shared_steps
from harness.tracking.existing import LOSS, VAL_LOSS
from harness.tracking.history import SWITCHED, RunHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"A": "#2c7fb8", "B": "#d95f0e"}
# Event -> the mark that stands for it, and its meaning.
_MARKS = {
    "guard.rollback": ("v", "rollback"),
    SWITCHED: ("s", "layers moved"),
    "guard.halt": ("X", "halt"),
    "run.changed": ("D", "config changed"),
}
_SKIPPED = ("x", "update skipped")
# Longest name of a run in the picture's title, and in its file's name.
_LONGEST, _LONGEST_IN_NAME = 60, 100


def picture_path(a: Side, b: Side, folder: Path) -> Path:
    """`compare-<A>-<B>.png` in `folder`, after the first run of each side."""
    # A folder's name may be no UTF-8, or be cut within a character: what is no text is left out.
    names = [os.fsencode(side.runs[0].run_dir.name)[:_LONGEST_IN_NAME] for side in (a, b)]
    one, other = (name.decode(errors="ignore") for name in names)
    return folder / f"compare-{one}-{other}.png"


def draw(a: Side, b: Side, path: Path, divergence: int | None) -> Path:
    """Draw losses and gap into `path`, a PNG file; returns it. Raises OSError.

    divergence: the step at which the runs part; None if they do not.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.4), dpi=120, layout="constrained")
    losses, gap = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.6])
    for side in (a, b):
        _draw_losses(losses, side)
        _draw_events(losses, side)
    _draw_gap(gap, a, b)

    # Where the runs part.
    if divergence is not None:
        for axes in (losses, gap):
            axes.axvline(divergence, color=INK, linestyle="--", linewidth=0.9)
        losses.plot([], [], color=INK, linestyle="--", label=f"first difference: step {divergence}")

    losses.set_ylabel("loss" if a.runs[0].unit == "loss" else f"loss, {a.runs[0].unit}")
    gap.set_ylabel("B - A")
    gap.set_xlabel("step")
    names = [label(side.name[:_LONGEST]) for side in (a, b)]
    losses.set_title(f"A: {names[0]}\nB: {names[1]}", loc="left", fontsize=10)
    for axes in (losses, gap):
        axes.grid(color=GRID, linewidth=0.6)
    losses.legend(frameon=False, fontsize=8)
    return save(figure, path)


def _draw_losses(axes: Axes, side: Side) -> None:
    """A line for each run's training loss, and points for its validations."""
    colour = COLOURS[side.letter]
    for place, run in enumerate(side.runs):
        steps, values = drawable(run.points(LOSS))
        name = f"{side.letter}, training" if not place else None
        axes.plot(steps, values, color=colour, linewidth=1.0, label=name)
        steps, values = drawable(run.points(VAL_LOSS))
        name = f"{side.letter}, validation" if not place and len(steps) else None
        axes.plot(steps, values, "o", color=colour, markersize=4, label=name)


def _draw_events(axes: Axes, side: Side) -> None:
    """A mark on the axis for each event; A's stand over B's."""
    height = 0.05 if side.letter == "A" else 0.02
    marks: dict[tuple[str, str], list[int]] = {}
    for run in side.runs:
        for event in run.events:
            if event["code"] in _MARKS:
                marks.setdefault(_MARKS[event["code"]], []).append(event["step"])
        marks.setdefault(_SKIPPED, []).extend(_skipped(run))
    for (shape, meaning), steps in marks.items():
        if steps:
            axes.plot(
                steps,
                [height] * len(steps),
                shape,
                color=COLOURS[side.letter],
                markersize=5,
                transform=axes.get_xaxis_transform(),
                label=f"{side.letter}, {meaning}",
            )


def _skipped(run: RunHistory) -> list[int]:
    applied = run.points("train/step_applied")
    return applied.steps[applied.figures == 0].tolist()


def _draw_gap(axes: Axes, a: Side, b: Side) -> None:
    """The difference of the mean losses, at the steps that all runs have."""
    steps, of_a, of_b = _means(a.runs, b.runs)
    gap = of_b - of_a
    drawn = np.abs(gap) < BEYOND
    axes.axhline(0.0, color=INK, linewidth=0.8)
    axes.plot(steps[drawn], gap[drawn], color=INK, linewidth=1.0)


def _means(a: Sequence[RunHistory], b: Sequence[RunHistory]) -> tuple[Ints, Floats, Floats]:
    """(steps that all runs have, mean loss of a's runs, mean loss of b's runs)."""
    shared = np.array(shared_steps((*a, *b), LOSS), np.int64)
    points = [run.points(LOSS) for run in (*a, *b)]
    values = np.stack([each.figures[np.searchsorted(each.steps, shared)] for each in points])
    with np.errstate(invalid="ignore", over="ignore"):
        return shared, values[: len(a)].mean(axis=0), values[len(a) :].mean(axis=0)
