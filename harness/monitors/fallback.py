"""Which FP8 layers should run in BF16, and when a whole run should leave its precision.

The life of a layer under `FallbackController`:

1. *Demotion.* `evidence` scores every statistic of every slot. A layer with a score over its threshold asks to leave
   FP8. The worst layers go first, until `max_demoted_share` of all layers are in BF16.
2. *Stay.* A demoted layer computes in BF16. Its tensors are still measured as if they were quantised.
3. *Promotion.* It returns after its dwell time, once nothing was bad for `fallback.window` observations. A layer that
   leaves again soon after its return stays longer the next time.
4. *Budget.* If more layers need to leave than the share allows, the run says so. If that lasts for `fallback.window`
   steps, the whole run goes to BF16 for good, unless `over_budget` is "stay".

Some statistics are expensive and only sampled. After a switch, after anything suspicious and in the first steps, the
controller asks for them at every step.

`WholeRunFallback` is the rule for runs without FP8 layers: it moves a run that fails in fp16 to bf16 or fp32.

Both see all-reduced facts only, so every rank decides alike. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.core.config import FallbackConfig
from harness.core.errors import CheckpointError, MisuseError, Problem, in_a_row, number_of
from harness.core.facts import StepFacts, Switch, Verdict, jsonable
from harness.core.protocols import Meta
from harness.monitors.base import Bools, Ints, KeptWindow, MonitorContext, is_calibration
from harness.monitors.evidence import PRESSING, Evidence, unknown_names

_NEVER = -1
"""Stands for "not yet" where a step is kept."""


class FallbackController(KeptWindow):
    """Proposes switches from slot statistics. It reads from `facts.demoted` what really runs in BF16.

    layers: the FP8 layers of the plan, in order.

    Facts are judged one step late, so a proposal is not repeated while it is on its way. After it was refused it rests
    for `window` steps. Only a completed step is evidence, so no layer switches before the first step.

    Verdicts, all healthy: clipping costs accuracy, and whether the run suffers is for the loss and gradients to say.
    - `precision.demote`: layers leave FP8; the same verdict carries layers that return.
    - `precision.promote`: layers return.
    - `precision.budget`: more layers want to leave than max_demoted_share allows, once per streak.
    - `precision.lowered`: that lasted for `window` steps, and the whole run leaves FP8 for good.
    - `precision.ok`: nothing to do.
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

        # One entry a layer.
        count = len(self.layers)
        self._demoted: Bools = np.zeros(count, dtype=np.bool_)
        # Back in FP8 since the newest step.
        self._fresh: Bools = np.zeros(count, dtype=np.bool_)
        # The step of the last switch, either way.
        self._since: Ints = np.full(count, _NEVER, dtype=np.int64)
        self._demotions: Ints = np.zeros(count, dtype=np.int64)
        # Stays in BF16 with short returns between them; they set the length of the next stay.
        self._stays: Ints = np.zeros(count, dtype=np.int64)
        # The step of the last proposal that has not been carried out.
        self._asked: Ints = np.full(count, _NEVER, dtype=np.int64)

        # Steps about the run: a layer left FP8 last, the budget was last exceeded, pressing layers began to wait.
        self._left_at = _NEVER
        self._over_budget_at = _NEVER
        self._stuck_since = _NEVER
        # Whether the whole run has been proposed to leave.
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
            # Scales do not fit yet, so the statistics are no evidence. How fast the scales move is.
            if facts.applied_steps > 1:
                self._evidence.note(facts.slots)
            else:  # the first step's scales are the initial ones, made from no tensor
                self._evidence.meet(facts.slots)
            # To catch a fault that is there from the start, measure the first steps that are evidence.
            return replace(quiet, sample_steps=self.policy.hits)

        # A layer just back in FP8 used a scale made from shadow values: its first ratio says nothing of the next ones.
        self._evidence.record(facts.slots, self._fresh)
        self._fresh[:] = False
        verdict = self._judge(facts.step) or quiet

        if self._evidence.suspicious(~self._demoted) or isinstance(verdict.proposal, Switch):
            # A layer whose values vanish costs more every step, so do not wait for the next usual sample. A switch
            # also changes what the layers behind it receive, and may reveal their faults.
            return replace(verdict, sample_steps=self.policy.window)
        return verdict

    def _follow(self, facts: StepFacts) -> None:
        """Take over which layers ran in BF16 in this step. A layer that changed starts with no evidence."""
        unknown = [layer for layer in facts.demoted if layer not in self._index]
        if unknown:
            raise MisuseError(unknown_names(unknown, "demoted layers"))
        demoted = np.zeros_like(self._demoted)
        demoted[[self._index[layer] for layer in facts.demoted]] = True
        changed = demoted != self._demoted
        if not changed.any():
            return

        self._evidence.forget(changed)
        self._asked[changed] = _NEVER

        # A layer that was back in FP8 for longer than its next stay leaves for another reason: its stays start over.
        left = changed & demoted
        for index in np.flatnonzero(left).tolist():
            stays = int(self._stays[index]) + 1
            since = int(self._since[index])
            again = since != _NEVER and facts.step - since < self.policy.dwell(stays)
            self._stays[index] = stays if again else 1

        if left.any():
            self._left_at = facts.step
        self._since[changed] = facts.step
        self._demotions += left
        self._fresh = (self._fresh | changed) & ~demoted
        self._demoted = demoted

    def _judge(self, step: int) -> Verdict | None:
        """What to propose at `step`; None for nothing."""
        over = self._evidence.over()
        if self._left_at != _NEVER and step - self._left_at < self.policy.hits:
            # A layer whose values all vanished hid the faults of the layers behind it. They have waited long enough:
            # one bad observation is evidence.
            over = over | self._evidence.lost()

        # A proposal shows in the facts one step late. One that changed nothing `window` steps after that was refused.
        ready = (self._asked == _NEVER) | (step > self._asked + self.policy.window)
        wants = over.any(axis=(0, 2)) & ~self._demoted
        on_their_way = ~ready & ~self._demoted

        # The worst layers leave, as far as the budget allows; the others are stuck in FP8.
        taken = int(self._demoted.sum() + on_their_way.sum())
        room = max(0, self.policy.max_demoted(len(self.layers)) - taken)
        leaving = self._worst_first(np.flatnonzero(wants & ready))
        demote, stuck = leaving[:room], leaving[room:]

        # The run leaves FP8 if layers are stuck for `window` steps because of a statistic in `evidence.PRESSING`.
        pressing = bool(over[PRESSING][:, stuck].any())
        if not pressing:
            self._stuck_since = _NEVER
        elif self._stuck_since == _NEVER:
            self._stuck_since = step
        lasted = pressing and step - self._stuck_since >= self.policy.window
        if lasted and self.policy.over_budget == "bf16":
            return self._fall_back(step, stuck, over)

        promote = self._returning(step, ready) if self._demoted.any() else []
        self._asked[[*demote, *promote]] = step

        # Report stuck layers once per streak. A switch has priority: the report can wait for a quiet step.
        since_report = step - self._over_budget_at
        in_streak = self._over_budget_at != _NEVER and since_report <= self.policy.window
        report = bool(stuck) and not in_streak and not (demote or promote)
        if report or (stuck and in_streak):
            self._over_budget_at = step

        if demote or promote:
            return self._switch(step, demote, promote, over)
        if report:
            return self._budget(step, stuck, over)
        return None

    def _worst_first(self, layers: Ints) -> list[int]:
        """Sorted by how far the worst slot is over its limit; equal ones in the order of the plan."""
        if not layers.size:
            return []
        order = np.argsort(-self._evidence.excess(layers), kind="stable")
        return layers[order].tolist()

    def _returning(self, step: int, ready: Bools) -> list[int]:
        """Demoted layers that are clean, have stayed for their dwell time, and have no proposal on its way."""
        returning: list[int] = []
        candidates = self._demoted & self._evidence.clean() & ready
        for index in np.flatnonzero(candidates).tolist():
            dwell = self.policy.dwell(int(self._stays[index]))
            if step - self._since[index] >= dwell:
                returning.append(index)
        return returning

    def _switch(
        self,
        step: int,
        demote: list[int],
        promote: list[int],
        over: Bools,
    ) -> Verdict:
        parts: list[str] = []
        down: dict[str, dict[str, Any]] = {}
        for index in demote:
            layer = self.layers[index]
            down[layer] = self._describe(index, over)
            parts.append(f"{layer} to BF16 ({self._first_slot(down[layer]['slots'])})")

        up: dict[str, dict[str, int]] = {}
        for index in promote:
            layer = self.layers[index]
            since = int(self._since[index])
            up[layer] = {"demoted_at": since, "steps": step - since}
            parts.append(f"{layer} back to FP8 (after {number_of(step - since, 'step')} in BF16)")

        # A switch in both directions is reported as a demotion, the graver of the two.
        code = "precision.demote" if demote else "precision.promote"
        text = "; ".join(parts)
        proposal = Switch(tuple(down), tuple(up), text)
        evidence = {"demote": down, "promote": up}
        return Verdict(code, step, text, proposal=proposal, evidence=evidence)

    def _budget(self, step: int, stuck: list[int], over: Bools) -> Verdict:
        names = ", ".join(self.layers[index] for index in stuck)
        count = len(self.layers)
        limit = self.policy.max_demoted(count)
        key = f"fallback.max_demoted_share ({self.policy.max_demoted_share:g})"
        text = f"{names} should leave FP8, but {key} allows {limit} of {count} layers in BF16"
        evidence = {"layers": self._describe_all(stuck, over), "allowed": limit}
        return Verdict("precision.budget", step, text, evidence=evidence)

    def _fall_back(self, step: int, stuck: list[int], over: Bools) -> Verdict:
        self._lowering = True
        names = ", ".join(self.layers[index] for index in stuck)
        count = len(self.layers)
        limit = self.policy.max_demoted(count)
        key = f"fallback.max_demoted_share ({self.policy.max_demoted_share:g})"
        text = f"{names} should have left FP8 for {step - self._stuck_since} steps, "
        text += f"beyond the {limit} of {count} layers that {key} allows: "
        text += "the whole run goes to BF16, for good"
        proposal = Switch(reason=text, whole_run_to="bf16")
        evidence = {"layers": self._describe_all(stuck, over), "allowed": limit}
        return Verdict("precision.lowered", step, text, proposal=proposal, evidence=evidence)

    def _describe(self, layer: int, over: Bools) -> dict[str, Any]:
        """The evidence against `layer`, for the record."""
        return {
            "slots": self._evidence.describe(layer, over),
            "demotions_before": int(self._demotions[layer]),
        }

    def _first_slot(self, slots: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
        """The first slot, its figures and their limit, for a line of text."""
        slot, figures = next(iter(slots.items()))
        statistic, values = next(iter(figures.items()))
        listed = ", ".join(f"{value:g}" for value in values)
        limit = self._evidence.limit(statistic, slot.rpartition(".")[2])
        return f"{slot} {statistic} {listed}; limit {limit:g}"

    def _describe_all(self, layers: list[int], over: Bools) -> dict[str, dict[str, Any]]:
        return {self.layers[index]: self._describe(index, over) for index in layers}

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {
            "layers": list(self.layers),
            "window": self.policy.window,
            "evidence": self._evidence.state_dict(),
            **super().state_dict(),
        }

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the state belongs to other layers or another window."""
        layers, window = tuple(meta["layers"]), meta["window"]
        if layers != self.layers or window != self.policy.window:
            what = "the checkpoint's fallback state belongs to other FP8 layers or another fallback.window"
            where = f"checkpoint: {len(layers)} layers, window {window}; "
            where += f"this run: {len(self.layers)} layers, window {self.policy.window}"
            fix = "resume with the recipe and model that wrote it"
            raise CheckpointError(Problem(what, where, fix=fix))
        self._evidence.load_state_dict(meta["evidence"])
        super().load_state_dict(meta)


class WholeRunFallback(KeptWindow):
    """Proposes to leave fp16 after `failed_steps` failed updates in a row.

    A failed update was skipped although lowering the loss scale does not help: the scaler is not just finding its range
    (see `is_calibration`). More range may help. Updates skipped for bad samples or a spike do not count.

    failed_steps: None never proposes. Keep it under guard.max_consecutive_skips - 1: a proposal takes two steps to act,
    and at that many skips the guard rolls back.
    precision: where to go, "bf16" or "fp32".

    Verdicts: `precision.lowered`, once (the responder never refuses it), else `precision.ok`. Both are healthy: the
    gradient monitor reports the failures.
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
        if self.failed_steps is None or self._proposed or facts.fell_back_to:
            return quiet
        # Skipped for its samples or as a spike: no sign of too little range.
        if facts.bad_data or facts.over_limits:
            return quiet
        if facts.applied:
            self._failures = 0
            self._last_scale = None
            return quiet

        self._failures += not is_calibration(facts.loss, facts.loss_scale, self._last_scale)
        self._last_scale = facts.loss_scale
        if self._failures < self.failed_steps:
            return quiet

        # Never again: the run goes to a format with the range of float32.
        self._proposed = True
        evidence = {
            "failed_steps": self._failures,
            "loss_scale": facts.loss_scale,
            "to": self.precision,
            "loss": jsonable(facts.loss),
            "grad_norm": jsonable(facts.grad_norm),
        }
        text = (
            f"{in_a_row(self._failures, 'update')} failed in fp16 (loss {facts.loss:g}, gradient norm "
            f"{facts.grad_norm:g}, loss scale {facts.loss_scale:g}): the run goes on in {self.precision}, for good"
        )
        proposal = Switch(reason=text, whole_run_to=self.precision)
        return Verdict("precision.lowered", facts.step, text, proposal=proposal, evidence=evidence)
