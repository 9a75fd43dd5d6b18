"""Skipped updates and gradient growth: is the gradient still fit to train with?"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from harness.core.calibration import is_calibration
from harness.core.facts import Continue, Rollback, StepFacts, Verdict, jsonable
from harness.core.protocols import Meta

ARMED_AFTER = 16


class GradientMonitor:
    """Judges skipped updates, and reports gradient norms that jump.

    max_consecutive_skips: skipped steps in a row that make it propose a rollback past their windows. growth: a norm
    this many times the running median is reported. growth_window: applied steps in that median.

    Verdicts: `nonfinite.skip`, `scaler.calibration` (both unhealthy), `gradient.growth` (healthy, once per streak),
    else `gradient.ok`.
    """

    def __init__(self, max_consecutive_skips: int, growth: float = 10.0, growth_window: int = 100) -> None:
        self.max_consecutive_skips = max_consecutive_skips
        self.growth = growth
        self._norms: deque[float] = deque(maxlen=growth_window)
        self._bad_windows: list[int] = []
        self._skip_scale: float | None = None
        self._growing = False

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; a step that was not applied never enters the median."""
        if not facts.applied:
            return self._skipped(facts)
        self._bad_windows.clear()
        self._skip_scale = None
        return self._applied(facts)

    def _skipped(self, facts: StepFacts) -> Verdict:
        calibrating = is_calibration(facts.loss, facts.loss_scale, self._skip_scale)
        self._skip_scale = facts.loss_scale
        evidence: dict[str, Any] = {
            "window": facts.window,
            "loss": jsonable(facts.loss),
            "grad_norm": jsonable(facts.grad_norm),
            "loss_scale": facts.loss_scale,
        }
        if calibrating:
            text = f"update skipped: the loss scale {facts.loss_scale:g} was too large and is being lowered"
            return Verdict("scaler.calibration", facts.step, text, healthy=False, evidence=evidence)
        self._bad_windows.append(facts.window)
        run = len(self._bad_windows)
        evidence["consecutive"] = run
        what = f"loss {facts.loss:g}, gradient norm {facts.grad_norm:g}, window {facts.window}"
        text = f"update skipped, weights unchanged: {what}"
        proposal: Continue | Rollback = Continue()
        if run >= self.max_consecutive_skips:
            # The whole run of windows goes: which of them broke the state first cannot be told from here.
            proposal = Rollback(f"{run} updates in a row were not finite (last: {what})", tuple(self._bad_windows))
        return Verdict("nonfinite.skip", facts.step, text, healthy=False, proposal=proposal, evidence=evidence)

    def _applied(self, facts: StepFacts) -> Verdict:
        norm = facts.grad_norm
        if not math.isfinite(norm):
            return Verdict("gradient.ok", facts.step)
        usual = median(self._norms) if len(self._norms) >= ARMED_AFTER else None
        self._norms.append(norm)
        was_growing = self._growing
        self._growing = usual is not None and norm >= self.growth * usual > 0
        if usual is None or not self._growing or was_growing:
            return Verdict("gradient.ok", facts.step)
        return Verdict(
            "gradient.growth",
            facts.step,
            f"gradient norm {norm:.4g} is {norm / usual:.1f} times the median of the last steps ({usual:.4g})",
            evidence={"grad_norm": norm, "median": usual, "window": facts.window},
        )

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {
            "norms": list(self._norms),
            "bad_windows": list(self._bad_windows),
            "skip_scale": self._skip_scale,
            "growing": self._growing,
        }

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._norms = deque(meta["norms"], maxlen=self._norms.maxlen)
        self._bad_windows = list(meta["bad_windows"])
        self._skip_scale = meta["skip_scale"]
        self._growing = bool(meta["growing"])
