"""`harness inspect`: a run's FP8 slots, one line each, the moves between FP8 and BF16, and the run's account.

Starts without torch.

The account is short: the loss, the precision that really ran, what happened, and where to look next. `summary` prints
it at the end of a run, and report.html has it too.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.checkpoint.manifest import check_header
from harness.core.errors import ExitCode, clipped, number_of, some
from harness.core.files import MAX_LARGE, read_json
from harness.core.screen import Screen
from harness.profiling.report import profiles, title
from harness.report import short, tool, typed
from harness.report.explain import HALTED, command_line, learned_little, next_steps, post_mortem
from harness.report.hunt import hunt_line
from harness.tracking.existing import spans
from harness.tracking.history import BYTES, MAX_TEXT, SWITCHED, RunHistory, bare
from harness.tracking.journal import POSITION, delivered, run_page, tracking_uri
from harness.tracking.store import Destination

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"
SPARK = 16
MOST_SLOTS = 20_000
COLUMNS = {"amax": "3g", "scale": "4g", "saturation": "3f", "underflow": "2%", "sqnr_db": "1f"}
"""Figures of a slot, each with its format."""
Histories = dict[str, npt.NDArray[np.float32]]
MAX_NAMED = 8
_OF_THE_STATE = ("applied", "skipped", "rollbacks")


def inspect(run_dir: Path, console: Screen) -> int:
    """Print a run's slots, switches and account; returns the exit code. Raises ConfigError if it is no run."""
    history = RunHistory.read(run_dir)

    # The slots.
    slots = history.slots()
    if slots:
        console.print(_slot_table(history, slots, console))
    else:
        console.print(Text("No FP8 slots: this run has no layer with amax and scale state."))

    # The moves between FP8 and BF16. An event of another program may have no text of its own.
    moves = [event for event in history.events if event["code"].startswith("precision.")]
    for event in moves:
        text = event.get("text") or _moved(event)
        console.print(Text(f"step {event['step']}: {text}"))
    if slots and not moves:
        console.print(Text("No layer was moved to BF16."))

    # The account.
    for label, text in account(history):
        console.print(Text(f"{label}: {text}"))
    return int(ExitCode.DONE)


