"""The pictures of a run that stand in `plots/` beside its page: loss, and the saturation of every slot."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.core.facts import ROLES
from harness.report import label
from harness.report.charts import drawable
from harness.report.fp8_pictures import GRID, INK, ROLE_COLOURS, pictures, save
from harness.report.hunt import hunt_plot
from harness.tracking.figures import Points
from harness.tracking.history import BYTES, RunHistory, bare, split_slot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS = 600
MAX_LABELS = 60
MAX_ROWS = 6000
OCTAVES = 2.0
"""The colour scale ends at a factor of 2**OCTAVES on either side of 1."""


def draw(history: RunHistory, folder: Path) -> list[Path]:
    """Draw every picture that has data into `folder`; returns their paths."""
    made: list[Path] = []
    if loss_plot(history, folder / "loss.png"):
        made.append(folder / "loss.png")
    if saturation_plot(history, folder / "fp8_saturation.png"):
        made.append(folder / "fp8_saturation.png")
    made += pictures(history, folder)
    if hunt_plot(history, folder / "grad_norms.png"):
        made.append(folder / "grad_norms.png")
    return made


def loss_plot(history: RunHistory, path: Path) -> bool:
    """Training and validation loss by step, skipped steps and rollbacks marked; False if there is no loss to draw."""
    train = history.points("train/loss")
    if not train:
        return False
    figure, axes = _figure(9.0, 4.6)

    # The curves; what a rollback discarded is behind them.
    _branch(axes, history.abandoned.get("train/loss"), train)
    steps, values = drawable(train)
    axes.plot(steps, values, color="#2c7fb8", linewidth=1.0, label="training")
    steps, values = drawable(history.points("val/loss"))
    axes.plot(
        steps, values, color="#d95f0e", marker="o", markersize=4, linewidth=1.4, label="validation"
    )

    # What frequencies alone give, and updates that were skipped.
    unigram = history.unigram
    if unigram:
        entropy = f"unigram entropy, {unigram:.2f} bits"
        axes.axhline(unigram * math.log(2), color=INK, linestyle=":", linewidth=1.2, label=entropy)
    applied = history.points("train/step_applied")
    skipped = applied.steps[applied.figures == 0]
    if len(skipped):
        marks = axes.get_xaxis_transform()
        axes.plot(
            skipped,
            [0.02] * len(skipped),
            "x",
            color="#cb181d",
            transform=marks,
            label="update skipped",
        )

    # Axes: of bytes also in bits, as losses of any two texts compare by those.
    _limits(axes, train, unigram)
    axes.set_xlabel("step")
    axes.set_ylabel("loss" if history.unit == "loss" else f"loss, {history.unit}")
    if history.unit == BYTES:
        to_bits = (
            lambda nats: np.divide(nats, math.log(2)),
            lambda bits: np.multiply(bits, math.log(2)),
        )
        axes.secondary_yaxis("right", functions=to_bits).set_ylabel("bits per byte")
    axes.set_title(f"Loss of {label(history.run_dir.name)}", loc="left", fontsize=11)
    axes.grid(color=GRID, linewidth=0.6)
    axes.legend(frameon=False, fontsize=9)
    save(figure, path)
    return True


def saturation_plot(history: RunHistory, path: Path) -> bool:
    """Saturation ratio of every slot by step; False if there are no FP8 slots.

    One row a slot, layers from top to bottom in the model's order. White is a ratio of 1: the largest value is at the
    format's limit, where delayed scaling puts it. Red was clipped. Grey had no amax.
    """
    slots = history.slots("fp8_saturation")[:MAX_ROWS]
    if not slots:
        return False
    from matplotlib.colors import Normalize

    # The map. Colours go by the ratio's logarithm: half the limit and twice the limit are equally far from white.
    steps, ratios = history.matrix("fp8_saturation", slots, MAX_COLUMNS)
    edges = _edges(steps)
    height = float(np.clip(0.095 * len(slots) + 1.8, 3.6, 17.0))
    figure, axes = _figure(11.0, height)
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.log2(ratios)
    axes.set_facecolor("#bdbdbd")
    mesh = axes.pcolormesh(
        edges,
        np.arange(len(slots) + 1),
        np.ma.masked_invalid(octaves),
        cmap="RdBu_r",
        norm=Normalize(-OCTAVES, OCTAVES),
        rasterized=True,
    )

    # What its rows are, and which layers were in BF16 when.
    _label_layers(axes, slots)
    _mark_roles(axes, slots)
    demoted = _mark_demotions(axes, history, slots, float(edges[-1]))
    axes.set_ylim(len(slots), 0)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("step")
    axes.set_title(
        f"FP8 saturation of {label(history.run_dir.name)}: amax x scale in use / largest value of the format\n"
        "white: at the limit, where delayed scaling puts it; red: clipped; grey: no amax",
        loc="left",
        fontsize=10,
        pad=8,
    )

    # Legend and colour scale.
    figure.legend(
        handles=_legend(demoted), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    ticks = np.arange(-OCTAVES, OCTAVES + 1)
    bar = figure.colorbar(
        mesh,
        ax=axes,
        extend="both",
        pad=0.015,
        aspect=30,
        shrink=min(1.0, 5.0 / height),
        ticks=ticks,
    )
    bar.ax.set_yticklabels([f"{2.0**tick:g}" for tick in ticks])
    bar.set_label("saturation ratio")
    save(figure, path)
    return True


def _figure(width: float, height: float) -> tuple[Any, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    return figure, figure.add_subplot()


def _branch(axes: Axes, abandoned: Points | None, train: Points) -> None:
    """The losses that a rollback discarded, and a line where the run went on."""
    if abandoned is None or not len(drawable(abandoned)[0]):
        return
    steps, values = drawable(abandoned)
    axes.plot(steps, values, color="#bdbdbd", linewidth=1.0, label="thrown away by a rollback")
    before = train.steps[train.steps < steps[0]]
    axes.axvline(before.max(initial=0), color="#969696", linestyle="--", linewidth=0.8)


def _limits(axes: Axes, train: Points, unigram: float | None) -> None:
    """End the loss axis a little over the start or the unigram line, so that a spike does not flatten the curve."""
    _, values = drawable(train)
    if not len(values):
        return
    usual = max(values[0], (unigram or 0.0) * math.log(2))
    if values.max() > 1.3 * usual:
        axes.set_ylim(top=1.15 * usual)


def _edges(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Edges of the columns that begin at `steps`."""
    width = 1.0
    if len(steps) > 1:
        width = float(np.median(np.diff(steps)))
    return np.append(steps, steps[-1] + width).astype(np.float64)


