"""The two sides of a comparison, and how far they are apart in loss, speed and memory. Torch-free.

A side is one run, or several that differ in their seed alone. With several seeds on both sides a gap has an interval:
of paired differences where both sides have the same seeds, else of two independent means. Runs of one seed are no
independent draws: a side that has a seed twice has no interval.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median
from typing import Any

import numpy as np

from harness.core.errors import ConfigError, Problem, number_of, some
from harness.core.facts import jsonable
from harness.report import short
from harness.report.differences import SEEDS, machine, read_start
from harness.report.intervals import of_independent, of_paired
from harness.tracking.existing import LOSS, VAL_LOSS
from harness.tracking.figures import Points
from harness.tracking.history import RunHistory

WARM_UP = 5
"""First steps that medians of speed leave out: compilation, caches. Of a run of fewer than twice as many, half."""
WINDOW = 10
"""The last steps whose mean loss is compared: a tenth of the run, and at least so many."""
_MOST_NAMED = 4
_OF_A_STEP = ("train.global_batch", "data.context")
_OF_VALIDATION = ("data.context", "data.val_samples", "data.packing")
_TAGS_OF_A_SIDE = ("recipe.sha256", "precision.resolved", "card")


@dataclass(frozen=True)
class Side:
    """One side. letter: A or B. runs: one, or several that differ in their seed alone."""

    letter: str
    runs: Sequence[RunHistory]

    @property
    def name(self) -> str:
        """The first run's name, and how many others there are."""
        first = self.runs[0].run_dir.name
        others = len(self.runs) - 1
        return f"{first} and {others} more" if others else first

    @cached_property
    def seeds(self) -> list[Any]:
        """The seed of each run; None where it is not recorded."""
        return [seed_of(run) for run in self.runs]

    @property
    def not_independent(self) -> str:
        """Why the side's runs are no independent draws, in words; empty if they are."""
        if None in self.seeds:
            return f"{self.letter} has runs without a recorded seed"
        seed, count = Counter(map(str, self.seeds)).most_common(1)[0]
        if count == 1:
            return ""
        times = "twice" if count == 2 else f"{count} times"
        return f"{self.letter} has seed {seed} {times}"

    def as_json(self) -> dict[str, Any]:
        """name, runs (paths), seeds."""
        paths = [short(run.run_dir) for run in self.runs]
        return {"name": self.name, "runs": paths, "seeds": self.seeds}


def seed_of(run: RunHistory) -> Any:
    """The run's seed; None if it is not recorded."""
    for key in SEEDS:
        if key in run.run["params"]:
            return run.run["params"][key]
    return None


def two_sides(runs: Sequence[RunHistory]) -> tuple[Side, Side]:
    """Divide runs into two sides, in the order in which they were given.

    Two runs are a side each. Of more, those that differ in their seed alone are a side. Raises ConfigError if that
    makes not exactly two.
    """
    if len(runs) == 2:
        return Side("A", runs[:1]), Side("B", runs[1:])

    # Runs that differ in their seed alone belong together.
    groups: dict[str, list[RunHistory]] = {}
    for run in runs:
        groups.setdefault(_apart_from_seed(run), []).append(run)
    if len(groups) == 2:
        first, second = groups.values()
        return Side("A", first), Side("B", second)

    # The error shows how the runs were grouped, which is mostly enough to see the mistake.
    named: list[str] = []
    for group in groups.values():
        names = [run.run_dir.name for run in group]
        named.append(f"[{some(names, _MOST_NAMED)}]")
    what = f"these runs make {number_of(len(groups), 'side')}, not two: {', '.join(named)}"
    why = (
        "runs that differ in nothing but train.seed are one side: same config, recipe, data, resolved precision, card "
        "and checkpoint that they started from"
    )
    fix = (
        "give runs of two configs, several seeds of each; or two runs, which are always a side each"
    )
    raise ConfigError(Problem(what, "harness compare", why, fix))


def _apart_from_seed(run: RunHistory) -> str:
    """The same text for runs that differ in their seed alone."""
    params = {key: value for key, value in run.run["params"].items() if key not in SEEDS}
    # The same config may run in another precision, as on another card.
    tags = [run.run["tags"].get(name) for name in _TAGS_OF_A_SIDE]
    parts = [params, tags, run.run["data"].get("sha256"), read_start(run)]
    return json.dumps(parts, sort_keys=True, default=str)


