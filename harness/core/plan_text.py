"""plan.json as text, for the start of a run, its report and `print(precision.plan)`. Torch-free."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.errors import number_of

HEADINGS = ("layers", "precision", "backend", "shape", "why")


@dataclass(frozen=True)
class Fold:
    """One row of the table: layers that differ only in their block number. name: `blocks.00-03.mlp.down`."""

    name: str
    count: int
    kind: str
    precision: str
    backend: str
    reason: str
    shape: tuple[int, ...]


def fold(layers: Iterable[Mapping[str, Any]]) -> list[Fold]:
    """Rows of plan.json's `layers`, in plan order; layers that differ only in their name's first number share one."""
    # Layers alike in all but the block's number are one row, or a deep model's table would fill the screen.
    groups: dict[tuple[Any, ...], list[str]] = {}
    for layer in layers:
        before, number, after = _split(layer["module"])
        shape = tuple(layer["shape"])
        alike = (layer["kind"], layer["precision"], layer["backend"], layer["reason"], shape)
        groups.setdefault((before, after, *alike), []).append(number)

    folds: list[Fold] = []
    for (before, after, *alike), numbers in groups.items():
        name = f"{before}{_ranges(numbers)}{after}"
        folds.append(Fold(name, len(numbers), *alike))
    return folds


def rung_lines(plan: Mapping[str, Any]) -> list[str]:
    """Requested, resolved and effective precision, why each better rung was not taken, and the plan's notes."""
    head = f"recipe {plan['recipe']} on {plan['tier']}: "
    head += f"requested {plan['requested']}, resolved {plan['resolved']}"
    if plan.get("effective"):
        head += f", effective {plan['effective']}"
    lines = [head]
    for rung in plan["rungs"]:
        verdict = "taken" if rung["taken"] else "not taken"
        lines.append(f"  {rung['rung']}: {verdict}: {rung['reason']}")
        # Rungs below the one that was taken were not looked at.
        if rung["taken"]:
            break
    return lines + [f"  note: {note}" for note in plan.get("notes", ())]


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table's rows under HEADINGS; equal layers of several blocks share one."""
    rows: list[tuple[str, ...]] = []
    for row in fold(plan["layers"]):
        shape = str(list(row.shape)) if row.shape else ""
        rows.append((row.name, row.precision, row.backend, shape, row.reason))
    return rows


def plan_text(plan: Mapping[str, Any]) -> str:
    """A plan as plain text, as at a run's start: the ladder, the notes, and a line for each row."""
    lines = [*rung_lines(plan), "", *aligned([HEADINGS, *plan_rows(plan)])]
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of any table as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


def _split(module: str) -> tuple[str, str, str]:
    """What is before the first number in a module's name, that number, and what is after it."""
    match = re.search(r"(?:^|(?<=\.))\d+(?=\.|$)", module)
    if match is None:
        return module, "", ""
    return module[: match.start()], match.group(), module[match.end() :]


def _ranges(numbers: Sequence[str]) -> str:
    """`["00", "01", "03"]` as `00-01,03`."""
    if numbers == [""]:
        return ""
    # Each span has its first number and, if there are more, its last.
    spans: list[list[str]] = []
    for number in sorted(numbers, key=int):
        follows = bool(spans) and int(number) == int(spans[-1][-1]) + 1
        if follows:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(span) for span in spans)


def effective_text(precisions: Iterable[str]) -> str:
    """How many modules ran in each precision: `bf16: 1 module, fp8: 16 modules`. precisions: of every module."""
    parts: list[str] = []
    for precision, count in sorted(Counter(precisions).items()):
        parts.append(f"{precision}: {number_of(count, 'module')}")
    return ", ".join(parts)
