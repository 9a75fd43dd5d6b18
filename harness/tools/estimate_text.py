"""Predictions of `harness estimate` as text: of one card in detail, of several as one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.capability.cards import GIB
from harness.core.errors import number_of
from harness.core.plan_text import plan_text
from harness.estimate.comparison import CardEstimate
from harness.estimate.fitting import Way
from harness.estimate.prediction import Prediction, Timing, exchanged, largest, pageable
from harness.estimate.trace import Trace

_SHOWN_WAITS = 5
# Over this share of the card's memory, the allocator's fragmentation may be too much.
_TIGHT = 0.92
_METHOD = "the training step on fake tensors, and a roofline. Nothing ran on a GPU."
_HEADINGS = ("card", "runs in", "memory, GiB", "speed", "hours", "cost", "limited by")
_NUMBERS = ("speed", "hours", "cost")


def show_estimates(found: Sequence[CardEstimate], with_plan: bool, console: Console) -> None:
    """Print what is predicted. with_plan: then also each card's plan, layer by layer."""
    if len(found) == 1:
        _show_one(found[0], console)
    else:
        _show_table(found, console)
    if not with_plan:
        return
    for each in found:
        if each.made is not None:
            console.print(f"\n[bold]{escape(each.offer.name)}: the plan[/]", highlight=False)
            _line(console, plan_text(each.made.plan.as_dict()))


def _line(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)


def _table() -> Table:
    """A table of names and texts."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _show_one(found: CardEstimate, console: Console) -> None:
    # A single card that cannot run is an error, not an estimate.
    made = found.made
    assert made is not None
    basis = "uncalibrated"
    if made.calibration.calibrated:
        basis = "calibrated with measurements from such a card"
    title = f"[bold]{escape(made.card.name)}, recipe {escape(made.recipe)}[/]"
    console.print(title, highlight=False)
    _line(console, f"A prediction ({basis}): {_METHOD}")
    table = _table()
    rows = [*_precision(made), *_memory(made), *_would_fit(found, made), *_time(made)]
    rows += [*_whole_run(found, made), *_exchange(made), *_host(made)]
    for name, line in rows:
        table.add_row(name, escape(line))
    for index, note in enumerate(made.notes):
        table.add_row("" if index else "note", escape(note))
    console.print(table)


def _show_table(found: Sequence[CardEstimate], console: Console) -> None:
    made = [each.made for each in found if each.made is not None]
    first = made[0]
    title = f"recipe {first.recipe}, {number_of(first.steps, 'step')}, {_parameters(first)}"
    if first.ranks > 1:
        title += f", {first.ranks} ranks"
    console.print(f"[bold]{escape(title)}[/]", highlight=False)

    # Whoever reads the figures has to know what they rest on.
    calibrated = [each.card.name for each in made if each.calibration.calibrated]
    basis = "uncalibrated"
    if calibrated:
        basis = f"calibrated with measurements for {', '.join(calibrated)} alone"
    _line(console, f"A prediction ({basis}): {_METHOD}")

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in _HEADINGS:
        justify = "right" if heading in _NUMBERS else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for each in found:
        table.add_row(*map(escape, _cells(each)))
    console.print(table)

    # What the columns have no room for: what would fit, and remarks.
    below = _table()
    for name, line in _remarks(found):
        below.add_row(name, escape(line))
    console.print(below)


def _cells(found: CardEstimate) -> tuple[str, ...]:
    """A card's row. A run that does not fit has no speed, hours and cost there."""
    name = found.offer.name
    made = found.made
    if made is None:
        return (name, "cannot run, see below", "", "", "", "", "")
    counts = [f"{count} {precision}" for precision, count in made.layers.items()]
    layers = ", ".join(counts)
    runs_in = f"{made.plan.resolved}\n{layers}"
    verdict = "does NOT fit"
    if made.fits:
        verdict = "fits, tightly" if _is_tight(made) else "fits"
    memory = f"{made.needed / GIB:,.1f} of {made.card.memory / GIB:,.1f}\n{verdict}"
    if not made.fits:
        return (name, runs_in, memory, "-", "-", "-", "-")
    speed = f"{made.tokens / made.timing.mean:,.0f}\n{made.counted}/s"
    hours = _hours(made.hours)
    cost = _money(found.cost(made.hours, made.ranks))
    return (name, runs_in, memory, speed, hours, cost, made.timing.bottleneck)


