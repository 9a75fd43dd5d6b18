"""The first step, and the first tensor in it, at which two runs differ. Torch-free.

Two runs of the same bits write the same figures: loss, gradient norm, and the amax and scale of every FP8 slot in every
step. So the first figure that differs says where the runs part, even if nothing of the tensors themselves was kept.
Figures are compared to the last bit: any rounding in between would hide a cause of one bit.

The order within a step is that in which the step computes:

    parameters -> inputs and weights, layer by layer -> loss -> output gradients, last layer first
               -> gradient norm -> learning rate, update -> guard -> validation

A rollback makes steps run again, so a step may have several rows. First each step is compared as it was executed for
the first time; if that shows no difference, as it counts in the end. Figures of speed and memory are left out, and so
are summaries of figures that are compared themselves.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.facts import SLOT_ROWS, jsonable
from harness.tracking.existing import LOSS, is_speed
from harness.tracking.figures import Points
from harness.tracking.history import RunHistory, bare, split_slot
from harness.tracking.slot_file import FIGURES, SLOT_FILE, SlotSteps

Floats = npt.NDArray[np.float32]

PARAMETERS, FORWARD, THE_LOSS, BACKWARD, GRADIENT, UPDATE, GUARD, VALIDATION, OTHER = range(9)
"""Stages of a step, in the order in which it computes."""

# Metric -> its stage, and the tensor that it is of.
_METRICS: Mapping[str, tuple[int, str]] = {
    "train/param_norm": (PARAMETERS, "parameters"),
    LOSS: (THE_LOSS, "loss"),
    "train/loss_scale": (THE_LOSS, "loss"),
    "train/grad_norm": (GRADIENT, "gradient"),
    "train/grad_zeros": (GRADIENT, "gradient"),
    "train/grad_near_limit": (GRADIENT, "gradient"),
    "train/lr": (UPDATE, "update"),
    "train/step_applied": (UPDATE, "update"),
}
_BY_PREFIX = {"guard/": (GUARD, "guard"), "val/": (VALIDATION, "validation")}
# The same figures under a second name, and figures over all layers, which depend on how often rows are written.
_REPEATED = ("Loss/", "fp8/")
# A step's cast uses a scale of earlier steps, so the scale is there before the tensor.
_OF_A_SLOT = ("scale", *(name for name in FIGURES if name != "scale"))
_SAMPLED = ("clipped", "underflow", "sqnr_db", "even_db", "centred_db")
_FIELDS = {metric.key: name for name, metric in SLOT_ROWS.items()}


@dataclass(frozen=True, slots=True)
class Split:
    """One figure of a step that differs between two runs.

    tensor: what it is of: a slot, or parameters, loss, gradient, update, guard, validation.
    kind: which figure of it: amax, scale, loss, grad_norm, lr, ...
    a, b: its values in the two runs.
    stage: of the step; one of those above.
    """

    step: int
    tensor: str
    kind: str
    a: float
    b: float
    stage: int

    @property
    def role(self) -> str:
        """input, weight or grad_output; empty for what is no slot."""
        return split_slot(self.tensor)[1] if "." in self.tensor else ""

    def as_json(self) -> dict[str, Any]:
        """step, tensor, kind, a, b. Values that are not finite are texts."""
        return {
            "step": self.step,
            "tensor": self.tensor,
            "kind": self.kind,
            "a": jsonable(self.a),
            "b": jsonable(self.b),
        }


@dataclass(frozen=True, slots=True)
class Compared:
    """What was compared, and what differs first.

    steps: how many steps both runs have a loss of.
    first, last: the first and the last step that was compared. A loop may log its loss in some steps alone, and have
        the FP8 figures of all.
    slots: whether the FP8 figures of all of `steps` were compared, up to the first difference. Where they were not, the
        series of the journals were.
    same_norm: whether the parameters' norm is in both at the step of the first difference, and agrees.
    splits: all figures that differ in the first such step, in the order of the step; empty if all agree.
    again: whether only the steps that ran again after a rollback or a restart differ.
    """

    steps: int
    first: int
    last: int
    slots: bool
    same_norm: bool = False
    splits: Sequence[Split] = ()
    again: bool = False


@dataclass(frozen=True)
class _View:
    """One way to look at a run's steps.

    points: metric -> its figures.
    names: of its metrics.
    slots: every step's FP8 figures; None if there is no file of them.
    """

    points: Callable[[str], Points]
    names: Sequence[str]
    slots: SlotSteps | None


def compare(a: RunHistory, b: RunHistory) -> Compared:
    """Find the first difference of two runs; `steps` is 0 if no step is in both."""
    place = _places(a)
    found = _compare(_as_executed(a), _as_executed(b), place)
    if found.splits or not found.steps or not (_has_repeats(a) or _has_repeats(b)):
        return found
    counted = _compare(_as_it_counts(a), _as_it_counts(b), place)
    if counted.splits:
        return replace(counted, again=True)
    return found


def compare_rerun(run: RunHistory, rerun: RunHistory, *, counted: bool) -> Compared:
    """The first difference of a run and some of its steps that were run again, by `harness compare --replay`.

    counted: steps of the run are taken as they count in the end; else as they were executed for the first time.
    """
    view = _as_it_counts if counted else _as_executed
    return _compare(view(run), view(rerun), _places(run))


def _has_repeats(history: RunHistory) -> bool:
    """Whether some steps may have been executed more than once."""
    restarted = any(event["code"] == "resume.mismatch" for event in history.events)
    return restarted or len(history.rows.begins()) > 1


def _as_executed(history: RunHistory) -> _View:
    slots: SlotSteps | None = None
    if history.slot_steps is not None:
        slots = SlotSteps(history.run_dir / SLOT_FILE, as_executed=True)
    return _View(history.rows.executed, history.rows.names(), slots)


def _as_it_counts(history: RunHistory) -> _View:
    return _View(history.points, history.rows.names(), history.slot_steps)


class _Earliest:
    """The earliest step so far in which a figure differs, infinity if there is none; and its figures that differ."""

    def __init__(self) -> None:
        self.step = math.inf
        self.splits: list[Split] = []

    def add(self, split: Split) -> None:
        if split.step < self.step:
            self.step = split.step
            self.splits = []
        if split.step == self.step:
            self.splits.append(split)


def _compare(a: _View, b: _View, place: Mapping[str, int]) -> Compared:
    shared = np.intersect1d(a.points(LOSS).steps, b.points(LOSS).steps)
    if not len(shared):
        return Compared(0, 0, 0, slots=False)
    there = set(b.names)
    both = [name for name in a.names if name in there]
    none = np.zeros(0, np.int64)
    earliest = _Earliest()
    for name in both:
        if not (_is_left_out(name) or _is_of_slot(name)):
            _add_first_split(earliest, name, a, b, without=none)

    # FP8 figures of all steps up to that one.
    in_files = none
    if a.slots is not None and b.slots is not None:
        in_files = _add_slot_splits(earliest, a.slots, b.slots)

    # A file may be torn, or lack steps: the journal has some figures of these.
    every_slot = bool(np.isin(shared[shared <= earliest.step], in_files).all())
    if not every_slot:
        for name in filter(_is_of_slot, both):
            _add_first_split(earliest, name, a, b, without=in_files)

    splits = sorted(earliest.splits, key=lambda each: _order(each, place))
    same_norm = False
    if splits:
        norms = [view.points("train/param_norm").get(splits[0].step) for view in (a, b)]
        same_norm = norms[0] is not None and norms[0] == norms[1]
    reached = [shared, in_files, [split.step for split in splits]]
    return Compared(
        steps=len(shared),
        first=min(int(steps[0]) for steps in reached if len(steps)),
        last=max(int(steps[-1]) for steps in reached if len(steps)),
        slots=every_slot,
        same_norm=same_norm,
        splits=splits,
    )


def _is_left_out(name: str) -> bool:
    return is_speed(name) or name.startswith(_REPEATED)


def _is_of_slot(name: str) -> bool:
    """Whether a metric of the journal is a series of one FP8 slot."""
    return name.partition("/")[0] in _FIELDS


def _add_first_split(
    earliest: _Earliest, name: str, a: _View, b: _View, without: npt.NDArray[np.int64]
) -> None:
    """Add the first step at which a metric has other bits; steps that only one run has are passed over.

    without: steps that are left out.
    """
    # Only steps that both runs have can be compared.
    of_a = a.points(name)
    of_b = b.points(name)
    steps, at_a, at_b = np.intersect1d(
        of_a.steps, of_b.steps, assume_unique=True, return_indices=True
    )
    figures_a = of_a.figures[at_a]
    figures_b = of_b.figures[at_b]
    stage, tensor, kind = _meaning(name)
    differ = _differ(figures_a, figures_b) & ~np.isin(steps, without)
    if differ.any():
        at = int(np.argmax(differ))
        values = float(figures_a[at]), float(figures_b[at])
        earliest.add(Split(int(steps[at]), tensor, kind, *values, stage=stage))


def _differ(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where two arrays differ to the last bit. 0.0 and -0.0 differ; any two NaN agree."""
    # As integers: a comparison of floats calls 0.0 and -0.0 equal.
    number = np.uint64 if a.dtype.itemsize == 8 else np.uint32
    bits_a = np.ascontiguousarray(a).view(number)
    bits_b = np.ascontiguousarray(b).view(number)
    bits_differ = bits_a != bits_b
    return bits_differ & ~(np.isnan(a) & np.isnan(b))


