"""What `benchmarks.held_out` found: a table, and a picture for each kind of fault and for the places."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.held_out import DUTIES, FAMILIES, HARMFUL, MISSED, PLACES
from harness.core.files import atomic_file

LIGHT = 0.1
"""Harm under which a demotion was needless: FP8 without a fault loses as much."""
COLOURS = ("#222222", "#2c7fb8", "#31a354", "#e6850e", "#cb181d")
Row = Mapping[str, Any]


def verdict(row: Row) -> str:
    """seen, miss (harmful, and the layer stayed), needless (it left without harm), or quiet."""
    if row["left"]:
        return "needless" if row["harm"] < LIGHT else "seen"
    return "miss" if row["harm"] >= HARMFUL else "quiet"


def table(rows: Sequence[Row]) -> str:
    """A line for each model, family and duty: faults that are harmful, seen of them, late by how much, and the rest."""
    lines = [
        f"{'model':<9}{'comes':<12}{'family':<38}harmful seen  steps    misses  needless  others"
    ]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["duty"], row["family"]), []).append(row)
    for (model, duty, family), mine in groups.items():
        harmful = [row for row in mine if row["harm"] >= HARMFUL]
        steps = [row["left"] for row in harmful if row["left"]]
        late = f"{min(steps)} to {max(steps)}" if steps else "-"
        verdicts = Counter(map(verdict, mine))
        others = sum(bool(row["others"]) for row in mine)

        name = f"{model:<9}{duty:<12}{family:<38}"
        seen = f"{len(harmful):>7} {len(steps):>4}  {late:<9}"
        wrong = f"{verdicts['miss']:>6}  {verdicts['needless']:>8}"
        lines.append(f"{name}{seen}{wrong}  {others:>6}")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Markdown: a line for each family, over all strengths, duties and places."""
    head = "| fault | runs | harmful | of these seen, after steps (median, latest) | missed | left without harm |"
    lines = [head, "|---|---|---|---|---|---|"]
    for family in dict.fromkeys(row["family"] for row in rows if row["family"] != "none"):
        mine = [row for row in rows if row["family"] == family]
        verdicts = Counter(map(verdict, mine))
        harmful = [row for row in mine if row["harm"] >= HARMFUL]
        steps = [row["left"] for row in harmful if row["left"]]
        late = f"{len(steps)} ({statistics.median(steps):g}, {max(steps)})" if steps else "-"
        counts = f"{verdicts['miss'] or '-'} | {verdicts['needless'] or '-'}"
        lines.append(f"| {family} | {len(mine)} | {len(harmful) or '-'} | {late} | {counts} |")
    healthy = [row for row in rows if row["family"] == "none"]
    others = sum(bool(row["others"]) for row in rows)
    harm = _range([row["harm"] for row in healthy])
    text = f"{len(rows)} runs, {len(healthy)} of them without a fault, of which {_left(healthy)} lost a layer; "
    text += f"another layer left in {others}. Harm without a fault: {harm}"
    return "\n".join([*lines, "", text])


def _left(rows: Sequence[Row]) -> int:
    return sum(bool(row["left"] or row["others"]) for row in rows)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else "-"


