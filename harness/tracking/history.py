"""What happened in a run, read from its folder: the one reader behind every report and replay. Torch-free.

A rollback makes steps run again under the next attempt, and the journal keeps the rows of both. `RunHistory` tells them
apart: a step of an attempt counts unless a later attempt began at or before it. `series` and `points` have the steps
that count; `abandoned` has those that a rollback discarded.

Somebody else may have written the folder. So text is made fit to be shown (`errors.shown`) and cut to a bounded length,
and fields that readers rely on have their types, or are not there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.core.errors import clipped, shown
from harness.core.facts import ROLES, SLOT_ROWS
from harness.core.files import MAX_LARGE, read_mapping
from harness.tracking.existing import LOSS, first_step
from harness.tracking.figures import Figures, MetricsRow, Points, SeriesOf
from harness.tracking.journal import JOURNAL, read_rows, require_run
from harness.tracking.slot_file import SlotSteps, rewritten

SWITCHED = "precision.switched"
BYTES = "nats per byte"
"""The unit of losses that are shown in bits per byte, too."""
TOKENS = "nats per token"
OWN_LOOP = "own"
"""Value of the tag `loop` in a run of the user's own loop, whose loss may be anything."""
_OF_A_LAYER, _OF_A_RUNG = ("module", "precision", "backend"), ("rung", "reason")
_OF_A_PLAN = ("precision.requested", "precision.resolved", "recipe.sha256", "tier")
"""Tags that say of which plan a start was."""
_DIGITS = 6
_BEGINS = ("run.resumed", "run.started_from", "guard.rollback")
"""Events that say from which step a process goes on. Later steps are under the recipe of that process."""
MAX_TEXT = 4000
"""Characters of a text in a run folder that are shown."""
MOST_LOST = 1 << 20
"""Most missing steps that are listed."""
_MAX_DEPTH = 16
# Fields of an event that readers rely on, by type.
_TEXTS, _NUMBERS = ("text", "reason", "path", "lowered"), ("to_step", "window")
_LISTS: Mapping[str, type] = {"demote": str, "promote": str, "passed_over": int}
Series = Mapping[int, float]
Demotions = list[tuple[str, int, int | None]]


class Returned(NamedTuple):
    """One rollback.

    attempt: the attempt that it ended.
    to_step: the step of the checkpoint that it went back to.
    passed_over: windows that the next attempt skips.
    """

    attempt: int
    to_step: int
    passed_over: tuple[int, ...]


class Stretch(NamedTuple):
    """Steps that were executed under one recipe, on one machine.

    after: the step before the first of them.
    recipe: as the config names it.
    sha256: of the recipe's contents; empty if the journal does not say.
    machine: as `machine_of`.
    """

    after: int
    recipe: str
    sha256: str
    machine: tuple[str, str]


