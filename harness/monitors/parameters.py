"""The weights themselves: do they run away?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from harness.core.facts import Continue, Rollback, StepFacts, Verdict, jsonable
from harness.core.protocols import Meta


class ParameterMonitor:
    """Watches the L2 norm of the trainable parameters, at the steps in which it was measured.

    growth: a norm this many times the smallest of the last `within` steps is reported. A norm of 0 is no measure.

    Verdicts: `parameters.growth` (unhealthy until the norm has settled, told once per streak), with a proposal to
    roll back if the weights are not finite; else `parameters.ok`. Such a rollback passes over no windows: the gate
    lets no bad gradient through, so the data is not to blame.
    """

    def __init__(self, growth: float = 10.0, within: int = 100) -> None:
        self.growth = growth
        self.within = within
        self._norms: list[tuple[int, float]] = []
        self._growing = False
        self._infinite = False

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; between measurements it stays what it was."""
        norm = facts.param_norm
        if not math.isnan(norm):
            self._norms = [(step, each) for step, each in self._norms if step >= facts.step - self.within]
            smallest = min((each for _, each in self._norms), default=math.inf)
            self._infinite = math.isinf(norm)
            if self._infinite:  # neither begins nor ends a streak of growth
                return self._grown(facts, norm, smallest)
            told, self._growing = self._growing, norm >= self.growth * smallest
            if norm > 0:
                self._norms.append((facts.step, norm))
            if self._growing and not told:
                return self._grown(facts, norm, smallest)
        bad = self._growing or self._infinite
        return Verdict("parameters.growth" if bad else "parameters.ok", facts.step, healthy=not bad)

    def _grown(self, facts: StepFacts, norm: float, smallest: float) -> Verdict:
        proposal: Continue | Rollback = Continue()
        if math.isinf(norm):
            reason = "the weights are not finite"
            proposal = Rollback(reason)
            text = (
                f"{reason} although every gradient was: the optimizer overflowed, something else writes to the "
                "weights, or the memory is faulty. Compare with a run on another card"
            )
        else:
            text = (
                f"the norm of the weights is {norm:.4g}, {norm / smallest:.1f} times its smallest of the last "
                f"{self.within} steps ({smallest:.4g}): the run diverges even if the loss does not show it yet. "
                "Lower train.lr, or lengthen train.warmup_steps"
            )
        evidence = {"norm": jsonable(norm), "smallest": jsonable(smallest), "lr": facts.lr, "window": facts.window}
        return Verdict("parameters.growth", facts.step, text, healthy=False, proposal=proposal, evidence=evidence)

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {"norms": [list(pair) for pair in self._norms], "growing": self._growing, "infinite": self._infinite}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._norms = [(int(step), float(norm)) for step, norm in meta["norms"]]
        self._growing = bool(meta["growing"])
        self._infinite = bool(meta.get("infinite", False))
