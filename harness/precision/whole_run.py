"""When a whole fp16 run should go on in bf16 or fp32: a pure rule, the same decision on every rank, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.core.calibration import is_calibration
from harness.core.facts import StepFacts, Switch, Verdict, jsonable
from harness.core.protocols import Meta


class WholeRunFallback:
    """Proposes to leave fp16 after `failed_steps` failed updates in a row.

    A failed update is one that was skipped, not for its samples or a spike, although the loss scale was not just
    finding its range (see `is_calibration`): lowering the scale does not help it, more range may. precision: where to
    go, "bf16" or "fp32". failed_steps: None never proposes. It should be under guard.max_consecutive_skips - 1: a
    proposal takes two steps to act, and at that many skips the guard rolls back.

    Verdicts: `precision.lowered`, once (the responder never refuses it), else `precision.ok`. Both healthy: the
    failures are for the gradient monitor to say.
    """

    def __init__(self, failed_steps: int | None, precision: str) -> None:
        self.failed_steps, self.precision = failed_steps, precision
        self._failures = 0
        self._last_scale: float | None = None
        self._proposed = False

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        quiet = Verdict("precision.ok", facts.step)
        if self.failed_steps is None or self._proposed or facts.lowered or facts.bad_data or facts.over_limits:
            return quiet
        if facts.applied:
            self._failures, self._last_scale = 0, None
            return quiet
        self._failures += not is_calibration(facts.loss, facts.loss_scale, self._last_scale)
        self._last_scale = facts.loss_scale
        if self._failures < self.failed_steps:
            return quiet
        self._proposed = True
        evidence = {"failed_steps": self._failures, "loss_scale": facts.loss_scale, "to": self.precision}
        evidence |= {key: jsonable(getattr(facts, key)) for key in ("loss", "grad_norm")}
        text = (
            f"{self._failures} updates in a row failed in fp16 (loss {facts.loss:g}, gradient norm "
            f"{facts.grad_norm:g}, loss scale {facts.loss_scale:g}): the run goes on in {self.precision}, for good"
        )
        return Verdict(
            "precision.lowered", facts.step, text, proposal=Switch(reason=text, lower=self.precision), evidence=evidence
        )

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {"failures": self._failures, "last_scale": self._last_scale, "proposed": self._proposed}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._failures = int(meta["failures"])
        self._last_scale = meta["last_scale"]
        self._proposed = bool(meta["proposed"])
