"""What FP8 did to each tensor in a rehearsal: the worst figures of every slot, and when it clipped. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.config import FallbackConfig
from harness.core.facts import SlotStats, jsonable
from harness.monitors.evidence import STATISTICS, limits_of, octaves_beyond

# Statistics that are shown, and how the worst of several values is found.
_KEPT = ("saturation", "clipped", "underflow", "sqnr_db", "even_db")
_BELOW = {kind.name: kind.below for kind in STATISTICS}
_PLACE = {kind.name: place for place, kind in enumerate(STATISTICS)}

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SlotRow:
    """The worst figures of one slot in a rehearsal. NaN: never measured.

    layer: as in the journal, with numbers padded. role: "input", "weight" or "grad_output".
    saturation: largest amax * scale / fp8_max; over 1 values were clipped.
    clipped, underflow: largest share of values clipped, and of non-zero values flushed to zero.
    sqnr_db, even_db: lowest SQNR of the whole tensor, and per element, in dB.
    worst: the statistic that is furthest beyond its limit of the recipe's `fallback`, or nearest to it.
    beyond: by how many octaves (factors of two, 6 dB) it is beyond; negative: within.
    """

    layer: str
    role: str
    saturation: float
    clipped: float
    underflow: float
    sqnr_db: float
    even_db: float
    worst: str
    beyond: float

    def as_json(self) -> dict[str, Any]:
        """JSON-able; figures that were not measured are null."""
        found: dict[str, Any] = {"layer": self.layer, "role": self.role}
        for name in (*_KEPT, "beyond"):
            value = getattr(self, name)
            found[name] = None if math.isnan(value) else jsonable(value)
        return {**found, "worst": self.worst}


class SlotRecord:
    """Collects the figures of a branch's slots, step by step.

    policy: the limits to compare with.

    The first `policy.warmup_steps` steps are left out, as in the fallback: scales are not set yet.
    """

    def __init__(self, policy: FallbackConfig) -> None:
        self._policy = policy
        self._skipped = 0
        self._names: tuple[str, ...] = ()
        self._worst: dict[str, Floats] = {}
        # Of each step, float32 [slots]. The clipped share is NaN where it was not sampled.
        self.saturations: list[Floats] = []
        self.clipped: list[Floats] = []

    def take(self, slots: SlotStats | None) -> None:
        """Add one applied step."""
        if slots is None or not slots.names:
            return
        if self._skipped < self._policy.warmup_steps:
            self._skipped += 1
            return
        self._names = slots.names
        self.saturations.append(slots.saturation.astype(np.float32))
        self.clipped.append(slots.clipped.astype(np.float32))
        for name in _KEPT:
            values = getattr(slots, name).astype(np.float32)
            # fmin and fmax pass over NaN, which stands for "not measured".
            worse = np.fmin if _BELOW[name] else np.fmax
            earlier = self._worst.get(name)
            self._worst[name] = values if earlier is None else worse(earlier, values)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the slots, in the order of every array; empty if nothing was measured."""
        return self._names

    def rows(self) -> list[SlotRow]:
        """One row for each slot, the one furthest beyond its limit first."""
        limits = limits_of(self._policy)[:, 0, :]
        roles = {"input": 0, "weight": 1, "grad_output": 2}
        rows: list[SlotRow] = []
        for place, slot in enumerate(self._names):
            layer, _, role = slot.rpartition(".")
            values = {name: float(self._worst[name][place]) for name in _KEPT}
            beyond: dict[str, float] = {}
            for name, value in values.items():
                if not math.isnan(value):
                    limit = limits[_PLACE[name], roles[role]]
                    given = np.array(value, dtype=np.float32)
                    beyond[name] = float(octaves_beyond(given, limit, _BELOW[name]))
            worst = max(beyond, key=beyond.__getitem__, default="")
            rows.append(
                SlotRow(layer, role, **values, worst=worst, beyond=beyond.get(worst, math.nan))
            )
        return sorted(rows, key=_least_beyond)


def _least_beyond(row: SlotRow) -> float:
    return math.inf if math.isnan(row.beyond) else -row.beyond
