"""What happened in a run, from its journal and its folder: the one reader behind every report and replay. Torch-free.

A rollback makes steps run again under the next attempt. Both attempts' rows stand in the journal; those that a later
attempt replaced are told apart here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.core.errors import clipped, shown
from harness.core.facts import ROLES, SLOT_ROWS
from harness.core.files import MAX_LARGE, read_mapping
from harness.tracking.figures import Figures, MetricsRow, Points, SeriesOf
from harness.tracking.journal import JOURNAL, read_rows, require_run
from harness.tracking.slot_file import SlotSteps, rewritten
from harness.tracking.standing import LOSS, first_step

SWITCHED = "precision.switched"
BYTES = "nats per byte"
"""The unit of losses that are shown in bits per byte, too."""
TOKENS = "nats per token"
OWN_LOOP = "own"
"""Value of the tag `loop` where somebody else's loop trained, whose loss may be anything."""
_OF_A_LAYER, _OF_A_RUNG = ("module", "precision", "backend"), ("rung", "reason")
_DIGITS = 6
_BEGINS = ("run.resumed", "run.started_from", "guard.rollback")
"""Events after which steps are done, perhaps again, under the recipe of the process that wrote them."""
MAX_TEXT = 4000
"""Characters of a text in a run folder that are shown."""
MOST_LOST = 1 << 20
_MAX_DEPTH = 16
# Of an event: fields that readers rely on.
_TEXTS, _NUMBERS = ("text", "reason", "path", "lowered"), ("to_step", "window")
_LISTS: Mapping[str, type] = {"demote": str, "promote": str, "passed_over": int}
Series = Mapping[int, float]
Demotions = list[tuple[str, int, int | None]]


class Returned(NamedTuple):
    """One rollback: decided in `attempt`, back to `to_step`, passing over the windows in `passed_over`."""

    attempt: int
    to_step: int
    passed_over: tuple[int, ...]


class Stretch(NamedTuple):
    """Steps that were done under one recipe: those after `after`. recipe: as the config names it. sha256: of its
    contents; empty where the journal does not say."""

    after: int
    recipe: str
    sha256: str


