"""Scales: what makes values fit a format.

FP8 slots of the run as a whole: infinite amaxes, dead slots, storms of saturation or underflow, frozen scales. The loss
scale of fp16: low is worth knowing, collapsed means that nothing is learned any more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import some
from harness.core.facts import ROLES, Halt, SlotStats, StepFacts, Verdict, jsonable
from harness.monitors.base import KeptWindow, MonitorContext

NAMED_IN_TEXT = 5
WORST_IN_TEXT = 3
WORST_IN_EVIDENCE = 32
TOO_FAR = 2.0
_LARGEST = float(np.finfo(np.float32).max)
Bools = npt.NDArray[np.bool_]
_Told = tuple[str, str, dict[str, Any]]
"""Kind, text and evidence of a verdict."""


class Fp8Monitor(KeptWindow):
    """Reports scrubbed infinities and dead slots; informational, every verdict is healthy.

    dead_after: applied steps in a row with amax 0 that make a slot dead; each slot is reported once. Those of a layer
    whose weight was trained in the first step without a call of the layer are reported at once.

    Verdicts: `fp8.scrubbed` (once per streak), `fp8.dead`, else `fp8.ok`. When both are due, `fp8.dead` follows one
    step later.
    """

    key = "fp8"
    kept = ("names", "zeros", "reported", "scrubbing")

    def __init__(self, dead_after: int = 50) -> None:
        self.dead_after = dead_after
        self._names: tuple[str, ...] = ()
        self._zeros: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._reported: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
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
        if facts.trained and (uncalled := self._uncalled(facts.trained, slots)):
            return Verdict(
                "fp8.dead",
                facts.step,
                f"{len(uncalled)} FP8 layers were not called, though their weights got gradients: something reads the "
                f"weight (F.linear(x, layer.weight)), which runs without FP8: {some(uncalled, NAMED_IN_TEXT)}",
                evidence={"layers": uncalled, "steps": 1},
            )
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

    def _uncalled(self, trained: Sequence[str], slots: SlotStats) -> list[str]:
        """Layers among `trained` none of whose tensors a cast has seen; their slots count as reported."""
        seen = {
            name.rpartition(".")[0]
            for name, amax in zip(slots.names, slots.amax.tolist(), strict=True)
            if amax
        }
        uncalled = [layer for layer in trained if layer not in seen]
        for place, name in enumerate(slots.names):
            self._reported[place] |= name.rpartition(".")[0] in uncalled
        return uncalled

    def _align(self, names: tuple[str, ...]) -> None:
        """Carry the counts over to the slots as they are named now (first step, or first after a resume)."""
        zeros = dict(zip(self._names, self._zeros.tolist(), strict=True))
        reported = dict(zip(self._names, self._reported.tolist(), strict=True))
        self._names = names
        self._zeros = np.array([zeros.get(name, 0) for name in names], dtype=np.int64)
        self._reported = np.array([reported.get(name, False) for name in names], dtype=np.bool_)


def _scrubbed(step: int, slots: SlotStats) -> Verdict:
    infinite = [slots.names[index] for index in np.flatnonzero(~np.isfinite(slots.amax))]
    where = f": {some(infinite, NAMED_IN_TEXT)}" if infinite else ""
    return Verdict(
        "fp8.scrubbed",
        step,
        f"{slots.scrubbed} infinite amax values were taken out of the histories, scales kept{where}",
        evidence={"scrubbed": slots.scrubbed, "slots": infinite},
    )


class Fp8StormMonitor(KeptWindow):
    """Reports storms; single layers are the fallback's to judge and to move.

    saturation: limit of the ratio amax * scale / fp8_max for each role, in the order of ROLES. underflow: limit of the
    share of non-zero values flushed to zero. share: more than this share of the tensors that are in FP8 (for underflow:
    and were sampled) over their limits make a bad step; `steps` bad ones in a row (samples, for underflow) a storm.
    warmup_steps: applied steps at the start that are not judged, while scales are still 1.

    Verdicts, healthy (what is cut off costs accuracy; whether the run suffers is for the loss to say):
    `fp8.saturation`, `fp8.underflow`, each once per streak, else `fp8.ok`. When both are due, `fp8.underflow` follows
    one step later.
    """

    key = "fp8_storm"
    kept = ("streaks", "due")

    def __init__(
        self,
        saturation: Sequence[float],
        underflow: float,
        share: float = 0.25,
        steps: int = 3,
        warmup_steps: int = 2,
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

    @classmethod
    def build(cls, context: MonitorContext) -> Fp8StormMonitor | None:
        """For runs with FP8 layers: with the fallback's limits, whether layers may fall back or not."""
        limits = context.fallback
        saturation = [getattr(limits, f"saturation_{role}") for role in ROLES]
        return (
            cls(saturation, limits.underflow, warmup_steps=limits.warmup_steps)
            if context.layers
            else None
        )

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        found: list[_Told] = [] if self._due is None else [self._due]
        slots = facts.slots
        if (
            slots is not None
            and facts.applied
            and not facts.fell_back_to
            and facts.applied_steps > self.warmup_steps
        ):
            found += self._judge(slots, facts.demoted)
        self._due = found[1] if len(found) > 1 else None
        if not found:
            return Verdict("fp8.ok", facts.step)
        kind, text, evidence = found[0]
        return Verdict(
            "fp8.saturation" if kind == "saturation" else "fp8.underflow",
            facts.step,
            text,
            evidence=evidence,
        )

    def _judge(self, slots: SlotStats, demoted: Sequence[str]) -> list[_Told]:
        if slots.names is not self._names and slots.names != self._names:
            self._names = slots.names
            self._limits = self.saturation[
                [ROLES.index(name.rpartition(".")[2]) for name in slots.names]
            ]
        live = np.ones(len(slots.names), dtype=np.bool_)
        if demoted:
            live &= [name.rpartition(".")[0] not in demoted for name in slots.names]
        told: list[_Told] = []
        for kind, values, limits, what in (
            (
                "saturation",
                slots.saturation,
                self._limits,
                "are far over their format's largest value, by ratio",
            ),
            (
                "underflow",
                slots.underflow,
                self.underflow,
                "lose many of their values to zero, by share",
            ),
        ):
            judged = live & ~np.isnan(values)
            if not judged.any():  # not sampled in this step
                continue
            over = judged & (values > limits)
            self._streaks[kind] = (
                self._streaks[kind] + 1 if over.sum() > self.share * judged.sum() else 0
            )
            if self._streaks[kind] == self.steps:
                told.append(
                    (kind, *self._describe(slots.names, values, over, int(judged.sum()), what))
                )
        return told

    def _describe(
        self,
        names: tuple[str, ...],
        values: npt.NDArray[np.float32],
        over: Bools,
        judged: int,
        what: str,
    ) -> tuple[str, dict[str, Any]]:
        worst = sorted(np.flatnonzero(over).tolist(), key=lambda place: (-values[place], place))
        count = len(worst)
        shown = some([f"{names[place]} {values[place]:.3g}" for place in worst], WORST_IN_TEXT)
        text = f"{count} of {judged} FP8 tensors {what}, {self.steps} times in a row: {shown}"
        figures = {
            names[place]: jsonable(float(values[place])) for place in worst[:WORST_IN_EVIDENCE]
        }
        return text, {"slots": figures, "count": count, "of": judged}