def picture(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    """Harm over strength for every family named: a line for each duty, filled where the layer left FP8."""
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.7 * lines + 0.4), dpi=150, layout="constrained")
    panels = np.atleast_1d(figure.subplots(lines, columns, sharey=True, squeeze=False)).ravel()
    for axes, name in zip(panels, names, strict=False):
        mine = [row for row in rows if row["family"] == name and row["layer"] == PLACES[1]]
        _panel(axes, mine, name)

    # The last line may have fewer panels than columns.
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("share of a product lost")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], name: str) -> None:
    for colour, duty in zip(COLOURS, DUTIES, strict=True):
        mine = [row for row in rows if row["duty"] == duty]
        mine.sort(key=lambda row: row["bits"])
        strengths = [row["bits"] for row in mine]
        harms = [row["harm"] for row in mine]
        axes.plot(strengths, harms, color=colour, linewidth=1, label=duty)

        # Filled: the layer left FP8.
        for left in (True, False):
            some = [row for row in mine if bool(row["left"]) is left]
            face = colour if left else "white"
            places = [row["bits"] for row in some], [row["harm"] for row in some]
            axes.plot(*places, "o", color=colour, markerfacecolor=face, markersize=4.5)
    axes.plot([], [], "o", color="0.4", label="left FP8")
    axes.axhline(HARMFUL, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    axes.set_ylim(0.04, 1.1)
    axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1], ["0.05", "0.1", "0.2", "0.5", "1"])
    if "drifting" not in name:
        axes.set_xticks((FAMILIES | MISSED)[name].strengths[::2])
    axes.set_title(name, fontsize=8.5, loc="left")
    axes.set_xlabel(_unit(name), fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e9e9e9", linewidth=0.5)


def _unit(name: str) -> str:
    if "tails" in name:
        return "octaves of a standard deviation"
    if "drifting" in name:
        return "octaves a step"
    if "harmless" in name:
        return "share of the channels, power of two"
    return "times as large, power of two"


def places_picture(rows: Sequence[Row]) -> Figure:
    """Every fault at every step against every place: the colour is what is lost, the number the steps to BF16. A
    harmful fault whose layer stayed has a red frame."""
    rows = [row for row in rows if row["duty"] == "every step" and row["family"] != "none"]
    faults = [(name, bits) for name, family in FAMILIES.items() for bits in family.some]
    places = list(dict.fromkeys((row["model"], row["layer"]) for row in rows))
    found = {(row["family"], row["bits"], row["model"], row["layer"]): row for row in rows}
    figure = Figure(figsize=(9.5, 0.19 * len(faults) + 1.9), dpi=150, layout="constrained")
    axes = figure.subplots()

    # A cell for each fault and place, NaN where it was not run.
    grid = np.full((len(faults), len(places)), np.nan)
    for line, (name, bits) in enumerate(faults):
        for column, place in enumerate(places):
            row = found.get((name, bits, *place))
            if row is None:
                continue
            grid[line, column] = row["harm"]
            colour = "white" if row["harm"] > 0.4 else "black"
            text = str(row["left"] or "-")
            axes.text(column, line, text, ha="center", va="center", fontsize=6.5, color=colour)
            if verdict(row) == "miss":
                corner = (column - 0.46, line - 0.42)
                look = {"fill": False, "color": "#ff3b30", "linewidth": 1.6}
                axes.add_patch(Rectangle(corner, 0.92, 0.84, **look))
    logarithms = np.log10(np.clip(grid, 0.03, 1))
    shown = axes.imshow(logarithms, aspect="auto", cmap="Blues", vmin=-1.5, vmax=0)

    # Names of places and faults, and the scale of the colours.
    columns = [_place(*place) for place in places]
    axes.set_xticks(range(len(places)), columns, rotation=60, ha="right", fontsize=7)
    lines = [f"{name}  {bits:g}" for name, bits in faults]
    axes.set_yticks(range(len(faults)), lines, fontsize=6.5)
    bar = figure.colorbar(shown, ax=axes, fraction=0.03, pad=0.01)
    marks = [0.05, 0.1, 0.2, 0.5, 1]
    bar.set_ticks(np.log10(marks).tolist(), labels=[f"{mark:g}" for mark in marks])
    bar.set_label("share of a product lost, mean of the steps", fontsize=7.5)
    return figure


def _place(model: str, layer: str) -> str:
    if model == "linears":
        return f"Linear {PLACES.index(layer) + 1} of 3"
    return layer.removeprefix("blocks.")


def draw(rows: Sequence[Row], folder: Path, part: str) -> None:
    """Write evidence_<kind>.png and evidence_places.png, or evidence_missed.png, into `folder`."""
    if part == "missed":
        figures = {"missed": picture(rows, list(MISSED))}
    else:
        figures: dict[str, Figure] = {}
        for kind in ("input", "weight", "gradient"):
            names = [name for name in FAMILIES if name.startswith(kind)]
            figures[kind] = picture(rows, names)
        figures["places"] = places_picture(rows)
    for kind, figure in figures.items():
        with atomic_file(folder / f"evidence_{kind}.png") as stream:
            figure.savefig(stream, format="png", facecolor="white")
