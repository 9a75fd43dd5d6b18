"""plan.json as people read it: the run's start, its report, and `print(precision.plan)`. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEADINGS = ("layers", "precision", "backend", "shape", "why")


@dataclass(frozen=True)
class Fold:
    """Layers that differ only in their block number. name: `blocks.00-03.mlp.down`."""

    name: str
    count: int
    kind: str
    precision: str
    backend: str
    reason: str
    shape: tuple[int, ...]


def fold(layers: Iterable[Mapping[str, Any]]) -> list[Fold]:
    """Rows of plan.json's `layers`, those alike but for the first number in their name put together, in plan order."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for layer in layers:
        before, number, after = _split(layer["module"])
        alike = (
            layer["kind"],
            layer["precision"],
            layer["backend"],
            layer["reason"],
            tuple(layer["shape"]),
        )
        groups.setdefault((before, after, *alike), []).append(number)
    return [
        Fold(f"{before}{_ranges(numbers)}{after}", len(numbers), *alike)
        for (before, after, *alike), numbers in groups.items()
    ]


def rung_lines(plan: Mapping[str, Any]) -> list[str]:
    """Requested, resolved and effective precision, why each better rung was not taken, and the plan's notes."""
    lines = [
        f"recipe {plan['recipe']} on {plan['tier']}: requested {plan['requested']}, resolved {plan['resolved']}"
    ]
    if plan.get("effective"):
        lines[0] += f", effective {plan['effective']}"
    for rung in plan["rungs"]:
        lines.append(
            f"  {rung['rung']}: {'taken' if rung['taken'] else 'not taken'}: {rung['reason']}"
        )
        if rung["taken"]:
            break
    return lines + [f"  note: {note}" for note in plan.get("notes", ())]


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table's rows under HEADINGS, equal layers of several blocks in one."""
    rows: list[tuple[str, ...]] = []
    for row in fold(plan["layers"]):
        shape = str(list(row.shape)) if row.shape else ""
        rows.append((row.name, row.precision, row.backend, shape, row.reason))
    return rows


def plan_text(plan: Mapping[str, Any]) -> str:
    """What the run's start shows of a plan, as plain text: the ladder, the notes, and a line for each row."""
    rows = [HEADINGS, *plan_rows(plan)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*rung_lines(plan), "", *lines])


def _split(module: str) -> tuple[str, str, str]:
    match = re.search(r"(?:^|(?<=\.))\d+(?=\.|$)", module)
    return (
        (module[: match.start()], match.group(), module[match.end() :])
        if match
        else (module, "", "")
    )


def _ranges(numbers: Sequence[str]) -> str:
    """`["00", "01", "03"]` as `00-01,03`."""
    if numbers == [""]:
        return ""
    spans: list[list[str]] = []
    for number in sorted(numbers, key=int):
        if spans and int(number) == int(spans[-1][-1]) + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(span) for span in spans)
