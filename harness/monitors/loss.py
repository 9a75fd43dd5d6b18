"""Loss spikes by robust statistics: the median and MAD of recent log losses, deaf to the outliers it looks for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from harness.core.facts import Continue, Rollback, StepFacts, Verdict
from harness.core.protocols import Meta

ARMED_AFTER = 16
MAD_TO_SIGMA = 1.4826
"""1 / Phi^-1(3/4): makes the median absolute deviation of a normal sample an estimate of its standard deviation."""
SIGMA_FLOOR = 0.01
"""Log units, about 1% of the loss: without it a very quiet window would call ordinary noise a spike."""


class LossMonitor:
    """Finds losses far above the recent ones.

    A loss spikes when log(loss) > median + spike_sigma * sigma, with sigma = max(0.01, 1.4826 * MAD about the falling
    trend), over the last `spike_window` losses that were applied, finite and not spikes. Armed after 16 of them (or
    `spike_window`, if that is less). Losses of zero or below have no logarithm and are not judged.

    Verdicts: `loss.spike` (unhealthy; proposes a rollback past the spiking windows after `spike_steps` in a row),
    else `loss.ok`. A step that was not applied neither extends nor ends a row: it left the weights as they were.
    """

    def __init__(self, spike_window: int, spike_sigma: float, spike_steps: int) -> None:
        self.spike_sigma = spike_sigma
        self.spike_steps = spike_steps
        self._logs: deque[float] = deque(maxlen=spike_window)
        self._armed_after = min(ARMED_AFTER, spike_window)
        self._spiking: list[int] = []

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        quiet = Verdict("loss.ok", facts.step)
        if not facts.applied or not math.isfinite(facts.loss) or facts.loss <= 0:
            return quiet
        value = math.log(facts.loss)
        if len(self._logs) >= self._armed_after:
            centre = median(self._logs)
            sigma = max(SIGMA_FLOOR, MAD_TO_SIGMA * _spread(list(self._logs)))
            if value > centre + self.spike_sigma * sigma:
                return self._spike(facts, math.exp(centre), (value - centre) / sigma)
        self._logs.append(value)
        self._spiking.clear()
        return quiet

    def _spike(self, facts: StepFacts, usual: float, sigmas: float) -> Verdict:
        self._spiking.append(facts.window)
        run = len(self._spiking)
        what = f"loss {facts.loss:.4g} against a median of {usual:.4g} ({sigmas:.1f} sigmas), window {facts.window}"
        proposal: Continue | Rollback = Continue()
        if run >= self.spike_steps:
            proposal = Rollback(f"the loss spiked {run} steps in a row (last: {what})", tuple(self._spiking))
        return Verdict(
            "loss.spike",
            facts.step,
            what,
            healthy=False,
            proposal=proposal,
            evidence={
                "loss": facts.loss,
                "median": usual,
                "sigmas": sigmas,
                "window": facts.window,
                "consecutive": run,
            },
        )

    def state_dict(self) -> Meta:
        """JSON-able; a resumed monitor is armed at once."""
        return {"logs": list(self._logs), "spiking": list(self._spiking)}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._logs = deque(meta["logs"], maxlen=self._logs.maxlen)
        self._spiking = list(meta["spiking"])


def _spread(logs: list[float]) -> float:
    """Median absolute deviation about the falling trend, the line through the medians of the two halves.

    The line is the first step of Tukey's resistant line (Exploratory Data Analysis, 1977, with halves for thirds).
    Without it the steep fall at the start of a run counts as noise and hides one tenfold spike in seven. A rising trend
    is left in: it is no sign of health that should make the detector keener.
    """
    half = len(logs) // 2
    if not half:
        return 0.0
    slope = min(0.0, (median(logs[half:]) - median(logs[:half])) / (len(logs) / 2))
    level = [value - slope * place for place, value in enumerate(logs)]
    centre = median(level)
    return median(abs(value - centre) for value in level)