def _meaning(name: str) -> tuple[int, str, str]:
    """(stage, tensor, kind) of a metric of the journal."""
    if name in _METRICS:
        return *_METRICS[name], name.rpartition("/")[2]
    key, _, rest = name.partition("/")
    if key in _FIELDS:
        return _stage_of_slot(rest), rest, _FIELDS[key]
    for prefix, (stage, tensor) in _BY_PREFIX.items():
        if name.startswith(prefix):
            return stage, tensor, rest
    return OTHER, name, "figure"


def _stage_of_slot(slot: str) -> int:
    _, role = split_slot(slot)
    return BACKWARD if role == "grad_output" else FORWARD


def _add_slot_splits(earliest: _Earliest, a: SlotSteps, b: SlotSteps) -> npt.NDArray[np.int64]:
    """Add the figures that differ in the first step in which some do; returns the steps that were compared, ascending.

    Steps after the earliest difference are not read.
    """
    read = array("q")
    for step, names_a, values_a, names_b, values_b in _together(a, b):
        if step > earliest.step:
            break
        read.append(step)
        # Slots of both: a layer that only one run has in FP8 is a difference of the plans.
        place = {name: at for at, name in enumerate(names_b)}
        names = [name for name in names_a if name in place]
        if names_a != names_b:
            at_a = [at for at, name in enumerate(names_a) if name in place]
            at_b = [place[name] for name in names]
            values_a = values_a[:, at_a]
            values_b = values_b[:, at_b]
        differ = _differ(values_a, values_b)

        # A figure that is sampled is NaN in other steps, and the runs may sample different ones.
        for row, figure in enumerate(FIGURES):
            if figure in _SAMPLED:
                differ[row] &= ~(np.isnan(values_a[row]) | np.isnan(values_b[row]))
        for row, column in np.argwhere(differ).tolist():
            name = names[column]
            pair = float(values_a[row, column]), float(values_b[row, column])
            earliest.add(Split(step, name, FIGURES[row], *pair, stage=_stage_of_slot(name)))
    return np.array(read, np.int64)


