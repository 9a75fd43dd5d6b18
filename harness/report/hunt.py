"""The gradient norms by layer that a run measured in its hunts (`guard.hunt`), and a picture of them. Torch-free.

Layers are ordered by growth: the largest norm over the usual one. The usual norm is the lower quartile, so that a layer
stands out that was bad in most of the steps measured. Steps that a rollback discarded count as well: the fault that is
hunted is most likely in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.core.errors import number_of, shown, some
from harness.core.metrics import OF_LAYERS
from harness.report import label
from harness.report.fp8_pictures import GRID, INK, save
from harness.tracking.history import RunHistory

SHOWN = 20
"""Layers in the report's table."""
_DRAWN, _NAMED = 8, 3
_PREFIX = f"{OF_LAYERS.key}/"
_USUAL = 0.25
# Norms beyond these have no place on an axis.
_SMALLEST, _LARGEST = 1e-99, 1e99


@dataclass(frozen=True, slots=True)
class Hunted:
    """One layer in the steps that measured it, those that a rollback discarded included.

    layer: name with padded numbers, as the journal has it.
    steps: how often it was measured; a step that was done again counts again.
    usual: lower quartile of its finite norms over zero; NaN if there is none.
    largest: infinite if a norm was not finite.
    at: the step that had the largest norm first.
    growth: largest over usual; infinite if a norm was not finite, NaN if all were zero.
    """

    layer: str
    steps: int
    usual: float
    largest: float
    at: int
    growth: float


def hunted(history: RunHistory) -> list[Hunted]:
    """Every layer that was measured, the one that grew most first."""
    names = [name for name in history.rows.names() if name.startswith(_PREFIX)]
    found = [_hunted(history, name) for name in names]

    def order(each: Hunted) -> tuple[float, float]:
        growth = -1.0 if math.isnan(each.growth) else each.growth
        return -growth, -each.largest

    return sorted(found, key=order)


def _hunted(history: RunHistory, name: str) -> Hunted:
    steps, norms = history.rows.measured(name)
    # A NaN is as bad as an infinity, and would hide every other number.
    norms = np.where(np.isfinite(norms), norms, math.inf)
    place = int(np.argmax(norms))
    usable = norms[np.isfinite(norms) & (norms > 0)]
    usual = math.nan
    if len(usable):
        usual = float(np.quantile(usable, _USUAL))
    largest = float(norms[place])
    growth = largest / usual if math.isfinite(largest) else math.inf
    return Hunted(
        layer=name.removeprefix(_PREFIX),
        steps=len(norms),
        usual=usual,
        largest=largest,
        at=int(steps[place]),
        growth=growth,
    )


def hunt_line(history: RunHistory) -> str:
    """The layers that grew most, for the account of a run; empty if nothing was hunted."""
    layers = hunted(history)
    if not layers:
        return ""
    steps = max(each.steps for each in layers)
    parts = [f"gradient norms of {number_of(len(layers), 'layer')} in {number_of(steps, 'step')}"]

    # Layers whose norm was not finite come first. They may be all: after a NaN loss no gradient is finite.
    count = sum(math.isinf(each.largest) for each in layers)
    if count:
        named = [f"{shown(each.layer)} at step {each.at}" for each in layers[:count]]
        which = some(named, _NAMED)
        if count == len(layers) > 1 and len({each.at for each in layers}) == 1:
            which = f"every layer, at step {layers[0].at}"
        parts.append(f"not finite: {which}")

    grown: list[str] = []
    for each in layers[count : count + _NAMED]:
        # All its norms were zero.
        if math.isnan(each.usual):
            break
        figures = f"{each.largest:.3g} at step {each.at}, usually {each.usual:.3g}"
        grown.append(f"{shown(each.layer)} {figures}")
    if grown:
        parts.append(f"grew most: {', '.join(grown)}")
    return "; ".join(parts)


def hunt_plot(history: RunHistory, path: Path) -> bool:
    """Gradient norms of the layers that grew most, by step; False if there are none to draw."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    layers = hunted(history)[:_DRAWN]
    if not layers:
        return False
    figure = Figure(figsize=(9.0, 4.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()

    drawn = False
    for number, each in enumerate(layers):
        name = _PREFIX + each.layer
        colour = f"C{number}"
        # Solid: the run as it counts. Dotted: what a rollback discarded.
        branches = [(history.points(name), "-", label(each.layer))]
        discarded = history.abandoned.get(name)
        if discarded is not None:
            branches.append((discarded, ":", ""))
        for points, style, text in branches:
            # A log axis has no place for a zero.
            can_be_drawn = (points.figures > _SMALLEST) & (points.figures < _LARGEST)
            steps = points.steps[can_be_drawn]
            norms = points.figures[can_be_drawn]
            drawn = drawn or len(steps) > 0
            axes.plot(
                steps, norms, style, color=colour, marker=".", label=text or None, linewidth=1.2
            )
    if not drawn:
        return False

    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("gradient norm of the layer", color=INK)
    axes.set_title(
        f"Layers of {label(history.run_dir.name)} whose gradients grew most (guard.hunt)\n"
        "dotted: steps that a rollback discarded",
        loc="left",
        fontsize=10,
    )
    axes.grid(color=GRID, linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    # Beside the axes: among eight lines there is no free place.
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    save(figure, path)
    return True
