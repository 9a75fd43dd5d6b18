"""FP8 state worth knowing of: infinities taken out of amax histories, and slots that never see a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import some
from harness.core.facts import SlotStats, StepFacts, Verdict
from harness.core.protocols import Meta

NAMED_IN_TEXT = 5


class Fp8Monitor:
    """Reports scrubbed infinities and dead slots; informational, every verdict is healthy.

    dead_after: applied steps in a row with amax 0 that make a slot dead; each slot is reported once.

    Verdicts: `fp8.scrubbed` (once per streak), `fp8.dead`, else `fp8.ok`. When both are due, `fp8.dead` follows one
    step later.
    """

    def __init__(self, dead_after: int = 50) -> None:
        self.dead_after = dead_after
        self._names: tuple[str, ...] = ()
        self._zeros: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._reported: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._scrubbing = False

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        slots = facts.slots
        if slots is None:
            return Verdict("fp8.ok", facts.step)
        if slots.names is not self._names and slots.names != self._names:
            self._align(slots.names)
        if facts.applied:
            self._zeros = np.where(slots.amax == 0, self._zeros + 1, 0)
        was_scrubbing, self._scrubbing = self._scrubbing, slots.scrubbed > 0
        if self._scrubbing and not was_scrubbing:
            return _scrubbed(facts.step, slots)
        dead = (self._zeros >= self.dead_after) & ~self._reported
        if not dead.any():
            return Verdict("fp8.ok", facts.step)
        self._reported |= dead
        names = [slots.names[index] for index in np.flatnonzero(dead)]
        return Verdict(
            "fp8.dead",
            facts.step,
            f"{len(names)} FP8 tensors were all zero for {self.dead_after} steps: {some(names, NAMED_IN_TEXT)}",
            evidence={"slots": names, "steps": self.dead_after},
        )

    def _align(self, names: tuple[str, ...]) -> None:
        """Carry the counts over to the slots as they are named now (first step, or first after a resume)."""
        zeros = dict(zip(self._names, self._zeros.tolist(), strict=True))
        reported = dict(zip(self._names, self._reported.tolist(), strict=True))
        self._names = names
        self._zeros = np.array([zeros.get(name, 0) for name in names], dtype=np.int64)
        self._reported = np.array([reported.get(name, False) for name in names], dtype=np.bool_)

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {
            "names": list(self._names),
            "zeros": self._zeros.tolist(),
            "reported": self._reported.tolist(),
            "scrubbing": self._scrubbing,
        }

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._names = tuple(meta["names"])
        self._zeros = np.array(meta["zeros"], dtype=np.int64)
        self._reported = np.array(meta["reported"], dtype=np.bool_)
        self._scrubbing = bool(meta["scrubbing"])


def _scrubbed(step: int, slots: SlotStats) -> Verdict:
    infinite = [slots.names[index] for index in np.flatnonzero(~np.isfinite(slots.amax))]
    where = f": {some(infinite, NAMED_IN_TEXT)}" if infinite else ""
    return Verdict(
        "fp8.scrubbed",
        step,
        f"{slots.scrubbed} infinite amax values were taken out of the histories, scales kept{where}",
        evidence={"scrubbed": slots.scrubbed, "slots": infinite},
    )