def _together(
    a: SlotSteps, b: SlotSteps
) -> Iterator[tuple[int, tuple[str, ...], Floats, tuple[str, ...], Floats]]:
    """(step, slots of a, figures of a, slots of b, figures of b) of each step that both have."""
    of_b = b.read()
    step_b, names_b, values_b = next(of_b, (-1, (), np.zeros((0, 0), np.float32)))
    for step, names_a, values_a in a.read():
        while 0 <= step_b < step:
            step_b, names_b, values_b = next(of_b, (-1, names_b, values_b))
        if step_b < 0:
            return
        if step_b == step:
            yield step, names_a, values_a, names_b, values_b


def _places(history: RunHistory) -> dict[str, int]:
    """Bare name of each layer -> its place in the forward pass, in the plan's order."""
    layers = [bare(split_slot(slot)[0]) for slot in history.slots()]
    return {layer: place for place, layer in enumerate(dict.fromkeys(layers))}


def _order(split: Split, places: Mapping[str, int]) -> tuple[Any, ...]:
    """Sorts the figures of a step in the order in which the step computes them."""
    layer, role = split_slot(split.tensor)
    place = places.get(bare(layer), len(places)) if split.role else 0
    if split.stage == BACKWARD:
        place = -place
    kind = len(_OF_A_SLOT)
    if split.kind in _OF_A_SLOT:
        kind = _OF_A_SLOT.index(split.kind)
    # An input is cast before the weight that it meets.
    return split.stage, place, role == "weight", kind, split.tensor
