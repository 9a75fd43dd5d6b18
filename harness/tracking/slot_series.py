"""Decide which FP8 figures become series in the tracker, and name them.

A model of 32 layers has some thousand series of single slots, and a tracker's page dies of them. So there are two
kinds:

- Every model has quantiles over the layers of each role, `fp8/<role>/<figure>_<quantile>`.
- Single slots have `fp8_<figure>/<slot>`. Up to `tracking.fp8_series` slots, all have them. In a larger model only
  these have them: slots whose names match `tracking.fp8_slots`, slots of layers that left FP8, and slots that were once
  beyond a limit of the recipe's fallback. A slot that was picked keeps its series.

Nothing is lost: the file of `slot_file` has every slot of every step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.config import TrackingConfig
from harness.core.errors import some
from harness.core.facts import ROLES, SAMPLED, SLOT_ROWS, SlotStats, StepFacts
from harness.core.metrics import ROLE_QUANTILES
from harness.tracking.journal import JOURNAL, read_rows
from harness.tracking.slot_file import FIGURES, SLOT_FILE, Floats, SlotFile, SlotSteps

MAX_PICKED = 6
"""Most slots that are picked for each of the two reasons below. Patterns may add `tracking.fp8_series` more."""
DEMOTED, NEAR = "its layer left FP8", "beyond a limit of the fallback"
_NAMED = 8
# Which figures are measured in sampled steps only, bool [figures, 1].
_IS_SAMPLED = [SLOT_ROWS[name].often == SAMPLED for name in FIGURES]
_SAMPLED = np.array(_IS_SAMPLED)[:, None]
# Figures by which a slot is the worst of its role; True: the lowest is the worst.
_WORST = (("saturation", False), ("underflow", False), ("sqnr_db", True))
_RANKS = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
Event = dict[str, Any]
"""An event's code and fields."""


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Thresholds beyond which a slot gets a series of its own.

    saturation: largest, one for each role in the order of ROLES; NaN: not judged (also below).
    clipped: largest share of values.
    underflow: largest share of non-zero values, one for each role.
    sqnr_db: least, in dB.
    warmup_steps: applied steps at the start that are not judged.
    even_db: least per-element SQNR in dB, one for each role.
    centred_db: least SQNR without each channel's mean, in dB.
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
        # One limit for each slot, by its role.
        roles = [ROLES.index(name.rpartition(".")[2]) for name in slots.names]
        limits = np.array(self.saturation)[roles]
        underflow = np.array(self.underflow)[roles]
        even = np.array(self.even_db)[roles]
        # NaN, a figure that was not measured, is beyond no limit.
        with np.errstate(invalid="ignore"):
            bad = (
                (slots.saturation > limits)
                | np.isinf(slots.amax)
                | (slots.clipped > self.clipped)
                | (slots.underflow > underflow)
                | (slots.sqnr_db < self.sqnr_db)
                | (slots.even_db < even)
                | (slots.centred_db < self.centred_db)
            )
            over = np.nan_to_num(slots.saturation / limits, nan=0.0)
        places: list[int] = np.flatnonzero(bad).tolist()
        return sorted(places, key=lambda place: (-over[place], place))


def slot_figures(slots: SlotStats, chosen: Collection[str] | None = None) -> dict[str, float]:
    """`fp8_<figure>/<slot>`, such as `fp8_amax/blocks.03.mlp.down.input`, for every figure that was measured.

    chosen: the slots wanted; None: all.
    """
    found: dict[str, float] = {}
    for field_name, metric in SLOT_ROWS.items():
        values = getattr(slots, field_name).tolist()
        for slot, value in zip(slots.names, values, strict=True):
            if not math.isnan(value) and (chosen is None or slot in chosen):
                found[f"{metric.key}/{slot}"] = value
    return found


def role_figures(
    names: Sequence[str],
    now: Floats,
    low: Floats,
    high: Floats,
) -> dict[str, float]:
    """`fp8/<role>/<figure>_<quantile>` over the layers.

    now: float32 [figures, slots] of this step, in the order of SLOT_ROWS; p10, p50 and p90 are of these.
    low: least value of each since the last such row; min is of these.
    high: largest value of each since then; max is of these.

    A quantile is the value of one slot (the nearest rank). Interpolation would make an infinite amax of one slot spoil
    the quantiles beside it.
    """
    found: dict[str, float] = {}
    for role in ROLES:
        columns = _columns_of(role, names)
        ordered = np.sort(now[:, columns], axis=1)  # NaN last
        measured = (~np.isnan(ordered)).sum(axis=1)
        for row, figure in enumerate(SLOT_ROWS):
            # Ranks among the layers, in this step.
            values: dict[str, float] = {}
            if measured[row]:
                last = int(measured[row]) - 1
                for name, rank in _RANKS.items():
                    values[name] = float(ordered[row, round(rank * last)])

            # Extremes of all steps since the last row: a spike between two rows must not be missed.
            lows, highs = low[row, columns], high[row, columns]
            lows = lows[~np.isnan(lows)]
            highs = highs[~np.isnan(highs)]
            if lows.size:
                values["min"] = float(lows.min())
            if highs.size:
                values["max"] = float(highs.max())
            for quantile in ROLE_QUANTILES[figure]:
                if quantile in values:
                    found[f"fp8/{role}/{figure}_{quantile}"] = values[quantile]
    return found


