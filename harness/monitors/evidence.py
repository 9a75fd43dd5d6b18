"""The evidence that a layer should leave FP8: limits, exceptions, kept observations and scores. Torch-free.

Every step yields up to nine statistics (`STATISTICS`) of every slot, that is of every quantised tensor of every layer.
This module judges each slot and statistic on its own. `fallback` decides what follows for the layer.

1. *Limits.* A statistic has a limit for each role (input, weight, gradient of the output). A value beyond its limit
   makes a bad observation. How far it is beyond is counted in octaves: factors of two, or 6 dB for decibels.
2. *Exceptions.* Some values beyond a limit are not faults:
   - A tensor that grows is larger than the scale that was made from its past. Its saturation limit is raised by the
     headroom that its growth explains (`growth.Growth`), and what it clips within that headroom is excused.
   - A tensor that was initialised with zeros has no scale of its own in its first uses.
   - Rows are nearly alike while a model learns what all samples have in common. The SQNR of what varies between rows
     counts only after it has been low for `centred_steps` steps.
   - A layer that has just returned to FP8 is left out for one step by the caller.
3. *Kept observations.* The last `fallback.window` of them, called `window` below. Reports show them, and a layer may
   return once they are clean.
4. *Score.* A count of the kept ones would forget faults that come less often. The score is a CUSUM instead (Page,
   Continuous inspection schemes, 1954). A bad observation adds 1, and half as much for each octave beyond the limit. A
   good one takes 1 / (2 * (window - hits)) away. A score of `hits` - 1/2 is enough to leave FP8, if at least `hits` bad
   observations made it: one huge outlier alone is no fault.

So `hits` bad observations within `window` are always enough. So are faults further apart, if they are far enough beyond
their limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.config import FallbackConfig
from harness.core.errors import MisuseError, Problem
from harness.core.facts import ROLES, SlotStats
from harness.core.protocols import Meta
from harness.monitors.base import Bools, Floats, Ints
from harness.monitors.growth import Growth

_Numbers = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Statistic:
    """One kind of evidence.

    sampled: measured in one of `fp8.stats_every` steps only.
    below: bad when under its limit, not when over it.
    """

    name: str
    sampled: bool = False
    below: bool = False


STATISTICS = (
    # amax * scale / fp8_max: over 1 means clipped.
    Statistic("saturation"),
    # Whether the amax is infinite: 0 or 1.
    Statistic("nonfinite"),
    # The amax over that of `window` observations before.
    Statistic("amax_growth"),
    Statistic("amax_over"),
    # Share of values over the format's largest one.
    Statistic("clipped", sampled=True),
    # Share of non-zero values that become zero.
    Statistic("underflow", sampled=True),
    # Signal over quantisation noise, dominated by the largest values.
    Statistic("sqnr_db", sampled=True, below=True),
    # Per-element SQNR: every value (of gradients: every row) weighs the same.
    Statistic("even_db", sampled=True, below=True),
    # SQNR of what varies between rows, without each channel's mean.
    Statistic("centred_db", sampled=True, below=True),
)
"""The order is the second axis of every array of evidence, in memory and in checkpoints."""

_PER_OCTAVE = 0.5
"""What a bad observation adds to the score for each octave beyond its limit."""

_DECIBELS_PER_OCTAVE = 20 * float(np.log10(2))

_SLACK = 0.5
"""Slack below `hits`: scores decay between observations."""

_FAINT = np.array([2.0**-6, 2.0**-6, 2.0**-14], dtype=np.float32)
"""Saturation (input, weight, gradient) under which small values begin to fall below what E4M3, or E5M2, resolves."""

_VANISHED = np.array([2.0**-10 / 448, 2.0**-10 / 448, 2.0**-17 / 57344], dtype=np.float32)
"""Saturation under which every value is flushed to zero: half of the smallest value of E4M3, or E5M2, over its largest.
Gradients in E4M3 vanish earlier."""

_COMMON = 3.0
"""Decibels that a centred SQNR must be under the plain SQNR to count: half of the energy is common to all rows."""

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)

_NAMES = [kind.name for kind in STATISTICS]

# Masks over the statistics.
_SAMPLED = np.array([kind.sampled for kind in STATISTICS])
PRESSING = np.array([name != "centred_db" for name in _NAMES])
"""Statistics for which the whole run may leave FP8. Rows that are alike in most layers may be the model's nature."""

