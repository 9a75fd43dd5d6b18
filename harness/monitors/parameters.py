"""The norm of the weights: growth that shows a run diverging before its loss does, and weights that are not finite."""

from __future__ import annotations

import math

from harness.core.facts import Continue, Rollback, StepFacts, Verdict, jsonable
from harness.monitors.base import KeptWindow, MonitorContext


class ParameterMonitor(KeptWindow):
    """Watches the L2 norm of the trainable parameters, at the steps in which it was measured.

    growth: a norm this many times the smallest of the last `within` steps is reported. If none was measured in these,
        it is compared with the measurement before. A norm of 0 is not compared with.

    Verdicts: `parameters.growth` (unhealthy until the norm has settled, reported once per streak), else
    `parameters.ok`. If the weights are not finite it proposes a rollback. Such a rollback skips no windows: no bad
    gradient passed the gate, so the data is not to blame.
    """

    key = "parameters"
    kept = ("norms", "growing", "infinite")

    def __init__(self, growth: float = 10.0, within: int = 100) -> None:
        self.growth = growth
        self.within = within
        self._norms: list[tuple[int, float]] = []
        self._growing = False
        self._infinite = False

    @classmethod
    def build(cls, context: MonitorContext) -> ParameterMonitor:
        """For every run."""
        return cls(context.guard.parameter_growth)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; between measurements it stays what it was."""
        # NaN: not measured in this step. Weights with a NaN arrive as an infinite norm.
        norm = facts.param_norm
        if not math.isnan(norm):
            oldest = facts.step - self.within
            recent = [(step, each) for step, each in self._norms if step >= oldest]
            self._norms = recent or self._norms[-1:]
            smallest = min((each for _, each in self._norms), default=math.inf)

            self._infinite = math.isinf(norm)
            if self._infinite:  # neither begins nor ends a streak of growth
                return self._grown(facts, norm, smallest)

            was_growing = self._growing
            self._growing = norm >= self.growth * smallest
            if norm > 0:
                self._norms.append((facts.step, norm))
            if self._growing and not was_growing:
                return self._grown(facts, norm, smallest)

        # Reported before, or not measured: as at the last measurement.
        if self._growing or self._infinite:
            return Verdict("parameters.growth", facts.step, healthy=False)
        return Verdict("parameters.ok", facts.step)

    def _grown(self, facts: StepFacts, norm: float, smallest: float) -> Verdict:
        proposal: Continue | Rollback = Continue()
        if math.isinf(norm):
            # Not the samples' fault, as the gradients were finite: no window is skipped.
            reason = "the weights are not finite"
            proposal = Rollback(reason)
            text = (
                f"{reason} although every gradient was: the optimizer overflowed, something else writes to the "
                "weights, or the memory is faulty. Compare with a run on another card"
            )
        else:
            span = max(self.within, facts.step - self._norms[0][0])
            text = (
                f"the norm of the weights is {norm:.4g}, {norm / smallest:.1f} times its smallest of the last "
                f"{span} steps ({smallest:.4g}): the run diverges even if the loss does not show it yet. "
                "Lower the learning rate, or lengthen the warm-up"
            )
        evidence = {
            "norm": jsonable(norm),
            "smallest": jsonable(smallest),
            "lr": facts.lr,
            "window": facts.window,
        }
        return Verdict(
            "parameters.growth",
            facts.step,
            text,
            healthy=False,
            proposal=proposal,
            evidence=evidence,
        )
