"""Scales, which make values fit a format: those of FP8 tensors over the whole run, and the loss scale of fp16.

FP8: infinite amaxes, dead slots (a slot is one quantised tensor of one layer), storms of saturation or underflow in
many slots at once, and scales that stand still. `fallback` judges and moves single layers.

fp16: the loss scale shifts gradients into the format's range. A low scale flushes small gradients to zero, and a scale
that collapsed means that nothing is learned any more.
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
"""A frozen scale is reported when its saturation is off by more than this factor."""
_LARGEST = float(np.finfo(np.float32).max)
Bools = npt.NDArray[np.bool_]
_Storm = tuple[str, str, dict[str, Any]]
"""Kind, text and evidence of the verdict on a storm."""


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

        uncalled = self._uncalled(facts.trained, slots) if facts.trained else []
        if uncalled:
            return Verdict(
                "fp8.dead",
                facts.step,
                f"{len(uncalled)} FP8 layers were not called, though their weights got gradients: something reads the "
                f"weight (F.linear(x, layer.weight)), which runs without FP8: {some(uncalled, NAMED_IN_TEXT)}",
                evidence={"layers": uncalled, "steps": 1},
            )

        was_scrubbing = self._scrubbing
        self._scrubbing = slots.scrubbed > 0
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
        """The layers among `trained` that cast no tensor to FP8. Their slots count as reported."""
        called: set[str] = set()
        for name, amax in zip(slots.names, slots.amax.tolist(), strict=True):
            if amax:
                called.add(name.rpartition(".")[0])
        uncalled = [layer for layer in trained if layer not in called]
        for place, name in enumerate(slots.names):
            self._reported[place] |= name.rpartition(".")[0] in uncalled
        return uncalled

    def _align(self, names: tuple[str, ...]) -> None:
        """Carry the counts over to the present slots by name (first step, or first after a resume)."""
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
    """Reports storms: many FP8 tensors over their limits at once. The fallback judges and moves single layers.

    saturation: limit of the ratio amax * scale / fp8_max for each role, in the order of ROLES.
    underflow: limit of the share of non-zero values flushed to zero.
    share: a step is bad if more than this share of the tensors in FP8 are over their limits. For underflow only the
        sampled ones count.
    steps: bad steps in a row (samples, for underflow) that make a storm.
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
        self._due: _Storm | None = None
        self._names: tuple[str, ...] = ()
        self._limits: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)

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
        values: npt.NDArray[np.float32],
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
        bad = over.sum() > self.share * judged.sum()
        self._streaks[kind] = self._streaks[kind] + 1 if bad else 0
        if self._streaks[kind] == self.steps:
            text, evidence = self._describe(self._names, values, over, int(judged.sum()), what)
            storms.append((kind, text, evidence))

    def _describe(
        self,
        names: tuple[str, ...],
        values: npt.NDArray[np.float32],
        over: Bools,
        judged: int,
        what: str,
    ) -> tuple[str, dict[str, Any]]:
        """Text and evidence of a storm, the worst tensors first."""
        worst = sorted(np.flatnonzero(over).tolist(), key=lambda place: (-values[place], place))
        shown = some([f"{names[place]} {values[place]:.3g}" for place in worst], WORST_IN_TEXT)
        text = f"{len(worst)} of {judged} FP8 tensors {what}, {self.steps} times in a row: {shown}"
        figures: dict[str, Any] = {}
        for place in worst[:WORST_IN_EVIDENCE]:
            figures[names[place]] = jsonable(float(values[place]))
        return text, {"slots": figures, "count": len(worst), "of": judged}