def _is_tight(made: Prediction) -> bool:
    return made.needed > _TIGHT * made.card.memory


def _remarks(found: Sequence[CardEstimate]) -> list[tuple[str, str]]:
    """What stands below the table: of each card, and then of all."""
    rows: list[tuple[str, str]] = []
    shared: list[str] = []
    for each in found:
        made = each.made
        card = each.offer.name
        if made is None:
            rows += [(card, f"cannot run: {problem}") for problem in each.problems]
            continue
        rows += [(card, line) for line in _not_taken(made)]
        for name, line in _would_fit(each, made):
            rows.append((card, f"{name} {line}".strip()))
        # A note that holds for several cards is shown once.
        for note in made.notes:
            if note not in shared:
                shared.append(note)
    rows += [("note", note) for note in shared]
    rows.append(("note", _LEFT_OUT))
    return rows


def _not_taken(made: Prediction) -> list[str]:
    """The better rungs of the ladder that this card cannot take, and why."""
    # Reason -> rungs: that no layer fits holds for all of FP8.
    rungs: dict[str, list[str]] = {}
    for verdict in made.plan.rungs:
        if verdict.taken:
            break
        rungs.setdefault(verdict.reason, []).append(verdict.rung)
    return [f"not {', '.join(names)}: {reason}" for reason, names in rungs.items()]


_LEFT_OUT = "hours and cost are of train.steps alone: start, validation and saves come on top"


def _whole_run(found: CardEstimate, made: Prediction) -> list[tuple[str, str]]:
    if not made.fits:
        return []
    text = f"{number_of(made.steps, 'step')}: {_hours(made.hours)} hours"
    cost = found.cost(made.hours, made.ranks)
    if cost is not None:
        text += f", cost {_money(cost)}"
    return [("run", f"{text}; limited by {made.timing.bottleneck}"), ("", _LEFT_OUT)]


def _would_fit(found: CardEstimate, made: Prediction) -> list[tuple[str, str]]:
    """What would make a run fit, each with its own prediction. Empty for one that fits."""
    if made.fits:
        return []
    if not found.ways:
        return [("would fit", "with nothing that was tried: take a larger card")]
    rows: list[tuple[str, str]] = []
    for way in found.ways:
        figures = _way_figures(found, made, way)
        rows.append(("would fit", f"with {_options(way, made)}: {figures}"))
    return rows


def _options(way: Way, made: Prediction) -> str:
    """What to add to the command."""
    words = list(way.overrides)
    if way.ranks != made.ranks:
        words.insert(0, f"--ranks {way.ranks}")
    return " ".join(words)


def _way_figures(found: CardEstimate, made: Prediction, way: Way) -> str:
    hours = made.hours_of(way.timing)
    speed = f"{made.tokens / way.timing.mean:,.0f} {made.counted}/s"
    text = f"{_gib(way.needed)} a card, {speed}, {_hours(hours)} hours"
    cost = found.cost(hours, way.ranks)
    if cost is not None:
        text += f", cost {_money(cost)}"
    if way.ranks > 1:
        text += ", communication left out"
    if way.retrains:
        text += "; another optimizer is another training"
    return text


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def _money(cost: float | None) -> str:
    if cost is None:
        return "-"
    # Of small amounts two digits are shown, however small they are.
    if cost >= 0.1 or not cost:
        return f"{cost:,.2f}"
    return f"{cost:.2g}"


def _precision(made: Prediction) -> list[tuple[str, str]]:
    layers = made.plan.layers
    fp8 = sum(layer.precision == "fp8" for layer in layers)
    linear = sum(bool(layer.shape) for layer in layers)
    text = made.plan.resolved
    if fp8:
        text += f", {fp8} of {linear} Linear layers in FP8"
    text += f"; {_parameters(made)}"
    return [("precision", text), *(("", line) for line in _not_taken(made))]