class Fp8FrozenMonitor(KeptWindow):
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

    key = "fp8_frozen"
    kept = ("names", "scale", "count", "peak", "newest", "told")

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
        moved = slots.scale != self._scale
        used = np.isfinite(slots.saturation) & (slots.amax > 0) & (slots.scale < _LARGEST)
        self._scale = slots.scale.copy()
        self._peak = np.where(
            moved, 0, np.where(used, np.maximum(self._peak, self._newest), self._peak)
        )
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
            f"tensors: {some(told, WORST_IN_TEXT)}"
        )
        figures = {self._names[place]: jsonable(float(ratio[place])) for place in places}
        return Verdict(
            "fp8.frozen", step, text, evidence={"slots": figures, "updates": self.updates}
        )


class ScalerMonitor(KeptWindow):
    """Watches the loss scale. Without a scaler (scale always 1) it stays silent.

    floor: a calibrated scale below this is reported. Calibrated means that an update was applied under a scale over 1:
    the skips before it are the scaler's search for its range. window, share: more skips than this share of the last
    `window` steps since then are reported. A scaler at rest skips once in its growth interval, which is thousands of
    steps. Skips for bad data, a spike or a loss that is itself not finite are not the scaler's.

    Verdicts: `scaler.low` (healthy, once per streak), `scaler.overflow` (healthy, once until half of the skips are
    gone), `scaler.collapse` (unhealthy, proposes a halt) when a scale that was over 1 reaches 1 or less, else
    `scaler.ok`. When two are due, `scaler.overflow` follows one step later.
    """

    key = "scaler"
    kept = ("scaling", "calibrated", "low", "skips", "overflowing")

    def __init__(self, floor: float = 1024.0, window: int = 200, share: float = 0.05) -> None:
        self.floor = floor
        self.share = share
        self._scaling = False
        self._calibrated = False
        self._low = False
        self._skips: deque[int] = deque(maxlen=window)
        self._overflowing = False

    @classmethod
    def build(cls, context: MonitorContext) -> ScalerMonitor | None:
        """Only where there is a scale: to a run that comes from fp16 and has none, its being 1 would be a collapse."""
        return cls() if context.scales_loss else None

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        if facts.fell_back_to:  # the whole run left fp16, and with it the need for a scale
            return Verdict("scaler.ok", facts.step)
        scale = facts.loss_scale
        self._scaling = self._scaling or scale > 1
        if not self._scaling:
            return Verdict("scaler.ok", facts.step)
        evidence = {"loss_scale": scale, "window": facts.window}
        if scale <= 1:
            reason = (
                f"the loss scale collapsed to {scale:g}: fp16 gradients overflow at any useful scale. "
                "Lower the learning rate or max_grad_norm, check the data, or use a bf16 or fp32 recipe"
            )
            return Verdict(
                "scaler.collapse",
                facts.step,
                reason,
                healthy=False,
                proposal=Halt(reason),
                evidence=evidence,
            )
        self._calibrated = self._calibrated or facts.applied
        if self._calibrated:
            foreign = facts.bad_data or facts.over_limits or not math.isfinite(facts.loss)
            self._skips.append(int(not facts.applied and not foreign))
        was_low, self._low = self._low, self._calibrated and scale < self.floor
        if self._low and not was_low:
            text = f"the loss scale fell to {scale:g}, under {self.floor:g}: small fp16 gradients are flushed to zero"
            return Verdict("scaler.low", facts.step, text, evidence=evidence)
        return self._overflow(facts) or Verdict("scaler.ok", facts.step)

    def _overflow(self, facts: StepFacts) -> Verdict | None:
        skips, limit = sum(self._skips), self.share * (self._skips.maxlen or 0)
        was, self._overflowing = (
            self._overflowing,
            skips > (limit / 2 if self._overflowing else limit),
        )
        if was or not self._overflowing:
            return None
        text = (
            f"{skips} of the last {len(self._skips)} updates overflowed in fp16 and were skipped (loss scale now "
            f"{facts.loss_scale:g}): this is no search for the right scale, which ends after a few steps"
        )
        evidence = {"skips": skips, "steps": len(self._skips), "loss_scale": facts.loss_scale}
        return Verdict("scaler.overflow", facts.step, text, evidence=evidence)
