"""Storms: saturation or underflow in many FP8 slots at once. `fallback` judges and moves single layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.core.errors import some
from harness.core.facts import ROLES, SlotStats, StepFacts, Verdict, jsonable
from harness.monitors.base import Bools, Floats, KeptWindow, MonitorContext

SHARE = 0.25
"""A step is bad if more than this share of the tensors in FP8 are over their limits. For underflow only the sampled
ones count."""
STEPS = 3
"""Bad steps in a row (samples, for underflow) that make a storm."""
WORST_IN_TEXT = 3
WORST_IN_EVIDENCE = 32
_Storm = tuple[str, str, dict[str, Any]]
"""Kind, text and evidence of the verdict on a storm."""


class Fp8StormMonitor(KeptWindow):
    """Reports storms: many FP8 tensors over their limits at once. The fallback judges and moves single layers.

    saturation: limit of the ratio amax * scale / fp8_max for each role, in the order of ROLES.
    underflow: limit of the share of non-zero values flushed to zero.
    warmup_steps: applied steps at the start that are not judged, while scales are still 1.

    Verdicts, healthy, since clipping costs accuracy and whether the run suffers is for the loss to say:
    `fp8.saturation`, `fp8.underflow`, each once per streak, else `fp8.ok`. When both are due, `fp8.underflow` follows
    one step later.
    """

    key = "fp8_storm"
    kept = ("streaks", "due")

    def __init__(
        self,
        saturation: Sequence[float],
        underflow: float,
        warmup_steps: int = 2,
    ) -> None:
        self.saturation = np.array(saturation, dtype=np.float32)
        self.underflow = underflow
        self.warmup_steps = warmup_steps
        self._streaks = {"saturation": 0, "underflow": 0}
        self._due: _Storm | None = None
        self._names: tuple[str, ...] = ()
        self._limits: Floats = np.zeros(0, dtype=np.float32)

    @classmethod
    def build(cls, context: MonitorContext) -> Fp8StormMonitor | None:
        """For runs with FP8 layers: with the fallback's limits, whether layers may fall back or not."""
        if not context.layers:
            return None
        limits = context.fallback
        saturation = [getattr(limits, f"saturation_{role}") for role in ROLES]
        return cls(saturation, limits.underflow, warmup_steps=limits.warmup_steps)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        found: list[_Storm] = [] if self._due is None else [self._due]
        slots = facts.slots
        usable = facts.applied and facts.applied_steps > self.warmup_steps
        if slots is not None and usable and not facts.fell_back_to:
            found += self._judge(slots, facts.demoted)

        # One verdict a step: the second storm waits for the next one.
        self._due = found[1] if len(found) > 1 else None
        if not found:
            return Verdict("fp8.ok", facts.step)
        kind, text, evidence = found[0]
        code = "fp8.saturation" if kind == "saturation" else "fp8.underflow"
        return Verdict(code, facts.step, text, evidence=evidence)

    def _judge(self, slots: SlotStats, demoted: Sequence[str]) -> list[_Storm]:
        """The storms that this step completes."""
        if slots.names is not self._names and slots.names != self._names:
            self._names = slots.names
            roles = [ROLES.index(name.rpartition(".")[2]) for name in slots.names]
            self._limits = self.saturation[roles]

        # Demoted layers are measured as if they were quantised, but nothing of theirs is clipped.
        in_fp8 = np.ones(len(slots.names), dtype=np.bool_)
        if demoted:
            in_fp8 &= [name.rpartition(".")[0] not in demoted for name in slots.names]

        storms: list[_Storm] = []
        ratio = "are far over their format's largest value, by ratio"
        over = slots.saturation > self._limits
        self._extend_streak("saturation", slots.saturation, over, in_fp8, ratio, storms)
        share = "lose many of their values to zero, by share"
        over = slots.underflow > self.underflow
        self._extend_streak("underflow", slots.underflow, over, in_fp8, share, storms)
        return storms

    def _extend_streak(
        self,
        kind: str,
        values: Floats,
        over: Bools,
        in_fp8: Bools,
        what: str,
        storms: list[_Storm],
    ) -> None:
        """Extend or end the streak of bad steps of one kind; add the storm that it completes to `storms`."""
        judged = in_fp8 & ~np.isnan(values)
        if not judged.any():  # not sampled in this step
            return
        over = judged & over
        bad = over.sum() > SHARE * judged.sum()
        self._streaks[kind] = self._streaks[kind] + 1 if bad else 0
        # Not again in a longer streak.
        if self._streaks[kind] == STEPS:
            text, evidence = self._describe(self._names, values, over, int(judged.sum()), what)
            storms.append((kind, text, evidence))

    def _describe(
        self,
        names: tuple[str, ...],
        values: Floats,
        over: Bools,
        judged: int,
        what: str,
    ) -> tuple[str, dict[str, Any]]:
        """Text and evidence of a storm, the worst tensors first."""
        worst = sorted(np.flatnonzero(over).tolist(), key=lambda place: (-values[place], place))
        named = [f"{names[place]} {values[place]:.3g}" for place in worst]
        shown = some(named, WORST_IN_TEXT)
        text = f"{len(worst)} of {judged} FP8 tensors {what}, {STEPS} times in a row: {shown}"
        figures: dict[str, Any] = {}
        for place in worst[:WORST_IN_EVIDENCE]:
            figures[names[place]] = jsonable(float(values[place]))
        return text, {"slots": figures, "count": len(worst), "of": judged}
