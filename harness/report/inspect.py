"""`harness inspect`: a run's FP8 slots, one line each, the moves between FP8 and BF16, and the run's account. Starts
without torch.

The account is short: the loss, the precision that really ran, what happened, and where to look next. `summary` prints
it at the end of a run, and the run's report has it too.
"""

from __future__ import annotations

import math
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
from harness.core.errors import ExitCode, clipped, some
from harness.core.files import MAX_LARGE, read_json
from harness.core.screen import Screen
from harness.report import RunFolder, short, tool
from harness.report.explain import HALTED, command_line, learned_little, next_steps, post_mortem
from harness.tracking.history import BYTES, MAX_TEXT, SWITCHED, RunHistory, bare
from harness.tracking.journal import POSITION, delivered, run_page, tracking_uri
from harness.tracking.standing import spans
from harness.tracking.store import Store

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"
SPARK = 16
MOST_SLOTS = 20_000
COLUMNS = ("amax", "scale", "saturation", "underflow", "sqnr_db")
Histories = dict[str, npt.NDArray[np.float32]]
MAX_NAMED = 8


def command(run: RunFolder) -> int:
    return inspect(run, Screen())


def inspect(run_dir: Path, console: Screen) -> int:
    """Print the slots, the switches and the outcome of a run; the exit code. Raises ConfigError if it is no run."""
    history = RunHistory.read(run_dir)
    slots = history.slots()
    if slots:
        console.print(_slot_table(history, slots, console))
    else:
        console.print(Text("No FP8 slots: this run has no layer with amax and scale state."))
    moves = [event for event in history.events if event["code"].startswith("precision.")]
    for event in moves:
        console.print(Text(f"step {event['step']}: {event.get('text') or _moved(event)}"))
    if slots and not moves:
        console.print(Text("No layer was moved to BF16."))
    for label, text in account(history):
        console.print(Text(f"{label}: {text}"))
    return int(ExitCode.DONE)


def sparkline(values: Sequence[float], bars: str = BARS) -> str:
    """One character for each value, scaled from the smallest to the largest; a blank where a value is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
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
    step, histories, unread = _checkpoint_histories(history.run_dir / "checkpoints")
    source = f"checkpoint of step {step}" if histories else "the last steps"
    source += f" (cannot be read: {some(unread, MAX_NAMED)})" if unread else ""
    bars = BARS if (console.encoding or "").lower().startswith("utf") else ASCII_BARS
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        header_style="bold",
        title=f"amax history: {source}, newest right",
    )
    table.add_column("slot", no_wrap=True)
    # On a narrow terminal the figures keep their width; slot names and the history are cut.
    for heading, width in (
        ("amax", 8),
        ("scale", 9),
        ("satur.", 6),
        ("underfl.", 8),
        ("SQNR dB", 7),
    ):
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    table.add_column("amax history", no_wrap=True, overflow="crop")
    listed = slots[:MOST_SLOTS]
    newest, tails = history.newest(listed, SPARK)
    for slot in listed:
        last = [next(iter(newest[f"fp8_{column}/{slot}"].values()), None) for column in COLUMNS]
        amaxes = histories.get(bare(slot))
        values = amaxes.tolist() if amaxes is not None else tails[slot]
        figures = [
            _figure(value, form)
            for value, form in zip(last, ("3g", "4g", "3f", "2%", "1f"), strict=True)
        ]
        table.add_row(Text(slot), *figures, sparkline(values[-SPARK:], bars))
    if len(slots) > MOST_SLOTS:
        table.add_row(f"and {len(slots) - MOST_SLOTS} more")
    return table


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, f".{form}")


def _checkpoint_histories(folder: Path) -> tuple[int | None, Histories, list[str]]:
    """The amax histories in the newest checkpoint that has FP8 state.

    Returns its step, {bare slot name: amax by update, oldest first}, and the names of newer checkpoints whose FP8 state
    cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    unread: list[str] = []
    for checkpoint in sorted(folder.glob("step-*"), reverse=True):
        try:
            if not (checkpoint / "fp8.safetensors").is_file():
                continue
            check_header(checkpoint / "fp8.safetensors")
            amaxes = load_file(checkpoint / "fp8.safetensors")["history"]
            names = read_json(checkpoint / "state.json", MAX_LARGE)["parts"]["fp8"]["slots"]
            step = int(checkpoint.name.removeprefix("step-"))
            # Row 0 collects the next amax; rows 1 to L-1 run from the oldest update to the newest.
            return (
                step,
                {bare(name): _filled(amaxes[1:, place]) for place, name in enumerate(names)},
                unread,
            )
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError):
            unread.append(checkpoint.name)
    return None, {}, unread


