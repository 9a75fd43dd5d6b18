"""`harness report`: pictures of a run, and one HTML file that holds them: from journal, config.yaml and plan.json."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import clipped, shown
from harness.core.facts import ROLES
from harness.core.files import atomic_file
from harness.core.plan_text import fold, rung_lines
from harness.core.screen import say
from harness.core.secrets import scrubbed
from harness.profiling.report import Profile, headings, notes, profiles, rows, title
from harness.report import RunFolder, label
from harness.report.fp8_pictures import GRID, INK, ROLE_COLOURS, pictures, save
from harness.report.hunt import SHOWN, hunt_plot, hunted
from harness.report.inspect import account
from harness.tracking.figures import Points
from harness.tracking.history import BYTES, MAX_TEXT, RunHistory, bare, split_slot
from harness.tracking.journal import run_page
from harness.tracking.slot_file import PARQUET, write_parquet
from harness.tracking.store import Destination

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_EVENTS = 500
MAX_CONFIG = 64 << 10
LOCAL_PAGES = "http://127.0.0.1:5000"
HEAD = ("kind", "step", "attempt", "time", "code")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } .wide { overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e5e5e5; }
code, td { font-variant-numeric: tabular-nums; } pre { white-space: pre-wrap; } img { max-width: 100%; }
"""


def command(run: RunFolder) -> int:
    made = write(run)
    try:
        table = write_parquet(run)
        if table is not None:
            made.append(table)
    except ImportError as error:
        print(f"no {PARQUET}: {error}; pip install pyarrow", file=sys.stderr)
    for path in made:
        say(path)
    return 0


def write(run_dir: Path) -> list[Path]:
    """Draw `plots/*.png` and write `report.html`; returns their paths.

    A picture without data is left out. Raises ConfigError if `run_dir` is no run folder.
    """
    history = RunHistory.read(run_dir)

    # The pictures are files of their own, too.
    plots = run_dir / "plots"
    made: list[Path] = []
    if loss_plot(history, plots / "loss.png"):
        made.append(plots / "loss.png")
    if saturation_plot(history, plots / "fp8_saturation.png"):
        made.append(plots / "fp8_saturation.png")
    made += pictures(history, plots)
    if hunt_plot(history, plots / "grad_norms.png"):
        made.append(plots / "grad_norms.png")

    # One file that can be sent to somebody: the pictures are inside.
    report = run_dir / "report.html"
    with atomic_file(report) as stream:
        stream.write(_page(history, made).encode())
    return [*made, report]


def _page(history: RunHistory, made: Sequence[Path]) -> str:
    name = escape(shown(history.run_dir.name))
    sections = [
        f"<h1>Run {name}</h1>",
        _table((), account(history)),
        *_link(history.run_dir),
    ]
    if made:
        sections.append("<h2>Pictures</h2>")
    for path in made:
        encoded = base64.b64encode(path.read_bytes()).decode()
        image = f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{encoded}">'
        sections.append(f"<p>{image}</p>")
    sections += _hunt(history)
    for _, made in profiles(history.run_dir):
        sections += _profile(made)
    sections += _plan(history.plan)
    sections += _config(history.run_dir)
    sections += _events(history.events)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Run {name}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _hunt(history: RunHistory) -> list[str]:
    """The layers whose gradients grew most, if the run measured them."""
    layers = hunted(history)
    if not layers:
        return []
    rows: list[Sequence[Any]] = []
    for each in layers[:SHOWN]:
        figures = (f"{each.usual:.4g}", f"{each.largest:.4g}", each.at, f"{each.growth:.4g}")
        rows.append((each.layer, each.steps, *figures))
    more = ""
    if len(layers) > SHOWN:
        more = (
            f"<p>The {SHOWN} of {len(layers)} layers that grew most; all are in journal.jsonl.</p>"
        )
    headings = ("layer", "steps", "usual norm", "largest norm", "at step", "largest / usual")
    return ["<h2>Gradient norms by layer</h2>", more, _table(headings, rows)]


def _profile(made: Profile) -> list[str]:
    text = "<br>".join(escape(shown(note)) for note in notes(made))
    return [
        f"<h2>{escape(title(made))}</h2>",
        _table(headings(made), rows(made)),
        f"<p>{text}</p>",
    ]


