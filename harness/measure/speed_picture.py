"""The picture of `harness doctor --speed`: a bar for each candidate's step, with the middle half of its turns."""

from __future__ import annotations

from pathlib import Path

from harness.measure.speed import SpeedReport
from harness.report import label
from harness.report.fp8_pictures import GRID, INK, save

_TAKEN, _OTHER = "#2c7fb8", "#b8c4cf"
_LONGEST = 60
# From here on milliseconds are written without a fraction.
_WHOLE = 100


def draw(report: SpeedReport, path: Path) -> Path:
    """Draw the times of `report` into `path`, a PNG file; returns it. Raises OSError."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.seconds]
    figure = Figure(figsize=(8.0, 1.4 + 0.42 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots()
    taken = report.choice.taken if report.choice else None
    # The first candidate is drawn at the top.
    for place, row in enumerate(reversed(rows)):
        low, median, high = (1e3 * each for each in row.spread)
        colour = _TAKEN if row is taken else _OTHER
        beside = [[median - low], [high - median]]
        axes.barh(place, median, 0.62, color=colour, xerr=beside, ecolor=INK, capsize=3)
        text = f"{median:,.0f} ms" if median >= _WHOLE else f"{median:.3g} ms"
        axes.annotate(
            text,
            (high, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    names = [label(row.name[:_LONGEST]) for row in reversed(rows)]
    axes.set_yticks(range(len(rows)), names)
    # A fifth more than the slowest, for the text beside its bar.
    slowest = max((row.spread.high for row in rows), default=1e-3)
    axes.set_xlim(0, 1.2e3 * slowest)
    axes.set_xlabel("ms a step: median, and the middle half of the turns")
    axes.set_title(label(f"{report.device}: {report.step}"[:100]), loc="left", fontsize=10)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return save(figure, path)