def _columns_of(role: str, names: Sequence[str]) -> list[int]:
    return [column for column, name in enumerate(names) if name.endswith(f".{role}")]


@dataclass(frozen=True, slots=True)
class Kept:
    """What telemetry logs of a step's FP8 figures.

    step: the step that the figures are of.
    figures: for the step's row, by the names of their series.
    events: about slots that were picked, and slots that had no room.
    worst: tags that changed, each with the worst slots of a role.
    """

    step: int
    figures: dict[str, float] = field(default_factory=dict[str, float])
    events: Sequence[Event] = ()
    worst: Mapping[str, str] = field(default_factory=dict[str, str])


class SlotSeries:
    """One run's choice of series, and its file of all figures.

    folder: the run's; None keeps nothing.
    limits: a slot beyond one is picked; None: no slot is.
    """

    def __init__(
        self, config: TrackingConfig, folder: Path | None, limits: SlotLimits | None = None
    ) -> None:
        self.config = config
        self.limits = limits
        self.file = None if folder is None else SlotFile(folder / SLOT_FILE)
        self._journal = None if folder is None else folder / JOURNAL
        self._names: tuple[str, ...] = ()
        # Slots that have series: those that match a pattern, and those that were picked, with the reason.
        self._asked: dict[str, None] = {}
        self._picked: dict[str, str] = {}
        # Reasons for which an event has named slots without room.
        self._full: set[str] = set()
        # (attempt, step) that follows the last one; another one begins anew.
        self._next: tuple[int, int] | None = None
        # Since the last row: extremes, and each figure's last measured value.
        self._low: Floats = np.zeros((len(FIGURES), 0), np.float32)
        self._high: Floats = self._low
        self._newest: Floats = self._low
        self._last: tuple[StepFacts, int] | None = None
        self._worst: dict[str, str] = {}

    def take(self, attempt: int, facts: StepFacts) -> Kept:
        """Take the FP8 figures of one step, in order: all go into the file, and some into the step's row."""
        slots = facts.slots
        if slots is None:
            return Kept(facts.step)

        # The first step of a process, one after a rollback, or one with other slots.
        events: list[Event] = []
        if self._next != (attempt, facts.step) or slots.names != self._names:
            events += self._begin(attempt, facts.step, slots.names)
        self._next = attempt, facts.step + 1

        # The file has every figure of every slot.
        if self.file is not None:
            self.file.add(attempt, facts.step, slots)

        self._note(slots.stacked())
        picked = self._pick(facts, slots, events)
        if facts.step % self.config.fp8_every == 0:
            return self._row(facts.step, slots, events)
        self._last = facts, attempt

        # Between two rows only the slots that were picked in this step: their figures show what they were picked for.
        figures = slot_figures(slots, picked) if picked else {}
        return Kept(facts.step, figures, events)

    def rest(self, attempt: int) -> Kept | None:
        """The figures of the last step, at the end of a run; None if that step's row has them."""
        if self._last is None:
            return None
        facts, attempt_of_last = self._last
        if attempt_of_last != attempt:
            return None
        assert facts.slots is not None
        return self._row(facts.step, facts.slots, [])

    def _row(self, step: int, slots: SlotStats, events: list[Event]) -> Kept:
        """A row with the quantiles of the roles and the series of single slots; the next row begins anew."""
        low, high, newest = self._low, self._high, self._newest
        self._forget()
        chosen = None if self._all else {*self._asked, *self._picked}
        # Figures that are sampled may be some steps old: they have been waiting for this row.
        slots = replace(slots, **dict(zip(SLOT_ROWS, newest, strict=True)))
        figures = slot_figures(slots, chosen)
        figures |= role_figures(self._names, newest, low, high)
        return Kept(step, figures, events, self._worst_now(step, low, high))

    def _note(self, now: Floats) -> None:
        """Add one step to those since the last row. Figures sampled between two rows wait for the second one."""
        self._low = np.fmin(self._low, now)
        self._high = np.fmax(self._high, now)
        self._newest = np.where(np.isnan(now) & _SAMPLED, self._newest, now)

    @property
    def _all(self) -> bool:
        """Whether all slots have series of their own."""
        return len(self._names) <= self.config.fp8_series

    def _forget(self) -> None:
        self._low = np.full((len(FIGURES), len(self._names)), np.nan, np.float32)
        self._high = self._newest = self._low
        self._last = None

    def _begin(self, attempt: int, step: int, names: tuple[str, ...]) -> Iterator[Event]:
        """Choose the slots anew; if this step continues an earlier process, read the steps since the last row."""
        first = self._next is None
        self._names = names
        self._forget()

        asked: list[str] = []
        for name in names:
            matched = any(fnmatchcase(name, each) for each in self.config.fp8_slots)
            if matched:
                asked.append(name)
        self._asked = dict.fromkeys(asked[: self.config.fp8_series])
        if first:
            yield from self._patterns(names, asked)
            self._picked = dict(self._picked_before(attempt, step))

        # The next row covers all steps since the last one; an earlier process wrote those before this step.
        since = (step - 1) // self.config.fp8_every * self.config.fp8_every
        if self.file is None or since == step - 1:
            return
        try:
            written = SlotSteps(self.file.path, before=(attempt, step))
        except (OSError, ValueError):
            return
        for _, names_then, values in written.read(since + 1):
            if names_then == names:
                self._note(values)

    def _patterns(self, names: Sequence[str], asked: Sequence[str]) -> Iterator[Event]:
        """Events about patterns that match nothing, or too many slots."""
        for pattern in self.config.fp8_slots:
            if not any(fnmatchcase(name, pattern) for name in names):
                text = f"tracking.fp8_slots: {pattern!r} matches no FP8 slot"
                yield {"code": "fp8.unmatched", "pattern": pattern, "text": text}
        most = self.config.fp8_series
        if len(asked) > most:
            bound = f"{most} at most, tracking.fp8_series"
            yield _not_picked(asked[most:], "asked for", bound)

    def _picked_before(self, attempt: int, step: int) -> Iterator[tuple[str, str]]:
        """(slot, why) of slots that were picked before, from the journal.

        So a resumed run has the same series as one that never stopped.
        """
        if self._all or self._journal is None:
            return
        try:
            for row in read_rows(self._journal, metrics=False):
                if row["kind"] != "event" or row["code"] != "fp8.picked":
                    continue
                slots = row.get("slots")
                is_before = row["attempt"] < attempt or row["step"] < step
                if not isinstance(slots, list) or not is_before:
                    continue
                for name in slots:
                    if name in self._names:
                        yield name, str(row.get("why"))
        except OSError:
            return

    def _pick(self, facts: StepFacts, slots: SlotStats, events: list[Event]) -> list[str]:
        """The slots that are picked in this step, each once in a run; adds their events."""
        if self._all:
            return []
        fresh: list[str] = []
        for why, wanted in self._wanted(facts, slots):
            with_series = {*self._picked, *self._asked}
            new = [name for name in wanted if name not in with_series]
            # Each reason has room of its own, so that one fault cannot hide another.
            used = list(self._picked.values()).count(why)
            room = max(0, MAX_PICKED - used)
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
        """(reason, slots) to pick in this step, the worst first."""
        if facts.demoted:
            demoted = set(facts.demoted)
            left = [name for name in slots.names if name.rpartition(".")[0] in demoted]
            yield DEMOTED, left

        # A step that was not applied, and the first ones, are not judged: their scales do not fit.
        limits = self.limits
        if limits is None or not facts.applied:
            return
        if facts.applied_steps > limits.warmup_steps:
            yield NEAR, [slots.names[place] for place in limits.beyond(slots)]

    def _worst_now(self, step: int, low: Floats, high: Floats) -> dict[str, str]:
        """A tag for each role whose worst slots changed since its last tag."""
        changed: dict[str, str] = {}
        for role in ROLES:
            worst = dict(self._worst_of(role, _columns_of(role, self._names), low, high))
            who = ", ".join(worst[key][0] for key in sorted(worst))
            if worst and self._worst.get(role) != who:
                self._worst[role] = who
                texts: list[str] = []
                for figure, (name, value) in worst.items():
                    text = f"{figure} {value:.3g}: {name}"
                    texts.append(text)
                changed[f"fp8.worst.{role}"] = f"{'; '.join(texts)} (step {step})"
        return changed

    def _worst_of(
        self, role: str, columns: Sequence[int], low: Floats, high: Floats
    ) -> Iterator[tuple[str, tuple[str, float]]]:
        """(figure, (layer, value)) of the worst layer by each figure that was measured."""
        for figure, least_is_worst in _WORST:
            extremes = low if least_is_worst else high
            values: Floats = extremes[FIGURES.index(figure), columns]
            if np.isnan(values).all():
                continue
            worst = np.nanargmin(values) if least_is_worst else np.nanargmax(values)
            at = int(worst)
            layer = self._names[columns[at]].removesuffix(f".{role}")
            yield figure, (layer, float(values[at]))


def _not_picked(names: Sequence[str], why: str, bound: str) -> Event:
    count = f"{len(names)} FP8 slots get no series of their own"
    text = f"{count} ({bound}; {why}): {some(names, _NAMED)}"
    return {"code": "fp8.not_picked", "slots": list(names), "why": why, "text": text}
