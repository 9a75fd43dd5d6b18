"""Which FP8 layers should run in BF16, and when a whole run should: the same decision on every rank, no torch.

A slot is bad at a step when one of its statistics is beyond its limit. A layer with a slot and statistic whose score
says that it was bad often enough, and far enough, asks to be demoted (see `FallbackConfig`). Its tensors go on being
measured, as if they were still quantised. It may come back once it stayed for its dwell time, which grows with every
demotion of the same layer, and nothing was bad for a whole window. What is not measured at every step it asks to be
measured at every step, for a window, after anything that is suspicious, and after a switch; and in the first steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.config import FallbackConfig
from harness.core.errors import CheckpointError, MisuseError, Problem
from harness.core.facts import StepFacts, Switch, Verdict, jsonable
from harness.core.protocols import Meta
from harness.monitors.base import KeptWindow, MonitorContext, is_calibration
from harness.monitors.evidence import PRESSING, Bools, Evidence, unknown_names

_NEVER = -1


class FallbackController(KeptWindow):
    """Proposes switches from slot statistics; what really runs where it reads from `facts.demoted`.

    layers: the FP8 layers of the plan, in order. A proposal is not repeated while it is on its way (facts are judged
    one step late), nor for a window after it was refused. Only a completed step is evidence, so no layer ever switches
    before the first step.

    Verdicts, all healthy (clipping costs accuracy; whether the run suffers is for the loss and gradients to say):
    `precision.demote`, `precision.promote` (one verdict carries both as `precision.demote`); when more layers want to
    leave than max_demoted_share allows, `precision.budget` (once per streak) and, if that lasts for a window and
    over_budget says so, `precision.lowered` (the whole run, for good); else `precision.ok`.
    """

    key = "fallback"
    kept = (
        "demoted",
        "fresh",
        "since",
        "demotions",
        "stays",
        "left_at",
        "asked",
        "over_budget_at",
        "stuck_since",
        "lowering",
    )

    def __init__(self, policy: FallbackConfig, layers: Sequence[str]) -> None:
        self.policy = policy
        self.layers = tuple(layers)
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        self._evidence = Evidence(policy, layers)
        count = len(self.layers)
        self._demoted: Bools = np.zeros(count, dtype=np.bool_)
        self._fresh: Bools = np.zeros(count, dtype=np.bool_)
        self._since: npt.NDArray[np.int64] = np.full(count, _NEVER, dtype=np.int64)
        self._demotions: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        # Stays in BF16 that belong together: how long the next one is goes by them.
        self._stays: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._asked: npt.NDArray[np.int64] = np.full(count, _NEVER, dtype=np.int64)
        self._left_at = _NEVER
        self._over_budget_at = _NEVER
        self._stuck_since = _NEVER
        self._lowering = False

    @classmethod
    def build(cls, context: MonitorContext) -> FallbackController | None:
        """For runs with FP8 layers."""
        return cls(context.fallback, context.layers) if context.layers else None

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step; deterministic. Raises MisuseError if facts name a layer or slot not in `layers`."""
        quiet = Verdict("precision.ok", facts.step)
        if not self.policy.enabled or facts.slots is None or facts.fell_back_to or self._lowering:
            return quiet
        self._follow(facts)
        if not facts.applied:
            return quiet
        if facts.applied_steps <= self.policy.warmup_steps:
            if facts.applied_steps > 1:
                self._evidence.note(facts.slots)
            else:  # the first step's scales are of no tensor
                self._evidence.meet(facts.slots)
            # A fault that is there from the start: the first steps that are evidence are measured.
            return replace(quiet, sample_steps=self.policy.hits)
        # A layer just back in FP8 used a scale made from shadow values: its first ratio says nothing of the next ones.
        self._evidence.record(facts.slots, self._fresh)
        self._fresh[:] = False
        verdict = self._judge(facts.step) or quiet
        if self._evidence.suspicious(~self._demoted) or isinstance(verdict.proposal, Switch):
            # A layer whose values vanish costs more every step: do not wait for samples at their usual distance. What
            # was hidden behind a layer shows once that one has left, or is back.
            return replace(verdict, sample_steps=self.policy.window)
        return verdict

    def _follow(self, facts: StepFacts) -> None:
        """Take over what ran in BF16 in this step; a layer that changed starts with no evidence."""
        if unknown := [layer for layer in facts.demoted if layer not in self._index]:
            raise MisuseError(unknown_names(unknown, "demoted layers"))
        demoted = np.zeros_like(self._demoted)
        demoted[[self._index[layer] for layer in facts.demoted]] = True
        changed = demoted != self._demoted
        if not changed.any():
            return
        self._evidence.forget(changed)
        self._asked[changed] = _NEVER
        for index in np.flatnonzero(changed & demoted).tolist():
            # A layer that did well in FP8 for longer than it would stay away now left for another reason.
            stays = int(self._stays[index]) + 1
            again = self._since[index] != _NEVER and facts.step - self._since[
                index
            ] < self.policy.dwell(stays)
            self._stays[index] = stays if again else 1
        if (changed & demoted).any():
            self._left_at = facts.step
        self._since[changed] = facts.step
        self._demotions += changed & demoted
        self._fresh = (self._fresh | changed) & ~demoted
        self._demoted = demoted

    def _judge(self, step: int) -> Verdict | None:
        over = self._evidence.over()
        if self._left_at != _NEVER and step - self._left_at < self.policy.hits:
            # A layer that computes nothing hides what a fault does to those behind it: they have waited long enough.
            over = over | self._evidence.lost()
        # One step for the facts' lag, then a window: only then has a proposal that changed nothing been refused.
        ready = (self._asked == _NEVER) | (step > self._asked + self.policy.window)
        wants = over.any(axis=(0, 2)) & ~self._demoted
        on_their_way = ~ready & ~self._demoted
        room = self.policy.max_demoted(len(self.layers)) - int(
            self._demoted.sum() + on_their_way.sum()
        )
        leaving = self._worst_first(np.flatnonzero(wants & ready))
        demote, stuck = leaving[: max(0, room)], leaving[max(0, room) :]
        pressing = bool(over[PRESSING][:, stuck].any())
        self._stuck_since = (
            (step if self._stuck_since == _NEVER else self._stuck_since) if pressing else _NEVER
        )
        if (
            pressing
            and self.policy.over_budget == "bf16"
            and step - self._stuck_since >= self.policy.window
        ):
            return self._fall_back(step, stuck, over)
        promote = self._returning(step, ready) if self._demoted.any() else []
        self._asked[[*demote, *promote]] = step
        in_streak = (
            self._over_budget_at != _NEVER and step - self._over_budget_at <= self.policy.window
        )
        tell = bool(stuck) and not in_streak and not (demote or promote)
        if tell or (stuck and in_streak):
            self._over_budget_at = step
        if demote or promote:
            return self._switch(step, demote, promote, over)
        return self._budget(step, stuck, over) if tell else None

    def _worst_first(self, layers: npt.NDArray[np.int64]) -> list[int]:
        """By how far the worst slot is over its limit; equal ones in the order of the plan."""
        if not layers.size:
            return []
        return layers[np.argsort(-self._evidence.excess(layers), kind="stable")].tolist()

    def _returning(self, step: int, ready: Bools) -> list[int]:
        candidates = np.flatnonzero(self._demoted & self._evidence.clean() & ready).tolist()
        return [
            i for i in candidates if step - self._since[i] >= self.policy.dwell(int(self._stays[i]))
        ]

    def _switch(self, step: int, demote: list[int], promote: list[int], over: Bools) -> Verdict:
        down = {self.layers[i]: self._describe(i, over) for i in demote}
        up = {
            self.layers[i]: {"demoted_at": int(self._since[i]), "steps": int(step - self._since[i])}
            for i in promote
        }
        told = [f"{layer} to BF16 ({_first_slot(found['slots'])})" for layer, found in down.items()]
        told += [
            f"{layer} back to FP8 (after {found['steps']} steps in BF16)"
            for layer, found in up.items()
        ]
        text = "; ".join(told)
        return Verdict(
            "precision.demote" if demote else "precision.promote",
            step,
            text,
            proposal=Switch(tuple(down), tuple(up), text),
            evidence={"demote": down, "promote": up},
        )

    def _budget(self, step: int, stuck: list[int], over: Bools) -> Verdict:
        names = [self.layers[i] for i in stuck]
        limit = self.policy.max_demoted(len(self.layers))
        return Verdict(
            "precision.budget",
            step,
            f"{', '.join(names)} should leave FP8, but fallback.max_demoted_share ({self.policy.max_demoted_share:g}) "
            f"allows {limit} of {len(self.layers)} layers in BF16",
            evidence={
                "layers": {self.layers[i]: self._describe(i, over) for i in stuck},
                "allowed": limit,
            },
        )

    def _fall_back(self, step: int, stuck: list[int], over: Bools) -> Verdict:
        self._lowering = True
        limit, count = self.policy.max_demoted(len(self.layers)), len(self.layers)
        text = (
            f"{', '.join(self.layers[i] for i in stuck)} should have left FP8 for {step - self._stuck_since} steps, "
            f"beyond the {limit} of {count} layers that fallback.max_demoted_share ({self.policy.max_demoted_share:g}) "
            "allows: the whole run goes to BF16, for good"
        )
        evidence = {
            "layers": {self.layers[i]: self._describe(i, over) for i in stuck},
            "allowed": limit,
        }
        return Verdict(
            "precision.lowered",
            step,
            text,
            proposal=Switch(reason=text, whole_run_to="bf16"),
            evidence=evidence,
        )

    def _describe(self, layer: int, over: Bools) -> dict[str, Any]:
        """What speaks against `layer`, for the record."""
        return {
            "slots": self._evidence.describe(layer, over),
            "demotions_before": int(self._demotions[layer]),
        }

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {
            "layers": list(self.layers),
            "window": self.policy.window,
            "evidence": self._evidence.state_dict(),
            **super().state_dict(),
        }

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the state is of other layers or another window."""
        if tuple(meta["layers"]) != self.layers or meta["window"] != self.policy.window:
            raise CheckpointError(
                Problem(
                    "the checkpoint's fallback state is of other FP8 layers or another fallback.window",
                    f"checkpoint: {len(meta['layers'])} layers, window {meta['window']}; "
                    f"this run: {len(self.layers)} layers, window {self.policy.window}",
                    fix="resume with the recipe and model that wrote it",
                )
            )
        self._evidence.load_state_dict(meta["evidence"])
        super().load_state_dict(meta)


def _first_slot(slots: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """The first slot and its figures, for a line of text."""
    slot, figures = next(iter(slots.items()))
    statistic, values = next(iter(figures.items()))
    return f"{slot} {statistic} {', '.join(f'{value:g}' for value in values)}"


class WholeRunFallback(KeptWindow):
    """Proposes to leave fp16 after `failed_steps` failed updates in a row.

    A failed update is one that was skipped, not for its samples or a spike, although the loss scale was not just
    finding its range (see `is_calibration`): lowering the scale does not help it, more range may. precision: where to
    go, "bf16" or "fp32". failed_steps: None never proposes. It should be under guard.max_consecutive_skips - 1: a
    proposal takes two steps to act, and at that many skips the guard rolls back.

    Verdicts: `precision.lowered`, once (the responder never refuses it), else `precision.ok`. Both healthy: the
    failures are for the gradient monitor to say.
    """

    key = "whole_run"
    kept = ("failures", "last_scale", "proposed")

    def __init__(self, failed_steps: int | None, precision: str) -> None:
        self.failed_steps, self.precision = failed_steps, precision
        self._failures = 0
        self._last_scale: float | None = None
        self._proposed = False

    @classmethod
    def build(cls, context: MonitorContext) -> WholeRunFallback | None:
        """For runs without FP8 layers that may leave fp16. Collective."""
        if context.layers or context.fallback_precision is None or not context.fallback.enabled:
            return None
        return cls(context.fallback.failed_steps, context.fallback_precision())

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step. Deterministic."""
        quiet = Verdict("precision.ok", facts.step)
        if (
            self.failed_steps is None
            or self._proposed
            or facts.fell_back_to
            or facts.bad_data
            or facts.over_limits
        ):
            return quiet
        if facts.applied:
            self._failures, self._last_scale = 0, None
            return quiet
        self._failures += not is_calibration(facts.loss, facts.loss_scale, self._last_scale)
        self._last_scale = facts.loss_scale
        if self._failures < self.failed_steps:
            return quiet
        self._proposed = True
        evidence = {
            "failed_steps": self._failures,
            "loss_scale": facts.loss_scale,
            "to": self.precision,
        }
        evidence |= {key: jsonable(getattr(facts, key)) for key in ("loss", "grad_norm")}
        text = (
            f"{self._failures} updates in a row failed in fp16 (loss {facts.loss:g}, gradient norm "
            f"{facts.grad_norm:g}, loss scale {facts.loss_scale:g}): the run goes on in {self.precision}, for good"
        )
        return Verdict(
            "precision.lowered",
            facts.step,
            text,
            proposal=Switch(reason=text, whole_run_to=self.precision),
            evidence=evidence,
        )
