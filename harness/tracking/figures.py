"""A run's figures in columns: 8 bytes a figure, where a dict for each row would take ten times that. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

First = Callable[[int], float]
"""Of an attempt: the first step that a later one did again."""


class MetricsRow(NamedTuple):
    """One metrics row. total: train.steps as the process had it that wrote the row; ranks, engine: what it was one of.

    A resume may change them. None, or empty: it did not say.
    """

    attempt: int
    step: int
    values: Mapping[str, float]
    total: int | None
    ranks: int | None = None
    engine: str = ""


class Points(Mapping[int, float]):
    """{step: value} of one metric, by step. steps: ascending, each once. figures: their values."""

    def __init__(self, steps: npt.NDArray[np.int64], figures: npt.NDArray[np.float64]) -> None:
        """In the order of the rows: the last of a step counts."""
        order = np.argsort(steps, kind="stable")
        steps, figures = steps[order], figures[order]
        last = np.append(steps[1:] != steps[:-1], True) if len(steps) else np.zeros(0, bool)
        self.steps, self.figures = steps[last], figures[last]

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
    """Rows with the same figures in the same order. number: of each row, among all. told: what else a row says, by its
    place in `Figures._told`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.number, self.steps, self.attempts, self.told = (
            array("q"),
            array("q"),
            array("q"),
            array("q"),
        )
        self.columns = {name: array("d") for name in names}

    def replaced(self, first: First) -> npt.NDArray[np.bool_]:
        """Of each row: whether a later attempt did its step again."""
        attempts, place = np.unique(np.array(self.attempts), return_inverse=True)
        limits = np.array([first(attempt) for attempt in attempts.tolist()])
        return np.array(self.steps) >= limits[place]


class Figures:
    """The metrics rows of a journal, in its order; add them as they are read."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._with: dict[str, list[_Group]] = {}
        self._told: dict[tuple[int | None, int | None, str], int] = {}
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
        group.told.append(
            self._told.setdefault((row.total, row.ranks, row.engine), len(self._told))
        )
        for column, value in zip(group.columns.values(), row.values.values(), strict=True):
            column.append(value)
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[MetricsRow]:
        """In the order of the journal; one row at a time is made again."""
        told, groups = list(self._told), list(self._groups.values())
        owner, place = np.empty(self._count, np.int64), np.empty(self._count, np.int64)
        for index, group in enumerate(groups):
            numbers = np.array(group.number)
            owner[numbers], place[numbers] = index, np.arange(len(numbers))
        for index, at in zip(owner, place, strict=True):
            yield _row(groups[index], int(at), told)

    def of_step(self, step: int) -> list[MetricsRow]:
        """The rows of `step`, in the order of the journal."""
        told = list(self._told)
        found = [
            (group.number[at], _row(group, int(at), told))
            for group in self._groups.values()
            for at in np.flatnonzero(np.array(group.steps) == step)
        ]
        return [row for _, row in sorted(found, key=lambda each: each[0])]

    def begins(self) -> dict[int, int]:
        """The first step of each attempt."""
        found: dict[int, int] = {}
        for group in self._groups.values():
            attempts, place = np.unique(np.array(group.attempts), return_inverse=True)
            firsts = np.full(len(attempts), np.iinfo(np.int64).max)
            np.minimum.at(firsts, place, np.array(group.steps))
            for attempt, first in zip(attempts.tolist(), firsts.tolist(), strict=True):
                found[attempt] = min(first, found.get(attempt, first))
        return found

    def names(self) -> list[str]:
        """Of all figures, in the order in which they came."""
        return list(self._with)

    def points(self, name: str, first: First, replaced: bool) -> Points:
        """Of the steps that count, or with `replaced` of those that a later attempt did again."""
        parts: list[
            tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]
        ] = []
        for group in self._with.get(name, ()):
            wanted = group.replaced(first) == replaced
            columns = (group.number, group.steps, group.columns[name])
            numbers, steps, values = (np.array(column)[wanted] for column in columns)
            parts.append((numbers, steps, values))
        if not parts:
            return Points(np.zeros(0, np.int64), np.zeros(0))
        numbers, steps, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.argsort(numbers)
        return Points(steps[order], values[order])


class SeriesOf(Mapping[str, Points]):
    """Metric name -> its points, made when they are asked for."""

    def __init__(self, figures: Figures, first: First, replaced: bool) -> None:
        self._figures, self._first, self._replaced = figures, first, replaced

    def __getitem__(self, name: str) -> Points:
        if not (found := self._figures.points(name, self._first, self._replaced)):
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._figures.names() if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _row(group: _Group, at: int, told: list[tuple[int | None, int | None, str]]) -> MetricsRow:
    values = {name: column[at] for name, column in group.columns.items()}
    return MetricsRow(group.attempts[at], group.steps[at], values, *told[group.told[at]])