# Masks that broadcast over [statistics, layers, roles].
_BELOW = np.array([kind.below for kind in STATISTICS])[:, None, None]
_SMALL_VALUES = [name in ("underflow", "even_db") for name in _NAMES]
_OF_SMALL_VALUES = np.array(_SMALL_VALUES)[:, None, None]
_YES_OR_NO = np.array([name == "nonfinite" for name in _NAMES])[:, None, None]
# Multiplied by its sign, every statistic is bad when over its limit.
_SIGN = np.where(_BELOW, -1, 1).astype(np.float32)

_SATURATION = _NAMES.index("saturation")
_CLIPPED = _NAMES.index("clipped")
_UNDERFLOW = _NAMES.index("underflow")
_SQNR = _NAMES.index("sqnr_db")
_EVEN = _NAMES.index("even_db")
_CENTRED = _NAMES.index("centred_db")


def limits_of(config: FallbackConfig) -> Floats:
    """Limit of each statistic and role, float32 [statistics, 1, 3]. NaN, which no value exceeds, turns one off."""
    given = config.model_dump()
    given["nonfinite"] = 0.5  # observed as 0 or 1

    # A key such as `saturation_input`, or one for all roles such as `clipped`. None becomes NaN.
    rows: list[list[float | None]] = []
    for name in _NAMES:
        for_all_roles = given.get(name)
        rows.append([given.get(f"{name}_{role}", for_all_roles) for role in ROLES])
    return np.array(rows, dtype=np.float32)[:, None, :]


