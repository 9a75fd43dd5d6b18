"""A finished or running run as its journal tells it, arranged for the report, the summary and `harness inspect`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.facts import ROLES
from harness.core.untrusted import MAX_LARGE, read_json
from harness.tracking.folder import require_run
from harness.tracking.position import JOURNAL
from harness.tracking.rows import read_rows

SWITCHED = "precision.switched"
SLOT_STATES = ("native", "transformer_engine")
"""Backends that keep an amax history and so can prove that FP8 ran."""
_OF_A_LAYER = ("module", "precision", "backend")
Series = dict[int, float]
Demotions = list[tuple[str, int, int | None]]


@dataclass(frozen=True)
class Record:
    """Everything but what the journal's rows look like.

    series: metric name -> {step: value} of the branch that counts. abandoned: the same for steps that a rollback threw
    away. events: event rows in order. switches: those that moved layers in the branch that counts. run: tags, params
    and data of the "run" rows. plan, outcome: the JSON files, empty if there are none.
    """

    run_dir: Path
    series: Mapping[str, Series]
    abandoned: Mapping[str, Series]
    events: Sequence[Mapping[str, Any]]
    switches: Sequence[Mapping[str, Any]]
    run: Mapping[str, Mapping[str, Any]]
    plan: Mapping[str, Any]
    outcome: Mapping[str, Any]

    @classmethod
    def read(cls, run_dir: Path) -> Record:
        """Read a run folder. Raises ConfigError if it is none."""
        run_dir = require_run(run_dir)
        rows: list[tuple[int, int, dict[str, float]]] = []
        events: list[Mapping[str, Any]] = []
        run: dict[str, dict[str, Any]] = {"tags": {}, "params": {}, "data": {}}
        end: dict[str, Any] = {}
        for row in read_rows(run_dir / JOURNAL):
            if row["kind"] == "metrics":
                rows.append((row["attempt"], row["step"], row["metrics"]))
            elif row["kind"] == "event":
                events.append(row)
            elif row["kind"] == "run":
                end = {}
                for part in run:
                    run[part] |= row.get(part, {})
            elif row["kind"] == "end":
                end = {"status": row["status"]}
        begins = _begins(rows)
        series: dict[str, Series] = {}
        abandoned: dict[str, Series] = {}
        for attempt, step, metrics in rows:
            target = abandoned if _lost(begins, attempt, step) else series
            for name, value in metrics.items():
                target.setdefault(name, {})[step] = value
        switches = [
            event
            for event in events
            if event["code"] == SWITCHED and not _lost(begins, event["attempt"], event["step"])
        ]
        outcome = end | _read_json(run_dir / "outcome.json")
        return cls(run_dir, series, abandoned, events, switches, run, _read_plan(run_dir / "plan.json"), outcome)

    def last(self, name: str) -> float | None:
        """The value of the highest step of a metric, None if it was never logged."""
        values = self.series.get(name)
        return values[max(values)] if values else None

    def slots(self, metric: str = "fp8_amax") -> list[str]:
        """Slots with `<metric>/<slot>` series, layer by layer in the plan's order, roles in the order of a step."""
        prefix = f"{metric}/"
        names = [name.removeprefix(prefix) for name in self.series if name.startswith(prefix)]
        order = {bare(layer["module"]): place for place, layer in enumerate(self.plan.get("layers", ()))}
        return sorted(names, key=lambda name: _slot_key(name, order))

    def expected_slots(self) -> set[str]:
        """Bare names of the slots that the plan's FP8 layers must have, where their backend keeps amax state."""
        return {
            f"{bare(layer['module'])}.{role}"
            for layer in self.plan.get("layers", ())
            if layer["precision"] == "fp8" and layer["backend"] in SLOT_STATES
            for role in ROLES
        }

    def demotions(self) -> Demotions:
        """(bare layer name, first step in BF16, first step back in FP8 or None), in order."""
        spans: Demotions = []
        for event in self.switches:
            for layer in map(bare, event["promote"]):
                for place, span in enumerate(spans):
                    if span[0] == layer and span[2] is None:
                        spans[place] = (layer, span[1], event["step"])
            spans += [(layer, event["step"], None) for layer in map(bare, event["demote"])]
        return spans

    def matrix(self, metric: str, slots: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """(steps [n], values [slots, n]) of `<metric>/<slot>`; NaN where a slot has no value at a step."""
        series = [self.series.get(f"{metric}/{slot}", {}) for slot in slots]
        steps = sorted(set().union(*series))
        places = {step: place for place, step in enumerate(steps)}
        values = np.full((len(slots), len(steps)), np.nan)
        for row, points in enumerate(series):
            values[row, [places[step] for step in points]] = list(points.values())
        return np.array(steps, dtype=np.int64), values


def bare(name: str) -> str:
    """A module or slot name without zero-padding: `blocks.03.up` and `blocks.3.up` are the same layer."""
    return re.sub(r"(?<![^.])0+(?=\d)", "", name)


def split_slot(slot: str) -> tuple[str, str]:
    """(layer, role) of a slot."""
    layer, _, role = slot.rpartition(".")
    return layer, role


def _slot_key(slot: str, order: Mapping[str, int]) -> tuple[Any, ...]:
    layer, role = split_slot(slot)
    natural = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in layer.split(".")]
    return order.get(bare(layer), len(order)), natural, ROLES.index(role) if role in ROLES else len(ROLES), role


def _begins(rows: Sequence[tuple[int, int, dict[str, float]]]) -> dict[int, int]:
    """The first step of each attempt."""
    begins: dict[int, int] = {}
    for attempt, step, _ in rows:
        begins[attempt] = min(step, begins.get(attempt, step))
    return begins


def _lost(begins: Mapping[int, int], attempt: int, step: int) -> bool:
    """Whether a rollback threw this step away: a later attempt begins at or before it."""
    return any(later > attempt and begin <= step for later, begin in begins.items())


def _read_plan(path: Path) -> dict[str, Any]:
    """plan.json with the layers that are described as they should be; empty if it is no plan."""
    plan = _read_json(path)
    layers = plan.get("layers")
    if not isinstance(layers, list) or not all(isinstance(plan.get(key), str) for key in ("requested", "resolved")):
        return {}
    return plan | {
        "layers": [
            layer
            for layer in layers
            if isinstance(layer, dict) and all(isinstance(layer.get(key), str) for key in _OF_A_LAYER)
        ]
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, MAX_LARGE)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
