"""When an FP8 slot is bad, and the last observations of every slot: which were, and by how much. Torch-free."""

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
from harness.monitors.growth import Bools, Floats, Growth

_Numbers = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Statistic:
    """One kind of evidence. sampled: measured in one of `fp8.stats_every` steps only. below: bad under its limit."""

    name: str
    sampled: bool = False
    below: bool = False


STATISTICS = (
    Statistic("saturation"),
    Statistic("nonfinite"),
    Statistic("amax_growth"),
    Statistic("amax_over"),
    Statistic("clipped", sampled=True),
    Statistic("underflow", sampled=True),
    Statistic("sqnr_db", sampled=True, below=True),
    Statistic("even_db", sampled=True, below=True),
    Statistic("centred_db", sampled=True, below=True),
)

_PER_OCTAVE = 0.5
_DECIBELS_PER_OCTAVE = 20 * float(np.log10(2))
_ENOUGH = 0.5
"""Of the last of `hits` bad observations, how much is needed: so much may have been taken away between them."""

_FAINT = np.array([2.0**-6, 2.0**-6, 2.0**-14], dtype=np.float32)
"""Saturation of input, weight and gradient under which a tensor begins to leave what E4M3, or E5M2, resolves."""

_VANISHED = np.array([2.0**-10 / 448, 2.0**-10 / 448, 2.0**-17 / 57344], dtype=np.float32)
"""Saturation under which every value is flushed to zero: half of the smallest value of E4M3, or E5M2, over its largest.
(Gradients in E4M3 vanish before that.)"""

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)
_SAMPLED = np.array([kind.sampled for kind in STATISTICS])
_BELOW = np.array([kind.below for kind in STATISTICS])[:, None, None]
_OF_LOSS = np.array([kind.name in ("underflow", "even_db") for kind in STATISTICS])[:, None, None]
_COUNTED = np.array([kind.name == "nonfinite" for kind in STATISTICS])[:, None, None]
_SATURATION, _CLIPPED, _UNDERFLOW, _SQNR, _EVEN, _CENTRED = (
    [kind.name for kind in STATISTICS].index(name)
    for name in ("saturation", "clipped", "underflow", "sqnr_db", "even_db", "centred_db")
)
_COMMON = 3.0
"""By how many dB the rows' common part must have lowered an SQNR for it to count: half of the energy is that part."""
PRESSING = np.array([kind.name != "centred_db" for kind in STATISTICS])
"""Statistics for which a whole run may leave FP8. What the rows of most layers share may be the model's own."""
_SIGN = np.where(_BELOW, -1, 1).astype(np.float32)


def limits_of(config: FallbackConfig) -> Floats:
    """Limit of each statistic and role, float32 [statistics, 1, 3]; NaN, which no value is beyond, where off."""
    given = config.model_dump()
    given["nonfinite"] = 0.5  # observed as 0 or 1
    rows = [
        [given.get(f"{kind.name}_{role}", given.get(kind.name)) for role in ROLES]
        for kind in STATISTICS
    ]
    return np.array(rows, dtype=np.float32)[:, None, :]


