"""`harness inspect --follow`: how a run stands now, and its slots by trouble, again and again while it trains.

Journal and slot file only grow, so each look reads what was written since the last one: of metrics rows the newest few
are parsed, and of the slot file the newest few steps. A look costs the same however long the run is. The first one has
to find the ends of both files: it passes over their lines and headers, and parses as little.

Starts without torch. Nothing here raises for what a folder holds.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.core.errors import clipped, clock, number_of
from harness.core.facts import SLOT_ROWS, jsonable
from harness.core.files import read_mapping
from harness.report.inspect import SPARK, row_of_slot, slot_columns
from harness.report.overview import State, Totals, layers_in, state_of
from harness.report.trouble import SlotFigures, Trouble, order
from harness.tracking.history import SWITCHED, bare, read_plan, split_slot
from harness.tracking.journal import JOURNAL, MAX_ROW, METRICS_LINE, decode
from harness.tracking.slot_file import FIGURES, SLOT_FILE, SlotTail

LAST_EVENTS = 5
PARSED = 16
"""Metrics rows that one look parses at most."""
STEPS = 64
"""Steps of the slot file that one look reads at most. Figures that are sampled more rarely come with later looks."""
MAX_EVENT = 160
# Bytes at the beginning of a journal by which it is recognised.
_HEAD = 200
# Figures that an order of trouble needs, and those that are finite as long as the tensor is.
_JUDGED = ("saturation", "clipped", "underflow", "sqnr_db", "even_db", "centred_db")
_ALWAYS_FINITE = ("amax", "scale", "saturation")
_ENDED = (State.DONE, State.HALTED, State.STOPPED, State.CRASHED, State.BROKEN)


@dataclass
class Follower:
    """What is known of a run that is being followed.

    folder: of the run.
    state, reason: how it stands, and why where there is more to say.
    totals: of the journal so far.
    events: the newest ones, as (step, code, text).
    layers: number of modules that run in each precision.
    """

    folder: Path
    state: State = State.EMPTY
    reason: str = ""
    totals: Totals = field(default_factory=Totals)
    events: deque[tuple[int, str, str]] = field(default_factory=lambda: deque(maxlen=LAST_EVENTS))
    layers: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self._at = 0
        self._head = b""
        # (time, step) of the newest rows, for the pace.
        self._pace: deque[tuple[float, int]] = deque(maxlen=PARSED)
        # Moves of layers, in order: (step, demoted, promoted), bare names.
        self._moves: list[tuple[int, list[str], list[str]]] = []
        self._tail = SlotTail(self.folder / SLOT_FILE)
        # By slot: newest measured figures, and the last amaxes.
        self._figures: dict[str, dict[str, float]] = {}
        self._amaxes: dict[str, deque[float]] = {}
        self._plan: Mapping[str, Any] = {}

    @property
    def ended(self) -> bool:
        """Whether the run writes no more."""
        return self.state in _ENDED

    def look(self, locked: bool) -> bool:
        """Read what is new; returns whether anything is.

        locked: whether a process held the run's lock. Ask for it before: what it wrote until then is read.
        """
        before = (self.state, self.reason)
        trouble_there = ""
        is_new = False
        try:
            is_new = self._read_journal()
        except FileNotFoundError:
            # No journal yet: the run prepares its data, or has not been started.
            self.state, self.reason = State.EMPTY, "has not begun: waiting for its first row"
            return before != (self.state, self.reason)
        except (OSError, ValueError) as error:
            trouble_there = f"{JOURNAL}: {getattr(error, 'strerror', None) or error}"
        self._read_slots()

        outcome_file = self.folder / "outcome.json"
        outcome = read_mapping(outcome_file)
        has_outcome = os.path.lexists(outcome_file)
        self.state, reason = state_of(outcome, has_outcome, self.totals, trouble_there, locked)
        self.reason = clipped(" ".join(reason.split()), MAX_EVENT)
        # A run that has ended has written into its plan what it ran in.
        if self.ended or not self._plan:
            self._plan = read_plan(self.folder / "plan.json")
        self.layers = layers_in(self._plan, self.totals, ended=self.ended)
        return is_new or before != (self.state, self.reason)

    @property
    def tokens_per_second(self) -> float:
        """Of the last step; NaN if it was not measured."""
        return float(self.totals.metrics.get("train/tokens_per_second", math.nan))

    @property
    def seconds_left(self) -> float:
        """By the pace of the newest rows; NaN if it is not known."""
        steps = self.totals.steps
        if steps is None or len(self._pace) < 2 or self.ended:
            return math.nan
        (began, first), (now, last) = self._pace[0], self._pace[-1]
        if last <= first:
            return math.nan
        return (steps - last) * (now - began) / (last - first)

    def slots(self) -> list[Trouble]:
        """Every slot, judged by its newest figures, the most troubled first."""
        in_bf16: set[str] = set()
        for _, demoted, promoted in self._moves:
            in_bf16 = (in_bf16 | set(demoted)) - set(promoted)

        found: list[SlotFigures] = []
        for name, figures in self._figures.items():
            layer, _ = split_slot(name)
            broken = any(math.isinf(figures.get(each, 0.0)) for each in _ALWAYS_FINITE)
            judged = {each: figures[each] for each in _JUDGED if each in figures}
            demoted_now = bare(layer) in in_bf16
            found.append(SlotFigures(name, nonfinite=int(broken), demoted=demoted_now, **judged))
        return order(found)

    def figures(self, slot: str) -> Mapping[str, float]:
        """Its newest figures, by their field in `core.facts.SlotStats`; what was not measured is left out."""
        return self._figures[slot]

    def amaxes(self, slot: str) -> list[float]:
        """Its last amaxes, the newest last."""
        return list(self._amaxes[slot])

    def _read_journal(self) -> bool:
        """Take the rows behind the last ones. Raises OSError."""
        path = self.folder / JOURNAL
        # The first row has the time at which the run began.
        with path.open("rb") as file:
            head = file.read(_HEAD)
        if head[: len(self._head)] != self._head or path.stat().st_size < self._at:
            self._begin_again()
        self._head = head

        newest: deque[bytes] = deque(maxlen=PARSED)
        validated: deque[bytes] = deque(maxlen=1)
        begun_at = self._at
        with path.open("rb") as lines:
            lines.seek(self._at)
            while line := lines.readline(MAX_ROW):
                is_whole = line.endswith(b"\n")
                # What has no end yet is being written. A line without one in MAX_ROW bytes is no row.
                if not is_whole and len(line) < MAX_ROW:
                    break
                self._at += len(line)
                if line.startswith(METRICS_LINE):
                    # A row with a validation may be followed by many others.
                    kept = validated if b'"val/loss"' in line else newest
                    kept.append(line)
                elif (row := decode(line)) is not None:
                    self._take(row)

        for line in (*validated, *newest):
            row = decode(line)
            if row is not None:
                self.totals.add(row)
                if line in newest and "train/loss" in row["metrics"]:
                    self._note_pace(row)
        return self._at > begun_at

    def _note_pace(self, row: Mapping[str, Any]) -> None:
        # After a rollback the steps begin again.
        if self._pace and row["step"] <= self._pace[-1][1]:
            self._pace.clear()
        self._pace.append((float(row.get("time", 0.0)), row["step"]))

    def _begin_again(self) -> None:
        """Another journal lies in the place of the one that was read."""
        self._at = 0
        self._tail = SlotTail(self.folder / SLOT_FILE)
        self.totals = Totals()
        self.events.clear()
        self._pace.clear()
        self._moves.clear()
        self._figures.clear()
        self._amaxes.clear()
        self._plan = {}

    def _take(self, row: Mapping[str, Any]) -> None:
        """Take a row that is no metrics."""
        self.totals.rows += 1
        self.totals.add(row)
        if row["kind"] == "run":
            # A process begins. Steps of the one before say nothing about its pace.
            self._pace.clear()
            self._plan = {}
        if row["kind"] != "event":
            return
        text = str(row.get("text") or row.get("reason") or "")
        if row["code"] == SWITCHED:
            demoted, promoted = _names(row.get("demote")), _names(row.get("promote"))
            self._moves.append((row["step"], demoted, promoted))
            text = text or f"to BF16: {number_of(len(demoted), 'layer')}, back: {len(promoted)}"
        elif row["code"] == "guard.rollback" and type(row.get("to_step")) is int:
            # The state before has the layers where they were then.
            self._moves = [move for move in self._moves if move[0] <= row["to_step"]]
        self.events.append((row["step"], row["code"], clipped(" ".join(text.split()), MAX_EVENT)))

    def _read_slots(self) -> None:
        """Take the newest steps of the slot file."""
        try:
            steps = self._tail.take(STEPS)
        except (OSError, ValueError):
            return
        for _, names, values in steps:
            measured = ~np.isnan(values)
            for place, name in enumerate(names):
                figures = self._figures.setdefault(name, {})
                for row, figure in enumerate(FIGURES):
                    # Figures that are sampled keep their last value.
                    if measured[row, place]:
                        figures[figure] = float(values[row, place])
                amaxes = self._amaxes.setdefault(name, deque(maxlen=SPARK))
                amaxes.append(float(values[0, place]))


def _names(value: Any) -> list[str]:
    """Bare names of layers in an event that another program may have written."""
    if not isinstance(value, list):
        return []
    return [bare(each) for each in value if isinstance(each, str)]


def view(run: Follower, rows: int, bars: str) -> RenderableType:
    """Header, newest events, and the `rows` most troubled slots. bars: see `inspect.sparkline`."""
    # One line each, however narrow the terminal is: it shows as many slots as there are lines left.
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in header(run)]
    slots = run.slots()
    if not slots:
        return Group(*lines)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    # First, as a narrow terminal cuts what is on the right.
    table.add_column("trouble", no_wrap=True, min_width=10)
    slot_columns(table)
    for judged in slots[:rows]:
        name = judged.slot.name
        cells = row_of_slot(name, run.figures(name), run.amaxes(name), bars)
        table.add_row(Text(judged.why), *cells)
    more = [Text(f"and {len(slots) - rows} more, less troubled")] if len(slots) > rows else []
    return Group(*lines, Text(), table, *more)


def header(run: Follower) -> list[str]:
    """Lines on the whole run: how it stands, its losses and pace, precisions, and newest events."""
    totals = run.totals
    state = f"{run.folder.name}: {run.state}"
    if run.state == State.EMPTY:
        state = f"{run.folder.name}: {run.reason}"
    elif run.reason:
        state += f": {run.reason}"
    lines = [state]

    # Figures that are not there yet are left out.
    if totals.step is not None:
        of = f"/{totals.steps}" if totals.steps else ""
        parts = [f"step {totals.step}{of}", f"loss {totals.metrics['train/loss']:.4f}"]
        if totals.val_loss is not None:
            parts.append(f"val {totals.val_loss:.4f}")
        if math.isfinite(run.tokens_per_second):
            parts.append(f"{run.tokens_per_second:,.0f} {totals.counted}/s")
        if math.isfinite(run.seconds_left):
            parts.append(f"eta {clock(run.seconds_left)}")
        lines.append("  ".join(parts))
    if run.layers:
        counted = [f"{precision} {count}" for precision, count in run.layers.items()]
        lines.append(f"modules in {', '.join(counted)}")
    for step, code, text in run.events:
        lines.append(f"step {step}: {code}: {text}".removesuffix(": "))
    return lines


def as_json(run: Follower, rows: int | None = None) -> dict[str, Any]:
    """The same as `view` as one JSON-able object. Figures that are not finite are texts.

    rows: slots at most; None: all.
    """
    totals = run.totals
    slots: list[dict[str, Any]] = []
    for judged in run.slots()[:rows]:
        entry: dict[str, Any] = {"slot": judged.slot.name, "trouble": judged.why}
        figures = run.figures(judged.slot.name)
        # A figure of the slot that is not known is null.
        for name in SLOT_ROWS:
            value = figures.get(name)
            entry[name] = None if value is None else jsonable(value)
        slots.append(entry)
    loss = totals.metrics.get("train/loss")
    return {
        "run": str(run.folder),
        "state": run.state,
        "reason": run.reason,
        "step": totals.step,
        "steps": totals.steps,
        "train_loss": None if loss is None else jsonable(loss),
        "val_loss": None if totals.val_loss is None else jsonable(totals.val_loss),
        "tokens_per_second": _known(run.tokens_per_second),
        "seconds_left": _known(run.seconds_left),
        "layers": dict(run.layers),
        "events": dict(totals.codes),
        "last_events": [list(event) for event in run.events],
        "slots": slots,
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
