"""Logs how the loss scale of fp16 moves: each growth, and each fall once it is over.

A fall at the start of training is the scaler's search for its range, some ten halvings in a row, and at rest one growth
comes every `loss_scale.growth_interval` steps. So a row of falls is one event, and neither kind comes more often than
every GAP steps; an event that waited for that covers all that happened meanwhile. Whether a move is a fault is judged
in `scaler` and `gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.core.facts import StepFacts, Verdict
from harness.core.protocols import Meta
from harness.monitors.base import MonitorContext

GAP = 200
"""Least steps between two events of one kind."""


@dataclass
class _Moves:
    """Changes in one direction that no event has reported.

    count: how many.
    since: the step of the first of them, and `before`, the scale before it.
    logged: the step of the last event; None: there was none.
    """

    count: int = 0
    since: int = 0
    before: float = 0.0
    logged: int | None = None

    def add(self, step: int, before: float) -> None:
        if not self.count:
            self.since, self.before = step, before
        self.count += 1

    def due(self, step: int) -> bool:
        return self.count > 0 and (self.logged is None or step - self.logged >= GAP)

    def take(self, step: int, scale: float) -> tuple[str, dict[str, Any]]:
        """Text and evidence of the event at `step`; the next one begins anew. scale: the present one."""
        said = f"{self.before:g} before step {self.since}, {scale:g} now"
        if self.count > 1:
            said += f", {self.count} times since then"
        evidence = {
            "loss_scale": scale,
            "before": self.before,
            "since": self.since,
            "changes": self.count,
        }
        self.count = 0
        self.logged = step
        return said, evidence


class ScaleMoves:
    """Watches the loss scale of fp16.

    Verdicts, all healthy:
    - `scaler.grew`: the scale went up.
    - `scaler.backed_off`: it went down, and an update has been applied since.
    - `scale_moves.ok`: nothing to log.
    """

    key = "scale_moves"

    def __init__(self) -> None:
        self._scale: float | None = None
        self._up = _Moves()
        self._down = _Moves()

    @classmethod
    def build(cls, context: MonitorContext) -> ScaleMoves | None:
        """Only where there is a scale."""
        return cls() if context.scales_loss else None

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        quiet = Verdict("scale_moves.ok", facts.step)
        # The whole run left fp16: its scale of 1 is no fall.
        if facts.fell_back_to:
            return quiet
        before, self._scale = self._scale, facts.loss_scale
        if before is None:
            return quiet
        scale, step = facts.loss_scale, facts.step
        if scale > before:
            self._up.add(step, before)
        elif scale < before:
            self._down.add(step, before)

        # While updates are skipped the scale still falls.
        if self._down.due(step) and facts.applied:
            said, evidence = self._down.take(step, scale)
            text = f"the loss scale was lowered: {said}"
            return Verdict("scaler.backed_off", step, text, evidence=evidence)
        if self._up.due(step):
            said, evidence = self._up.take(step, scale)
            return Verdict(
                "scaler.grew", step, f"the loss scale was raised: {said}", evidence=evidence
            )
        return quiet

    def state_dict(self) -> Meta:
        """JSON-able; restores every later event exactly."""
        return {"scale": self._scale, "up": asdict(self._up), "down": asdict(self._down)}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave. Raises LookupError or TypeError if it is something else."""
        # Read everything before changing anything.
        scale, up, down = meta["scale"], _Moves(**meta["up"]), _Moves(**meta["down"])
        self._scale, self._up, self._down = scale, up, down
