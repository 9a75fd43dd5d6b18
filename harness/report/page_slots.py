"""The FP8 slots of a page: every slot's figures, the order of trouble, and its amax, scale and saturation by step.

All comes from one pass over the file of all slots and steps (`tracking.slot_file`). Where that file is lost, the
journal's series stand in: it has some slots, in some steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import clipped, shown
from harness.core.facts import SLOT_ROWS
from harness.report.charts import SETTLED
from harness.report.decimate import Bounds, Groups, Ints, Packed, as_text, pack
from harness.report.trouble import SlotFigures, Trouble, order
from harness.tracking.history import MAX_TEXT, RunHistory, bare, split_slot
from harness.tracking.slot_file import FIGURES

MOST_SLOTS = 20_000
"""Most slots that are listed."""
FEWEST_GROUPS, MOST_GROUPS = 30, 1000
"""Of a series: its points at least, and at most, where the room divided by the slots gives other numbers."""
# Bytes of a slot in one group: amax and scale have a smallest and a largest value, saturation a largest; 16 bits each.
_BYTES_OF_A_GROUP = 10
_AMAX, _SCALE, _SATURATION = (FIGURES.index(name) for name in ("amax", "scale", "saturation"))
# Figures that are worst where they are smallest.
_LEAST_IS_WORST = ("sqnr_db", "even_db", "centred_db")
_WORST = ("saturation", "clipped", "underflow", *_LEAST_IS_WORST)

Block = tuple[Ints, Sequence[str], npt.NDArray[np.floating]]
"""Places of neighbouring steps, their slots, and figures [steps, figures, slots]."""


class _Gathered:
    """Everything of one pass.

    steps: int64 [n] of all steps. groups: how they are joined.
    amax, scale, saturation: bounds of each slot and group.
    worst: figure -> float64 [slots], of the steps that are judged; newest: of the last step that has it.
    nonfinite: int64 [slots], steps that are judged with an amax that is not finite.
    """

    def __init__(self, slots: Sequence[str], steps: Ints, groups: Groups, judged: Any) -> None:
        self.steps = steps
        self.groups = groups
        self._judged = judged
        self._rows = {name: row for row, name in enumerate(slots)}
        self._names: Sequence[str] | None = None
        self._at = np.zeros(0, np.int64)
        self._targets = np.zeros(0, np.int64)
        count = len(slots)
        self.amax, self.scale, self.saturation = (Bounds(count, len(groups)) for _ in range(3))
        self.worst = {name: np.full(count, np.nan) for name in _WORST}
        self.newest = {name: np.full(count, np.nan) for name in FIGURES}
        self.nonfinite = np.zeros(count, np.int64)

    def add(self, block: Block) -> None:
        """Take neighbouring steps of one group."""
        places, names, values = block
        if names is not self._names:
            self._names = names
            wanted = [at for at, name in enumerate(names) if name in self._rows]
            self._at = np.array(wanted, np.int64)
            targets = [self._rows[names[at]] for at in wanted]
            self._targets = np.array(targets, np.int64)
        rows = self._targets
        if not len(rows):
            return
        values = values[:, :, self._at]
        group = self.groups.of_place(int(places[0]))
        self.amax.add(group, rows, values[:, _AMAX])
        self.scale.add(group, rows, values[:, _SCALE])
        self.saturation.add(group, rows, values[:, _SATURATION])

        # The newest value of each figure: of the last step of the block that has it.
        for number, name in enumerate(FIGURES):
            for step in range(len(values) - 1, -1, -1):
                there = ~np.isnan(values[step, number])
                if there.any():
                    newest = self.newest[name]
                    newest[rows[there]] = values[step, number][there]
                    break

        # The first steps and skipped ones say nothing of a slot: scales are not set, or all gradients are bad.
        judged = values[self._judged[places]]
        if not len(judged):
            return
        self.nonfinite[rows] += (~np.isfinite(judged[:, _AMAX])).sum(axis=0)
        for name in _WORST:
            worst = self.worst[name]
            join = np.fmin if name in _LEAST_IS_WORST else np.fmax
            of_block = join.reduce(judged[:, FIGURES.index(name)], axis=0)
            # An infinite ratio comes from an infinite amax, which is counted already.
            worst[rows] = join(worst[rows], np.where(np.isinf(of_block), np.nan, of_block))


def content(history: RunHistory, room: int) -> dict[str, Any] | None:
    """The slots as the page's script reads them; None if the run has none.

    room: bytes that all series may take, before they become text.
    """
    slots = history.slots()
    listed = slots[:MOST_SLOTS]
    if not listed:
        return None
    # As many groups as there is room for, within limits.
    bytes_of_a_group = _BYTES_OF_A_GROUP * len(listed)
    most = min(MOST_GROUPS, max(FEWEST_GROUPS, room // bytes_of_a_group))
    gathered = _gather(history, listed, most)

    demoted = {layer for layer, *_ in history.demotions()}
    figures: list[SlotFigures] = []
    for row, name in enumerate(listed):
        worst = {figure: float(values[row]) for figure, values in gathered.worst.items()}
        layer, _ = split_slot(name)
        is_demoted = bare(layer) in demoted
        figures.append(SlotFigures(name, int(gathered.nonfinite[row]), is_demoted, **worst))
    # A run folder does not keep its recipe, so the limits are a recipe's defaults.
    ordered = order(figures)

    # Where there is no room for the series of all, those with the most trouble have theirs.
    rows = {name: row for row, name in enumerate(listed)}
    with_series = max(1, room // (_BYTES_OF_A_GROUP * most))
    chosen = [rows[each.slot.name] for each in ordered[:with_series]]
    return {
        "steps": gathered.steps[:: gathered.groups.each].tolist(),
        "last": int(gathered.steps[-1]),
        "joined": gathered.groups.each,
        "left_out": len(slots) - len(listed),
        "judged_from": SETTLED,
        # Every step has a value, or only steps with rows in the journal.
        "every_step": history.slot_steps is not None,
        "slots": [_row(each, rows[each.slot.name], gathered) for each in ordered],
        "series": _series(gathered, chosen),
    }


def _gather(history: RunHistory, slots: Sequence[str], most: int) -> _Gathered:
    # The slots' file has every step. If it is lost, the journal has some.
    found = history.slot_steps
    if found is None:
        steps, *_ = history.matrix("fp8_amax", slots)
    else:
        steps = found.steps
    applied = history.points("train/step_applied")
    skipped = applied.steps[applied.figures == 0]
    judged = (steps >= SETTLED) & ~np.isin(steps, skipped)
    groups = Groups.of(len(steps), most)
    gathered = _Gathered(slots, steps, groups, judged)
    if history.slot_steps is None:
        blocks = _blocks_of_journal(history, slots, groups)
    else:
        blocks = history.slot_steps.neighbours(groups.each)
    for block in blocks:
        gathered.add(block)
    return gathered


def _blocks_of_journal(
    history: RunHistory, slots: Sequence[str], groups: Groups
) -> Iterator[Block]:
    """The same from the journal's series."""
    matrices = [history.matrix(metric.key, slots) for metric in SLOT_ROWS.values()]
    steps = matrices[0][0]
    values = np.full((len(steps), len(FIGURES), len(slots)), np.nan)
    for number, (of_figure, matrix) in enumerate(matrices):
        # A figure may be in fewer rows than amax; rows without an amax are left out.
        there = np.isin(of_figure, steps)
        rows = np.searchsorted(steps, of_figure[there])
        values[rows, number] = matrix[:, there].T
    # Which slots have a row differs: one that got into trouble late has none before. What has no row is no NaN.
    there = np.zeros((len(steps), len(slots)), np.bool_)
    amax = SLOT_ROWS["amax"].key
    for number, slot in enumerate(slots):
        of_slot = history.points(f"{amax}/{slot}")
        there[:, number] = np.isin(steps, of_slot.steps)

    # The steps of a block are of one group, and have the same slots.
    begins: list[int] = []
    for place in range(len(steps)):
        begins_group = place % groups.each == 0
        if begins_group or (there[place] != there[place - 1]).any():
            begins.append(place)
    for first, last in zip(begins, [*begins[1:], len(steps)], strict=True):
        wanted = np.flatnonzero(there[first])
        names = [slots[number] for number in wanted.tolist()]
        yield np.arange(first, last), names, values[first:last][:, :, wanted]


