"""`harness estimate`: predict memory and time of a config and a recipe on a card that this machine does not have."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.capability.cards import GIB, Card
from harness.core.config import RunConfig
from harness.core.errors import ConfigError, Problem
from harness.estimate.roofline import Calibration, find_card, read_calibration, uncalibrated
from harness.precision.recipe import Recipe
from harness.tools.start import ConfigName, Overrides, RecipeName, read_policies

if TYPE_CHECKING:
    from rich.console import Console

    from harness.estimate.prediction import Prediction

_SHOWN_WAITS = 5
# Over this share of the card's memory, the allocator's fragmentation may be too much.
_TIGHT = 0.92


def command(
    overrides: Overrides = None,
    card: Annotated[str, typer.Option(help="card to estimate for, such as H100")] = "H100",
    recipe: RecipeName = None,
    config: ConfigName = "quickstart",
    ranks: Annotated[int, typer.Option(min=1, help="processes that share the global batch")] = 1,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="measurements of a card that `make proof` wrote [default: datasheet peaks]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    # Report the problems of config, recipe, card and calibration together.
    problems: list[Problem] = []
    asked = measured = None
    try:
        asked = read_policies(config, overrides, recipe)
    except ConfigError as error:
        problems += error.problems
    try:
        found = find_card(card)
        peaks = read_calibration(calibration, found) if calibration else uncalibrated(found)
        measured = (found, peaks)
    except ConfigError as error:
        problems += error.problems
    if asked is None or measured is None:
        raise ConfigError(problems)

    from harness.estimate import device

    device.load()  # before anything imports torch
    from rich.console import Console

    return estimate(*asked, *measured, ranks, as_json, Console())


def estimate(
    config: RunConfig,
    recipe: Recipe,
    card: Card,
    calibration: Calibration,
    ranks: int,
    as_json: bool,
    console: Console,
) -> int:
    """Predict and print; returns 0 whether it fits or not. Raises as `predict` does."""
    from harness.estimate.prediction import predict

    # What the model prints as it is built and run is not part of the answer.
    with redirect_stdout(sys.stderr):
        made = predict(config, recipe, card, calibration, ranks)
    if as_json:
        print(json.dumps(made.as_dict(), indent=2, allow_nan=False))
    else:
        _say(made, console)
    return 0


def _say(made: Prediction, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    basis = "uncalibrated"
    if made.calibration.calibrated:
        basis = "calibrated with measurements from such a card"
    console.print(
        f"[bold]{escape(made.card.name)}, recipe {escape(made.recipe)}[/]", highlight=False
    )
    text = f"A prediction ({basis}): the training step on fake tensors, and a roofline. Nothing ran on a GPU."
    console.print(text, highlight=False, soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = [*_precision(made), *_memory(made), *_time(made), *_exchange(made), *_host(made)]
    for name, line in rows:
        table.add_row(name, escape(line))
    for index, note in enumerate(made.notes):
        table.add_row("" if index else "note", escape(note))
    console.print(table)


def _precision(made: Prediction) -> list[tuple[str, str]]:
    layers = made.trace.layers
    fp8 = sum(layer.precision == "fp8" for layer in layers)
    linear = sum(bool(layer.shape) for layer in layers)
    text = made.taken
    if fp8:
        text += f", {fp8} of {linear} Linear layers in FP8"
    text += f"; {made.trace.parameters / 1e6:,.0f}M parameters"
    rows = [("precision", text)]

    # The better rungs of the ladder that this card cannot take, and why.
    for verdict in made.rungs:
        if verdict.taken:
            break
        rows.append(("", f"not {verdict.rung}: {verdict.reason}"))
    return rows


def _memory(made: Prediction) -> list[tuple[str, str]]:
    from harness.estimate.prediction import largest

    context, card = made.calibration.rates.context_bytes, made.card.memory
    if made.trace.static + context > card:
        static = _gib(made.trace.static)
        verdict = f"does NOT fit: {static} of it are weights and optimizer, whatever the batch"
    elif not made.fits:
        verdict = "does NOT fit: lower train.micro_batch or data.context, or take a larger card"
    elif made.needed > _TIGHT * card:
        verdict = "fits, but so tightly that fragmentation may be too much"
    else:
        verdict = "fits"
    peak = _gib(made.trace.peak)
    text = f"{peak} at the peak + {_gib(context)} for CUDA itself, of {_gib(card)}: {verdict}"
    kinds = [f"{kind} {_gib(size)}" for kind, size in largest(made.trace)]
    rows = [("memory", text), ("", ", ".join(kinds))]
    if made.bf16 is not None and made.bf16 is not made.trace:
        rows.append(("", f"in bf16 the peak would be {_gib(made.bf16.peak)}"))
    return rows


def _time(made: Prediction) -> list[tuple[str, str]]:
    timing, baseline = made.timing, made.bf16_timing
    rate = made.tokens / timing.mean
    text = f"{timing.mean * 1e3:,.1f} ms, {rate:,.0f} {made.counted}/s"
    if made.ranks > 1:
        text += f" over {made.ranks} ranks"
    if baseline is not None and made.bf16 is not made.trace:
        ratio = timing.mean / baseline.mean
        text += f"; {ratio:.2f} of bf16's {baseline.mean * 1e3:,.1f} ms"
    rows = [("step", text)]
    if timing.sampled > 1.01 * timing.usual:
        rows.append(("", f"one that samples FP8 statistics {timing.sampled * 1e3:,.1f} ms"))

    products = f"{made.flops / 1e12:,.3g} TFLOP of matrix products"
    if made.ranks > 1:
        products += " on each rank"
    rows.append(("", products))

    # What would be shown as 0.0 ms is left out.
    parts: list[str] = []
    for name, seconds in timing.by_purpose.items():
        if seconds > 5e-5:
            parts.append(f"{name} {seconds * 1e3:,.1f}")
    rows.append(("", f"{', '.join(parts)} ms"))
    return rows


def _exchange(made: Prediction) -> list[tuple[str, str]]:
    """What a rank exchanges with the others in a step. What is smaller than a MiB is left out."""
    from harness.estimate.prediction import exchanged

    rows: list[tuple[str, str]] = []
    for (what, phase), (count, size) in exchanged(made.trace).items():
        if size >= 2**20:
            name = "" if rows else "exchange"
            rows.append(
                (name, f"{what} in {phase}: {count} times a step, {_gib(size)} of whole tensors")
            )
    return rows


def _host(made: Prediction) -> list[tuple[str, str]]:
    text = f"{made.timing.kernels:,} kernel launches a step"
    if made.timing.host_bound:
        text += ", which take longer than the work: larger micro-batches or engine.compile=blocks would help"
    waits: Counter[tuple[str, str]] = Counter()
    for wait in made.trace.waits:
        where = wait.where[0] if wait.where else "?"
        waits[wait.what, where] += 1
    if not waits:
        text += "; the host never waits for the card within a step"
    rows = [("host", text)]
    for (what, where), count in waits.most_common(_SHOWN_WAITS):
        times = f" ({count} times)" if count > 1 else ""
        rows.append(("", f"waits for the card: {what} at {where}{times}"))
    return [*rows, *_copies(made)]


def _copies(made: Prediction) -> list[tuple[str, str]]:
    from harness.estimate.prediction import pageable

    places = Counter(pageable(made.trace))
    shown = places.most_common(_SHOWN_WAITS)
    return [("", f"copies from pageable memory at {where}") for where, _ in shown]


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 2 else f"{size / 2**20:,.1f} MiB"
