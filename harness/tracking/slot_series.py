"""Which FP8 figures become series: quantiles over layers for each role always, single slots as a policy picks them.

A tracker's page dies at some thousand series, and a model of 32 layers has as many slots. Up to `tracking.fp8_series`
slots all have series of their own. Beyond, these have: those whose names match `tracking.fp8_slots`, those of layers
that left FP8, and those that were beyond a limit of the recipe's fallback once; a slot that was picked stays. Nothing
is lost by it: the file of `slot_file` has every slot of every step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.config import TrackingConfig
from harness.core.errors import some
from harness.core.facts import ROLES, SAMPLED, SlotStats, StepFacts
from harness.core.metrics import SLOT_ROWS, role_row
from harness.tracking.journal import JOURNAL, read_rows
from harness.tracking.slot_file import FIGURES, SLOT_FILE, Floats, SlotFile, SlotSteps, stacked

MAX_PICKED = 6
"""Slots that are picked for each of two reasons; asked for by pattern there may be `tracking.fp8_series` more."""
PICKED = "fp8.picked"
DEMOTED, NEAR = "its layer left FP8", "beyond a limit of the fallback"
_NAMED = 8
_SAMPLED = np.array([SLOT_ROWS[name].often == SAMPLED for name in FIGURES])[:, None]
_WORST = (("saturation", False), ("underflow", False), ("sqnr_db", True))
Told = dict[str, Any]
"""An event's code and fields."""


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """When a slot is worth a series: its saturation over that of its role, more clipped or underflow, less SQNR (dB).

    saturation, underflow, even_db: for each role, in the order of ROLES; NaN: not judged. warmup_steps: applied steps
    at the start that are not judged.
    """

    saturation: tuple[float, ...]
    clipped: float
    underflow: tuple[float, ...]
    sqnr_db: float
    warmup_steps: int
    even_db: tuple[float, ...] = (math.nan, math.nan, math.nan)
    centred_db: float = math.nan

    def beyond(self, slots: SlotStats) -> list[int]:
        """Places of the slots beyond a limit in this step, the worst by saturation first."""
        role = [ROLES.index(name.rpartition(".")[2]) for name in slots.names]
        limits, underflow, even = (np.array(each)[role] for each in (self.saturation, self.underflow, self.even_db))
        with np.errstate(invalid="ignore"):
            bad = (
                (slots.saturation > limits)
                | ~(np.isfinite(slots.amax) | np.isnan(slots.amax))
                | (slots.clipped > self.clipped)
                | (slots.underflow > underflow)
                | (slots.sqnr_db < self.sqnr_db)
                | (slots.even_db < even)
                | (slots.centred_db < self.centred_db)
            )
            over = np.nan_to_num(slots.saturation / limits, nan=0.0)
        return sorted(np.flatnonzero(bad).tolist(), key=lambda place: (-over[place], place))


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a step's FP8 figures goes into its row.

    with_slots: series of single slots, of those in `picked`, or of all where it is None. figures: of the roles.
    events: of what was picked, and of what was not for want of room. worst: tags that changed. slots: with what was
    last sampled since the row before, where the step itself was not; step: its number where told after its row.
    """

    with_slots: bool = False
    picked: Collection[str] | None = None
    figures: dict[str, float] = field(default_factory=dict)
    events: Sequence[Told] = ()
    worst: Mapping[str, str] = field(default_factory=dict)
    step: int = 0
    slots: SlotStats | None = None


class SlotSeries:
    """The policy of one run, and its file of all figures.

    folder: the run's; None keeps nothing. limits: None: no slot is picked for being beyond them.
    """

    def __init__(self, config: TrackingConfig, folder: Path | None, limits: SlotLimits | None = None) -> None:
        self.config, self.limits = config, limits
        self.file = None if folder is None else SlotFile(folder / SLOT_FILE)
        self._journal = None if folder is None else folder / JOURNAL
        self._names: tuple[str, ...] = ()
        self._asked: dict[str, None] = {}
        self._picked: dict[str, str] = {}
        self._full: set[str] = set()
        self._next: tuple[int, int] | None = None
        self._low: Floats = np.zeros((len(FIGURES), 0), np.float32)
        self._high: Floats = self._low
        self._newest: Floats = self._low
        self._last: tuple[StepFacts, int] | None = None
        self._worst: dict[str, str] = {}

    def take(self, attempt: int, facts: StepFacts) -> Kept:
        """One step, in order. Its figures are in the file, and what is told of them in the row is returned."""
        slots = facts.slots
        if slots is None:
            return Kept()
        events: list[Told] = []
        if self._next != (attempt, facts.step) or slots.names != self._names:
            events += self._begin(attempt, facts.step, slots.names)
        self._next = attempt, facts.step + 1
        if self.file is not None:
            self.file.add(attempt, facts.step, slots)
        self._note(stacked(slots))
        fresh = self._pick(facts, slots, events)
        if facts.step % self.config.fp8_every == 0:
            return self._row(facts.step, slots, events)
        self._last = facts, attempt
        if fresh:  # what it was picked for must be seen
            return Kept(True, fresh, events=events)
        return Kept(events=events)

    def rest(self, attempt: int) -> Kept:
        """Of the last step, if its figures are not in its row: a run's end."""
        if self._last is None or self._last[1] != attempt:
            return Kept()
        facts, slots = self._last[0], self._last[0].slots
        assert slots is not None
        return replace(self._row(facts.step, slots, []), step=facts.step)

    def _row(self, step: int, slots: SlotStats, events: list[Told]) -> Kept:
        low, high, newest = self._low, self._high, self._newest
        figures = role_row(self._names, newest, low, high)
        self._forget()
        chosen = None if self._all else {*self._asked, *self._picked}
        told = replace(slots, **dict(zip(FIGURES, newest, strict=True)))
        return Kept(True, chosen, figures, events, self._changed(step, low, high), slots=told)

    def _note(self, now: Floats) -> None:
        """One more step since the row before. Samples come at steps of their own, and are told by the next row."""
        self._low, self._high = np.fmin(self._low, now), np.fmax(self._high, now)
        self._newest = np.where(np.isnan(now) & _SAMPLED, self._newest, now)

    @property
    def _all(self) -> bool:
        return len(self._names) <= self.config.fp8_series

    def _forget(self) -> None:
        self._low = np.full((len(FIGURES), len(self._names)), np.nan, np.float32)
        self._high = self._newest = self._low
        self._last = None

    def _begin(self, attempt: int, step: int, names: tuple[str, ...]) -> Iterator[Told]:
        """The first step of a process, after a rollback, or of other slots: take up what stands of this stretch."""
        first = self._next is None
        self._names = names
        self._forget()
        asked = [name for name in names if any(fnmatchcase(name, each) for each in self.config.fp8_slots)]
        self._asked = dict.fromkeys(asked[: self.config.fp8_series])
        if first:
            yield from self._patterns(names, asked)
            self._picked = dict(self._picked_before(attempt, step))
        since = (step - 1) // self.config.fp8_every * self.config.fp8_every
        if self.file is None or since == step - 1:
            return
        try:
            standing = SlotSteps(self.file.path, before=(attempt, step))
        except (OSError, ValueError):
            return
        for _, then, values in standing.read(since + 1):
            if then == names:
                self._note(values)

    def _patterns(self, names: Sequence[str], asked: Sequence[str]) -> Iterator[Told]:
        for pattern in self.config.fp8_slots:
            if not any(fnmatchcase(name, pattern) for name in names):
                text = f"tracking.fp8_slots: {pattern!r} matches no FP8 slot"
                yield {"code": "fp8.unmatched", "pattern": pattern, "text": text}
        if len(asked) > self.config.fp8_series:
            rest = asked[self.config.fp8_series :]
            yield _not_picked(rest, "asked for", f"{self.config.fp8_series} at most, tracking.fp8_series")

    def _picked_before(self, attempt: int, step: int) -> Iterator[tuple[str, str]]:
        """Slots and why: a run that goes on has the same series as one that was never stopped."""
        if self._all or self._journal is None:
            return
        try:
            for row in read_rows(self._journal, metrics=False):
                known = row["kind"] == "event" and row["code"] == PICKED and isinstance(row.get("slots"), list)
                if known and (row["attempt"] < attempt or row["step"] < step):
                    yield from ((name, str(row.get("why"))) for name in row["slots"] if name in self._names)
        except OSError:
            return

    def _pick(self, facts: StepFacts, slots: SlotStats, events: list[Told]) -> list[str]:
        """What is picked in this step."""
        if self._all:
            return []
        fresh: list[str] = []
        for why, wanted in self._wanted(facts, slots):
            new = [name for name in wanted if name not in self._picked and name not in self._asked]
            room = max(0, MAX_PICKED - sum(reason == why for reason in self._picked.values()))
            taken, left_out = new[:room], new[room:]
            self._picked |= dict.fromkeys(taken, why)
            fresh += taken
            if taken:
                events.append({"code": "fp8.picked", "slots": taken, "why": why})
            if left_out and why not in self._full:
                self._full.add(why)
                events.append(_not_picked(left_out, why, f"{MAX_PICKED} at most"))
        return fresh

    def _wanted(self, facts: StepFacts, slots: SlotStats) -> Iterator[tuple[str, list[str]]]:
        if facts.demoted:
            demoted = set(facts.demoted)
            yield DEMOTED, [name for name in slots.names if name.rpartition(".")[0] in demoted]
        limits = self.limits
        if limits is not None and facts.applied and facts.applied_steps > limits.warmup_steps:
            yield NEAR, [slots.names[place] for place in limits.beyond(slots)]

    def _changed(self, step: int, low: Floats, high: Floats) -> dict[str, str]:
        """Tags of the roles whose worst slot is another than before."""
        changed: dict[str, str] = {}
        for role in ROLES:
            of_role = [place for place, name in enumerate(self._names) if name.endswith(f".{role}")]
            worst = dict(self._worst_of(role, of_role, low, high))
            who = ", ".join(worst[key][0] for key in sorted(worst))
            if worst and self._worst.get(role) != who:
                self._worst[role] = who
                told = "; ".join(f"{figure} {value:.3g}: {name}" for figure, (name, value) in worst.items())
                changed[f"fp8.worst.{role}"] = f"{told} (step {step})"
        return changed

    def _worst_of(
        self, role: str, places: Sequence[int], low: Floats, high: Floats
    ) -> Iterator[tuple[str, tuple[str, float]]]:
        for figure, least in _WORST:
            values: npt.NDArray[np.float32] = (low if least else high)[FIGURES.index(figure), places]
            if not np.isnan(values).all():
                at = int(np.nanargmin(values) if least else np.nanargmax(values))
                yield figure, (self._names[places[at]].removesuffix(f".{role}"), float(values[at]))


def _not_picked(names: Sequence[str], why: str, bound: str) -> Told:
    text = f"{len(names)} FP8 slots get no series of their own ({bound}; {why}): {some(names, _NAMED)}"
    return {"code": "fp8.not_picked", "slots": list(names), "why": why, "text": text}
