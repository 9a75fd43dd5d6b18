"""Has the run stopped learning? The loss stands still, or does so because no gradient is left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import islice
from statistics import median
from typing import Any

from harness.core.facts import StepFacts, Verdict
from harness.core.protocols import Meta

LOOK_EVERY = 16
FIRST_MARK = 512
IMPROVEMENT = 0.005
"""Falls of the median loss under this share are none. The median of 64 losses with 3% noise has a standard error of
0.5%, and a loss that falls as slowly as the -0.07th power of the steps falls by 4.7% while they double."""


class PlateauMonitor:
    """Looks at the loss and the gradient norm of the last `window` applied steps, in two halves.

    The loss stands still if the later half's median is not IMPROVEMENT under the earlier one's. The gradient has
    vanished if, besides, its median norm in the later half is under `vanished` times the largest such median of the
    run so far (single spikes do not count). At applied step 512, 1024, 2048, ... the window's median loss is compared
    with the one at half as many steps: a run on a plateau has gained nothing from all of them.

    Verdicts, healthy: `gradient.vanished`, once until the norm is ten times over the limit again; `loss.plateau`, once
    until a later doubling brought the loss down; else `loss.ok`. Losses of zero or below are on no plateau.
    """

    def __init__(self, window: int = 128, vanished: float = 1e-3) -> None:
        self.vanished = vanished
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window // 2)
        self._peak = 0.0
        self._gone = False
        self._mark: float | None = None
        self._flat = False

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; a step that was not applied counts for nothing."""
        quiet = Verdict("loss.ok", facts.step)
        if not facts.applied or not math.isfinite(facts.loss) or not math.isfinite(facts.grad_norm):
            return quiet
        self._losses.append(facts.loss)
        self._norms.append(facts.grad_norm)
        if facts.applied_steps % LOOK_EVERY or len(self._losses) < (self._losses.maxlen or 0):
            return quiet
        plateau = self._doubled(facts)
        return self._vanishing(facts) or plateau or quiet

    def _vanishing(self, facts: StepFacts) -> Verdict | None:
        norm = median(self._norms)
        self._peak = max(self._peak, norm)
        if self._gone:
            self._gone = norm < 10 * self.vanished * self._peak
            return None
        half = len(self._losses) // 2
        before, now = median(islice(self._losses, half)), median(islice(self._losses, half, None))
        self._gone = norm < self.vanished * self._peak and _stands(before, now)
        if not self._gone:
            return None
        text = (
            f"the gradient norm fell to {norm:.3g}, {norm / self._peak:.1g} of its largest ({self._peak:.3g}, medians "
            f"of {half} steps), and the loss no longer falls ({before:.4g}, then {now:.4g})"
        )
        evidence = {"grad_norm": norm, "largest": self._peak, "loss_before": before, "loss": now}
        return Verdict("gradient.vanished", facts.step, text, evidence=evidence)

    def _doubled(self, facts: StepFacts) -> Verdict | None:
        steps = facts.applied_steps
        if steps < FIRST_MARK // 2 or steps & (steps - 1):
            return None
        before, now = self._mark, median(self._losses)
        self._mark = now
        was_flat, self._flat = self._flat, before is not None and _stands(before, now)
        if before is None or not self._flat or was_flat:
            return None
        text = (
            f"the loss did not fall between updates {steps // 2} and {steps}: {before:.4g}, then {now:.4g} "
            f"(medians of {len(self._losses)} steps)"
        )
        evidence = {"loss_before": before, "loss": now, "from_update": steps // 2, "to_update": steps}
        return Verdict("loss.plateau", facts.step, text, evidence=evidence)

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "peak": self._peak,
            "gone": self._gone,
            "mark": self._mark,
            "flat": self._flat,
        }

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._losses = deque(meta["losses"], maxlen=self._losses.maxlen)
        self._norms = deque(meta["norms"], maxlen=self._norms.maxlen)
        self._peak = float(meta["peak"])
        self._gone = bool(meta["gone"])
        self._mark = meta["mark"]
        self._flat = bool(meta["flat"])


def _stands(before: float, now: float) -> bool:
    return now > 0 and now > (1 - IMPROVEMENT) * before
