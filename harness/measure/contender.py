"""A run whose steps are timed in turns with those of others: by `harness doctor --speed` and by `make proof`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.core.facts import Halt, Rollback, StepFacts
from harness.core.timing import wait
from harness.core.update import InFlight
from harness.run import Run, next_step


@dataclass
class Contender:
    """A run that trains when it is its turn. As in the trainer's loop, a step is judged while the next one runs.

    rung: its precision, `backend:precision`.
    fused: number of fused blocks: a norm with its Linear, or a whole MLP.
    notes: of its plan, such as why `fp8.backend: auto` took this precision.
    pending: steps that the guard has not judged yet.
    last: the facts of the newest step that was judged.
    demoted: layers that left FP8.
    skipped: updates that were skipped.
    nonfinite: steps whose loss was NaN or infinite.
    """

    run: Run
    rung: str
    fused: int = 0
    notes: Sequence[str] = ()
    pending: deque[InFlight] = field(default_factory=deque)
    last: StepFacts | None = None
    demoted: set[str] = field(default_factory=set)
    skipped: int = 0
    nonfinite: int = 0

    def steps(self, count: int, before: Callable[[], None] = lambda: None) -> float:
        """Train `count` steps. Returns their seconds, including the wait for the last one.

        before: called first; its time counts.
        """
        wait(self.run.engine.device)
        began = time.perf_counter()
        before()
        for _ in range(count):
            self.pending.append(next_step(self.run))
            # One step stays pending while the device computes it. Before a snapshot all are judged, so that no bad step
            # gets into it.
            due = self.run.guard.snapshot_due()
            while len(self.pending) > (0 if due else 1):
                self._judge()
            if due:
                self.run.guard.snapshot()
        while self.pending:
            self._judge()
        wait(self.run.engine.device)
        return time.perf_counter() - began

    def _judge(self) -> None:
        facts = self.pending.popleft().facts()
        self.skipped += not facts.applied
        self.nonfinite += not math.isfinite(facts.loss)
        action = self.run.guard.observe(facts).action
        if isinstance(action, Rollback | Halt):
            raise RuntimeError(
                f"{self.rung}, step {facts.step}: the guard wants {type(action).__name__}"
            )
        self.last = facts
        self.demoted |= set(facts.demoted)

    def last_step(self) -> dict[str, Any]:
        """How the last step was trained: rung, loss, layers that left FP8.

        Raises RuntimeError if its update was skipped, or if its FP8 tensors were all zero: its time would say nothing.
        """
        facts = self.last
        assert facts is not None
        if not facts.applied:
            raise RuntimeError(
                f"{self.rung}: the update of step {facts.step} was skipped, loss {facts.loss}"
            )
        if self.run.precision.layers and (facts.slots is None or not (facts.slots.amax > 0).all()):
            raise RuntimeError(
                f"{self.rung}: step {facts.step} used FP8 tensors that were all zero, or none"
            )
        # A block that went back to eager was timed as something else than it is called.
        eager = self.run.watch.take() if self.run.watch is not None else ""
        return {
            "rung": self.rung,
            "loss": facts.loss,
            "steps": facts.step,
            "note": self.run.precision.note,
            "left_fp8": sorted(self.demoted),
            "fell_back_to_eager": eager,
        }
