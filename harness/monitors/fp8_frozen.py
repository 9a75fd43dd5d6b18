"""FP8 scales that no longer follow their tensors: the sign of a broken update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import some
from harness.core.facts import StepFacts, Verdict, jsonable
from harness.core.protocols import Meta

NAMED_IN_TEXT = 3
TOO_FAR = 2.0
_LARGEST = float(np.finfo(np.float32).max)


class Fp8FrozenMonitor:
    """Finds delayed scales that stand still although they do not fit their tensor's amax.

    After a correct update a scale puts the largest amax of the history `margin` powers of two under the format's
    maximum: the saturation ratio of that step would have been 2^-margin. If a scale stays the same for longer than the
    history reaches back, the largest ratio of all those steps (but the newest, which the scale cannot know) is exactly
    that, whatever the tensor does. A largest ratio more than a factor of two away from it is a scale that was not
    updated. Steps in which a tensor was unused (amax 0), not finite, or not applied change no scale and do not count.

    history, margin: `fp8.amax_history_len` and `fp8.margin` of the recipe. Scales are judged over stretches of twice as
    many updates as the history keeps.

    Verdicts, healthy: `fp8.frozen`, once for a scale until it moves, else `fp8.ok`.
    """

    def __init__(self, history: int, margin: int = 0) -> None:
        self.updates = 2 * history
        self.expected = 2.0**-margin
        self._names: tuple[str, ...] = ()
        self._forget(0)

    def _forget(self, slots: int) -> None:
        self._scale: npt.NDArray[np.float32] = np.full(slots, np.nan, dtype=np.float32)
        self._count: npt.NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self._peak: npt.NDArray[np.float32] = np.zeros(slots, dtype=np.float32)
        self._newest: npt.NDArray[np.float32] = np.zeros(slots, dtype=np.float32)
        self._told: npt.NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        slots = facts.slots
        if slots is None or facts.lowered:
            return Verdict("fp8.ok", facts.step)
        if slots.names is not self._names and slots.names != self._names:
            self._names = slots.names
            self._forget(len(slots.names))
        if not facts.applied:
            return Verdict("fp8.ok", facts.step)
        moved = slots.scale != self._scale
        used = np.isfinite(slots.saturation) & (slots.amax > 0) & (slots.scale < _LARGEST)
        self._scale = slots.scale.copy()
        self._peak = np.where(moved, 0, np.where(used, np.maximum(self._peak, self._newest), self._peak))
        self._newest = np.where(used, slots.saturation, np.where(moved, 0, self._newest))
        self._count = np.where(moved, 0, self._count) + used
        due = self._count > self.updates
        ratio = self._peak / self.expected
        frozen = due & ~self._told & ((ratio > TOO_FAR) | (ratio < 1 / TOO_FAR))
        self._told = (self._told | frozen) & ~moved
        # What a stretch began with must not vouch for the scale for ever.
        self._count, self._peak = np.where(due, 0, self._count), np.where(due, 0, self._peak)
        if not frozen.any():
            return Verdict("fp8.ok", facts.step)
        return self._frozen(facts.step, np.flatnonzero(frozen).tolist(), ratio)

    def _frozen(self, step: int, places: list[int], ratio: npt.NDArray[np.float32]) -> Verdict:
        told = [f"{self._names[place]} ({ratio[place]:.3g} times what fits)" for place in places]
        text = (
            f"{len(places)} FP8 scales have not moved for {self.updates} updates although they do not fit their "
            f"tensors: {some(told, NAMED_IN_TEXT)}"
        )
        figures = {self._names[place]: jsonable(float(ratio[place])) for place in places}
        return Verdict("fp8.frozen", step, text, evidence={"slots": figures, "updates": self.updates})

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {
            "names": list(self._names),
            "scale": [None if np.isnan(value) else float(value) for value in self._scale],
            "count": self._count.tolist(),
            "peak": self._peak.tolist(),
            "newest": self._newest.tolist(),
            "told": self._told.tolist(),
        }

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._names = tuple(meta["names"])
        self._scale = np.array([np.nan if value is None else value for value in meta["scale"]], dtype=np.float32)
        self._count = np.array(meta["count"], dtype=np.int64)
        self._peak = np.array(meta["peak"], dtype=np.float32)
        self._newest = np.array(meta["newest"], dtype=np.float32)
        self._told = np.array(meta["told"], dtype=np.bool_)