def sparkline(values: Sequence[float], bars: str = BARS) -> str:
    """One character for each value, scaled from the smallest to the largest; a blank where a value is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low = min(finite)
    span = max(finite) - low

    # Figures that are not finite leave a gap. A flat line is drawn in the middle.
    top = len(bars) - 1
    line = ""
    for value in values:
        if not math.isfinite(value):
            line += " "
        elif span:
            line += bars[round((value - low) / span * top)]
        else:
            line += bars[top // 2]
    return line


def _moved(event: Mapping[str, Any]) -> str:
    moves: list[str] = []
    for key, where in (("demote", "now in BF16"), ("promote", "back in FP8")):
        if event.get(key):
            moves.append(f"{', '.join(event[key])} {where}")
    return clipped("; ".join(moves), MAX_TEXT)


def _slot_table(history: RunHistory, slots: Sequence[str], console: Screen) -> Table:
    """One row a slot: its newest figures, and its amax history as a sparkline."""
    # The history is the newest checkpoint's, in which no update is missing; without one, the last logged amaxes.
    step, histories, unread = _checkpoint_histories(history.run_dir / "checkpoints")
    source = "the last steps"
    if histories:
        source = f"checkpoint of step {step}"
    if unread:
        source += f" (cannot be read: {some(unread, MAX_NAMED)})"
    bars = bars_of(console)

    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        header_style="bold",
        title=f"amax history: {source}, newest right",
    )
    slot_columns(table)

    listed = slots[:MOST_SLOTS]
    newest, tails = history.newest(listed, SPARK)
    for slot in listed:
        figures: dict[str, float] = {}
        for column in COLUMNS:
            # {step: value}, of one step or none.
            values = newest[f"fp8_{column}/{slot}"].values()
            if values:
                figures[column] = next(iter(values))
        # Checkpoint and journal pad numbers differently (blocks.03, blocks.3): `bare` takes the zeros away.
        amaxes = histories.get(bare(slot))
        tail = tails[slot] if amaxes is None else amaxes.tolist()
        table.add_row(*row_of_slot(slot, figures, tail, bars))
    if len(slots) > MOST_SLOTS:
        table.add_row(f"and {len(slots) - MOST_SLOTS} more")
    return table


def slot_columns(table: Table) -> None:
    """Add the columns of slots to `table`; `row_of_slot` makes their rows."""
    table.add_column("slot", no_wrap=True)
    # On a narrow terminal the figures keep their width; slot names and the history are cut.
    widths = {"amax": 8, "scale": 9, "satur.": 6, "underfl.": 8, "SQNR dB": 7}
    for heading, width in widths.items():
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    table.add_column("amax history", no_wrap=True, overflow="crop")


def row_of_slot(
    slot: str,
    figures: Mapping[str, float],
    amaxes: Sequence[float],
    bars: str,
) -> list[Text]:
    """One row of `slot_columns`.

    figures: by their names in COLUMNS; one that is missing was not measured.
    amaxes: the newest last.
    bars: see `sparkline`.
    """
    cells = [Text(slot)]
    for column, form in COLUMNS.items():
        value = figures.get(column)
        text = "-" if value is None else format(value, f".{form}")
        cells.append(Text(text))
    cells.append(Text(sparkline(amaxes[-SPARK:], bars)))
    return cells


def bars_of(console: Screen) -> str:
    """The characters of sparklines that the console can show."""
    can_draw = (console.encoding or "").lower().startswith("utf")
    return BARS if can_draw else ASCII_BARS


def _checkpoint_histories(folder: Path) -> tuple[int | None, Histories, list[str]]:
    """The amax histories in the newest checkpoint that has FP8 state.

    Returns its step, {slot name as `bare` gives it: amax by update, oldest first}, and the names of newer checkpoints
    whose FP8 state cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    unread: list[str] = []
    for checkpoint in sorted(folder.glob("step-*"), reverse=True):
        try:
            file = checkpoint / "fp8.safetensors"
            if not file.is_file():
                continue
            check_header(file)
            amaxes = load_file(file)["history"]
            state = read_json(checkpoint / "state.json", MAX_LARGE)
            names = state["parts"]["fp8"]["slots"]
            step = int(checkpoint.name.removeprefix("step-"))
            # Row 0 collects the next amax; rows 1 to L-1 run from the oldest update to the newest.
            histories: Histories = {}
            for place, name in enumerate(names):
                histories[bare(name)] = _filled(amaxes[1:, place])
            return step, histories, unread
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError):
            unread.append(checkpoint.name)
    return None, {}, unread