def _filled(column: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The history without leading zeros, which stand for updates that have not happened yet."""
    used = np.flatnonzero(column)
    return column[used[0] :] if len(used) else column[:0]


def summary(run_dir: Path, ended: Mapping[str, Any] | None = None) -> RenderableType:
    """The text at the end of a run; print it with crop=False, because commands are not wrapped.

    ended: the run's outcome, which counts more than outcome.json: a full disk may have refused that file. Raises
    ConfigError if `run_dir` is no run folder.
    """
    history = RunHistory.read(run_dir)
    if ended is not None:
        history = replace(history, outcome={**history.outcome, **ended})
    table = Table.grid(padding=(0, 2))
    halted = history.outcome.get("status") == HALTED
    for label, text in [*account(history), *_where(history)]:
        shown = f"{HALTED}, see the post-mortem below" if halted and label == "outcome" else text
        table.add_row(Text(label, style="bold"), Text(shown))
    if halted:
        return Group(Text(), table, post_mortem(history))
    return Group(Text(), table, *(command_line(*each) for each in next_steps(history)))


def account(history: RunHistory) -> list[tuple[str, str]]:
    """(label, text) of outcome, loss, precision with proof, data, steps, speed and events."""
    lines = [
        ("outcome", _outcome(history)),
        ("loss", _loss(history)),
        ("precision", _precision(history)),
    ]
    try:
        trained = trained_on(history.run["data"], history.run["params"])
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        trained = [f"what the journal says of it cannot be read ({type(error).__name__})"]
    lines += [("data", trained[0]), *(("", text) for text in trained[1:])] if trained else []
    if proof := fp8_proof(history):
        lines.append(("FP8 proof", proof))
    lines += [("steps", _steps(history)), ("speed", _speed(history))]
    if history.lost:
        lines.append(("journal", f"no figures of {len(history.lost)} steps: {spans(history.lost)}"))
    counts = Counter(event["code"] for event in history.events)
    events = ", ".join(f"{code} x {count}" for code, count in sorted(counts.items())) or "none"
    return [(label, clipped(text, MAX_TEXT)) for label, text in (*lines, ("events", events))]


def trained_on(data: Mapping[str, Any], params: Mapping[str, Any]) -> list[str]:
    """Lines on a run's data: files, tokens, epochs, and what was left out and why; empty in a loop of the user's own.

    data: the source's own figures. params: the config, flat.
    """
    if "train_samples" not in data:
        return []
    sizes = [params.get(f"train.{key}") for key in ("steps", "global_batch")]
    steps, samples = (int(size) if size is not None else 0 for size in sizes)
    if "train_tokens" not in data:
        return _own_data(data, _epochs(steps * samples / data["train_samples"]), steps)
    files = data["files"]
    lines = [
        f"{data['source']} ({data['kind']}): {files:,} file{'s' if files > 1 else ''}, {data['train_tokens']:,} tokens "
        f"to train on, {data['val_tokens']:,} to validate on, {data['vocab']:,} token ids; "
        f"{steps:,} steps are {_epochs(steps * samples / data['train_samples'])}"
    ]
    for part in data.get("mixture", ()):
        epochs = _epochs(steps * samples * part["share"] / part["train_samples"])
        lines.append(
            f"{part['share']:.1%} of {part['source']}: {part['train_tokens']:,} tokens, {epochs}"
        )
    if left := data.get("skipped"):
        lines.append(f"left out {len(left):,}: {some(left, MAX_NAMED)}")
    return lines


def _own_data(data: Mapping[str, Any], epochs: str, steps: int) -> list[str]:
    """The same for a data set of the user's own."""
    fields = ", ".join(
        f"{name} {dtype} {shape}" for name, (dtype, *shape) in data["fields"].items()
    )
    lines = [
        f"{data['source']}: {data['train_samples']:,} samples to train on, {data['val_samples']:,} to validate on, of "
        f"{fields}; {steps:,} steps are {epochs}"
    ]
    if left := data["unreadable"]:
        lines.append(
            f"unreadable among the {len(data['looked_at'])} looked at: {some(left, MAX_NAMED)}"
        )
    return lines


def _epochs(epochs: float) -> str:
    return f"{epochs:.3g} epochs" if epochs < 1000 else f"{epochs:,.0f} epochs"


def fp8_proof(history: RunHistory) -> str:
    """How many of the planned FP8 slots ever saw a nonzero amax, and which did not; empty if none was planned."""
    names = {bare(slot): slot for slot in history.slots()}
    expected = history.expected_slots() | set(names)
    if not expected:
        dynamic = [layer for layer in history.plan.get("layers", ()) if layer["precision"] == "fp8"]
        return "none: dynamic scaling keeps no amax" if dynamic else ""
    silent = [names.get(slot, slot) for slot in history.silent(sorted(expected))]
    text = f"{len(expected) - len(silent)} of {len(expected)} FP8 slots saw a nonzero amax"
    frozen = {
        bare(row["module"]) for row in history.plan.get("layers", ()) if "frozen" in row["reason"]
    }
    ends = {
        slot
        for slot in silent
        if slot.endswith(".grad_output") and bare(slot.rpartition(".")[0]) in frozen
    }
    others = [slot for slot in silent if slot not in ends]
    text += f"; none seen by: {some(others, MAX_NAMED)}" if others else ""
    text += f"; no gradient goes back to {some(sorted(ends), MAX_NAMED)}" if ends else ""
    return f"{text}: frozen, and nothing before is trained" if ends else text


def counts(history: RunHistory) -> dict[str, int]:
    """Counts of a run: steps, applied and skipped updates without those that a rollback undid; all rollbacks and
    demotions.
    """
    applied = history.points("train/step_applied").figures
    rollbacks = history.last("guard/rollbacks") or 0
    rollbacks = rollbacks if math.isfinite(rollbacks) else 0
    demoted = sum(len(event["demote"]) for event in history.events if event["code"] == SWITCHED)
    counted = {
        "steps": len(applied),
        "applied": int((applied == 1).sum()),
        "skipped": int((applied == 0).sum()),
        "rollbacks": int(rollbacks),
        "demotions": demoted,
    }
    # The journal may lack rows if the disk was full; the outcome's figures come from the state.
    known = {name: history.outcome.get(name) for name in ("applied", "skipped", "rollbacks")}
    usable = {name: value for name, value in known.items() if type(value) is int and value >= 0}
    if len(usable) == len(known):
        counted |= usable | {"steps": usable["applied"] + usable["skipped"]}
    return counted


def _outcome(history: RunHistory) -> str:
    outcome = history.outcome
    if not outcome.get("status"):
        return "not ended: still running, or killed"
    reason = f": {outcome['reason']}" if outcome.get("reason") else ""
    at = f" at step {outcome['step']}" if "step" in outcome else ""
    return f"{outcome['status']}{at}{reason}"


def _loss(history: RunHistory) -> str:
    value, last = history.last("val/loss"), history.last("train/loss")
    unit = "" if history.unit == "loss" else f" {history.unit}"
    if history.of_own_loop:  # its loss may have any unit
        kinds = (("validation", value), ("last training loss", last))
        return ", ".join(f"{kind} {loss:.4g}" for kind, loss in kinds if loss is not None) or "none"
    if value is None:
        return "no validation" + (
            f"; last training loss {last:.4f}{unit}" if last is not None else ""
        )
    accuracy = history.last("val/accuracy")
    hits = "" if accuracy is None else f", accuracy {accuracy:.1%}"
    if history.unit != BYTES:
        text = f"validation {value:.4f}{unit}{hits}"
        if not history.unigram_nats:
            return text
        little = (
            "; little more is learned than how often each token occurs"
            if learned_little(history)
            else ""
        )
        ratio = value / history.unigram_nats
        return f"{text}; unigram entropy of the corpus {history.unigram_nats:.4f}, ratio {ratio:.3f}{little}"
    bits = value / math.log(2)
    text = f"validation {bits:.4f} bits per byte ({value:.4f} nats){hits}"
    unigram = history.unigram
    if not unigram:
        return text
    little = (
        "; little more is learned than how often each byte occurs"
        if learned_little(history)
        else ""
    )
    return (
        f"{text}; unigram entropy of the corpus {unigram:.4f}, ratio {bits / unigram:.3f}{little}"
    )


def _precision(history: RunHistory) -> str:
    plan = history.plan
    if not plan:
        return "no plan.json"
    effective = plan.get("effective") or "not recorded"
    return f"requested {plan['requested']}, resolved {plan['resolved']}, effective {effective}"


def _steps(history: RunHistory) -> str:
    found = counts(history)
    demoted = sorted({span[0] for span in history.demotions()})
    text = f"{found['steps']}: {found['applied']} applied, {found['skipped']} skipped; rollbacks {found['rollbacks']}; "
    return (
        text
        + f"demotions {found['demotions']}"
        + (f" ({some(demoted, MAX_NAMED)})" if demoted else "")
    )


def _speed(history: RunHistory) -> str:
    found = [
        history.points(f"train/{key}").figures
        for key in ("tokens_per_second", "mfu", "peak_memory_gib")
    ]
    rates, shares, sizes = (values[np.isfinite(values)] for values in found)
    counted = history.run["data"].get("counted", "tokens")
    parts = [f"{np.median(rates):,.0f} {counted}/s (median)" if len(rates) else "not measured"]
    if len(shares):
        parts.append(f"MFU {np.median(shares):.1%} (median)")
    if len(sizes):
        what = " (of the whole process)" if history.plan.get("tier") == "CPU" else ""
        parts.append(f"peak memory {sizes.max():.2f} GiB{what}")
    return ", ".join(parts)


def _where(history: RunHistory) -> list[tuple[str, str]]:
    run_dir = history.run_dir
    lines = [("MLflow", _mlflow(run_dir))]
    if (run_dir / "report.html").exists():
        lines.append(("report", short(run_dir / "report.html")))
    if history.slots():
        lines.append(("FP8 slots", f"{tool('harness')} inspect {short(run_dir)}"))
    return lines


def _mlflow(run_dir: Path) -> str:
    if not (run_dir / POSITION).exists() and not (run_dir / "shipper.log").exists():
        return "off"
    if not delivered(run_dir):
        command = f"{tool('harness')} sync {short(run_dir)}"
        return f"not all delivered (see {short(run_dir / 'shipper.log')}); later: {command}"
    store = Store.load(run_dir)
    uri, page = tracking_uri() if store is None else store.uri, run_page(run_dir)
    if uri.startswith(("http://", "https://")):
        return f"delivered to {uri}{page}"
    then = f", then http://127.0.0.1:5000{page}" if page else ""
    return f"delivered; {tool('mlflow')} ui --backend-store-uri {uri}{then}"
