"""The picture of a rehearsal: losses of all branches, their gaps to float32, and the SQNR of every FP8 tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.core.config import FallbackConfig
from harness.rehearse.branch import Branch
from harness.report import label
from harness.report.compare_picture import BEYOND
from harness.report.fp8_pictures import GRID, INK, save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

FILE = "rehearsal.png"

_COLOURS = {"fp32": "#222222", "bf16": "#2c7fb8", "fp16": "#7b3294", "fp8": "#d95f0e"}
# Branches of one precision share its colour and differ in their line; the first one is solid.
_STYLES = ("-", ":", "--", "-.")
# Role -> marker.
_ROLES = {"input": "o", "weight": "s", "grad_output": "^"}
# Most layers that are drawn, and most characters of a layer's name.
_LAYERS = 40
_LONGEST = 40


def draw(
    branches: Sequence[Branch], fp8: Branch | None, policy: FallbackConfig, path: Path
) -> Path:
    """Draw into `path`, a PNG file; returns it. Raises OSError.

    branches: the first one is the float32 reference.
    fp8: the branch whose slots are drawn; None: only losses are drawn. policy: the limits of its slots.
    """
    from matplotlib.figure import Figure

    # Panels from top to bottom: losses, gaps, and SQNR if there is any.
    has_slots = fp8 is not None and bool(fp8.slots)
    heights = [3.0, 2.0]
    if has_slots:
        heights.append(2.4)
    figure = Figure(figsize=(9.0, 1.0 + 1.2 * sum(heights)), dpi=120, layout="constrained")
    losses, gaps, *rest = figure.subplots(len(heights), 1, height_ratios=heights)
    _draw_losses(losses, branches)
    _draw_gaps(gaps, branches)
    if fp8 is not None and rest:
        _draw_sqnr(rest[0], fp8, policy)
    return save(figure, path)


def _styles(branches: Sequence[Branch]) -> list[tuple[Branch, str, str]]:
    """(branch, colour, line) of every branch."""
    seen: dict[str, int] = {}
    found: list[tuple[Branch, str, str]] = []
    for branch in branches:
        place = seen.get(branch.precision, 0)
        seen[branch.precision] = place + 1
        style = _STYLES[place % len(_STYLES)]
        found.append((branch, _COLOURS[branch.precision], style))
    return found


def _draw_losses(axes: Axes, branches: Sequence[Branch]) -> None:
    """A line for each branch; a cross at its first fault."""
    for branch, colour, style in _styles(branches):
        values = np.array(branch.losses, dtype=np.float64)
        _draw_line(axes, branch, values, colour, style)
        if branch.fault is not None:
            axes.axvline(branch.fault.step, color=colour, linestyle=style, linewidth=0.8)
            # The cross stands at the bottom, as the loss of that step may have no place on the axis.
            across = axes.get_xaxis_transform()
            axes.plot([branch.fault.step], [0.03], "X", color=colour, transform=across)
    axes.set_ylabel("training loss")
    axes.set_title("loss of every branch; a cross marks its first fault", loc="left", fontsize=10)
    axes.grid(color=GRID, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)


def _draw_gaps(axes: Axes, branches: Sequence[Branch]) -> None:
    """Each branch's loss minus that of the first branch, float32, over the steps that both have."""
    reference = np.array(branches[0].losses, dtype=np.float64)
    for branch, colour, style in _styles(branches)[1:]:
        values = np.array(branch.losses, dtype=np.float64)[: len(reference)]
        # inf - inf is NaN, and is not drawn.
        with np.errstate(invalid="ignore", over="ignore"):
            _draw_line(axes, branch, values - reference[: len(values)], colour, style)
    axes.axhline(0.0, color=INK, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss - that of fp32")
    axes.grid(color=GRID, linewidth=0.6)


def _draw_line(
    axes: Axes, branch: Branch, values: npt.NDArray[np.float64], colour: str, style: str
) -> None:
    """A line through `values`, one for each step of the branch, without NaN and values of BEYOND and more."""
    steps = np.arange(branch.begin + 1, branch.begin + 1 + len(values))
    with np.errstate(invalid="ignore"):
        drawn = np.abs(values) < BEYOND
    name = label(branch.name)
    axes.plot(steps[drawn], values[drawn], style, color=colour, linewidth=1.2, label=name)


def _draw_sqnr(axes: Axes, fp8: Branch, policy: FallbackConfig) -> None:
    """A marker for the lowest SQNR of each tensor, by layer; layers that would leave FP8 are shaded.

    The layers are in the model's order. If there are more than _LAYERS, only the worst ones are drawn.
    """
    # Slots come with the worst first. Names have padded numbers, so their order is the model's.
    by_beyond = dict.fromkeys(row.layer for row in fp8.slots)
    worst = list(by_beyond)[:_LAYERS]
    layers = sorted(worst)
    places = {layer: place for place, layer in enumerate(layers)}

    for role, marker in _ROLES.items():
        rows = [row for row in fp8.slots if row.role == role and row.layer in places]
        x = [places[row.layer] for row in rows]
        y = [row.sqnr_db for row in rows]
        axes.plot(x, y, marker, color=_COLOURS["fp8"], fillstyle="none", label=role)
    axes.axhline(policy.sqnr_db, color=INK, linestyle="--", linewidth=0.9, label="limit")

    for layer in fp8.predicted:
        if layer not in places:
            continue
        place = places[layer]
        axes.axvspan(place - 0.5, place + 0.5, color="#fdd0a2", linewidth=0)

    # The end of a name says which layer it is.
    names = [label(layer[-_LONGEST:]) for layer in layers]
    axes.set_xticks(range(len(layers)), names, rotation=90, fontsize=6)
    axes.set_ylabel("lowest SQNR, dB")
    axes.set_title("FP8 tensors; shaded: layers that would leave FP8", loc="left", fontsize=10)
    axes.grid(color=GRID, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
