"""FP8 scales of delayed scaling that stand still although they do not fit their tensors.

A correct update scales the largest amax of the history to `margin` powers of two under the format's maximum. With that
scale, the saturation ratio of that step would have been 2^-margin. So while a scale stays the same for longer than the
history reaches back, the largest ratio of all those steps is exactly 2^-margin, whatever the tensor does. (The newest
step is left out: the scale cannot know it.) If the largest ratio is off by more than a factor of two, the scale was not
updated.
"""

from __future__ import annotations

import numpy as np

from harness.core.errors import some
from harness.core.facts import StepFacts, Verdict, jsonable
from harness.monitors.base import Bools, Floats, Ints, KeptWindow, MonitorContext

WORST_IN_TEXT = 3
TOO_FAR = 2.0
"""A frozen scale is reported when its saturation is off by more than this factor."""
_LARGEST = float(np.finfo(np.float32).max)


class Fp8FrozenMonitor(KeptWindow):
    """Finds delayed scales that stand still although they do not fit their tensor's amax.

    history: `fp8.amax_history_len` of the recipe.
    margin: `fp8.margin` of the recipe, powers of two.

    Steps in which a tensor was unused (amax 0), not finite, or not applied change no scale and do not count. Scales are
    judged over stretches of twice as many updates as the history keeps.

    Verdicts, healthy: `fp8.frozen`, once for a scale until it moves, else `fp8.ok`.
    """

    key = "fp8_frozen"
    kept = ("names", "scale", "count", "peak", "newest", "told")

    def __init__(self, history: int, margin: int = 0) -> None:
        self.updates = 2 * history
        self.expected = 2.0**-margin
        self._names: tuple[str, ...] = ()
        self._forget(0)

    def _forget(self, slots: int) -> None:
        """Begin anew with so many slots."""
        self._scale: Floats = np.full(slots, np.nan, dtype=np.float32)
        # Updates since the stretch began, the largest ratio in it but for the newest, and the newest.
        self._count: Ints = np.zeros(slots, dtype=np.int64)
        self._peak: Floats = np.zeros(slots, dtype=np.float32)
        self._newest: Floats = np.zeros(slots, dtype=np.float32)
        # Whether it was reported since the scale last moved. Checkpoints have it under the name "told".
        self._told: Bools = np.zeros(slots, dtype=np.bool_)

    @classmethod
    def build(cls, context: MonitorContext) -> Fp8FrozenMonitor | None:
        """For runs with FP8 layers whose scales follow amax histories."""
        if not context.layers or context.amax_history is None:
            return None
        return cls(context.amax_history, context.margin)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        slots = facts.slots
        if slots is None or facts.fell_back_to:
            return Verdict("fp8.ok", facts.step)
        if slots.names is not self._names and slots.names != self._names:
            self._names = slots.names
            self._forget(len(slots.names))
        if not facts.applied:
            return Verdict("fp8.ok", facts.step)

        # A scale that moved begins a new stretch. The newest ratio enters the largest one only a step later.
        moved = slots.scale != self._scale
        used = np.isfinite(slots.saturation) & (slots.amax > 0) & (slots.scale < _LARGEST)
        self._scale = slots.scale.copy()
        raised = np.where(used, np.maximum(self._peak, self._newest), self._peak)
        self._peak = np.where(moved, 0, raised)
        kept = np.where(moved, 0, self._newest)
        self._newest = np.where(used, slots.saturation, kept)
        self._count = np.where(moved, 0, self._count) + used

        # Judge the stretches that are long enough.
        due = self._count > self.updates
        ratio = self._peak / self.expected
        does_not_fit = (ratio > TOO_FAR) | (ratio < 1 / TOO_FAR)
        frozen = due & does_not_fit & ~self._told
        self._told = (self._told | frozen) & ~moved

        # Start the next stretch: a large ratio at the beginning of this one must not excuse the scale for ever.
        self._count = np.where(due, 0, self._count)
        self._peak = np.where(due, 0, self._peak)
        if not frozen.any():
            return Verdict("fp8.ok", facts.step)
        return self._frozen(facts.step, np.flatnonzero(frozen).tolist(), ratio)

    def _frozen(self, step: int, places: list[int], ratio: Floats) -> Verdict:
        shown: list[str] = []
        figures: dict[str, float | str] = {}
        for place in places:
            name = self._names[place]
            shown.append(f"{name} ({ratio[place]:.3g} times what fits)")
            figures[name] = jsonable(float(ratio[place]))
        text = (
            f"FP8 scales have not moved for {self.updates} updates although they do not fit their tensors: "
            f"{some(shown, WORST_IN_TEXT)}"
        )
        evidence = {"slots": figures, "updates": self.updates}
        return Verdict("fp8.frozen", step, text, evidence=evidence)