class Fp8FrozenMonitor(KeptWindow):
    """Finds delayed scales that stand still although they do not fit their tensor's amax.

    history: `fp8.amax_history_len` of the recipe.
    margin: `fp8.margin` of the recipe, powers of two.

    A correct update scales the largest amax of the history to `margin` powers of two under the format's maximum. With
    that scale, the saturation ratio of that step would have been 2^-margin. So while a scale stays the same for longer
    than the history reaches back, the largest ratio of all those steps is exactly 2^-margin, whatever the tensor does.
    (The newest step is left out: the scale cannot know it.) If the largest ratio is off by more than a factor of two,
    the scale was not updated.

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
        self._scale: npt.NDArray[np.float32] = np.full(slots, np.nan, dtype=np.float32)
        # Updates since the stretch began, the largest ratio in it but for the newest, and the newest.
        self._count: npt.NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self._peak: npt.NDArray[np.float32] = np.zeros(slots, dtype=np.float32)
        self._newest: npt.NDArray[np.float32] = np.zeros(slots, dtype=np.float32)
        # Whether it was reported since the scale last moved. Checkpoints have it under the name "told".
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
        frozen = due & ~self._told & ((ratio > TOO_FAR) | (ratio < 1 / TOO_FAR))
        self._told = (self._told | frozen) & ~moved

        # Start the next stretch: a large ratio at the beginning of this one must not excuse the scale for ever.
        self._count = np.where(due, 0, self._count)
        self._peak = np.where(due, 0, self._peak)
        if not frozen.any():
            return Verdict("fp8.ok", facts.step)
        return self._frozen(facts.step, np.flatnonzero(frozen).tolist(), ratio)

    def _frozen(self, step: int, places: list[int], ratio: npt.NDArray[np.float32]) -> Verdict:
        shown = [f"{self._names[place]} ({ratio[place]:.3g} times what fits)" for place in places]
        text = (
            f"{len(places)} FP8 scales have not moved for {self.updates} updates although they do not fit their "
            f"tensors: {some(shown, WORST_IN_TEXT)}"
        )
        figures = {self._names[place]: jsonable(float(ratio[place])) for place in places}
        evidence = {"slots": figures, "updates": self.updates}
        return Verdict("fp8.frozen", step, text, evidence=evidence)


class ScalerMonitor(KeptWindow):
    """Watches the loss scale of fp16. Without a scaler (the scale is always 1) it stays silent.

    floor: a calibrated scale below this is reported. A scale is calibrated once an update was applied under a scale
        over 1; the skips before that are the scaler's search for its range.
    window: steps looked back on.
    share: more skips than this share of `window`, once calibrated, are reported.

    A scaler at rest skips once in its growth interval, which is thousands of steps. Skips for bad data, a spike or a
    loss that is itself not finite are not the scaler's.

    Verdicts:
    - `scaler.low`, healthy, once per streak.
    - `scaler.overflow`, healthy, once until half of the skips are gone. If both are due, it follows one step later.
    - `scaler.collapse`, unhealthy: a scale that was over 1 reached 1 or less. Proposes a halt.
    - `scaler.ok`: nothing to report.
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
        """Only where there is a scale. A resume from fp16 into a run without one would take its 1 for a collapse."""
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

        was_low = self._low
        self._low = self._calibrated and scale < self.floor
        if self._low and not was_low:
            text = f"the loss scale fell to {scale:g}, under {self.floor:g}: small fp16 gradients are flushed to zero"
            return Verdict("scaler.low", facts.step, text, evidence=evidence)
        return self._overflow(facts) or Verdict("scaler.ok", facts.step)

    def _overflow(self, facts: StepFacts) -> Verdict | None:
        """The verdict on a scaler that skips too often; None if it does not, or that was reported before."""
        skips = sum(self._skips)
        limit = self.share * (self._skips.maxlen or 0)
        was_overflowing = self._overflowing
        self._overflowing = skips > (limit / 2 if was_overflowing else limit)
        if was_overflowing or not self._overflowing:
            return None
        text = (
            f"{skips} of the last {len(self._skips)} updates overflowed in fp16 and were skipped (loss scale now "
            f"{facts.loss_scale:g}): this is no search for the right scale, which ends after a few steps"
        )
        evidence = {"skips": skips, "steps": len(self._skips), "loss_scale": facts.loss_scale}
        return Verdict("scaler.overflow", facts.step, text, evidence=evidence)