def _spans(names: Iterable[str]) -> list[tuple[str, int, int]]:
    """(name, first row, row after the last) of each group of equal neighbours."""
    spans: list[tuple[str, int, int]] = []
    for row, name in enumerate(names):
        if spans and spans[-1][0] == name:
            spans[-1] = (name, spans[-1][1], row + 1)
        else:
            spans.append((name, row, row + 1))
    return spans


def _label_layers(axes: Axes, slots: list[str]) -> None:
    """Names and dividing lines of the layers, or of whole blocks if the layers are too many to read."""
    layers = [split_slot(slot)[0] for slot in slots]
    spans = _spans(layers)
    if len(spans) > MAX_LABELS:
        # A block is a name up to its first number.
        spans = _spans(re.sub(r"^(.*?\b\d+)\b.*$", r"\1", layer) for layer in layers)

    # Still too many: name some of them, evenly spread.
    named = spans[:: math.ceil(len(spans) / MAX_LABELS)]
    middles = [(first + after) / 2 for _, first, after in named]
    axes.set_yticks(middles, [label(name) for name, _, _ in named], fontsize=7)
    axes.tick_params(axis="y", length=0, pad=9)
    if len(spans) <= MAX_LABELS:
        borders = [first for _, first, _ in spans[1:]]
        axes.hlines(borders, *axes.get_xlim(), color="white", linewidth=1.2)


def _mark_roles(axes: Axes, slots: list[str]) -> None:
    """A narrow coloured strip left of the map: input, weight and grad_output rows."""
    from matplotlib.patches import Rectangle

    beside = axes.get_yaxis_transform()
    for row, slot in enumerate(slots):
        colour = ROLE_COLOURS.get(split_slot(slot)[1], INK)
        strip = Rectangle(
            (-0.011, row), 0.008, 1, transform=beside, color=colour, linewidth=0, clip_on=False
        )
        axes.add_patch(strip)


def _mark_demotions(axes: Axes, history: RunHistory, slots: list[str], end: float) -> bool:
    """Hatched boxes over the steps in which a layer was in BF16; whether there are any."""
    from matplotlib.patches import Rectangle

    # A layer's slots are drawn in neighbouring rows.
    rows: dict[str, tuple[int, int]] = {}
    layers = [split_slot(slot)[0] for slot in slots]
    for layer, first, after in _spans(layers):
        rows[bare(layer)] = (first, after)

    # A layer that is in BF16 to this day has no end: its box goes to the last step.
    marked = False
    for layer, since, until in history.demotions():
        if layer not in rows:
            continue
        first, after = rows[layer]
        width = (end if until is None else until) - since
        box = Rectangle(
            (since, first),
            width,
            after - first,
            fill=False,
            edgecolor=INK,
            hatch="////",
            linewidth=1.2,
        )
        axes.add_patch(box)
        marked = True
    return marked


def _legend(demoted: bool) -> list[Any]:
    from matplotlib.patches import Patch

    handles = [Patch(color=ROLE_COLOURS[role], label=role) for role in ROLES]
    if demoted:
        handles.append(Patch(facecolor="white", edgecolor=INK, hatch="////", label="layer in BF16"))
    return handles
