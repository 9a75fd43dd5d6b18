"""Draws the FP8 figures of a run: quantiles over layers by step, exponents beside the formats, and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.core.facts import ROLES
from harness.core.files import atomic_file
from harness.report import label
from harness.tracking.history import RunHistory
from harness.tracking.slot_file import FIGURES, SlotSteps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
INK, GRID = "#222222", "#e5e5e5"
ROLE_COLOURS = {"input": "#8c6bb1", "weight": "#737373", "grad_output": "#e6a117"}
FORMATS = {
    # name: (log2 of the smallest value over 0, log2 of the smallest normal one, log2 of the largest, colour)
    "E4M3": (-9.0, -6.0, math.log2(448.0), "#1b7837"),
    "E5M2": (-16.0, -14.0, math.log2(57344.0), "#2c7fb8"),
    "fp16": (-24.0, -14.0, math.log2(65504.0), "#b2182b"),
}
# Binary exponents that are counted.
LOWEST, HIGHEST = -40, 24
MAX_COLUMNS = 400
# Quantiles over the layers of a role.
RANKS = (0.0, 0.1, 0.5, 0.9, 1.0)
# (figure, title of its axis, whether the axis is logarithmic)
_FANS = (
    ("amax", "amax, unscaled", True),
    ("saturation", "saturation", True),
    ("sqnr_db", "SQNR, dB", False),
)


@dataclass
class Gathered:
    """The data of the pictures, over `n` columns of neighbouring steps.

    steps: float64 [n], the first step of each column.
    fans: (role, figure) -> [RANKS, n].
    exponents: (role, whether amax is scaled) -> how often its binary exponent was LOWEST to HIGHEST, counted over all
        slots and steps.
    """

    steps: Floats
    fans: dict[tuple[str, str], Floats]
    exponents: dict[tuple[str, bool], Ints]


def pictures(history: RunHistory, folder: Path) -> list[Path]:
    """Draw those of `fp8_fan.png`, `fp8_exponents.png` and `loss_scale.png` that have data. Returns their paths."""
    made: list[Path] = []
    if history.slot_steps is not None:
        gathered = gather(history.slot_steps)
        made += [_fan(history, gathered, folder / "fp8_fan.png")]
        made += [_exponents(history, gathered, folder / "fp8_exponents.png")]
    if loss_scale(history, folder / "loss_scale.png"):
        made.append(folder / "loss_scale.png")
    return made


def gather(found: SlotSteps) -> Gathered:
    """Gather the data of the pictures in one pass over all steps.

    A column joins `each` neighbouring steps: their smallest minimum, their largest maximum, and for each quantile
    between these the median over the steps.
    """
    each = max(1, -(-len(found.steps) // MAX_COLUMNS))
    firsts = found.steps[::each]

    # `wide` has the steps of the present column, `fans` all columns. A run may have millions of steps, so nothing else
    # stays in memory.
    wide = np.full((len(ROLES), len(_FANS), len(RANKS), each), np.nan)
    fans = np.full((len(ROLES), len(_FANS), len(RANKS), len(firsts)), np.nan)
    exponents: dict[tuple[str, bool], Ints] = {}
    for role in ROLES:
        for scaled in (False, True):
            exponents[role, scaled] = np.zeros(HIGHEST - LOWEST + 1, np.int64)

    # Where the slots of each role are in a row of values. Looked up again only if the names change.
    places: list[Ints] = []
    looked_up: tuple[str, ...] | None = None
    column = 0
    for steps, names, values in found.neighbours(each):
        if names is not looked_up:
            looked_up = names
            places = [_places_of(role, names) for role in ROLES]

        # The first step of the next column: join the steps of this one.
        if steps[0] // each != column:
            _join(wide, fans, column)
            wide[:] = np.nan
            column = int(steps[0]) // each

        # A model may have no slot of a role: frozen layers have no gradients.
        for row, (role, at) in enumerate(zip(ROLES, places, strict=True)):
            if not len(at):
                continue
            for place, (figure, _, _) in enumerate(_FANS):
                quantiles = _quantiles(values[:, FIGURES.index(figure)][:, at])
                wide[row, place][:, steps % each] = quantiles
            amax = values[:, FIGURES.index("amax")][:, at].astype(np.float64)
            scale = values[:, FIGURES.index("scale")][:, at].astype(np.float64)
            exponents[role, False] += _count_exponents(amax)
            exponents[role, True] += _count_exponents(amax * scale)
    _join(wide, fans, column)

    by_name: dict[tuple[str, str], Floats] = {}
    for row, role in enumerate(ROLES):
        for place, (figure, _, _) in enumerate(_FANS):
            by_name[role, figure] = fans[row, place]
    return Gathered(firsts.astype(np.float64), by_name, exponents)


def _places_of(role: str, names: Sequence[str]) -> Ints:
    """Indices of the slots of a role among `names`."""
    places = [at for at, name in enumerate(names) if name.endswith(f".{role}")]
    return np.array(places)


def _count_exponents(magnitudes: Floats) -> Ints:
    """How many magnitudes have each binary exponent, LOWEST to HIGHEST; what is beyond counts at the ends."""
    usable = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    exponents = np.clip(np.floor(np.log2(usable)), LOWEST, HIGHEST)
    bins = exponents.astype(np.int64) - LOWEST
    return np.bincount(bins, minlength=HIGHEST - LOWEST + 1)


def _quantiles(values: npt.NDArray[np.float32]) -> Floats:
    """The quantiles RANKS of each step's finite values, [RANKS, steps]; NaN if none is finite.

    values: [steps, slots].
    """
    is_finite = np.isfinite(values)
    # NaN is sorted behind all numbers.
    ordered = np.sort(np.where(is_finite, values, np.nan), axis=1).astype(np.float64)
    last = np.maximum(is_finite.sum(axis=1) - 1, 0)
    # Nearest rank without interpolation: each point of the picture is the figure of some layer.
    places = np.rint(np.multiply.outer(RANKS, last)).astype(np.int64)
    return ordered[np.arange(len(values)), places]


def _join(wide: Floats, fans: Floats, column: int) -> None:
    """Join the steps of a column and write them into `fans`; NaN where no step had a value."""
    # wide is [roles, figures, ranks, steps]. The first rank is the minimum over the layers, the last the maximum.
    lowest, highest = wide[:, :, 0, :], wide[:, :, -1, :]
    measured = ~np.isnan(lowest).all(axis=-1)
    joined = np.full(fans.shape[:3], np.nan)
    joined[measured, 0] = np.nanmin(lowest[measured], axis=-1)
    joined[measured, -1] = np.nanmax(highest[measured], axis=-1)
    for rank in range(1, len(RANKS) - 1):
        of_rank = wide[:, :, rank, :]
        joined[measured, rank] = np.nanmedian(of_rank[measured], axis=-1)
    fans[..., column] = joined


def _fan(history: RunHistory, gathered: Gathered, path: Path) -> Path:
    """For each role and figure the minimum, 10%, 50%, 90% and maximum over the layers, by step."""
    figure, grid = _grid(len(_FANS), len(ROLES), 11.0, 8.2)
    for row, (name, title, logarithmic) in enumerate(_FANS):
        for column, role in enumerate(ROLES):
            axes = grid[row][column]
            values = gathered.fans[role, name]
            measured = ~np.isnan(values[0])
            steps = gathered.steps[measured]
            values = values[:, measured]
            if logarithmic:
                # 0 has no place on a logarithmic axis, and would take the whole band off the picture.
                values = np.where(values > 0, values, np.nan)
                axes.set_yscale("log", base=2)

            # values has a row for each of RANKS: all layers, 80% of them, and the median.
            colour = ROLE_COLOURS[role]
            axes.fill_between(steps, values[0], values[4], color=colour, alpha=0.18, linewidth=0)
            axes.fill_between(steps, values[1], values[3], color=colour, alpha=0.38, linewidth=0)
            axes.plot(steps, values[2], color=colour, linewidth=1.3)
            _look_past_the_start(axes, steps, values, logarithmic)
            if name == "saturation":
                axes.axhline(1.0, color=INK, linestyle=":", linewidth=1.0)
            if row == 0:
                axes.set_title(role, fontsize=10, loc="left")
            if column == 0:
                axes.set_ylabel(title)
            axes.set_xlabel("step" if row == len(_FANS) - 1 else "")
            axes.grid(color=GRID, linewidth=0.6)
    figure.suptitle(
        f"FP8 figures of {label(history.run_dir.name)} over its layers: half of them lie on either side of the line,\n"
        "80% in the dark band, all in the light one. Dotted: the format's largest value. "
        "The axes are those of the steps after the first, whose scales are not set yet",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    return save(figure, path)


def _look_past_the_start(axes: Axes, steps: Floats, values: Floats, logarithmic: bool) -> None:
    """Scale the axis to all steps but those of the first column, where scales are not set yet."""
    later = values[:, steps > steps[0]] if len(steps) > 1 else values
    later = later[np.isfinite(later)]
    if not len(later):
        return
    low, high = float(later.min()), float(later.max())
    if logarithmic:
        axes.set_ylim(low / 1.5, high * 1.5)
    else:
        margin = 0.05 * (high - low) or 1.0
        axes.set_ylim(low - margin, high + margin)


def _exponents(history: RunHistory, gathered: Gathered, path: Path) -> Path:
    """Distribution of the amax's exponents, before and after scaling, beside the ranges of the formats."""
    figure, grid = _grid(2, 1, 9.5, 7.4, share_x=True)
    edges = np.arange(LOWEST, HIGHEST + 1)
    panels = ((False, "amax of the tensor"), (True, "amax x scale, as it is cast"))
    for row, (scaled, title) in enumerate(panels):
        axes = grid[row][0]
        for role in ROLES:
            counts = gathered.exponents[role, scaled]
            share = counts / max(1, int(counts.sum()))
            axes.stairs(
                share,
                np.append(edges, HIGHEST + 1),
                color=ROLE_COLOURS[role],
                linewidth=1.6,
                label=role,
            )

        # The bars of the formats are above the distribution.
        top = max(0.02, *(float(patch.get_data().values.max()) for patch in axes.patches))
        axes.set_ylim(0, 1.55 * top)
        _ranges(axes, top)
        axes.set_ylabel("share of slots and steps")
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(color=GRID, linewidth=0.6)
    axes = grid[1][0]
    axes.set_xlim(-32, 20)
    powers = range(-32, 21, 4)
    axes.set_xticks(powers, [f"$2^{{{power}}}$" for power in powers])
    grid[0][0].legend(frameon=False, fontsize=9, loc="center left")
    figure.suptitle(
        f"Binary exponents in {label(history.run_dir.name)}, and what each format holds (thin: only with fewer digits)",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    return save(figure, path)


def _ranges(axes: Axes, top: float) -> None:
    """A bar for each format: thin over its subnormal values, thick over its normal ones, dotted at its largest."""
    for place, (name, (least, normal, largest, colour)) in enumerate(FORMATS.items()):
        height = (1.14 + 0.13 * place) * top
        axes.plot([least, normal], [height, height], color=colour, linewidth=1.2)
        axes.plot(
            [normal, largest], [height, height], color=colour, linewidth=5, solid_capstyle="butt"
        )
        axes.text(largest + 0.3, height, name, color=colour, fontsize=8, va="center")
        axes.axvline(largest, color=colour, linewidth=0.8, linestyle=":")


def loss_scale(history: RunHistory, path: Path) -> bool:
    """The loss scale by step, with marks at skipped updates; False if the run had none."""
    points = history.points("train/loss_scale")
    # Only values that a GradScaler can have and an axis can show.
    usable = (points.figures > 1e-99) & (points.figures < 1e99)
    steps, scale = points.steps[usable], points.figures[usable]
    if not len(scale) or (scale == 1.0).all():
        return False

    # An overflow leaves a norm that is not finite. An update that was skipped for limits or bad data does not.
    applied = history.points("train/step_applied")
    norm = history.points("train/grad_norm")
    skipped = np.isin(steps, applied.steps[applied.figures == 0])
    overflowed = skipped & np.isin(steps, norm.steps[~np.isfinite(norm.figures)])
    figure, grid = _grid(1, 1, 9.0, 3.6)
    axes = grid[0][0]
    axes.step(steps, scale, where="post", color="#2c7fb8", linewidth=1.3, label="loss scale")
    marks = (
        (overflowed, "#cb181d", "gradients not finite: update skipped"),
        (skipped & ~overflowed, INK, "update skipped for another reason"),
    )
    for marked, colour, text in marks:
        if marked.any():
            axes.plot(steps[marked], scale[marked], "x", color=colour, label=text, linestyle="none")
    # A scale doubles and halves.
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    title = f"Loss scale of {label(history.run_dir.name)}: {skipped.sum()} updates skipped"
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(color=GRID, linewidth=0.6)
    axes.legend(frameon=False, fontsize=9)
    save(figure, path)
    return True


def _grid(
    rows: int, columns: int, width: float, height: float, share_x: bool = False
) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=share_x)


def save(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as stream:
        figure.savefig(stream, format="png", facecolor="white")
    return path
