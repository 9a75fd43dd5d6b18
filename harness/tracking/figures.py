"""A run's figures in columns, at 8 bytes a figure; a dict for each row would take ten times that. Torch-free."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.tracking.existing import LOSS

First = Callable[[int], float]
"""Gives, for an attempt, the first step that a later attempt did again; infinity if none did."""


Process = tuple[int | None, int | None, str, int]
"""total, ranks, engine and described, as in a MetricsRow."""


class MetricsRow(NamedTuple):
    """One metrics row, and what its process was; a resume may change that.

    values: figure by name.
    total: train.steps of the process; None if it did not say.
    ranks: number of ranks; None if it did not say.
    engine: empty if it did not say.
    described: how many of the journal's "run" rows, which describe the run, came before this row.
    """

    attempt: int
    step: int
    values: Mapping[str, float]
    total: int | None
    ranks: int | None = None
    engine: str = ""
    described: int = 0


class Points(Mapping[int, float]):
    """{step: value} of one metric.

    steps: ascending, each once.
    figures: their values.
    """

    def __init__(self, steps: npt.NDArray[np.int64], figures: npt.NDArray[np.float64]) -> None:
        """steps, figures: in the order of the rows. Of several rows of a step, the last counts."""
        # A stable sort: rows of one step stay in their order.
        order = np.argsort(steps, kind="stable")
        steps, figures = steps[order], figures[order]
        is_last = np.ones(len(steps), bool)
        is_last[:-1] = steps[1:] != steps[:-1]
        self.steps = steps[is_last]
        self.figures = figures[is_last]

    def __getitem__(self, step: int) -> float:
        place = int(np.searchsorted(self.steps, step))
        if place == len(self.steps) or self.steps[place] != step:
            raise KeyError(step)
        return float(self.figures[place])

    def __iter__(self) -> Iterator[int]:
        return map(int, self.steps)

    def __len__(self) -> int:
        return len(self.steps)


class _Group:
    """Rows with the same figures in the same order; one entry a row in each array.

    number: the row's place among all rows of the journal.
    processes: the row's process, by its place in `Figures._processes`.
    columns: values of each figure.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.number = array("q")
        self.steps = array("q")
        self.attempts = array("q")
        self.processes = array("q")
        self.columns = {name: array("d") for name in names}

    def replaced(self, first: First) -> npt.NDArray[np.bool_]:
        """For each row, whether a later attempt did its step again."""
        attempts, place = np.unique(np.array(self.attempts), return_inverse=True)
        limits = np.array([first(attempt) for attempt in attempts.tolist()])
        return np.array(self.steps) >= limits[place]