def _parameters(made: Prediction) -> str:
    """How many the model has: `3 parameters`, `123.6M parameters`."""
    count = made.trace.parameters
    if count < 100_000:
        return number_of(count, "parameter")
    millions = count / 1e6
    if millions >= 1000:
        return f"{millions:,.0f}M parameters"
    return f"{millions:,.1f}M parameters"


def _memory(made: Prediction) -> list[tuple[str, str]]:
    context = made.calibration.rates.context_bytes
    card = made.card.memory
    # What lasts from step to step comes first: no smaller batch helps there.
    if made.trace.lasting + context > card:
        lasting = _gib(made.trace.lasting)
        verdict = (
            f"does NOT fit: {lasting} are weights, gradients and optimizer, whatever the batch"
        )
    elif not made.fits:
        verdict = "does NOT fit"
    elif _is_tight(made):
        verdict = "fits, but so tightly that fragmentation may be too much"
    else:
        verdict = "fits"
    peak = _gib(made.trace.peak)
    snapshots = f" + {_gib(made.snapshots)} for snapshots" if made.snapshots else ""
    text = f"{peak} at the peak{snapshots} + {_gib(context)} for CUDA itself, of {_gib(card)}: {verdict}"
    kinds = [f"{kind} {_gib(size)}" for kind, size in largest(made.trace)]
    rows = [("memory", text), ("", ", ".join(kinds))]
    if made.bf16 is not None and made.bf16 is not made.trace:
        rows.append(("", f"in bf16 the peak would be {_gib(made.bf16.peak)}"))
    return rows


def _time(made: Prediction) -> list[tuple[str, str]]:
    timing = made.timing
    baseline = made.bf16_timing
    rate = made.tokens / timing.mean
    text = f"{_took(timing, made.trace)}, {rate:,.0f} {made.counted}/s"
    if made.ranks > 1:
        text += f" over {made.ranks} ranks"
    if baseline is not None and made.bf16 is not made.trace:
        assert made.bf16 is not None
        ratio = timing.mean / baseline.mean
        word = "of" if ratio < 1 else "times"
        text += f"; {ratio:.2f} {word} bf16's {_took(baseline, made.bf16)}"
    rows = [("step", text)]
    if made.trace.compiled:
        rows.append(("", f"{made.eager.mean * 1e3:,.1f} ms in eager mode (engine.compile=none)"))
    # A difference of under a percent is left out.
    if timing.sampled > 1.01 * timing.usual:
        sampled = timing.sampled * 1e3
        rows.append(("", f"one that samples FP8 statistics {sampled:,.1f} ms"))

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


def _took(timing: Timing, made: Trace) -> str:
    return f"{timing.mean * 1e3:,.1f} ms{' compiled' if made.compiled else ''}"


def _exchange(made: Prediction) -> list[tuple[str, str]]:
    """What a rank exchanges with the others in a step. What is smaller than a MiB is left out."""
    rows: list[tuple[str, str]] = []
    for (what, phase), (count, size) in exchanged(made.trace).items():
        if size < 2**20:
            continue
        name = "" if rows else "exchange"
        times = number_of(count, "time")
        rows.append((name, f"{what} in {phase}: {times} a step, {_gib(size)} of whole tensors"))
    return rows


def _host(made: Prediction) -> list[tuple[str, str]]:
    text = f"{made.timing.kernels:,} kernel launches a step"
    if made.timing.host_bound:
        text += ", which the host queues more slowly than the card runs them: larger micro-batches would help"
    # Waits at the same line of code are counted together.
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
    places = Counter(pageable(made.trace))
    shown = places.most_common(_SHOWN_WAITS)
    return [("", f"copies from pageable memory at {where}") for where, _ in shown]


def _gib(size: int) -> str:
    if size >= GIB / 2:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / 2**20:,.1f} MiB"
