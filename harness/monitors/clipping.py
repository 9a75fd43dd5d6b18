"""Clipping that is active nearly always: a symptom, not a cure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from harness.core.facts import StepFacts, Verdict
from harness.core.protocols import Meta


class ClippingMonitor:
    """Reports when nearly every update is clipped.

    max_grad_norm: the run's limit. warmup_steps: applied steps of the learning rate's warm-up, which do not count:
    gradients are large while nothing is learned yet. share: of the last `window` applied steps that makes it speak.
    A streak ends once under half of that share are clipped, so that a share that wavers about the limit is told once.

    Verdicts: `gradient.clipping` (healthy, once per streak), else `clipping.ok`.
    """

    def __init__(self, max_grad_norm: float, warmup_steps: int, share: float = 0.95, window: int = 200) -> None:
        self.max_grad_norm = max_grad_norm
        self.warmup_steps = warmup_steps
        self.share = share
        self._norms: deque[float] = deque(maxlen=window)
        self._told = False

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic; a skipped step does not count."""
        quiet = Verdict("clipping.ok", facts.step)
        if not facts.applied or facts.applied_steps <= self.warmup_steps:
            return quiet
        self._norms.append(facts.grad_norm)
        if len(self._norms) != self._norms.maxlen:
            return quiet
        share = sum(norm > self.max_grad_norm for norm in self._norms) / len(self._norms)
        was_told = self._told
        self._told = share >= (self.share / 2 if was_told else self.share)
        if was_told or not self._told:
            return quiet
        usual = median(self._norms)
        text = (
            f"{share:.0%} of the last {len(self._norms)} updates were clipped: train.max_grad_norm is "
            f"{self.max_grad_norm:g}, the median gradient norm {usual:.4g}. Clipping bounds what breaks a run and does "
            "not mend it: now the limit, not the gradient, sets the length of every step. Lower train.lr, look for a "
            "loss that is summed where it should be averaged, or raise train.max_grad_norm above the usual norm"
        )
        evidence = {"share": share, "median": usual, "max_grad_norm": self.max_grad_norm}
        return Verdict("gradient.clipping", facts.step, text, evidence=evidence)

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {"norms": list(self._norms), "told": self._told}

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        self._norms = deque(meta["norms"], maxlen=self._norms.maxlen)
        self._told = bool(meta["told"])
