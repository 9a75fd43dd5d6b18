"""`harness inspect`: a run's FP8 slots, one line each, and the moves between FP8 and BF16. Starts without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from harness.checkpoint.manifest import check_header
from harness.core.errors import ExitCode, clipped
from harness.core.files import MAX_LARGE, read_json
from harness.core.screen import Screen
from harness.report import RunFolder
from harness.report.summary import account
from harness.tracking.history import MAX_TEXT, RunHistory, bare

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"
SPARK = 16
MOST_SLOTS = 20_000
COLUMNS = ("amax", "scale", "saturation", "underflow", "sqnr_db")
Histories = dict[str, npt.NDArray[np.float32]]


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
    """One character a value, from the least to the greatest of them; a blank where a value is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(bars) - 1
    return "".join(
        " " if not math.isfinite(value) else bars[round((value - low) / span * top) if span else top // 2]
        for value in values
    )


def _moved(event: Mapping[str, Any]) -> str:
    told = [
        f"{', '.join(event[key])} {where}"
        for key, where in (("demote", "now in BF16"), ("promote", "back in FP8"))
        if event.get(key)
    ]
    return clipped("; ".join(told), MAX_TEXT)


def _slot_table(history: RunHistory, slots: Sequence[str], console: Screen) -> Table:
    step, histories = _checkpoint_histories(history.run_dir / "checkpoints")
    source = f"checkpoint of step {step}" if histories else "the last steps"
    bars = BARS if (console.encoding or "").lower().startswith("utf") else ASCII_BARS
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title=f"amax history: {source}, newest right")
    table.add_column("slot", no_wrap=True)
    # Figures keep their width on a narrow terminal; names and the history give way.
    for heading, width in (("amax", 8), ("scale", 9), ("satur.", 6), ("underfl.", 8), ("SQNR dB", 7)):
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    table.add_column("amax history", no_wrap=True, overflow="crop")
    listed = slots[:MOST_SLOTS]
    newest, tails = history.newest(listed, SPARK)
    for slot in listed:
        last = [next(iter(newest[f"fp8_{column}/{slot}"].values()), None) for column in COLUMNS]
        amaxes = histories.get(bare(slot))
        values = amaxes.tolist() if amaxes is not None else tails[slot]
        figures = [_figure(value, form) for value, form in zip(last, ("3g", "4g", "3f", "2%", "1f"), strict=True)]
        table.add_row(Text(slot), *figures, sparkline(values[-SPARK:], bars))
    if len(slots) > MOST_SLOTS:
        table.add_row(f"and {len(slots) - MOST_SLOTS} more")
    return table


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, f".{form}")


def _checkpoint_histories(folder: Path) -> tuple[int | None, Histories]:
    """(step, {bare slot name: amax by update, oldest first}) of the newest checkpoint that has FP8 state."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    for checkpoint in sorted(folder.glob("step-*"), reverse=True):
        try:
            if not (checkpoint / "fp8.safetensors").is_file():
                continue
            check_header(checkpoint / "fp8.safetensors")
            amaxes = load_file(checkpoint / "fp8.safetensors")["history"]
            names = read_json(checkpoint / "state.json", MAX_LARGE)["parts"]["fp8"]["slots"]
            step = int(checkpoint.name.removeprefix("step-"))
            # Row 0 is where the next amax is gathered; rows 1 to L-1 run from the oldest update to the newest.
            return step, {bare(name): _filled(amaxes[1:, place]) for place, name in enumerate(names)}
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return None, {}


def _filled(column: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Without the zeros of updates that have not happened yet."""
    used = np.flatnonzero(column)
    return column[used[0] :] if len(used) else column[:0]