def _row(trouble: Trouble, row: int, gathered: _Gathered) -> dict[str, Any]:
    """One slot of the table."""
    slot = trouble.slot
    newest = {name: _number(values[row]) for name, values in gathered.newest.items()}
    worst = {name: _number(getattr(slot, name)) for name in _WORST}
    return {
        "name": shown(clipped(slot.name, MAX_TEXT)),
        # Its place in the model, in which the layers are sorted.
        "model": row,
        "why": trouble.why,
        "demoted": slot.demoted,
        "nonfinite": slot.nonfinite,
        "newest": newest,
        "worst": worst,
    }


def _number(value: float) -> float | str | None:
    """A figure for JSON, with 6 digits: NaN, not measured, is null; infinities are texts."""
    if np.isnan(value):
        return None
    if np.isinf(value):
        return str(value)
    return float(f"{value:.6g}")


def _series(gathered: _Gathered, rows: Sequence[int]) -> dict[str, Any]:
    """The series of the slots `rows`, in that order."""
    amax, scale, saturation = gathered.amax, gathered.scale, gathered.saturation
    marks = (amax.marks | scale.marks | saturation.marks)[rows]
    return {
        "amax_low": _as_json(pack(amax.low[rows])),
        "amax_high": _as_json(pack(amax.high[rows])),
        "scale_low": _as_json(pack(scale.low[rows])),
        "scale_high": _as_json(pack(scale.high[rows])),
        "saturation_high": _as_json(pack(saturation.high[rows])),
        # Only few slots have any.
        "marks": [as_text(row) if row.any() else "" for row in marks],
    }


def _as_json(packed: Packed) -> dict[str, Any]:
    return {"codes": packed.codes, "low": packed.low, "high": packed.high}