def pair(a: Side, b: Side) -> tuple[RunHistory, RunHistory]:
    """One run of each side: with the same seed if there are such, else the first of each."""
    for one, seed in zip(a.runs, a.seeds, strict=True):
        for other, other_seed in zip(b.runs, b.seeds, strict=True):
            if seed is not None and seed == other_seed:
                return one, other
    return a.runs[0], b.runs[0]


_NAMES = {"last": "loss", "window": "mean loss", "validation": "validation loss"}


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two sides are apart in a loss.

    what: last, window or validation.
    first, last: the steps that it is of.
    a, b: mean over the runs of each side, in the unit of the losses.
    interval: 95% interval of b - a; None without several seeds on both sides, each once.
    """

    what: str
    first: int
    last: int
    a: float
    b: float
    interval: tuple[float, float] | None

    @property
    def name(self) -> str:
        """`loss, step 12`, `mean loss, steps 3-12`."""
        name = _NAMES[self.what]
        if self.first == self.last:
            return f"{name}, step {self.last}"
        return f"{name}, steps {self.first}-{self.last}"

    @property
    def gap(self) -> float:
        """b - a."""
        return self.b - self.a

    def as_json(self) -> dict[str, Any]:
        """The fields, and gap. Values that are not finite are texts."""
        interval = self.interval
        return {
            "first_step": self.first,
            "last_step": self.last,
            "a": jsonable(self.a),
            "b": jsonable(self.b),
            "gap": jsonable(self.gap),
            "interval_95": None if interval is None else [jsonable(each) for each in interval],
        }


def loss_gaps(a: Side, b: Side) -> list[Gap]:
    """The gaps at the last step that all runs have, over the last window, and in validation; those that there are."""
    found: list[Gap] = []
    runs = (*a.runs, *b.runs)
    steps = shared_steps(runs, LOSS)
    if steps:
        found.append(_gap("last", a, b, LOSS, steps[-1:]))
        count = max(WINDOW, len(steps) // 10)
        found.append(_gap("window", a, b, LOSS, steps[-count:]))
    validated = shared_steps(runs, VAL_LOSS)
    if validated:
        found.append(_gap("validation", a, b, VAL_LOSS, validated[-1:]))
    return found


def shared_steps(runs: Sequence[RunHistory], metric: str) -> list[int]:
    """Steps in which every run has the metric, ascending."""
    shared = set(runs[0].points(metric).steps.tolist())
    for run in runs[1:]:
        shared &= set(run.points(metric).steps.tolist())
    return sorted(shared)


def _gap(what: str, a: Side, b: Side, metric: str, steps: Sequence[int]) -> Gap:
    of_a = [_mean(run.points(metric), steps) for run in a.runs]
    of_b = [_mean(run.points(metric), steps) for run in b.runs]
    interval = None
    is_independent = not (a.not_independent or b.not_independent)
    # The interval needs several independent runs of each side, and losses that are numbers.
    usable = _have_several(a, b) and is_independent
    if usable and all(map(math.isfinite, [*of_a, *of_b])):
        interval = _interval(a, b, of_a, of_b)
    return Gap(what, steps[0], steps[-1], mean(of_a), mean(of_b), interval)


def _have_several(a: Side, b: Side) -> bool:
    return len(a.runs) > 1 and len(b.runs) > 1


def _mean(points: Points, steps: Sequence[int]) -> float:
    places = np.searchsorted(points.steps, steps)
    return float(np.mean(points.figures[places]))


def _interval(
    a: Side, b: Side, of_a: Sequence[float], of_b: Sequence[float]
) -> tuple[float, float]:
    """Paired by seed if both sides have the same seeds."""
    by_seed_a = dict(zip(map(str, a.seeds), of_a, strict=True))
    by_seed_b = dict(zip(map(str, b.seeds), of_b, strict=True))
    if by_seed_a.keys() == by_seed_b.keys():
        paired_a: list[float] = []
        paired_b: list[float] = []
        for seed in by_seed_a:
            paired_a.append(by_seed_a[seed])
            paired_b.append(by_seed_b[seed])
        return of_paired(paired_a, paired_b)
    return of_independent(of_a, of_b)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of speed or memory of both sides, and b / a. unit: of the figures."""

    unit: str
    a: float
    b: float

    def as_json(self) -> dict[str, Any]:
        """a, b, ratio, unit."""
        ratio = self.b / self.a
        return {"a": self.a, "b": self.b, "ratio": ratio, "unit": self.unit}