def octaves_beyond(values: _Numbers, limits: _Numbers, below: Bools | bool) -> _Numbers:
    """How many octaves (factors of two) values are beyond their limits; negative within them, 0 for NaN.

    below: these values are decibels, and bad when under their limit.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        finite = np.clip(values, _SMALLEST, _LARGEST)
        above = np.log2(finite / limits)
    under = (limits - values) / _DECIBELS_PER_OCTAVE
    return np.nan_to_num(np.where(below, under, above))


class Score:
    """The CUSUM scores of many series at once; all arrays are float32 of `shape`.

    value: the scores.
    bad: bad observations since the score was last zero, `hits` at most.
    """

    def __init__(self, policy: FallbackConfig, shape: tuple[int, ...]) -> None:
        self._hits = policy.hits
        if policy.window > policy.hits:
            # The good observations of a window that holds `hits` bad ones use up the slack, and no more.
            self._relief = 0.5 / (policy.window - policy.hits)
            self._threshold = policy.hits - _SLACK
        else:
            # Every observation of the window must be bad: there is nothing to make allowance for.
            self._relief = 1.0
            self._threshold = float(policy.hits)
        self.value: Floats = np.zeros(shape, dtype=np.float32)
        self.bad: Floats = np.zeros(shape, dtype=np.float32)

    def add(self, seen: Bools, bad: Bools, octaves: _Numbers) -> None:
        """Add one observation to the series in `seen`. octaves: how far the bad ones are beyond their limits."""
        gain = np.where(bad, 1 + _PER_OCTAVE * octaves, -self._relief)
        # The cap lets one window without a bad value take any score below the threshold again.
        value = np.clip(self.value + gain, 0, self._threshold + _SLACK).astype(np.float32)
        self.value = np.where(seen, value, self.value)

        counted = np.minimum(self.bad + bad, self._hits)
        self.bad = np.where(self.value > 0, counted, 0).astype(np.float32)

    def over(self) -> Bools:
        """Which series are evidence enough to leave FP8."""
        return (self.value >= self._threshold) & (self.bad >= self._hits)

    def forget(self, place: Any) -> None:
        """Start the series at index `place` anew."""
        self.value[place] = 0
        self.bad[place] = 0

    def restore(self, value: Floats, bad: Floats) -> None:
        """Load what `value` and `bad` were."""
        self.value = value.reshape(self.value.shape)
        self.bad = bad.reshape(self.bad.shape)


class Evidence:
    """The observations and scores of every slot and statistic of `layers`. Each statistic has a `window` of its own."""

    def __init__(self, policy: FallbackConfig, layers: Sequence[str]) -> None:
        self.policy = policy
        self.layers = tuple(layers)
        self._limits = limits_of(policy)
        count = len(self.layers)

        # [window, statistics, layers, roles], newest last. 0: within its limit. NaN: none yet. Else: the bad value.
        shape = (policy.window, len(STATISTICS), count, 3)
        self._recent: Floats = np.full(shape, np.nan, dtype=np.float32)
        self._score = Score(policy, (len(STATISTICS), count, 3))

        # Facts about the tensors themselves, in whatever precision they are multiplied: a switch does not clear them.
        self._amax: Floats = np.full((policy.window + 1, count, 3), np.nan, dtype=np.float32)
        self._growth = Growth(policy.window, policy.warmup_steps, count)
        # Steps since the first of the present samples in a row that found the rows nearly alike; 0: they are not.
        self._alike: Ints = np.zeros((count, 3), dtype=np.int64)

        # Whether sampled statistics have been seen at all.
        self._samples = False

        # About the newest step alone, so not part of the state: slots whose saturation asks for a closer look, and
        # what lost its small values.
        self._odd: Bools = np.zeros((count, 3), dtype=np.bool_)
        self._lost: Bools = np.zeros((len(STATISTICS), count, 3), dtype=np.bool_)

        # Where the reported slots go in [layers, roles]; found again when their names change.
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        self._names: tuple[str, ...] = ()
        self._places: Ints = np.zeros(0, dtype=np.int64)
        self._present: Bools = np.zeros((count, 3), dtype=np.bool_)

    def meet(self, slots: SlotStats) -> None:
        """Note which tensors are zero in a run's first step. Raises as `record`."""
        self._find(slots.names)
        self._growth.meet(self._spread(slots.amax))

    def note(self, slots: SlotStats) -> None:
        """Note only a step's scales, to measure growth. Raises as `record`."""
        self._find(slots.names)
        self._growth.note(self._spread(slots.scale), self._spread(slots.amax))

    def record(self, slots: SlotStats, ignore: Bools) -> None:
        """Judge one step and append it.

        ignore: bool [layers], whose values are no evidence. Raises MisuseError for unknown slots.
        """
        self.note(slots)
        values = self._observed(slots)
        values[:, ignore] = np.nan
        values[:, self._growth.unset()] = np.nan
        self._samples = self._samples or not np.isnan(values[_SAMPLED]).all()

        # A saturation this low proves that the whole tensor was flushed to zero. Waiting for the next sample could
        # miss that, so it counts as an underflow of 100%.
        ratio = values[_SATURATION]
        underflow = values[_UNDERFLOW]
        vanished = (ratio > 0) & (ratio < _VANISHED) & np.isnan(underflow)
        values[_UNDERFLOW] = np.where(vanished, np.float32(1), underflow)

        # The exceptions: growth raises limits and excuses clipping, rows that are alike must stay so to count.
        limits = self._limits.repeat(len(self.layers), axis=1)
        headroom = self._growth.headroom()
        limits[_SATURATION] *= headroom
        values[_CENTRED] = self._common_mode(values, limits)
        self._without_clipping(values, headroom)

        # Compare, and append to the windows of the statistics that were measured.
        bad = values * _SIGN > limits * _SIGN
        seen = ~np.isnan(values)
        # In a window 0 means fine, so a bad value of exactly 0 (an SQNR of 0 dB) is kept as the smallest number.
        finite = np.clip(values, -_LARGEST, _LARGEST)
        nonzero = np.where(values == 0, np.float32(_SMALLEST), finite)
        fine = np.where(seen, np.float32(0), values)
        observations = np.where(bad, nonzero, fine)
        appended = np.concatenate([self._recent[1:], observations[None]])
        self._recent = np.where(seen, appended, self._recent)

        # Infinity is no number of octaves beyond a limit: an infinite amax counts once.
        octaves = octaves_beyond(values, limits, _BELOW)
        octaves = np.where(_YES_OR_NO, np.float32(0), octaves)
        self._score.add(seen, bad, octaves)

        # What the next step may have to be measured for, before any evidence is complete.
        faint = (ratio > 0) & (ratio < _FAINT)
        self._odd = bad[_SATURATION] | faint
        self._lost = bad & (octaves >= 1) & _OF_SMALL_VALUES

    def _observed(self, slots: SlotStats) -> Floats:
        """The statistics of one step, float32 [statistics, layers, roles]; NaN where not measured. Appends the amax."""
        amax = self._spread(slots.amax)
        self._amax = np.concatenate([self._amax[1:], amax[None]])
        infinite = np.isinf(amax)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            growth = np.where(self._amax[0] > 0, amax / self._amax[0], np.nan)
        return np.stack(
            [
                self._spread(slots.saturation),
                np.where(np.isnan(amax), np.nan, infinite.astype(np.float32)),
                np.where(infinite, np.nan, growth),
                np.where(infinite, np.nan, amax),
                self._spread(slots.clipped),
                self._spread(slots.underflow),
                self._spread(slots.sqnr_db),
                self._spread(slots.even_db),
                self._spread(slots.centred_db),
            ]
        )

    def _common_mode(self, values: Floats, limits: Floats) -> Floats:
        """The centred SQNRs to judge, float32 [layers, roles].

        NaN: not measured, or low but not for long enough. Largest float: cleared, since something else explains it.

        Clipping, or noise that the plain SQNR shows too, also lowers the centred SQNR. The clipped share and the SQNR
        report those, so only a loss that the rows' common part hides counts here. Rows of a healthy run are nearly
        alike for a while after the start: a slot counts once it has been low for `centred_steps` steps.
        """
        centred = values[_CENTRED]
        not_clipped = values[_CLIPPED] <= limits[_CLIPPED]
        common = not_clipped & (values[_SQNR] - centred > _COMMON)
        low = common & (centred < limits[_CENTRED])

        # Count steps, not samples: a count goes on through steps without a sample, and a good sample ends it.
        self._alike = np.where(self._alike > 0, self._alike + 1, 0)
        sampled = np.where(low, np.maximum(self._alike, 1), 0)
        self._alike = np.where(np.isnan(centred), self._alike, sampled)
        lasting = self._alike >= self.policy.centred_steps

        cleared = np.where(common | np.isnan(centred), centred, _LARGEST)
        return np.where(low & ~lasting, np.float32(np.nan), cleared)

    def _without_clipping(self, values: Floats, headroom: Floats) -> None:
        """Excuse in `values`, in place, what tensors clip because they grow: their scales will follow.

        headroom: float32 [layers, roles], how far over its limit a saturation may be.

        A value that is clipped at a saturation of r loses at most 1 - 1/r of itself. From sqnr_db and even_db of a
        young tensor only that much noise is subtracted. The rest was lost to something else and is still judged.
        """
        ratio = values[_SATURATION]
        clipped = values[_CLIPPED]
        grown = (headroom > 1) & (ratio <= headroom)
        young = grown & self._growth.young() & (ratio > 1)

        # Noise and energy are shares of the tensor's energy. Clipped values are the largest and may hold all of the
        # energy, so in sqnr_db any clipped value counts fully; in even_db elements weigh by their number.
        with np.errstate(divide="ignore", invalid="ignore"):
            cut = np.where(young, (1 - 1 / ratio) ** 2, 0)
            for place, share in ((_SQNR, np.sign(clipped)), (_EVEN, clipped)):
                measured = values[place]
                noise = 10 ** (-measured / 10)
                rest = noise - np.nan_to_num(share) * cut
                decibels = -10 * np.log10(np.maximum(rest, _SMALLEST))
                excused = young & ~np.isnan(measured)
                values[place] = np.where(excused, decibels, measured)
        values[_CLIPPED] = np.where(grown & ~np.isnan(clipped), 0, clipped)

    def suspicious(self, among: Bools) -> bool:
        """Whether any layer in `among` (bool [layers]) gives reason to measure every statistic at every step.

        One reason is a sampled statistic whose newest observation was bad. Another is the newest saturation: bad, or so
        low that small values may be lost, since the tensor shrank or follows one that was far larger.
        """
        newest = np.nan_to_num(self._recent[-1]) != 0
        sampled = newest[_SAMPLED][:, among].any()
        return bool(sampled or self._odd[among].any())

    def forget(self, layers: Bools) -> None:
        """Drop the observations of `layers` (bool [layers]): their precision changed."""
        self._recent[:, :, layers] = np.nan
        self._score.forget((slice(None), layers))

    def over(self) -> Bools:
        """Where there is evidence enough to leave FP8: bool [statistics, layers, roles]."""
        return self._score.over()

    def lost(self) -> Bools:
        """Where the newest step lost small values, an octave or more beyond: bool [statistics, layers, roles]."""
        return self._lost

    def clean(self) -> Bools:
        """Which layers have no bad value in a full window: bool [layers].

        Where sampled statistics exist, their last `hits` samples count: a full window of them would take too long.
        """
        # Both are [window, statistics, layers, roles].
        seen = ~np.isnan(self._recent)
        bad = seen & (self._recent != 0)

        # The saturation is measured at every step, so it tells whether a slot's window is full.
        slot_full = seen[:, _SATURATION].all(axis=0) | ~self._present
        full = slot_full.all(axis=-1)
        steady = full & ~bad[:, ~_SAMPLED].any(axis=(0, 1, 3))
        if not self._samples:
            return steady

        # A slot without values (a gradient that is all zero) has no samples: one role that has them is enough.
        newest = slice(-self.policy.hits, None)
        sampled = seen[newest, _SAMPLED].all(axis=0).any(axis=0).any(axis=-1)
        return steady & sampled & ~bad[newest, _SAMPLED].any(axis=(0, 1, 3))

    def excess(self, layers: Ints) -> Floats:
        """The factor by which the worst value of each of `layers` is beyond its limit: float32 [len(layers)]."""
        values = np.nan_to_num(self._recent[:, :, layers])
        with np.errstate(over="ignore"):
            ratio = values / self._limits
            decibels = 10.0 ** ((self._limits - values) / 20.0)
        factors = np.where(values == 0, 0.0, np.where(_BELOW, decibels, ratio))
        return np.nan_to_num(factors).max(axis=(0, 1, 3))

    def limit(self, statistic: str, role: str) -> float:
        """The limit of a statistic, without what growth adds to it."""
        return float(self._limits[_NAMES.index(statistic), 0, ROLES.index(role)])

    def describe(self, layer: int, over: Bools) -> dict[str, dict[str, Any]]:
        """For every slot of a layer that is `over`: the values beyond their limits, oldest first, and its amaxes."""
        slots: dict[str, dict[str, Any]] = {}
        for number, role in zip(*np.nonzero(over[:, layer]), strict=True):
            values = np.nan_to_num(self._recent[:, number, layer, role])
            slot = f"{self.layers[layer]}.{ROLES[role]}"
            figures = slots.setdefault(slot, {})
            name = _NAMES[int(number)]
            figures[name] = [_figure(value) for value in values[values != 0]]

        for slot, figures in slots.items():
            role_name = slot.rpartition(".")[2]
            amaxes = self._amax[:, layer, ROLES.index(role_name)]
            figures["amax"] = [_figure(value) for value in amaxes[~np.isnan(amaxes)]]
        return slots

    def state_dict(self) -> Meta:
        """JSON-able."""
        arrays = {
            "recent": self._recent,
            "amax": self._amax,
            **self._growth.arrays(),
            "score": self._score.value,
            "bad": self._score.bad,
        }
        meta: dict[str, Any] = {}
        for name, values in arrays.items():
            listed = _listed(values)
            meta[name] = listed
        meta["samples"] = self._samples
        meta["alike"] = self._alike.ravel().tolist()
        return meta

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of the same layers and window gave."""
        self._recent = _array(meta["recent"]).reshape(self._recent.shape)
        self._amax = _array(meta["amax"]).reshape(self._amax.shape)
        self._samples = bool(meta["samples"])
        growth = {name: _array(meta[name]) for name in self._growth.arrays()}
        self._growth.restore(growth)
        self._alike = np.array(meta["alike"], dtype=np.int64).reshape(self._alike.shape)
        self._score.restore(_array(meta["score"]), _array(meta["bad"]))

    def _spread(self, values: Floats) -> Floats:
        """[slots] -> [layers, roles], NaN for slots that are not reported."""
        spread = np.full(len(self.layers) * 3, np.nan, dtype=np.float32)
        spread[self._places] = values
        return spread.reshape(-1, 3)

    def _find(self, names: tuple[str, ...]) -> None:
        """Look up the places of `names`, unless they are those of the step before. Raises MisuseError."""
        if names is not self._names and names != self._names:
            self._place(names)

    def _place(self, names: tuple[str, ...]) -> None:
        unknown: list[str] = []
        places: list[int] = []
        for name in names:
            layer, _, role = name.rpartition(".")
            if layer in self._index and role in ROLES:
                places.append(self._index[layer] * 3 + ROLES.index(role))
            else:
                unknown.append(name)
        if unknown:
            raise MisuseError(unknown_names(unknown, "slots"))

        # Slots lie in a table of layers and roles; a backend need not have all of them.
        self._places = np.array(places, dtype=np.int64)
        self._present[:] = False
        self._present.reshape(-1)[self._places] = True
        self._names = names


def unknown_names(names: Sequence[str], kind: str) -> Problem:
    """The problem to report when facts name layers that are not among the plan's."""
    what = f"{kind} that do not belong to the plan's FP8 layers: {', '.join(names)}"
    roles = ", ".join(ROLES)
    fix = f"give the controller every FP8 layer; slots are <layer>.<role> with role one of {roles}"
    return Problem(what, "step facts", fix=fix)


def _figure(value: float) -> float:
    """Four significant digits; the largest float32 for an infinity, which strict JSON does not have."""
    bounded = min(max(float(value), -_LARGEST), _LARGEST)
    return float(f"{bounded:.4g}")


def _listed(values: Floats) -> list[float | None]:
    """The values as JSON takes them: None for NaN, the largest float32 for infinity."""
    listed: list[float | None] = []
    for value in values.ravel().tolist():
        is_nan = value != value
        listed.append(None if is_nan else min(value, _LARGEST))
    return listed


def _array(values: Sequence[float | None]) -> Floats:
    given = [np.nan if value is None else value for value in values]
    return np.array(given, dtype=np.float32)
