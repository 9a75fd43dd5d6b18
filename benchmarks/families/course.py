"""A run without a model: loss and norm by formula, through the gate, every monitor of loss and norms, and rollbacks."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any

from benchmarks.families.shapes import Formula
from harness.core.config import FallbackConfig, GuardConfig
from harness.core.facts import Halt, Limits, Rollback, StepFacts
from harness.core.protocols import Monitor
from harness.core.state import RunLedger, TrainState
from harness.monitors.base import AHEAD, MonitorContext
from harness.monitors.gradients import GradientMonitor
from harness.monitors.loss import LossMonitor
from harness.monitors.responder import Responder
from harness.monitors.rise import LossRiseMonitor

HEALTHY = 10


@dataclass
class Course:
    """How a run went.

    status, reason: "done", or "halted" and why.
    applied, skipped: windows, of every attempt.
    told: (code, window) of every event.
    rollbacks: the windows that each rollback skipped.
    returned_to: the step that each rollback went back to.
    resumed: how often a new process continued.
    limits: (loss, norm) of every step.
    """

    status: str = "done"
    reason: str = ""
    applied: list[int] = field(default_factory=list[int])
    skipped: list[int] = field(default_factory=list[int])
    told: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    rollbacks: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    returned_to: list[int] = field(default_factory=list[int])
    resumed: int = 0
    limits: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])

    @property
    def codes(self) -> set[str]:
        """The codes of all reports."""
        return {code for code, _ in self.told}


def built(guard: GuardConfig) -> list[Monitor]:
    """The monitors of loss and norms."""
    context = MonitorContext(guard, FallbackConfig())
    return [kind.build(context) for kind in (GradientMonitor, LossMonitor, LossRiseMonitor)]


def resumed(ledger: RunLedger, on_disk: str, step: int) -> RunLedger:
    """What another process has of `ledger`: the file of the last rollback, and a checkpoint of `step`."""
    _, meta = TrainState({}, ledger, step=step).state_dict()
    state = TrainState({}, RunLedger.from_json(json.loads(on_disk)))
    state.resume({}, json.loads(json.dumps(meta)))
    return state.ledger


def drive(
    formula: Formula, steps: int, every: int = 20, resume_every: int = 0, **keys: Any
) -> Course:
    """Runs `steps` steps, or until it halts.

    every: steps between states that a rollback can go back to
    resume_every: steps after which a new process continues; 0: never
    """
    guard = GuardConfig.model_validate(keys)
    monitors = built(guard)
    course, ledger = Course(), RunLedger()
    # The ledger as its file has it: written at each rollback.
    on_disk = json.dumps(asdict(ledger))
    responder = Responder(guard, ledger)
    # Limits by the step for which they hold. A monitor sets those of a step that lies AHEAD.
    limits: dict[int, Limits] = {}
    step = applied = healthy = 0
    # Saved states as JSON: one that waits for enough healthy steps, and the last good one.
    waiting = good = ""
    while step < steps:
        step += 1

        # The step: loss and norm by formula, and the gate.
        window = ledger.window_index(step - 1)
        loss, norm = formula(applied, window)
        now = limits.pop(step, Limits())
        course.limits.append((now.loss, now.norm))
        facts = StepFacts(
            step, window, loss, norm, 1e-3, 1.0, True, applied + 1, 1, 1.0, limits=now
        )
        facts = replace(facts, applied=math.isfinite(loss + norm) and not facts.over_limits)
        applied += facts.applied
        if facts.applied:
            course.applied.append(window)
        else:
            course.skipped.append(window)

        # The guard's verdicts, and the action that they ask for.
        verdicts = [monitor.observe(facts) for monitor in monitors]
        for verdict in verdicts:
            if verdict.text:
                course.told.append((verdict.code, window))
        limits[step + AHEAD] = reduce(Limits.stricter, (verdict.limits for verdict in verdicts))
        action = responder.decide(verdicts, window)

        # A saved state is good once enough healthy steps have followed it.
        healthy = healthy + 1 if responder.healthy(verdicts) else 0
        if waiting and healthy >= HEALTHY:
            good, waiting = waiting, ""

        # Roll back, or halt. A rollback without a good state to return to is a halt.
        if isinstance(action, Rollback) and good:
            course.rollbacks.append(action.bad)
            state = json.loads(good)
            step, applied, healthy = state["step"], state["applied"], 0
            limits = {
                int(each): Limits.from_json(values) for each, values in state["limits"].items()
            }
            for monitor, meta in zip(monitors, state["monitors"], strict=True):
                monitor.load_state_dict(meta)
            course.returned_to.append(step)
            ledger.go_back(step, action.bad)
            on_disk = json.dumps(asdict(ledger))
            waiting = ""
        elif isinstance(action, Halt | Rollback):
            course.status, course.reason = "halted", action.reason
            return course

        # Save a state to go back to.
        if step % every == 0:
            state = {
                "step": step,
                "applied": applied,
                "limits": {number: each.as_json() for number, each in limits.items()},
                "monitors": [monitor.state_dict() for monitor in monitors],
            }
            waiting, healthy = json.dumps(state), 0

        # A new process continues: all objects are new, and have only what was saved.
        if resume_every and step % resume_every == 0:
            windows = json.loads(json.dumps([monitor.state_dict() for monitor in monitors]))
            monitors = built(guard)
            for monitor, meta in zip(monitors, windows, strict=True):
                monitor.load_state_dict(meta)
            ledger = resumed(ledger, on_disk, step)
            responder = Responder(guard, ledger)
            course.resumed += 1
    return course
