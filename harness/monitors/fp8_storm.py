"""FP8 trouble of the run as a whole: many tensors over their limits in the same steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import some
from harness.core.facts import ROLES, SlotStats, StepFacts, Verdict, jsonable
from harness.core.protocols import Meta

NAMED_IN_TEXT = 3
NAMED_IN_EVIDENCE = 32
Bools = npt.NDArray[np.bool_]
_Told = tuple[str, str, dict[str, Any]]
"""Kind, text and evidence of a verdict."""


class Fp8StormMonitor:
    """Reports storms; single layers are the fallback's to judge and to move.

    saturation: limit of the ratio amax * scale / fp8_max for each role, in the order of ROLES. underflow: limit of the
    share of non-zero values flushed to zero. share: more than this share of the tensors that are in FP8 (for underflow:
    and were sampled) over their limits make a bad step; `steps` bad ones in a row (samples, for underflow) a storm.
    warmup_steps: applied steps at the start that are not judged, while scales are still 1.

    Verdicts, healthy (what is cut off costs accuracy; whether the run suffers is for the loss to say):
    `fp8.saturation`, `fp8.underflow`, each once per streak, else `fp8.ok`. When both are due, `fp8.underflow` follows
    one step later.
    """

    def __init__(
        self, saturation: Sequence[float], underflow: float, share: float = 0.25, steps: int = 3, warmup_steps: int = 2
    ) -> None:
        self.saturation = np.array(saturation, dtype=np.float32)
        self.underflow = underflow
        self.share = share
        self.steps = steps
        self.warmup_steps = warmup_steps
        self._streaks = {"saturation": 0, "underflow": 0}
        self._due: _Told | None = None
        self._names: tuple[str, ...] = ()
        self._limits: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        found: list[_Told] = [] if self._due is None else [self._due]
        slots = facts.slots
        if slots is not None and facts.applied and not facts.lowered and facts.applied_steps > self.warmup_steps:
            found += self._judge(slots, facts.demoted)
        self._due = found[1] if len(found) > 1 else None
        if not found:
            return Verdict("fp8.ok", facts.step)
        kind, text, evidence = found[0]
        return Verdict(
            "fp8.saturation" if kind == "saturation" else "fp8.underflow", facts.step, text, evidence=evidence
        )

    def _judge(self, slots: SlotStats, demoted: Sequence[str]) -> list[_Told]:
        if slots.names is not self._names and slots.names != self._names:
            self._names = slots.names
            self._limits = self.saturation[[ROLES.index(name.rpartition(".")[2]) for name in slots.names]]
        live = np.ones(len(slots.names), dtype=np.bool_)
        if demoted:
            live &= [name.rpartition(".")[0] not in demoted for name in slots.names]
        told: list[_Told] = []
        for kind, values, limits, what in (
            ("saturation", slots.saturation, self._limits, "are far over their format's largest value, by ratio"),
            ("underflow", slots.underflow, self.underflow, "lose many of their values to zero, by share"),
        ):
            judged = live & ~np.isnan(values)
            if not judged.any():  # not sampled in this step
                continue
            over = judged & (values > limits)
            self._streaks[kind] = self._streaks[kind] + 1 if over.sum() > self.share * judged.sum() else 0
            if self._streaks[kind] == self.steps:
                told.append((kind, *self._describe(slots.names, values, over, int(judged.sum()), what)))
        return told

    def _describe(
        self, names: tuple[str, ...], values: npt.NDArray[np.float32], over: Bools, judged: int, what: str
    ) -> tuple[str, dict[str, Any]]:
        worst = sorted(np.flatnonzero(over).tolist(), key=lambda place: (-values[place], place))
        count = len(worst)
        shown = some([f"{names[place]} {values[place]:.3g}" for place in worst], NAMED_IN_TEXT)
        text = f"{count} of {judged} FP8 tensors {what}, {self.steps} times in a row: {shown}"
        figures = {names[place]: jsonable(float(values[place])) for place in worst[:NAMED_IN_EVIDENCE]}
        return text, {"slots": figures, "count": count, "of": judged}

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {"streaks": dict(self._streaks), "due": self._due}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._streaks = {kind: int(meta["streaks"][kind]) for kind in self._streaks}
        self._due = None if meta["due"] is None else (meta["due"][0], meta["due"][1], meta["due"][2])