@dataclass(frozen=True)
class RunHistory:
    """rows, events: of the journal, in order. run: tags, params and data of its "run" rows. plan, outcome: the JSON
    files, empty if there are none. begun: where each start, and each way back, began to do steps, in order.

    Somebody else may have written all of it: text is fit to be shown (`errors.shown`) and of bounded length, and fields
    that readers rely on are of their types, or not there.
    """

    run_dir: Path
    rows: Figures
    events: Sequence[Mapping[str, Any]]
    run: Mapping[str, Mapping[str, Any]]
    plan: Mapping[str, Any]
    outcome: Mapping[str, Any]
    begun: Sequence[Stretch] = ()

    @classmethod
    def read(cls, run_dir: Path) -> RunHistory:
        """Read a run folder. Raises ConfigError if it is none."""
        run_dir = require_run(run_dir)
        rows = Figures()
        events: list[Mapping[str, Any]] = []
        run: dict[str, dict[str, Any]] = {"tags": {}, "params": {}, "data": {}}
        end: dict[str, Any] = {}
        begun: list[Stretch] = []
        started = False
        for row in read_rows(run_dir / JOURNAL):
            if row["kind"] == "metrics":
                if (
                    started
                ):  # a start that says nothing of where it goes on begins with its first figures
                    begun.append(_stretch(max(row["step"] - 1, 0), run))
                    started = False
                ranks, engine = (
                    str(run["tags"].get("ranks"))[:_DIGITS],
                    str(run["tags"].get("engine", "")),
                )
                total = run["params"].get("train.steps")
                total = total if type(total) is int else None
                told = (total, int(ranks) if ranks.isdecimal() else None, engine)
                rows.add(MetricsRow(row["attempt"], row["step"], row["metrics"], *told))
            elif row["kind"] == "event":
                events.append(event := _event(row))
                if event["code"] in _BEGINS and "step" in event:
                    begun.append(_stretch(event.get("to_step", event["step"]), run))
                    started = False
            elif row["kind"] == "run":
                end, started = {}, True
                for part in run:
                    run[part] |= _fit(row.get(part, {}))
            elif row["kind"] == "end":
                end = {"status": row["status"]}
        run["tags"] = {name: str(value) for name, value in run["tags"].items()}
        outcome = _fit(end | read_mapping(run_dir / "outcome.json"))
        return cls(run_dir, rows, events, run, _read_plan(run_dir / "plan.json"), outcome, begun)

    @cached_property
    def lost(self) -> list[int]:
        """Steps of the run that have no figures; none in a loop that is not ours, which tells of what it likes."""
        known = self.series.get(LOSS)
        if not known or self.of_own_loop:
            return []
        there = known.steps
        if (thrown := self.abandoned.get(LOSS)) is not None:
            there = np.union1d(there, thrown.steps)
        first, last = first_step(self.run_dir) or int(known.steps[0]), int(known.steps[-1])
        if last - len(there) > MOST_LOST:  # nobody counts those of a step that somebody made up
            return []
        return np.setdiff1d(np.arange(first, last + 1), there, assume_unique=True).tolist()

    @property
    def of_own_loop(self) -> bool:
        """Whether somebody else's loop trained: its loss may be anything, and no command of ours starts it."""
        return self.run["tags"].get("loop") == OWN_LOOP

    @property
    def unit(self) -> str:
        """What the losses are in; "loss" where nobody knows."""
        return str(self.run["data"].get("unit", "loss" if self.of_own_loop else BYTES))

    @property
    def unigram(self) -> float | None:
        """Bits per byte that the frequencies of the corpus's bytes alone give, where the losses compare with it."""
        return self._entropy("unigram_bits_per_byte") if self.unit == BYTES else None

    @property
    def unigram_nats(self) -> float | None:
        """Nats per token that the frequencies of the corpus's tokens alone give, where the losses compare with it."""
        if self.unigram is not None:
            return self.unigram * math.log(2)
        return self._entropy("unigram_nats") if self.unit == TOKENS else None

    def _entropy(self, name: str) -> float | None:
        value = self.run["data"].get(name)
        return float(value) if isinstance(value, int | float) and 0 < value < math.inf else None

    @cached_property
    def _replaced_from(self) -> Callable[[int], float]:
        return rewritten(self.rows.begins())

    def replaced(self, attempt: int, step: int) -> bool:
        """Whether a rollback threw this step away: a later attempt begins at or before it."""
        return step >= self._replaced_from(attempt)

    @cached_property
    def series(self) -> Mapping[str, Points]:
        """Metric name -> {step: value} of the steps that count."""
        return SeriesOf(self.rows, self._replaced_from, replaced=False)

    @cached_property
    def abandoned(self) -> Mapping[str, Points]:
        """The same for steps that a rollback threw away."""
        return SeriesOf(self.rows, self._replaced_from, replaced=True)

    def points(self, name: str) -> Points:
        """A metric at the steps that count; empty if it was never logged."""
        return self.rows.points(name, self._replaced_from, replaced=False)

    def stretches(self, step: int) -> list[Stretch]:
        """The recipes under which the steps up to `step` were done, in order; a resume may have changed them.

        Steps that a rollback or a resume did again count as those of the last time.
        """
        found: list[Stretch] = []
        for each in self.begun:
            found = [earlier for earlier in found if earlier.after < each.after]
            if not found or found[-1][1:] != each[1:]:
                found.append(each)
        return [each for each in found if each.after < step]

    @property
    def switches(self) -> list[Mapping[str, Any]]:
        """Events that moved layers, of the steps that count."""
        moves = (event for event in self.events if event["code"] == SWITCHED)
        return [event for event in moves if not self.replaced(event["attempt"], event["step"])]

    @property
    def rollbacks(self) -> list[Returned]:
        """One for each attempt that ended in a rollback, in order; told twice, the last counts."""
        told = {
            event["attempt"]: Returned(
                event["attempt"], event["to_step"], tuple(event.get("passed_over", ()))
            )
            for event in self.events
            if event["code"] == "guard.rollback" and "to_step" in event
        }
        return [told[attempt] for attempt in sorted(told)]

    def last(self, name: str) -> float | None:
        """The value of the highest step of a metric, None if it was never logged."""
        points = self.series.get(name)
        return None if points is None else float(points.figures[-1])

    @cached_property
    def slot_steps(self) -> SlotSteps | None:
        """Every step's FP8 figures; None where their file is lost or cannot be read: the journal has some of them."""
        return SlotSteps.of(self.run_dir)

    def slots(self, metric: str = "fp8_amax") -> list[str]:
        """Slots with `<metric>/<slot>` figures, layer by layer in the plan's order, roles in the order of a step."""
        prefix = f"{metric}/"
        if self.slot_steps is not None:
            names = list(self.slot_steps.names)
        else:
            names = [name.removeprefix(prefix) for name in self.series if name.startswith(prefix)]
        order = {
            bare(layer["module"]): place for place, layer in enumerate(self.plan.get("layers", ()))
        }
        return sorted(names, key=lambda name: _slot_key(name, order))

    def expected_slots(self) -> set[str]:
        """Bare names of the slots that the plan's FP8 layers must have, where their backend keeps amax state."""
        if not self.plan.get("keeps_amax"):
            return set()
        return {
            f"{bare(layer['module'])}.{role}"
            for layer in self.plan.get("layers", ())
            if layer["precision"] == "fp8"
            for role in ROLES
        }

    def demotions(self) -> Demotions:
        """(bare layer name, first step in BF16, first step back in FP8 or None), in order."""
        spans: Demotions = []
        open_spans: dict[str, list[int]] = {}
        for event in self.switches:
            for layer in map(bare, event["promote"]):
                for place in open_spans.pop(layer, ()):
                    spans[place] = (layer, spans[place][1], event["step"])
            for layer in map(bare, event["demote"]):
                open_spans.setdefault(layer, []).append(len(spans))
                spans.append((layer, event["step"], None))
        return spans

    def silent(self, slots: Iterable[str]) -> list[str]:
        """Those of `slots` (bare names) whose amax never was over 0."""
        if self.slot_steps is None:
            prefix = "fp8_amax/"
            named = {
                bare(name.removeprefix(prefix)): name
                for name in self.series
                if name.startswith(prefix)
            }
            heard = {
                slot
                for slot, name in named.items()
                if any(value > 0 for value in self.series[name].values())
            }
        else:
            heard = {bare(slot) for slot in self.slot_steps.heard()}
        return [slot for slot in slots if slot not in heard]

    def newest(
        self, slots: Sequence[str], count: int
    ) -> tuple[Mapping[str, Series], dict[str, list[float]]]:
        """({`fp8_<figure>/<slot>`: its last measured value at its step}, {slot: its last `count` amaxes})."""
        if self.slot_steps is not None:
            return self.slot_steps.newest(slots, count)
        names = [f"{metric.key}/{slot}" for metric in SLOT_ROWS.values() for slot in slots]
        last: dict[str, Series] = {}
        for name in names:
            measured = {
                step: value
                for step, value in self.series.get(name, {}).items()
                if not math.isnan(value)
            }
            last[name] = {max(measured): measured[max(measured)]} if measured else {}
        amaxes = {slot: self.series.get(f"fp8_amax/{slot}", {}) for slot in slots}
        return last, {
            slot: [values[step] for step in sorted(values)[-count:]]
            for slot, values in amaxes.items()
        }

    def matrix(
        self, metric: str, slots: Sequence[str], columns: int | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """(steps [n], values [slots, n]) of `<metric>/<slot>`; NaN where a slot has no value at a step.

        columns: neighbouring steps are joined by their largest value where there are more.
        """
        if self.slot_steps is not None:
            figure = {each.key: name for name, each in SLOT_ROWS.items()}[metric]
            return self.slot_steps.joined(figure, slots, columns)
        series = [self.series.get(f"{metric}/{slot}", {}) for slot in slots]
        steps = sorted(set().union(*series))
        places = {step: place for place, step in enumerate(steps)}
        values = np.full((len(slots), len(steps)), np.nan)
        for row, points in enumerate(series):
            values[row, [places[step] for step in points]] = list(points.values())
        each = 1 if columns is None else max(1, -(-len(steps) // columns))
        values = np.pad(values, ((0, 0), (0, -len(steps) % each)), constant_values=np.nan)
        joined = np.fmax.reduce(values.reshape(len(slots), -1, each), axis=2) if steps else values
        return np.array(steps[::each], dtype=np.int64), joined


def _stretch(after: int, run: Mapping[str, Mapping[str, Any]]) -> Stretch:
    recipe, sha256 = run["params"].get("recipe", ""), run["tags"].get("recipe.sha256", "")
    return Stretch(after, shown(str(recipe)), shown(str(sha256)))


def bare(name: str) -> str:
    """A module or slot name without zero-padding: `blocks.03.up` and `blocks.3.up` are the same layer."""
    return re.sub(r"(?<![^.])0+(?=\d)", "", name)


def split_slot(slot: str) -> tuple[str, str]:
    """(layer, role) of a slot."""
    layer, _, role = slot.rpartition(".")
    return layer, role


def _slot_key(slot: str, order: Mapping[str, int]) -> tuple[Any, ...]:
    layer, role = split_slot(slot)
    natural = [
        (0, int(part), "") if part.isdecimal() and len(part) < MAX_TEXT else (1, 0, part)
        for part in layer.split(".")
    ]
    return (
        order.get(bare(layer), len(order)),
        natural,
        ROLES.index(role) if role in ROLES else len(ROLES),
        role,
    )


def _fit(value: Any, depth: int = 0) -> Any:
    """Text that can be shown, none of it longer than MAX_TEXT."""
    if isinstance(value, str):
        return shown(clipped(value, MAX_TEXT))
    if isinstance(value, dict | list) and depth == _MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {_fit(name): _fit(item, depth + 1) for name, item in value.items()}
    return [_fit(item, depth + 1) for item in value] if isinstance(value, list) else value


def _event(row: Mapping[str, Any]) -> dict[str, Any]:
    """An event without the fields that are of another type than theirs; a move of layers has both of its lists."""
    event = _fit(row)
    wrong = [name for name in _TEXTS if not isinstance(event.get(name, ""), str)]
    wrong += [name for name in _NUMBERS if type(event.get(name, 0)) is not int]
    for name, of in _LISTS.items():
        items = event.get(name, [])
        if not isinstance(items, list) or not all(type(item) is of for item in items):
            wrong.append(name)
    for name in wrong:
        del event[name]
    return {"demote": [], "promote": []} | event if event["code"] == SWITCHED else event


def _read_plan(path: Path) -> dict[str, Any]:
    """plan.json with the layers and rungs that are described as they should be; empty if it is no plan."""
    plan = _fit(read_mapping(path, MAX_LARGE))
    layers, rungs, notes = (plan.get(key, []) for key in ("layers", "rungs", "notes"))
    lists = all(isinstance(each, list) for each in (layers, rungs, notes))
    if not lists or "layers" not in plan or not _has_texts(plan, ("requested", "resolved")):
        return {}
    texts = {key: str(plan.get(key, "?")) for key in ("recipe", "recipe_sha256", "tier")}
    whole = {"kind": "", "reason": "", "shape": []}
    described = [
        whole | layer
        for layer in layers
        if isinstance(layer, dict) and _has_texts(layer, _OF_A_LAYER)
    ]
    return (
        plan
        | texts
        | {
            "layers": [
                layer
                for layer in described
                if _has_texts(layer, ("kind", "reason")) and isinstance(layer["shape"], list)
            ],
            "rungs": [
                {"taken": False} | rung
                for rung in rungs
                if isinstance(rung, dict) and _has_texts(rung, _OF_A_RUNG)
            ],
            "notes": [str(note) for note in notes],
        }
    )


def _has_texts(described: Mapping[str, Any], keys: Iterable[str]) -> bool:
    return all(isinstance(described.get(key), str) for key in keys)
