"""Clipping that is the rule: nearly every update of the run is clipped.

Clipping is meant for rare large gradients. Where it acts on nearly every update, the limit sets the length of all
steps, and the learning rate means little. This monitor reports that and does no more.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from harness.core.facts import StepFacts, Verdict
from harness.monitors.base import KeptWindow, MonitorContext


class ClippingMonitor(KeptWindow):
    """Reports when nearly every update is clipped.

    max_grad_norm: the norm to which the run clips.
    warmup_steps: applied steps of the learning rate's warm-up. They do not count: gradients of an untrained model are
    large.
    share: of the last `window` applied steps; more clipped ones are reported.

    A streak ends when under half of that share are clipped, so a share that wavers about the limit is reported once.

    Verdicts: `gradient.clipping` (healthy, once per streak), else `clipping.ok`.
    """

    key = "clipping"
    kept = ("norms", "told")

    def __init__(
        self, max_grad_norm: float, warmup_steps: int, share: float = 0.95, window: int = 200
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.warmup_steps = warmup_steps
        self.share = share
        self._norms: deque[float] = deque(maxlen=window)
        # Whether the present streak was reported. Checkpoints have it under the name "told".
        self._told = False

    @classmethod
    def build(cls, context: MonitorContext) -> ClippingMonitor:
        """For every run."""
        return cls(context.max_grad_norm, context.warmup_steps, context.guard.clipping_share)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; a skipped step does not count."""
        quiet = Verdict("clipping.ok", facts.step)
        if not facts.applied or facts.applied_steps <= self.warmup_steps:
            return quiet
        self._norms.append(facts.grad_norm)
        count = len(self._norms)
        if count != self._norms.maxlen:
            return quiet

        # A streak begins at `share`, and goes on until under half of that is clipped.
        clipped = sum(norm > self.max_grad_norm for norm in self._norms)
        share = clipped / count
        was_told = self._told
        least = self.share / 2 if was_told else self.share
        self._told = share >= least
        if was_told or not self._told:
            return quiet

        usual = median(self._norms)
        text = (
            f"{share:.0%} of the last {count} updates were clipped: max_grad_norm is "
            f"{self.max_grad_norm:g}, the median gradient norm {usual:.4g}. Clipping bounds what breaks a run and does "
            "not mend it: now the limit, not the gradient, sets the length of every step. Lower the learning rate, "
            "look for a loss that is summed where it should be averaged, or raise max_grad_norm above the usual norm"
        )
        evidence = {"share": share, "median": usual, "max_grad_norm": self.max_grad_norm}
        return Verdict("gradient.clipping", facts.step, text, evidence=evidence)