@dataclass(frozen=True)
class RunHistory:
    """A run as its folder tells it.

    rows: the journal's metrics rows, in order.
    events: the journal's events, in order.
    run: tags, params, data and where (host, folder) of its "run" rows; later rows replace earlier ones.
    plan: plan.json; empty if there is none.
    outcome: outcome.json; empty if there is none.
    begun: the step after which each start, resume or rollback went on, with recipe and machine, in order.
    descriptions: the journal's "run" rows one by one, in order.
    """

    run_dir: Path
    rows: Figures
    events: Sequence[Mapping[str, Any]]
    run: Mapping[str, Mapping[str, Any]]
    plan: Mapping[str, Any]
    outcome: Mapping[str, Any]
    begun: Sequence[Stretch] = ()
    descriptions: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, run_dir: Path) -> RunHistory:
        """Read a run folder. Raises ConfigError if it is none."""
        run_dir = require_run(run_dir)

        # One pass over the journal. Its rows are in the order of time: a "run" row describes the rows after it.
        rows = Figures()
        events: list[Mapping[str, Any]] = []
        run = _described([])
        descriptions: list[Mapping[str, Any]] = []
        end: dict[str, Any] = {}
        begun: list[Stretch] = []
        started = False
        for row in read_rows(run_dir / JOURNAL):
            if row["kind"] == "metrics":
                # A start that wrote no event with its step began at its first figures.
                if started:
                    begun.append(_stretch(max(row["step"] - 1, 0), run))
                    started = False
                rows.add(_metrics_row(row, run, len(descriptions)))
            elif row["kind"] == "event":
                event = _event(row)
                events.append(event)
                if event["code"] in _BEGINS and "step" in event:
                    begun.append(_stretch(event.get("to_step", event["step"]), run))
                    started = False
            elif row["kind"] == "run":
                # A process begins, so the end that an earlier one wrote is none.
                end = {}
                started = True
                description = {part: _fit(row.get(part, {})) for part in run}
                descriptions.append(description)
                for part in run:
                    run[part] |= description[part]
            elif row["kind"] == "end":
                end = {"status": row["status"]}

        # The other files. outcome.json says more than the "end" row, which counts where a full disk refused that file.
        run["tags"] = {name: str(value) for name, value in run["tags"].items()}
        outcome = _fit(end | read_mapping(run_dir / "outcome.json"))
        plan = read_plan(run_dir / "plan.json")
        return cls(run_dir, rows, events, run, plan, outcome, begun, descriptions)

    def as_of(self, step: int, *, counted: bool) -> RunHistory:
        """This history with the description that the run had when `step` ran: a resume may have changed config,
        recipe, ranks or machine since. Without figures of that step, with the present description.

        counted: of a step that ran several times, as it counts in the end; else as it ran for the first time.
        """
        rows = [row for row in self.rows.of_step(step) if LOSS in row.values]
        if not rows:
            return self
        ran = rows[-1] if counted else rows[0]
        run = _described(self.descriptions[: ran.described])
        run["tags"] = {name: str(value) for name, value in run["tags"].items()}
        # plan.json is of the last start. Of another recipe or rung it says nothing.
        planned = all(run["tags"].get(tag) == self.run["tags"].get(tag) for tag in _OF_A_PLAN)
        return replace(self, run=run, plan=self.plan if planned else {})

    @cached_property
    def lost(self) -> list[int]:
        """Steps of the run without figures; empty for a loop of the user's own, which logs the steps that it likes."""
        points = self.series.get(LOSS)
        if not points or self.of_own_loop:
            return []

        # A step that a rollback discarded was done: its figures are not lost.
        there = points.steps
        abandoned = self.abandoned.get(LOSS)
        if abandoned is not None:
            there = np.union1d(there, abandoned.steps)
        first = first_step(self.run_dir) or int(points.steps[0])
        last = int(points.steps[-1])
        # A forged step number would make this list huge.
        if last - len(there) > MOST_LOST:
            return []
        expected = np.arange(first, last + 1)
        return np.setdiff1d(expected, there, assume_unique=True).tolist()

    @property
    def of_own_loop(self) -> bool:
        """Whether a loop of the user's own trained: its loss may be anything, and `harness train` cannot start it."""
        return self.run["tags"].get("loop") == OWN_LOOP

    @property
    def unit(self) -> str:
        """Unit of the losses; "loss" if it is not known."""
        default = "loss" if self.of_own_loop else BYTES
        return str(self.run["data"].get("unit", default))

    @property
    def unigram(self) -> float | None:
        """Bits per byte of a model that knows only how often each byte occurs; None if losses have another unit."""
        return self._entropy("unigram_bits_per_byte") if self.unit == BYTES else None

    @property
    def unigram_nats(self) -> float | None:
        """Nats per token of a model that knows only how often each token occurs; None if losses have another unit."""
        if self.unigram is not None:
            return self.unigram * math.log(2)
        return self._entropy("unigram_nats") if self.unit == TOKENS else None

    def _entropy(self, name: str) -> float | None:
        value = self.run["data"].get(name)
        if isinstance(value, int | float) and 0 < value < math.inf:
            return float(value)
        return None

    @cached_property
    def _replaced_from(self) -> Callable[[int], float]:
        """A function: attempt -> the first step that a later attempt did again; infinity if none did."""
        return rewritten(self.rows.begins())

    def replaced(self, attempt: int, step: int) -> bool:
        """Whether a rollback discarded this step: a later attempt begins at or before it."""
        return step >= self._replaced_from(attempt)

    @cached_property
    def series(self) -> Mapping[str, Points]:
        """Metric name -> {step: value} of the steps that count."""
        return SeriesOf(self.rows, self._replaced_from, replaced=False)

    @cached_property
    def abandoned(self) -> Mapping[str, Points]:
        """The same for steps that a rollback discarded."""
        return SeriesOf(self.rows, self._replaced_from, replaced=True)

    @property
    def thrown_away(self) -> int:
        """How many steps rollbacks discarded; a step that two attempts did in vain counts twice."""
        return self.rows.count_replaced(LOSS, self._replaced_from)

    def points(self, name: str) -> Points:
        """A metric at the steps that count; empty if it was never logged."""
        return self.rows.points(name, self._replaced_from, replaced=False)

    def stretches(self, step: int) -> list[Stretch]:
        """The recipes of the steps up to `step`, in order; a resume may have changed the recipe.

        A step that was executed again counts for the last time only.
        """
        found: list[Stretch] = []
        for each in self.begun:
            # Whoever goes on from a step does all later ones again.
            found = [earlier for earlier in found if earlier.after < each.after]
            recipe = (each.recipe, each.sha256)
            if not found or (found[-1].recipe, found[-1].sha256) != recipe:
                found.append(each)
        return [each for each in found if each.after < step]

    @cached_property
    def on_this_machine(self) -> Stretch | None:
        """The last steps, all of them on one kind of machine; None if there are no steps.

        A resume may bring other cards, or more of them. What is slower on one says nothing about the other.
        """
        last: Stretch | None = None
        for each in reversed(self.begun):
            if last is None:
                last = each
            elif each.machine != last.machine:
                break
            # A rollback may have gone back to a step of the machine before. It is done again on this one.
            last = last._replace(after=min(last.after, each.after))
        return last

    def points_here(self, name: str) -> Points:
        """As `points`, of the steps in `on_this_machine`."""
        points = self.points(name)
        last = self.on_this_machine
        if last is None:
            return points
        here = points.steps > last.after
        return Points(points.steps[here], points.figures[here])

    @property
    def switches(self) -> list[Mapping[str, Any]]:
        """Events that moved layers, of the steps that count."""
        found: list[Mapping[str, Any]] = []
        for event in self.events:
            is_move = event["code"] == SWITCHED
            if is_move and not self.replaced(event["attempt"], event["step"]):
                found.append(event)
        return found

    @property
    def rollbacks(self) -> list[Returned]:
        """One for each attempt that ended in a rollback, in order. If the journal has two, the later one counts."""
        found: dict[int, Returned] = {}
        for event in self.events:
            if event["code"] == "guard.rollback" and "to_step" in event:
                windows = tuple(event.get("passed_over", ()))
                found[event["attempt"]] = Returned(event["attempt"], event["to_step"], windows)
        return [found[attempt] for attempt in sorted(found)]

    def last(self, name: str) -> float | None:
        """The value of the highest step of a metric, None if it was never logged."""
        points = self.series.get(name)
        return None if points is None else float(points.figures[-1])

    @cached_property
    def slot_steps(self) -> SlotSteps | None:
        """Every step's FP8 figures. None if their file is lost or cannot be read; the journal has some of them."""
        return SlotSteps.of(self.run_dir)

    def slots(self, metric: str = "fp8_amax") -> list[str]:
        """Slots with `<metric>/<slot>` figures: layers in the plan's order, roles in the order of a step."""
        if self.slot_steps is not None:
            names = list(self.slot_steps.names)
        else:
            # The file is lost: the journal has some slots.
            names = []
            for name in self.series:
                key, slash, slot = name.partition("/")
                if key == metric and slash:
                    names.append(slot)
        order: dict[str, int] = {}
        for place, layer in enumerate(self.plan.get("layers", ())):
            order[bare(layer["module"])] = place
        return sorted(names, key=lambda name: _slot_key(name, order))

    def expected_slots(self) -> set[str]:
        """Bare names of the slots that the plan's FP8 layers must have, if their backend keeps amax state."""
        if not self.plan.get("keeps_amax"):
            return set()
        slots: set[str] = set()
        for layer in self.plan.get("layers", ()):
            if layer["precision"] == "fp8":
                slots |= {f"{bare(layer['module'])}.{role}" for role in ROLES}
        return slots

    def demotions(self) -> Demotions:
        """(bare layer name, first step in BF16, first step back in FP8 or None), in order."""
        spans: Demotions = []
        # Places in `spans` of the stretches that have no end yet, by layer.
        open_spans: dict[str, list[int]] = {}
        for event in self.switches:
            # Promotions first: one event may do both, of other layers.
            for layer in map(bare, event["promote"]):
                for place in open_spans.pop(layer, ()):
                    first = spans[place][1]
                    spans[place] = (layer, first, event["step"])
            for layer in map(bare, event["demote"]):
                open_spans.setdefault(layer, []).append(len(spans))
                spans.append((layer, event["step"], None))
        return spans

    def silent(self, slots: Iterable[str]) -> list[str]:
        """Those of `slots` (bare names) whose amax was never over 0."""
        heard: set[str] = set()
        if self.slot_steps is not None:
            heard.update(map(bare, self.slot_steps.heard()))
        else:
            for name in self.series:
                prefix, _, slot = name.partition("/")
                if prefix == "fp8_amax" and (self.series[name].figures > 0).any():
                    heard.add(bare(slot))
        return [slot for slot in slots if slot not in heard]

    def newest(
        self, slots: Sequence[str], count: int
    ) -> tuple[Mapping[str, Series], dict[str, list[float]]]:
        """Returns ({series name: {step: last measured value}}, {slot: last `count` amaxes}) for `slots`.

        Series are named `fp8_<figure>/<slot>`.
        """
        if self.slot_steps is not None:
            return self.slot_steps.newest(slots, count)

        # The file is lost: the journal's rows have the slots that were picked.
        last: dict[str, Series] = {}
        for metric in SLOT_ROWS.values():
            for slot in slots:
                name = f"{metric.key}/{slot}"
                points = self.points(name)
                last[name] = {}
                measured = np.flatnonzero(~np.isnan(points.figures))
                if len(measured):
                    at = measured[-1]
                    last[name] = {int(points.steps[at]): float(points.figures[at])}
        amaxes: dict[str, list[float]] = {}
        for slot in slots:
            points = self.series.get(f"fp8_amax/{slot}", {})
            newest = sorted(points)[-count:]
            amaxes[slot] = [points[step] for step in newest]
        return last, amaxes

    def matrix(
        self, metric: str, slots: Sequence[str], columns: int | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """(steps [n], values [slots, n]) of `<metric>/<slot>`; NaN where a slot has no value at a step.

        columns: at most so many; neighbouring steps are merged, by their largest value. None: every step.
        """
        if self.slot_steps is not None:
            # The file has figures by their field, the journal by their key.
            figures = {each.key: name for name, each in SLOT_ROWS.items()}
            figure = figures[metric]
            return self.slot_steps.joined(figure, slots, columns)

        # The file is lost: fill a matrix from the journal's series.
        series = [self.series.get(f"{metric}/{slot}", {}) for slot in slots]
        steps = sorted(set().union(*series))
        places = {step: place for place, step in enumerate(steps)}
        values = np.full((len(slots), len(steps)), np.nan)
        for row, points in enumerate(series):
            for step, value in points.items():
                values[row, places[step]] = value

        # Join neighbours; padding makes the last group whole.
        each = 1
        if columns is not None:
            each = max(1, -(-len(steps) // columns))
        padding = -len(steps) % each
        values = np.pad(values, ((0, 0), (0, padding)), constant_values=np.nan)
        if steps:
            groups = values.reshape(len(slots), -1, each)
            values = np.fmax.reduce(groups, axis=2)
        return np.array(steps[::each], dtype=np.int64), values


def _described(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tags, params, data and where of "run" rows; later rows replace earlier ones."""
    run: dict[str, dict[str, Any]] = {"tags": {}, "params": {}, "data": {}, "where": {}}
    for row in rows:
        for part in run:
            run[part] |= row[part]
    return run


def _metrics_row(
    row: Mapping[str, Any], run: Mapping[str, Mapping[str, Any]], described: int
) -> MetricsRow:
    """A row with the ranks, engine and length that its process had, from the "run" rows before it.

    described: how many these are.
    """
    ranks = str(run["tags"].get("ranks"))[:_DIGITS]
    total = run["params"].get("train.steps")
    return MetricsRow(
        attempt=row["attempt"],
        step=row["step"],
        values=row["metrics"],
        total=total if type(total) is int else None,
        ranks=int(ranks) if ranks.isdecimal() else None,
        engine=str(run["tags"].get("engine", "")),
        described=described,
    )


def _stretch(after: int, run: Mapping[str, Mapping[str, Any]]) -> Stretch:
    recipe = run["params"].get("recipe", "")
    sha256 = run["tags"].get("recipe.sha256", "")
    return Stretch(after, shown(str(recipe)), shown(str(sha256)), machine_of(run["tags"]))


def machine_of(tags: Mapping[str, Any]) -> tuple[str, str]:
    """(ranks, card) of a process; without a GPU its tier. The card is empty if it is not recorded."""
    card = tags.get("card") or tags.get("tier") or ""
    return str(tags.get("ranks", "1")), str(card)


def bare(name: str) -> str:
    """A module or slot name without zero-padding: `blocks.03.up` and `blocks.3.up` are the same layer."""
    return re.sub(r"(?<![^.])0+(?=\d)", "", name)


def split_slot(slot: str) -> tuple[str, str]:
    """(layer, role) of a slot."""
    layer, _, role = slot.rpartition(".")
    return layer, role


def _slot_key(slot: str, order: Mapping[str, int]) -> tuple[Any, ...]:
    """Sorts slots by the plan's order of layers, then by name with numbers as numbers, then by role."""
    layer, role = split_slot(slot)
    natural: list[tuple[int, int, str]] = []
    for part in layer.split("."):
        if part.isdecimal() and len(part) < MAX_TEXT:
            natural.append((0, int(part), ""))
        else:
            natural.append((1, 0, part))

    # Layers that the plan does not have, and roles that are not known, come last.
    place = order.get(bare(layer), len(order))
    role_place = len(ROLES)
    if role in ROLES:
        role_place = ROLES.index(role)
    return place, natural, role_place, role


def _fit(value: Any, depth: int = 0) -> Any:
    """`value` with every text in it made fit to show and cut to MAX_TEXT, and with bounded nesting."""
    if isinstance(value, str):
        return shown(clipped(value, MAX_TEXT))
    if isinstance(value, dict | list) and depth == _MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {_fit(name): _fit(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_fit(item, depth + 1) for item in value]
    return value


def _event(row: Mapping[str, Any]) -> dict[str, Any]:
    """An event without fields of a wrong type. A move of layers gets an empty list where one is missing.

    A verdict of the fallback has its evidence by layer under the names that a move has for its lists of layers; here it
    is under `evidence`.
    """
    event = _fit(row)
    evidence: dict[str, Any] = {}
    for name in ("demote", "promote"):
        if isinstance(event.get(name), dict):
            evidence[name] = event.pop(name)
    event.pop("evidence", None)
    if evidence:
        event["evidence"] = evidence
    wrong = [name for name in _TEXTS if not isinstance(event.get(name, ""), str)]
    # Not isinstance: True is an int there.
    wrong += [name for name in _NUMBERS if type(event.get(name, 0)) is not int]
    for name, of in _LISTS.items():
        items = event.get(name, [])
        if not isinstance(items, list) or not all(type(item) is of for item in items):
            wrong.append(name)
    for name in wrong:
        del event[name]
    if event["code"] == SWITCHED:
        event = {"demote": [], "promote": []} | event
    return event


def read_plan(path: Path) -> dict[str, Any]:
    """A run's plan.json, with those layers and rungs that have what readers rely on; empty if it is no plan."""
    plan = _fit(read_mapping(path, MAX_LARGE))
    layers = plan.get("layers", [])
    rungs = plan.get("rungs", [])
    notes = plan.get("notes", [])
    lists = all(isinstance(each, list) for each in (layers, rungs, notes))
    if not lists or "layers" not in plan or not _has_texts(plan, ("requested", "resolved")):
        return {}

    for key in ("recipe", "recipe_sha256", "tier"):
        plan[key] = str(plan.get(key, "?"))

    # A layer or rung that lacks something is left out; the others are still of use.
    plan["layers"] = []
    for layer in layers:
        if not isinstance(layer, dict) or not _has_texts(layer, _OF_A_LAYER):
            continue
        whole = {"kind": "", "reason": "", "shape": [], "frozen": False} | layer
        if _has_texts(whole, ("kind", "reason")) and isinstance(whole["shape"], list):
            plan["layers"].append(whole)

    plan["rungs"] = []
    for rung in rungs:
        if isinstance(rung, dict) and _has_texts(rung, _OF_A_RUNG):
            plan["rungs"].append({"taken": False} | rung)

    plan["notes"] = [str(note) for note in notes]
    return plan


def _has_texts(described: Mapping[str, Any], keys: Iterable[str]) -> bool:
    return all(isinstance(described.get(key), str) for key in keys)