class Figures:
    """The metrics rows of a journal, in its order; add them as they are read."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._with: dict[str, list[_Group]] = {}
        # Each process -> its place: rows share a handful of them.
        self._processes: dict[Process, int] = {}
        self._count = 0

    def add(self, row: MetricsRow) -> None:
        """The next row."""
        names = tuple(row.values)
        group = self._groups.get(names)
        if group is None:
            group = self._groups[names] = _Group(names)
            for name in names:
                self._with.setdefault(name, []).append(group)
        group.number.append(self._count)
        group.steps.append(row.step)
        group.attempts.append(row.attempt)
        process = (row.total, row.ranks, row.engine, row.described)
        number = self._processes.setdefault(process, len(self._processes))
        group.processes.append(number)
        for column, value in zip(group.columns.values(), row.values.values(), strict=True):
            column.append(value)
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[MetricsRow]:
        """Rows in the order of the journal; each is made anew when it is asked for."""
        processes = list(self._processes)
        groups = list(self._groups.values())

        # For each row of the journal, the group that has it, and its place there.
        owner = np.empty(self._count, np.int64)
        place = np.empty(self._count, np.int64)
        for index, group in enumerate(groups):
            numbers = np.array(group.number)
            owner[numbers] = index
            place[numbers] = np.arange(len(numbers))
        for index, at in zip(owner, place, strict=True):
            yield _row(groups[index], int(at), processes)

    def of_step(self, step: int) -> list[MetricsRow]:
        """The rows of `step`, in the order of the journal."""
        processes = list(self._processes)
        by_number: dict[int, MetricsRow] = {}
        for group in self._groups.values():
            is_of_step = np.array(group.steps) == step
            for at in np.flatnonzero(is_of_step).tolist():
                by_number[group.number[at]] = _row(group, at, processes)
        return [by_number[number] for number in sorted(by_number)]

    def begins(self) -> dict[int, int]:
        """The first step of each attempt.

        Rows with a loss decide, if the attempt has any: the step that a rollback returned to may have other figures
        afterwards, such as a validation, and was not done again.
        """
        with_loss = self._first_steps(self._with.get(LOSS, ()))
        return self._first_steps(self._groups.values()) | with_loss

    def _first_steps(self, groups: Iterable[_Group]) -> dict[int, int]:
        """The first step of each attempt in these rows."""
        found: dict[int, int] = {}
        for group in groups:
            # The least step of the rows of each attempt.
            attempts, place = np.unique(np.array(group.attempts), return_inverse=True)
            firsts = np.full(len(attempts), np.iinfo(np.int64).max)
            np.minimum.at(firsts, place, np.array(group.steps))
            for attempt, first in zip(attempts.tolist(), firsts.tolist(), strict=True):
                found[attempt] = min(first, found.get(attempt, first))
        return found

    def names(self) -> list[str]:
        """Names of all figures, in the order of appearance."""
        return list(self._with)

    def points(self, name: str, first: First, replaced: bool) -> Points:
        """One figure at the steps that count, or with `replaced` at those that a later attempt did again."""
        steps, values, was_replaced = self._in_order(name, first)
        wanted = was_replaced == replaced
        return Points(steps[wanted], values[wanted])

    def measured(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """(steps, figures) of all rows that have one figure, in the order of the journal; a step may come again."""
        steps, values, _ = self._in_order(name, lambda _: math.inf)
        return steps, values

    def count_replaced(self, name: str, first: First) -> int:
        """In how many rows one figure is of a step that a later attempt did again."""
        _, _, replaced = self._in_order(name, first)
        return int(replaced.sum())

    def executed(self, name: str) -> Points:
        """One figure of each step as it was when the step was executed for the first time."""
        steps, values = self.measured(name)
        # Points keeps the last row of a step.
        return Points(steps[::-1], values[::-1])

    def _in_order(
        self, name: str, first: First
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """(steps, values, whether a later attempt did the step again) of a figure, in the order of the journal."""
        # Each list begins with an empty array: there may be no group, and nothing cannot be concatenated.
        numbers = [np.zeros(0, np.int64)]
        steps = [np.zeros(0, np.int64)]
        values = [np.zeros(0)]
        replaced = [np.zeros(0, np.bool_)]
        for group in self._with.get(name, ()):
            numbers.append(np.array(group.number))
            steps.append(np.array(group.steps))
            values.append(np.array(group.columns[name]))
            replaced.append(group.replaced(first))

        # Groups are apart in memory.
        order = np.argsort(np.concatenate(numbers))
        return (
            np.concatenate(steps)[order],
            np.concatenate(values)[order],
            np.concatenate(replaced)[order],
        )


class SeriesOf(Mapping[str, Points]):
    """Metric name -> its points, made when they are asked for."""

    def __init__(self, figures: Figures, first: First, replaced: bool) -> None:
        self._figures = figures
        self._first = first
        self._replaced = replaced

    def __getitem__(self, name: str) -> Points:
        found = self._figures.points(name, self._first, self._replaced)
        if not found:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._figures.names() if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _row(group: _Group, at: int, processes: list[Process]) -> MetricsRow:
    values = {name: column[at] for name, column in group.columns.items()}
    return MetricsRow(group.attempts[at], group.steps[at], values, *processes[group.processes[at]])