def speed(a: Side, b: Side) -> Ratio | None:
    """Median throughput of the steps after the first ones; None if it was not measured, or counts other things."""
    counted = {str(run.run["data"].get("counted", "tokens")) for run in (*a.runs, *b.runs)}
    if len(counted) > 1:
        return None
    medians = _per_side(a, b, "train/tokens_per_second", _late_median)
    if medians is None:
        return None
    return Ratio(f"{counted.pop()}/s", *medians)


def memory(a: Side, b: Side) -> Ratio | None:
    """Peak memory; None if it was not measured."""
    peaks = _per_side(a, b, "train/peak_memory_gib", lambda points: float(points.figures.max()))
    if peaks is None:
        return None
    return Ratio("GiB", *peaks)


def _late_median(points: Points) -> float:
    left_out = min(WARM_UP, len(points) // 2)
    return float(np.median(points.figures[left_out:]))


def _per_side(a: Side, b: Side, metric: str, reduce: Any) -> tuple[float, float] | None:
    """The median over each side's runs, of the steps on their last machine; None if a run has no figure there."""
    sides: list[float] = []
    for side in (a, b):
        values: list[float] = []
        for run in side.runs:
            points = run.points_here(metric)
            usable = np.isfinite(points.figures) & (points.figures > 0)
            if not usable.any():
                return None
            points = Points(points.steps[usable], points.figures[usable])
            values.append(reduce(points))
        sides.append(median(values))
    return sides[0], sides[1]


def notes(a: Side, b: Side, is_measured: bool) -> list[str]:
    """What makes figures of the two sides hard to compare. is_measured: whether speed or memory is compared."""
    found: list[str] = []
    one, other = a.runs[0], b.runs[0]
    if one.unit != other.unit:
        found.append(f"losses have other units: {one.unit} in A, {other.unit} in B")
    hashes = [run.run["data"].get("sha256") for run in (one, other)]
    if None in hashes:
        found.append("whether the data are the same is not recorded")
    elif hashes[0] != hashes[1]:
        found.append("the data differ, so losses are of other texts")
    amounts = [_amount_of_a_step(run) for run in (one, other)]
    text = _apart(one, other, _OF_A_STEP)
    if text and amounts[0] != amounts[1]:
        found.append(f"losses are compared by step, and a step takes more data in one: {text}")
    if text := _apart(one, other, _OF_VALIDATION):
        found.append(f"validation is of other samples: {text}")
    # An interval needs runs that differ in nothing but chance.
    if _have_several(a, b):
        reasons = filter(None, (a.not_independent, b.not_independent))
        found += [f"{reason}: no interval" for reason in reasons]
    if is_measured:
        found += _notes_on_machines(a, b)
    return found


def _amount_of_a_step(run: RunHistory) -> int | None:
    """Tokens of one step, or what else its samples have; None if it is not recorded."""
    batch, context = (run.run["params"].get(key) for key in _OF_A_STEP)
    if not isinstance(batch, int) or not isinstance(context, int):
        return None
    return batch * context


def _apart(one: RunHistory, other: RunHistory, keys: Sequence[str]) -> str:
    """The values of those `keys` of the config that differ between A and B; empty if none does."""
    texts: list[str] = []
    for key in keys:
        values = [run.run["params"].get(key) for run in (one, other)]
        if None not in values and values[0] != values[1]:
            texts.append(f"{key} {values[0]} in A, {values[1]} in B")
    return "; ".join(texts)


def _notes_on_machines(a: Side, b: Side) -> list[str]:
    """Whether speed and memory are of several machines."""
    of_a = _machines(a)
    of_b = _machines(b)
    texts = [some(each, _MOST_NAMED) for each in (of_a, of_b)]
    if set(of_a) != set(of_b):
        return [f"speed and memory are of other machines: A {texts[0]}; B {texts[1]}"]
    if len(of_a) > 1:
        return [f"speed and memory of each side are of several machines: {texts[0]}"]
    return []


def _machines(side: Side) -> list[str]:
    """The machines that a side's runs are of, each once."""
    found: list[str] = []
    for run in side.runs:
        facts = [f"{name} {value}" for name, value in machine(run).items()]
        described = ", ".join(facts)
        found.append(f"[{described}]" if described else "not recorded")
    return list(dict.fromkeys(found))