def octaves_beyond(values: _Numbers, limits: _Numbers, below: Bools | bool) -> _Numbers:
    """How far values are beyond their limits, as powers of two; negative within them, 0 for NaN.

    below: those are decibels that should be over their limit.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log2(np.clip(values, _SMALLEST, _LARGEST) / limits)
    return np.nan_to_num(np.where(below, (limits - values) / _DECIBELS_PER_OCTAVE, ratio))


class Score:
    """The evidence of many series at once, see `FallbackConfig`; arrays are float32 of `shape`."""

    def __init__(self, policy: FallbackConfig, shape: tuple[int, ...]) -> None:
        self._hits, window = policy.hits, policy.window
        self._relief = 0.5 / (window - self._hits) if window > self._hits else 1.0
        self._enough = self._hits - _ENOUGH if window > self._hits else float(self._hits)
        self.value: Floats = np.zeros(shape, dtype=np.float32)
        self.bad: Floats = np.zeros(shape, dtype=np.float32)
        """Bad observations since the value was zero, `hits` at most."""

    def add(self, seen: Bools, bad: Bools, octaves: _Numbers) -> None:
        """One observation of those that were seen. octaves: how far the bad ones are beyond their limits."""
        gain = np.where(bad, 1 + _PER_OCTAVE * octaves, -self._relief)
        # No higher than what a window without a bad value takes under `_enough` again.
        value = np.clip(self.value + gain, 0, self._enough + _ENOUGH).astype(np.float32)
        self.value = np.where(seen, value, self.value)
        self.bad = np.where(self.value > 0, np.minimum(self.bad + bad, self._hits), 0).astype(
            np.float32
        )

    def over(self) -> Bools:
        """Evidence enough to leave FP8."""
        return (self.value >= self._enough) & (self.bad >= self._hits)

    def forget(self, place: Any) -> None:
        """Start the series at `place` anew."""
        self.value[place] = self.bad[place] = 0

    def restore(self, value: Floats, bad: Floats) -> None:
        """Be what `value` and `bad` were."""
        self.value = value.reshape(self.value.shape)
        self.bad = bad.reshape(self.bad.shape)


class Evidence:
    """A window of observations for each slot and statistic of `layers`; each statistic has a window of its own.

    Arrays are [window, statistics, layers, roles], newest last: 0 when fine, else the value beyond its limit, NaN when
    there is none yet.
    """

    def __init__(self, policy: FallbackConfig, layers: Sequence[str]) -> None:
        self.policy, self.layers = policy, tuple(layers)
        self._limits = limits_of(policy)
        count = len(self.layers)
        self._recent: Floats = np.full(
            (policy.window, len(STATISTICS), count, 3), np.nan, dtype=np.float32
        )
        # Of the tensors themselves, whatever precision they are multiplied in: a switch does not clear it.
        self._amax: Floats = np.full((policy.window + 1, count, 3), np.nan, dtype=np.float32)
        self._growth = Growth(policy.window, policy.warmup_steps, count)
        # Steps since the first sample of those without a break in which the rows were nearly alike: of tensors, too.
        self._alike: npt.NDArray[np.int64] = np.zeros((count, 3), dtype=np.int64)
        self._score = Score(policy, (len(STATISTICS), count, 3))
        self._samples = False
        # Slots whose newest saturation is a reason to look closely, and what that step lost: no part of the state.
        self._odd: Bools = np.zeros((count, 3), dtype=np.bool_)
        self._lost: Bools = np.zeros((len(STATISTICS), count, 3), dtype=np.bool_)
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        self._names: tuple[str, ...] = ()
        self._places: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._present: Bools = np.zeros((count, 3), dtype=np.bool_)

    def meet(self, slots: SlotStats) -> None:
        """A run's first step: which tensors are zero. Raises as `record`."""
        self._find(slots.names)
        self._growth.meet(self._spread(slots.amax))

    def note(self, slots: SlotStats) -> None:
        """Append a step's scales alone, to know where they go. Raises as `record`."""
        self._find(slots.names)
        self._growth.note(self._spread(slots.scale), self._spread(slots.amax))

    def record(self, slots: SlotStats, ignore: Bools) -> None:
        """Append one step. ignore: bool [layers], whose values say nothing. Raises MisuseError for unknown slots."""
        self.note(slots)
        amax = self._spread(slots.amax)
        self._amax = np.concatenate([self._amax[1:], amax[None]])
        infinite = np.isinf(amax)
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = np.where(self._amax[0] > 0, amax / self._amax[0], np.nan)
        values = np.stack(
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
        values[:, ignore] = np.nan
        values[:, self._growth.unset()] = np.nan
        self._samples = self._samples or not np.isnan(values[_SAMPLED]).all()
        # That all of a tensor was lost takes no sample, and the next one may come when it is over.
        vanished = (
            (values[_SATURATION] > 0)
            & (values[_SATURATION] < _VANISHED)
            & np.isnan(values[_UNDERFLOW])
        )
        values[_UNDERFLOW] = np.where(vanished, np.float32(1), values[_UNDERFLOW])
        limits, headroom = self._limits.repeat(amax.shape[0], axis=1), self._growth.headroom()
        limits[_SATURATION] *= headroom
        values[_CENTRED] = self._common_mode(values, limits)
        self._without_clipping(values, headroom)
        bad = values * _SIGN > limits * _SIGN
        # 0 means fine, so a bad value of exactly 0 (an SQNR of 0 dB) is told as the smallest number.
        told = np.where(values == 0, np.float32(_SMALLEST), np.clip(values, -_LARGEST, _LARGEST))
        hits = np.where(bad, told, np.where(np.isnan(values), values, np.float32(0)))
        ratio = values[_SATURATION]
        self._odd = bad[_SATURATION] | ((ratio > 0) & (ratio < _FAINT))
        seen = ~np.isnan(values)
        self._recent = np.where(seen, np.concatenate([self._recent[1:], hits[None]]), self._recent)
        beyond = np.where(_COUNTED, np.float32(0), octaves_beyond(values, limits, _BELOW))
        self._score.add(seen, bad, beyond)
        self._lost = bad & (beyond >= 1) & _OF_LOSS

    def _common_mode(self, values: Floats, limits: Floats) -> Floats:
        """The centred SQNRs that count, NaN for the others: float32 [layers, roles].

        What is cut off, or lost without a common part, takes the rows' differences with it: clipped share and SQNR say
        so. In a healthy run, too, rows are nearly alike for a while after the start, while it learns what all of them
        have in common: a slot counts once it has been so for `centred_steps` steps.
        """
        centred = values[_CENTRED]
        common = (values[_CLIPPED] <= limits[_CLIPPED]) & (values[_SQNR] - centred > _COMMON)
        low = common & (centred < limits[_CENTRED])
        self._alike = np.where(self._alike > 0, self._alike + 1, 0)
        self._alike = np.where(
            np.isnan(centred), self._alike, np.where(low, np.maximum(self._alike, 1), 0)
        )
        lasting = self._alike >= self.policy.centred_steps
        return np.where(
            low & ~lasting,
            np.float32(np.nan),
            np.where(common | np.isnan(centred), centred, _LARGEST),
        )

    def _without_clipping(self, values: Floats, headroom: Floats) -> None:
        """Take from `values` what growth alone clips: the scale is on its way. In place.

        A value that is cut by r, the saturation, is off by at most 1 - 1/r of itself. What a young tensor loses in
        sqnr_db and even_db beyond what its clipped values can have lost is still judged: it is lost to something else.
        """
        ratio, clipped = values[_SATURATION], values[_CLIPPED]
        grown = (headroom > 1) & (ratio <= headroom)
        young = grown & self._growth.young() & (ratio > 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            cut = np.where(young, (1 - 1 / ratio) ** 2, 0)
            for place, share in ((_SQNR, np.sign(clipped)), (_EVEN, clipped)):
                rest = 10 ** (-values[place] / 10) - np.nan_to_num(share) * cut
                decibels = -10 * np.log10(np.maximum(rest, _SMALLEST))
                values[place] = np.where(young & ~np.isnan(values[place]), decibels, values[place])
        values[_CLIPPED] = np.where(grown & ~np.isnan(clipped), 0, clipped)

    def suspicious(self, among: Bools) -> bool:
        """Whether anything of a layer in `among` (bool [layers]) is reason to measure everything.

        A sampled statistic that was bad in its newest observation; or, in the newest step, a saturation that was bad,
        or so low that what comes of the tensor may be lost: it fell, or something before it was far larger.
        """
        newest = np.nan_to_num(self._recent[-1]) != 0
        return bool(newest[_SAMPLED][:, among].any() or self._odd[among].any())

    def forget(self, layers: Bools) -> None:
        """Start `layers` (bool [layers]) without observations: their precision changed."""
        self._recent[:, :, layers] = np.nan
        self._score.forget((slice(None), layers))

    def over(self) -> Bools:
        """Evidence enough to leave FP8: bool [statistics, layers, roles]."""
        return self._score.over()

    def lost(self) -> Bools:
        """Where the newest step shows small values lost, twice beyond a limit: bool [statistics, layers, roles]."""
        return self._lost

    def clean(self) -> Bools:
        """No bad value in a full window: bool [layers].

        Where sampled statistics exist, their last `hits` samples count: a window of them would be long.
        """
        seen = ~np.isnan(self._recent)
        bad = seen & (self._recent != 0)
        full = (seen[:, 0].all(axis=0) | ~self._present).all(axis=-1)
        steady = full & ~bad[:, ~_SAMPLED].any(axis=0).any(axis=0).any(axis=-1)
        if not self._samples:
            return steady
        seen, bad = (array[-self.policy.hits :, _SAMPLED] for array in (seen, bad))
        # A slot without values (a gradient that is all zero) has no samples: one role that has them is enough.
        sampled = seen.all(axis=0).any(axis=0).any(axis=-1)
        return steady & sampled & ~bad.any(axis=0).any(axis=0).any(axis=-1)

    def excess(self, layers: npt.NDArray[np.int64]) -> Floats:
        """How far the worst value of each of `layers` is beyond its limit, as a factor: float32 [len(layers)]."""
        values = np.nan_to_num(self._recent[:, :, layers])
        with np.errstate(over="ignore"):
            ratio = values / self._limits
            decibels = 10.0 ** ((self._limits - values) / 20.0)
        factors = np.where(values == 0, 0.0, np.where(_BELOW, decibels, ratio))
        return np.nan_to_num(factors).max(axis=(0, 1, 3))

    def describe(self, layer: int, over: Bools) -> dict[str, dict[str, Any]]:
        """For every slot of a layer that is `over`: the values beyond their limits, oldest first, and its amaxes."""
        slots: dict[str, dict[str, Any]] = {}
        for number, role in zip(*np.nonzero(over[:, layer]), strict=True):
            values = np.nan_to_num(self._recent[:, number, layer, role])
            found = slots.setdefault(f"{self.layers[layer]}.{ROLES[role]}", {})
            found[STATISTICS[int(number)].name] = [_figure(value) for value in values[values != 0]]
        for slot, found in slots.items():
            amaxes = self._amax[:, layer, ROLES.index(slot.rpartition(".")[2])]
            found["amax"] = [_figure(value) for value in amaxes[~np.isnan(amaxes)]]
        return slots

    def state_dict(self) -> Meta:
        """JSON-able."""
        arrays = {"recent": self._recent, "amax": self._amax, **self._growth.arrays()}
        arrays |= {"score": self._score.value, "bad": self._score.bad}
        listed = {name: _listed(values) for name, values in arrays.items()}
        return {**listed, "samples": self._samples, "alike": self._alike.ravel().tolist()}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of the same layers and window gave."""
        self._recent = _array(meta["recent"]).reshape(self._recent.shape)
        self._amax = _array(meta["amax"]).reshape(self._amax.shape)
        self._samples = bool(meta["samples"])
        self._growth.restore({name: _array(meta[name]) for name in self._growth.arrays()})
        self._alike = np.array(meta["alike"], dtype=np.int64).reshape(self._alike.shape)
        self._score.restore(_array(meta["score"]), _array(meta["bad"]))

    def _spread(self, values: npt.NDArray[np.float32]) -> Floats:
        """[slots] -> [layers, roles], NaN for slots that are not reported."""
        spread = np.full(len(self.layers) * 3, np.nan, dtype=np.float32)
        spread[self._places] = values
        return spread.reshape(-1, 3)

    def _find(self, names: tuple[str, ...]) -> None:
        if names is not self._names and names != self._names:
            self._place(names)

    def _place(self, names: tuple[str, ...]) -> None:
        parts = [name.rpartition(".") for name in names]
        known = [layer in self._index and role in ROLES for layer, _, role in parts]
        if not all(known):
            unknown = [name for name, ok in zip(names, known, strict=True) if not ok]
            raise MisuseError(unknown_names(unknown, "slots"))
        places = [self._index[layer] * 3 + ROLES.index(role) for layer, _, role in parts]
        self._places = np.array(places, dtype=np.int64)
        self._present[:] = False
        self._present.reshape(-1)[self._places] = True
        self._names = names


def unknown_names(names: Sequence[str], kind: str) -> Problem:
    """The problem of facts that are about other layers than the plan's."""
    return Problem(
        f"{kind} that are not of the plan's FP8 layers: {', '.join(names)}",
        "step facts",
        fix=f"give the controller every FP8 layer; slots are <layer>.<role> with role one of {', '.join(ROLES)}",
    )


def _figure(value: float) -> float:
    """Four digits; the largest float32 for an infinity, which strict JSON does not have."""
    return float(f"{min(max(float(value), -_LARGEST), _LARGEST):.4g}")


def _listed(values: Floats) -> list[float | None]:
    return [None if value != value else min(value, _LARGEST) for value in values.ravel().tolist()]


def _array(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float32)
