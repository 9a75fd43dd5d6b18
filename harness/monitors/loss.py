"""Loss spikes by robust statistics: the median and MAD of recent log losses, deaf to the outliers it looks for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from harness.core.facts import Continue, Limits, Rollback, StepFacts, Verdict, jsonable
from harness.core.protocols import Meta
from harness.monitors.robust import AHEAD, ARMED_AFTER, Level, from_log, level, why_skipped

JUDGED_AFTER = 16
"""Losses until spikes are told; a limit, which acts by itself, needs twice as many."""
SIGMA_FLOOR = 0.01
"""Log units, about 1% of the loss: without it a very quiet window would call ordinary noise a spike."""


class LossMonitor:
    """Finds losses far above the recent ones, and limits those to come.

    A loss spikes when log(loss) > centre + spike_sigma * max(0.01, sigma), both from the last `spike_window` losses
    that were applied, finite and not spikes (see `robust.level`). Judged after 16 of them (or `spike_window`, if less).
    After 32 (or `spike_window`) every verdict carries that bound as the limit for the update two steps on, which is
    skipped if it is over. Losses of zero or below have no logarithm and are not judged.

    Spikes stay out of the window, so a loss that changes for good by more than the limit is never accepted: rollbacks
    follow, then the halt, whose text names the key to raise.

    Verdicts: `loss.skip` (over the limit, not applied) and `loss.spike` (a spike that was applied, where no limit was
    in force), both unhealthy; `spike_steps` of them in a row propose a rollback past their windows. Else `loss.ok`.
    A step skipped for another reason neither extends nor ends a row: it left the weights as they were.
    """

    def __init__(self, spike_window: int, spike_sigma: float, spike_steps: int) -> None:
        self.spike_sigma = spike_sigma
        self.spike_steps = spike_steps
        self._logs: deque[float] = deque(maxlen=spike_window)
        self._spiking: list[int] = []

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step, with the limit for the step two on. Deterministic."""
        code, usual = "loss.ok", self._level(1, JUDGED_AFTER)
        why = why_skipped(facts)
        if why == "loss":
            code = "loss.skip"
        elif not why and 0 < facts.loss < math.inf:
            if usual is not None and math.log(facts.loss) > self._bound(usual):
                code = "loss.spike"
            else:
                self._logs.append(math.log(facts.loss))
                self._spiking.clear()
        expected = self._level(AHEAD, ARMED_AFTER)
        limits = Limits() if expected is None else Limits(loss=from_log(self._bound(expected)))
        if code == "loss.ok":
            return Verdict(code, facts.step, limits=limits)
        return self._spike(facts, code, usual, limits)

    def _level(self, ahead: int, armed_after: int) -> Level | None:
        """With the floor on sigma; None while too few losses are known."""
        if len(self._logs) < min(armed_after, self._logs.maxlen or armed_after):
            return None
        found = level(list(self._logs), ahead)
        return Level(found.centre, max(SIGMA_FLOOR, found.sigma))

    def _bound(self, usual: Level) -> float:
        return usual.centre + self.spike_sigma * usual.sigma

    def _spike(self, facts: StepFacts, code: str, usual: Level | None, limits: Limits) -> Verdict:
        self._spiking.append(facts.window)
        run = len(self._spiking)
        expected, sigmas = math.nan, math.nan
        if usual is not None:
            expected, sigmas = from_log(usual.centre), (math.log(facts.loss) - usual.centre) / usual.sigma
        what = f"loss {facts.loss:.4g} against {expected:.4g} ({sigmas:.1f} sigmas), window {facts.window}"
        proposal: Continue | Rollback = Continue()
        if run >= self.spike_steps:
            reason = (
                f"the loss spiked {run} steps in a row (last: {what}); if losses like this are right, raise "
                f"guard.spike_sigma ({self.spike_sigma:g})"
            )
            proposal = Rollback(reason, tuple(self._spiking))
        skipped = "update skipped, weights unchanged: " if code == "loss.skip" else ""
        evidence = {
            "loss": facts.loss,
            "expected": jsonable(expected),
            "sigmas": jsonable(sigmas),
            "limit": jsonable(facts.limits.loss),
            "grad_norm": jsonable(facts.grad_norm),
            "window": facts.window,
            "consecutive": run,
        }
        return Verdict(
            code, facts.step, skipped + what, healthy=False, proposal=proposal, evidence=evidence, limits=limits
        )

    def state_dict(self) -> Meta:
        """JSON-able; a resumed monitor is armed at once."""
        return {"logs": list(self._logs), "spiking": list(self._spiking)}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._logs = deque(meta["logs"], maxlen=self._logs.maxlen)
        self._spiking = list(meta["spiking"])
