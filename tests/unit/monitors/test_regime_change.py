"""A loss or norm that changes for good: accepted within the limits, else a halt within budget that names the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from harness.core.config import GuardConfig
from harness.core.facts import Action, Continue, Halt, Limits, Rollback, StepFacts
from harness.core.state import RunLedger
from harness.monitors.base import AHEAD
from harness.monitors.gradients import GradientMonitor
from harness.monitors.loss import LossMonitor
from harness.monitors.responder import Responder

MakeFacts = Callable[..., StepFacts]
CHANGE = 60


def actions(make_facts: MakeFacts, loss: float, norm: float) -> Iterator[tuple[int, bool, Action]]:
    """(step, applied, action) of a run with loss 2 and norm 1 up to step 60, and these ever after, with its gate.

    A rollback takes limits and monitors back to where they were at the change, as a real one would.
    """
    guard = GuardConfig()
    monitors = [
        GradientMonitor(guard.max_consecutive_skips, guard.skip_growth, guard.clip_growth, guard.spike_window),
        LossMonitor(guard.spike_window, guard.spike_sigma, guard.spike_steps),
    ]
    responder, limits, good = Responder(guard, RunLedger()), {}, []
    for step in range(CHANGE + 200):
        if step == CHANGE:
            good = [monitor.state_dict() for monitor in monitors]
        values = (2.0, 1.0) if step < CHANGE else (loss, norm)
        facts = make_facts(step, loss=values[0], grad_norm=values[1], limits=limits.get(step, Limits()))
        facts = replace(facts, applied=not facts.over_limits)
        verdicts = [monitor.observe(facts) for monitor in monitors]
        limits[step + AHEAD] = verdicts[0].limits.stricter(verdicts[1].limits)
        action = responder.decide(verdicts)
        yield step, facts.applied, action
        if isinstance(action, Halt):
            return
        if isinstance(action, Rollback):
            for monitor, meta in zip(monitors, good, strict=True):
                monitor.load_state_dict(meta)


@pytest.mark.parametrize(
    ("loss", "norm", "key"), [(2.0, 40.0, "guard.skip_growth (5)"), (6.0, 1.0, "guard.spike_sigma (12)")]
)
def test_beyond_the_limits_it_is_skipped_rolled_back_and_halted(
    make_facts: MakeFacts, loss: float, norm: float, key: str
) -> None:
    seen = list(actions(make_facts, loss, norm))
    assert not any(applied for step, applied, _ in seen if step >= CHANGE)
    assert [type(action) for _, _, action in seen if action != Continue()] == [Rollback] * 3 + [Halt]
    step, _, last = seen[-1]
    assert step == CHANGE + 4 * 5 - 1, "five skips for each rollback and for the halt"
    assert isinstance(last, Halt)
    assert key in last.reason


def test_within_the_limits_it_becomes_the_new_usual(make_facts: MakeFacts) -> None:
    seen = list(actions(make_facts, 2.2, 3.0))
    assert len(seen) == CHANGE + 200
    assert all(applied and action == Continue() for _, applied, action in seen)