def _plan(plan: Mapping[str, Any]) -> list[str]:
    if not plan:
        return []
    rows: list[Sequence[Any]] = []
    for row in fold(plan["layers"]):
        shape = "x".join(map(str, row.shape))
        rows.append((row.name, row.count, row.precision, row.backend, shape, row.reason))
    lines = escape(shown("\n".join(rung_lines(plan))))
    headings = ("layers", "count", "precision", "backend", "shape", "why")
    return ["<h2>Precision plan</h2>", f"<pre>{lines}</pre>", _table(headings, rows)]


def _link(run_dir: Path) -> list[str]:
    """A link to the run in MLflow; none before the first delivery, which gives the run its id there."""
    destination = Destination.load(run_dir)
    page = run_page(run_dir)
    if destination is None or not page:
        return []
    if destination.uri.startswith(("http://", "https://")):
        address = escape(shown(destination.uri + page))
        return [f'<p><a href="{address}">This run in MLflow</a></p>']
    command = escape(shown(f"mlflow ui --backend-store-uri {destination.uri}"))
    address = escape(f"{LOCAL_PAGES}{page}")
    return [f'<p>In MLflow: <code>{command}</code>, then <a href="{address}">this run</a>.</p>']


def _config(run_dir: Path) -> list[str]:
    """The config that the run was started with; a loop of the user's own has none."""
    try:
        with (run_dir / "config.yaml").open("rb") as stream:
            text = stream.read(MAX_CONFIG).decode(errors="replace")
    except OSError:
        return []
    return ["<h2>Config</h2>", f"<pre>{escape(shown(scrubbed(text)))}</pre>"]


def _events(events: Sequence[Mapping[str, Any]]) -> list[str]:
    if not events:
        return ["<h2>Events</h2>", "<p>None.</p>"]
    rows: list[Sequence[Any]] = []
    for event in events[:MAX_EVENTS]:
        moment = _moment(event.get("time"))
        rows.append((event["step"], event["attempt"], moment, event["code"], _details(event)))
    count, more = len(events), ""
    if count > MAX_EVENTS:
        more = f"<p>The first {MAX_EVENTS} of {count}; all are in journal.jsonl.</p>"
    return ["<h2>Events</h2>", more, _table(("step", "attempt", "time", "code", "details"), rows)]


def _details(event: Mapping[str, Any]) -> str:
    details: list[str] = []
    for name, value in event.items():
        if name not in HEAD:
            text = value if isinstance(value, str) else json.dumps(value)
            details.append(f"{name}: {text}")
    return clipped(", ".join(details), MAX_TEXT)


def _moment(seconds: float | None) -> str:
    """Local time; "-" for an event without a time, which another program may have written."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines: list[str] = []
    for row in rows:
        cells = "".join(f"<td>{escape(shown(str(cell)))}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    # Two columns of label and text need no headings.
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    if head:
        head = f"<tr>{head}</tr>"
    body = "\n".join(lines)
    return f'<div class="wide"><table>{head}\n{body}\n</table></div>'


MAX_COLUMNS = 600
MAX_LABELS = 60
BEYOND = 1e100
"""Figures over this are not drawn, like those that are not finite: the axis would have no finite width."""
MAX_ROWS = 6000
OCTAVES = 2.0
"""The colour scale ends at a factor of 2**OCTAVES on either side of 1."""


def loss_plot(history: RunHistory, path: Path) -> bool:
    """Training and validation loss by step, skipped steps and rollbacks marked; False if there is no loss to draw."""
    train = history.points("train/loss")
    if not train:
        return False
    figure, axes = _figure(9.0, 4.6)

    # The curves; what a rollback discarded is behind them.
    _branch(axes, history.abandoned.get("train/loss"), train)
    steps, values = _finite(train)
    axes.plot(steps, values, color="#2c7fb8", linewidth=1.0, label="training")
    steps, values = _finite(history.points("val/loss"))
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


def _finite(points: Points) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    drawn = np.abs(points.figures) < BEYOND
    return points.steps[drawn], points.figures[drawn]


def _branch(axes: Axes, abandoned: Points | None, train: Points) -> None:
    """The losses that a rollback discarded, and a line where the run went on."""
    if abandoned is None or not len(_finite(abandoned)[0]):
        return
    steps, values = _finite(abandoned)
    axes.plot(steps, values, color="#bdbdbd", linewidth=1.0, label="thrown away by a rollback")
    before = train.steps[train.steps < steps[0]]
    axes.axvline(before.max(initial=0), color="#969696", linestyle="--", linewidth=0.8)


def _limits(axes: Axes, train: Points, unigram: float | None) -> None:
    """End the loss axis a little over the start or the unigram line, so that a spike does not flatten the curve."""
    _, values = _finite(train)
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
