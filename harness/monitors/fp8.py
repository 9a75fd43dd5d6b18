"""FP8 tensors that carry nothing: infinite amaxes that were dropped, and dead slots, whose amax stays 0.

`fp8_storm` judges many slots at once, `fp8_frozen` scales that stand still, `fallback` single layers, which it moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.core.errors import some
from harness.core.facts import SlotStats, StepFacts, Verdict
from harness.monitors.base import Bools, Ints, KeptWindow, MonitorContext

NAMED_IN_TEXT = 5


class Fp8Monitor(KeptWindow):
    """Reports infinite amaxes that were dropped, and dead slots.

    dead_after: applied steps in a row with amax 0 that make a slot dead.

    Each dead slot is reported once. A layer whose weight was trained in the first step although the layer was never
    called is reported at once: something uses the weight without FP8.

    Verdicts, all healthy: `fp8.scrubbed` (once per streak), `fp8.dead`, else `fp8.ok`. When both are due, `fp8.dead`
    follows one step later.
    """

    key = "fp8"
    kept = ("names", "zeros", "reported", "scrubbing")

    def __init__(self, dead_after: int = 50) -> None:
        self.dead_after = dead_after
        self._names: tuple[str, ...] = ()
        self._zeros: Ints = np.zeros(0, dtype=np.int64)
        self._reported: Bools = np.zeros(0, dtype=np.bool_)
        self._scrubbing = False

    @classmethod
    def build(cls, context: MonitorContext) -> Fp8Monitor | None:
        """For runs with FP8 layers."""
        return cls() if context.layers else None

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        slots = facts.slots
        if slots is None:
            return Verdict("fp8.ok", facts.step)
        if slots.names is not self._names and slots.names != self._names:
            self._align(slots.names)
        if facts.applied:
            self._zeros = np.where(slots.amax == 0, self._zeros + 1, 0)

        # Layers that are not called: only a run's first step says which weights were trained.
        uncalled = self._uncalled(facts.trained, slots) if facts.trained else []
        if uncalled:
            shown = some(uncalled, NAMED_IN_TEXT)
            text = (
                f"{len(uncalled)} FP8 layers were not called, though their weights got gradients: something reads the "
                "weight (F.linear(x, layer.weight)), or calls the Linear that was replaced (from a plain list of "
                f"modules), which runs without FP8: {shown}"
            )
            evidence = {"layers": uncalled, "steps": 1}
            return Verdict("fp8.dead", facts.step, text, evidence=evidence)

        # Infinite amaxes, reported at the start of a streak.
        was_scrubbing = self._scrubbing
        self._scrubbing = slots.scrubbed > 0
        if self._scrubbing and not was_scrubbing:
            return _scrubbed(facts.step, slots)

        # Dead slots, each reported once: the layer may be one that this model never needs.
        dead = (self._zeros >= self.dead_after) & ~self._reported
        if not dead.any():
            return Verdict("fp8.ok", facts.step)
        self._reported |= dead
        names = [slots.names[index] for index in np.flatnonzero(dead)]
        shown = some(names, NAMED_IN_TEXT)
        tensors = "1 FP8 tensor was" if len(names) == 1 else f"{len(names)} FP8 tensors were"
        text = f"{tensors} all zero for {self.dead_after} steps: {shown}"
        evidence = {"slots": names, "steps": self.dead_after}
        return Verdict("fp8.dead", facts.step, text, evidence=evidence)

    def _uncalled(self, trained: Sequence[str], slots: SlotStats) -> list[str]:
        """The layers among `trained` that cast no tensor to FP8. Their slots count as reported."""
        called: set[str] = set()
        for name, amax in zip(slots.names, slots.amax.tolist(), strict=True):
            if amax:
                called.add(name.rpartition(".")[0])
        uncalled = [layer for layer in trained if layer not in called]
        for place, name in enumerate(slots.names):
            layer = name.rpartition(".")[0]
            self._reported[place] |= layer in uncalled
        return uncalled

    def _align(self, names: tuple[str, ...]) -> None:
        """Carry the counts over to the present slots by name (first step, or first after a resume)."""
        zeros = dict(zip(self._names, self._zeros.tolist(), strict=True))
        reported = dict(zip(self._names, self._reported.tolist(), strict=True))
        zeros_now = [zeros.get(name, 0) for name in names]
        reported_now = [reported.get(name, False) for name in names]
        self._names = names
        self._zeros = np.array(zeros_now, dtype=np.int64)
        self._reported = np.array(reported_now, dtype=np.bool_)


def _scrubbed(step: int, slots: SlotStats) -> Verdict:
    # Those of this step; the histories may have had others.
    places = np.flatnonzero(~np.isfinite(slots.amax))
    infinite = [slots.names[place] for place in places]
    text = f"{slots.scrubbed} infinite amax values were taken out of the histories, scales kept"
    if infinite:
        text += f": {some(infinite, NAMED_IN_TEXT)}"
    evidence = {"scrubbed": slots.scrubbed, "slots": infinite}
    return Verdict("fp8.scrubbed", step, text, evidence=evidence)