def _filled(column: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The history without leading zeros, which stand for updates that have not happened yet."""
    used = np.flatnonzero(column)
    return column[used[0] :] if len(used) else column[:0]


def summary(run_dir: Path, ended: Mapping[str, Any] | None = None) -> RenderableType:
    """The text at the end of a run; print it with crop=False, because commands are not wrapped.

    ended: the run's outcome; it overrides outcome.json, which a full disk may have refused.

    Raises ConfigError if `run_dir` is no run folder.
    """
    history = RunHistory.read(run_dir)
    if ended is not None:
        history = replace(history, outcome={**history.outcome, **ended})

    # The post-mortem has the reason of a halt, so the account need not repeat it.
    table = Table.grid(padding=(0, 2))
    halted = history.outcome.get("status") == HALTED
    for label, text in [*account(history), *_where(history)]:
        if halted and label == "outcome":
            text = f"{HALTED}, see the post-mortem below"
        table.add_row(Text(label, style="bold"), Text(text))

    if halted:
        return Group(Text(), table, post_mortem(history))
    commands = [command_line(*each) for each in next_steps(history)]
    return Group(Text(), table, *commands)


def account(history: RunHistory) -> list[tuple[str, str]]:
    """Lines (label, text): outcome, loss, precision, data, proof of FP8, steps, speed and events."""
    lines = [
        ("outcome", _outcome(history)),
        ("loss", _loss(history)),
        ("precision", _precision(history)),
    ]

    # Another program may have written the journal: its data section may be anything.
    try:
        trained = trained_on(history.run["data"], history.run["params"])
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        trained = [f"what the journal says of it cannot be read ({type(error).__name__})"]
    for place, text in enumerate(trained):
        lines.append(("" if place else "data", text))

    # What really ran, and what happened.
    if proof := fp8_proof(history):
        lines.append(("FP8 proof", proof))
    lines += [("steps", _steps(history)), ("speed", _speed(history))]
    if hunt := hunt_line(history):
        lines.append(("hunt", hunt))
    for path, made in profiles(history.run_dir):
        where = path.parent / path.name.replace(".table.json", ".md")
        lines.append(("profile", f"{title(made)}: {made.summary()}; see {short(where)}"))
    if history.lost:
        steps = number_of(len(history.lost), "step")
        lines.append(("journal", f"no figures of {steps}: {spans(history.lost)}"))
    codes = Counter(event["code"] for event in history.events)
    events = [f"{code} x {count}" for code, count in sorted(codes.items())]
    lines.append(("events", ", ".join(events) or "none"))
    return [(label, clipped(text, MAX_TEXT)) for label, text in lines]


def trained_on(data: Mapping[str, Any], params: Mapping[str, Any]) -> list[str]:
    """Lines on a run's data: files, tokens, epochs, and what was left out and why; none for a loop of the user's own.

    data: the source's own figures.
    params: the config by dotted keys.
    """
    if "train_samples" not in data:
        return []
    # Epochs follow from the samples that training takes, over those that there are.
    steps = _setting(params, "train.steps")
    samples = steps * _setting(params, "train.global_batch")
    epochs = _epochs(samples / data["train_samples"])
    if "train_tokens" not in data:
        return _own_data(data, epochs, steps)

    files = data["files"]
    text = f"{data['source']} ({data['kind']}): {number_of(files, 'file')}, "
    text += f"{data['train_tokens']:,} tokens to train on, {data['val_tokens']:,} to validate on, "
    text += f"{data['vocab']:,} token ids; {_take(steps, epochs)}"
    lines = [text]

    # A small source with a large share is repeated more often than the whole.
    for part in data.get("mixture", ()):
        share = part["share"]
        tokens = part["train_tokens"]
        epochs = _epochs(samples * share / part["train_samples"])
        lines.append(f"{share:.1%} of {part['source']}: {tokens:,} tokens, {epochs}")
    if left := data.get("skipped"):
        lines.append(f"left out {len(left):,}: {some(left, MAX_NAMED)}")
    return lines


def _setting(params: Mapping[str, Any], key: str) -> int:
    value = params.get(key)
    return 0 if value is None else int(value)


def _own_data(data: Mapping[str, Any], epochs: str, steps: int) -> list[str]:
    """The same for a data set of the user's own."""
    fields: list[str] = []
    for name, (dtype, *shape) in data["fields"].items():
        fields.append(f"{name} {dtype} {shape}")
    text = f"{data['source']}: {data['train_samples']:,} samples to train on, "
    text += f"{data['val_samples']:,} to validate on, of {', '.join(fields)}; "
    text += _take(steps, epochs)
    lines = [text]
    if left := data["unreadable"]:
        looked_at = len(data["looked_at"])
        lines.append(f"unreadable among the {looked_at} looked at: {some(left, MAX_NAMED)}")
    # Runs of earlier versions do not say it.
    if left := data.get("skipped"):
        lines.append(f"left out {len(left):,}: {some(left, MAX_NAMED)}")
    return lines


def _take(steps: int, epochs: str) -> str:
    """How much of the data the run's steps take."""
    verb = "is" if steps == 1 else "are"
    return f"{number_of(steps, 'step')} {verb} {epochs}"


def _epochs(epochs: float) -> str:
    number = f"{epochs:,.0f}"
    if epochs < 1000:
        number = f"{epochs:.3g}"
    return f"{number} epoch" if number == "1" else f"{number} epochs"


def fp8_proof(history: RunHistory) -> str:
    """How many of the planned FP8 slots ever had a nonzero amax, and which had not; empty if none was planned."""
    # A slot is expected if the plan has it in FP8, or if figures of it were recorded.
    layers = history.plan.get("layers", ())
    names = {bare(slot): slot for slot in history.slots()}
    expected = history.expected_slots() | set(names)
    if not expected:
        dynamic = any(layer["precision"] == "fp8" for layer in layers)
        return "none: dynamic scaling keeps no amax" if dynamic else ""

    silent = [names.get(slot, slot) for slot in history.silent(sorted(expected))]
    text = f"{len(expected) - len(silent)} of {len(expected)} FP8 slots saw a nonzero amax"

    # A frozen layer with nothing trained before it gets no gradient, so the silence of that slot is right.
    frozen: set[str] = set()
    for row in layers:
        if row["frozen"]:
            frozen.add(bare(row["module"]))
    no_gradient: list[str] = []
    others: list[str] = []
    for slot in silent:
        layer, _, role = slot.rpartition(".")
        if role == "grad_output" and bare(layer) in frozen:
            no_gradient.append(slot)
        else:
            others.append(slot)
    if others:
        text += f"; none seen by: {some(others, MAX_NAMED)}"
    if no_gradient:
        text += f"; no gradient goes back to {some(sorted(no_gradient), MAX_NAMED)}"
        text += ": frozen, and nothing before is trained"
    return text


def counts(history: RunHistory) -> dict[str, int]:
    """Counts of a run.

    Steps that a rollback undid are not counted, nor are their updates. Rollbacks and demotions all are.
    """
    # From the journal.
    applied = history.points("train/step_applied").figures
    rollbacks = history.last("guard/rollbacks") or 0
    if not math.isfinite(rollbacks):
        rollbacks = 0
    switches = [event for event in history.events if event["code"] == SWITCHED]
    demoted = sum(len(event["demote"]) for event in switches)
    counted = {
        "steps": len(applied),
        "applied": int((applied == 1).sum()),
        "skipped": int((applied == 0).sum()),
        "rollbacks": int(rollbacks),
        "demotions": demoted,
    }

    # The journal may lack rows if the disk was full; the outcome's figures come from the state.
    usable: dict[str, int] = {}
    for name in _OF_THE_STATE:
        value = history.outcome.get(name)
        if type(value) is int and value >= 0:
            usable[name] = value
    if len(usable) == len(_OF_THE_STATE):
        counted |= usable | {"steps": usable["applied"] + usable["skipped"]}
    return counted


def _outcome(history: RunHistory) -> str:
    outcome = history.outcome
    if not outcome.get("status"):
        return "not ended: still running, or killed"
    text = str(outcome["status"])
    if "step" in outcome:
        text += f" at step {outcome['step']}"
    if outcome.get("reason"):
        text += f": {outcome['reason']}"
    return text


def _loss(history: RunHistory) -> str:
    """The validation loss, and how far it is under what byte or token frequencies alone give."""
    value = history.last("val/loss")
    last = history.last("train/loss")
    unit = "" if history.unit == "loss" else f" {history.unit}"

    # A loop of the user's own: its loss may have any unit.
    if history.of_own_loop:
        losses: list[str] = []
        if value is not None:
            losses.append(f"validation {value:.4g}")
        if last is not None:
            losses.append(f"last training loss {last:.4g}")
        return ", ".join(losses) or "none"
    if value is None:
        text = "no validation"
        if last is not None:
            text += f"; last training loss {last:.4f}{unit}"
        return text

    # The validation loss, for bytes in bits too: so losses of any two texts compare.
    accuracy = history.last("val/accuracy")
    hits = "" if accuracy is None else f", accuracy {accuracy:.1%}"
    if history.unit == BYTES:
        counted, unigram = "byte", history.unigram
        value_in_unit = value / math.log(2)
        text = f"validation {value_in_unit:.4f} bits per byte ({value:.4f} nats){hits}"
    else:
        counted, unigram = "token", history.unigram_nats
        value_in_unit = value
        text = f"validation {value:.4f}{unit}{hits}"
    if not unigram:
        return text

    # Against a model that knows only frequencies: a run that is no better has not learned from context.
    text += f"; unigram entropy of the corpus {unigram:.4f}, ratio {value_in_unit / unigram:.3f}"
    if learned_little(history):
        text += f"; little more is learned than how often each {counted} occurs"
    return text


def _precision(history: RunHistory) -> str:
    plan = history.plan
    if not plan:
        return "no plan.json"
    effective = plan.get("effective") or "not recorded"
    return f"requested {plan['requested']}, resolved {plan['resolved']}, effective {effective}"


def _steps(history: RunHistory) -> str:
    found = counts(history)
    text = f"{found['steps']}: {found['applied']} applied, {found['skipped']} skipped; "
    text += f"rollbacks {found['rollbacks']}; demotions {found['demotions']}"
    demoted = sorted({layer for layer, *_ in history.demotions()})
    if demoted:
        text += f" ({some(demoted, MAX_NAMED)})"
    return text


def _speed(history: RunHistory) -> str:
    rates = _finite(history, "tokens_per_second")
    shares = _finite(history, "mfu")
    sizes = _finite(history, "peak_memory_gib")
    counted = history.run["data"].get("counted", "tokens")
    parts = ["not measured"]
    if len(rates):
        parts = [f"{np.median(rates):,.0f} {counted}/s (median)"]
    if len(shares):
        parts.append(f"MFU {np.median(shares):.1%} (median)")
    if len(sizes):
        what = " (of the whole process)" if history.plan.get("tier") == "CPU" else ""
        parts.append(f"peak memory {sizes.max():.2f} GiB{what}")
    text = ", ".join(parts)

    last = history.on_this_machine
    machines = {each.machine for each in history.begun}
    if last is not None and len(machines) > 1:
        ranks, card = last.machine
        where = "1 rank" if ranks == "1" else f"{ranks} ranks"
        if card:
            where += f" on {card}"
        text += f"; since step {last.after}, {where}"
    return text


def _finite(history: RunHistory, key: str) -> npt.NDArray[np.float64]:
    values = history.points_here(f"train/{key}").figures
    return values[np.isfinite(values)]


def _where(history: RunHistory) -> list[tuple[str, str]]:
    run_dir = history.run_dir
    lines = [("MLflow", _mlflow(run_dir))]
    if (run_dir / "report.html").exists():
        lines.append(("report", short(run_dir / "report.html")))
    if history.slots():
        lines.append(("FP8 slots", f"{tool('harness')} inspect {typed(run_dir)}"))
    return lines


def _mlflow(run_dir: Path) -> str:
    if not (run_dir / POSITION).exists() and not (run_dir / "shipper.log").exists():
        return "off"
    if not delivered(run_dir):
        command = f"{tool('harness')} sync {typed(run_dir)}"
        return f"not all delivered (see {short(run_dir / 'shipper.log')}); later: {command}"
    destination = Destination.load(run_dir)
    uri = tracking_uri() if destination is None else destination.uri
    page = run_page(run_dir)
    if uri.startswith(("http://", "https://")):
        return f"delivered to {uri}{page}"
    then = f", then http://127.0.0.1:5000{page}" if page else ""
    return f"delivered; {tool('mlflow')} ui --backend-store-uri {shlex.quote(uri)}{then}"
