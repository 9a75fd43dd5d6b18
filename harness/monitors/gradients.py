"""Skipped updates, limits on the gradient norm and its growth: is the gradient still fit to train with?"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

from harness.core.calibration import is_calibration
from harness.core.facts import Continue, Limits, Rollback, StepFacts, Verdict, jsonable
from harness.core.protocols import Meta
from harness.monitors.robust import AHEAD, ARMED_AFTER, from_log, level, why_skipped

SKIP_SIGMA = 6.0
"""Robust sigmas that a norm must be over the usual one, however small `skip_growth` is: for noisy gradients."""
GROWTH = 10.0
GROWTH_WINDOW = 100
"""Applied steps within which a norm that grew `GROWTH`-fold is reported."""
GROWTH_ARMED_AFTER = 16
OLDEST = 10


class GradientMonitor:
    """Judges skipped updates, sets the limits for those to come, and reports gradient norms that grow.

    max_consecutive_skips: skipped steps in a row that make it propose a rollback past their windows. skip_growth,
    clip_growth: how many times the usual norm is not applied, is clipped to. window: applied steps that say what is
    usual, on a log scale (see `robust.level`); armed after 32 of them (or `window`, if that is less).

    The limit for an update two steps on is max(skip_growth, e^(6 sigma)) times the usual norm. Whatever was skipped
    stays out of the window, so a norm that changes for good by more than the limit is never accepted: rollbacks follow,
    then the halt, whose text names the key to raise.

    Verdicts: `nonfinite.skip`, `gradient.skip`, `scaler.calibration` (all unhealthy), `gradient.growth` (healthy, once
    per streak), else `gradient.ok`, all with limits once armed. Updates skipped for their samples or their loss are
    other monitors' to judge; they neither extend nor end a row.
    """

    def __init__(
        self, max_consecutive_skips: int, skip_growth: float = 5.0, clip_growth: float = 3.0, window: int = 40
    ) -> None:
        self.max_consecutive_skips = max_consecutive_skips
        self.skip_growth = skip_growth
        self.clip_growth = clip_growth
        self.window = window
        self._norms: deque[float] = deque(maxlen=max(GROWTH_WINDOW, window))
        self._bad_windows: list[int] = []
        self._skip_scale: float | None = None
        self._growing = False

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step, with the limits for the step two on. Deterministic."""
        match why_skipped(facts):
            case "":
                self._bad_windows.clear()
                self._skip_scale = None
                verdict = self._applied(facts)
            case "norm":
                verdict = self._over(facts)
            case "nonfinite":
                verdict = self._not_finite(facts)
            case _:
                verdict = Verdict("gradient.ok", facts.step)
        return replace(verdict, limits=self._limits())

    def _limits(self) -> Limits:
        if len(self._norms) < min(ARMED_AFTER, self.window):
            return Limits()
        newest = islice(self._norms, max(0, len(self._norms) - self.window), None)
        usual = level([math.log(norm) for norm in newest], AHEAD)
        room = max(math.log(self.skip_growth), SKIP_SIGMA * usual.sigma)
        clip = from_log(usual.centre + math.log(self.clip_growth))
        return Limits(norm=from_log(usual.centre + room), clip=clip)

    def _over(self, facts: StepFacts) -> Verdict:
        limit, usual = facts.limits.norm, median(self._norms) if self._norms else math.nan
        what = (
            f"gradient norm {facts.grad_norm:.4g} is over its limit of {limit:.4g} (median {usual:.4g}), "
            f"loss {facts.loss:.4g}, window {facts.window}"
        )
        evidence = {"grad_norm": facts.grad_norm, "limit": limit, "median": jsonable(usual), "loss": facts.loss}
        advice = f"; if norms like this are right, raise guard.skip_growth ({self.skip_growth:g})"
        return self._skip(facts, "gradient.skip", what, f"were skipped (last: {what}){advice}", evidence)

    def _not_finite(self, facts: StepFacts) -> Verdict:
        calibrating = is_calibration(facts.loss, facts.loss_scale, self._skip_scale)
        self._skip_scale = facts.loss_scale
        evidence: dict[str, Any] = {
            "loss": jsonable(facts.loss),
            "grad_norm": jsonable(facts.grad_norm),
            "loss_scale": facts.loss_scale,
        }
        if calibrating:
            text = f"update skipped: the loss scale {facts.loss_scale:g} was too large and is being lowered"
            evidence["window"] = facts.window
            return Verdict("scaler.calibration", facts.step, text, healthy=False, evidence=evidence)
        what = f"loss {facts.loss:g}, gradient norm {facts.grad_norm:g}, window {facts.window}"
        return self._skip(facts, "nonfinite.skip", what, f"were not finite (last: {what})", evidence)

    def _skip(self, facts: StepFacts, code: str, what: str, why: str, evidence: dict[str, Any]) -> Verdict:
        self._bad_windows.append(facts.window)
        run = len(self._bad_windows)
        proposal: Continue | Rollback = Continue()
        if run >= self.max_consecutive_skips:
            # The whole run of windows goes: which of them broke the state first cannot be told from here.
            proposal = Rollback(f"{run} updates in a row {why}", tuple(self._bad_windows))
        return Verdict(
            code,
            facts.step,
            f"update skipped, weights unchanged: {what}",
            healthy=False,
            proposal=proposal,
            evidence={"window": facts.window, **evidence, "consecutive": run},
        )

    def _applied(self, facts: StepFacts) -> Verdict:
        norm = facts.grad_norm
        if not 0 < norm < math.inf:
            return Verdict("gradient.ok", facts.step)
        usual = self._growth_base()
        self._norms.append(norm)
        was_growing = self._growing
        self._growing = usual is not None and norm >= GROWTH * usual
        if usual is None or not self._growing or was_growing:
            return Verdict("gradient.ok", facts.step)
        return Verdict(
            "gradient.growth",
            facts.step,
            f"gradient norm {norm:.4g} is {norm / usual:.1f} times what it was in the last {GROWTH_WINDOW} steps "
            f"({usual:.4g})",
            evidence={"grad_norm": norm, "median": usual, "window": facts.window},
        )

    def _growth_base(self) -> float | None:
        """The median of the last 100 norms, or of the oldest of them where growth is gradual and that is less."""
        norms = list(self._norms)[-GROWTH_WINDOW:]
        if len(norms) < GROWTH_ARMED_AFTER:
            return None
        return min(median(norms), median(norms[:OLDEST]))

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
