"""A loss or norm that changes for good: accepted within the limits, else a halt within budget that names the key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
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
ROOT = Path(__file__).resolve().parents[3]


def actions(
    make_facts: MakeFacts, loss: float, norm: float, large_updates: float = math.inf
) -> Iterator[tuple[int, bool, Action]]:
    """(step, applied, action) of a run with loss 4, from step 16 on 2, and norm 1 up to step 60, and these ever after,
    with its gate, or until so many updates with them were applied.

    A rollback takes limits and monitors back to where they were at the change, as a real one would.
    """
    guard = GuardConfig()
    monitors = [
        GradientMonitor(
            guard.max_consecutive_skips, guard.skip_growth, guard.clip_growth, guard.spike_window
        ),
        LossMonitor(guard.spike_window, guard.spike_sigma, guard.spike_steps),
    ]
    responder, limits, good = Responder(guard, RunLedger()), {}, []
    for step in range(CHANGE + 200):
        if step == CHANGE:
            good = [monitor.state_dict() for monitor in monitors]
        usual = (4.0 if step < 16 else 2.0, 1.0)
        values = usual if step < CHANGE or large_updates <= 0 else (loss, norm)
        facts = make_facts(
            step, loss=values[0], grad_norm=values[1], limits=limits.get(step, Limits())
        )
        facts = replace(facts, applied=not facts.over_limits)
        large_updates -= facts.applied and step >= CHANGE
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
    ("loss", "norm", "key"),
    [(2.0, 40.0, "guard.skip_growth (5)"), (8.0, 1.0, "guard.spike_sigma (12)")],
)
def test_beyond_the_limits_it_is_skipped_rolled_back_and_halted(
    make_facts: MakeFacts, loss: float, norm: float, key: str
) -> None:
    seen = list(actions(make_facts, loss, norm))
    assert not any(applied for step, applied, _ in seen if step >= CHANGE)
    assert [type(action) for _, _, action in seen if action != Continue()] == [Rollback] * 3 + [
        Halt
    ]
    step, _, last = seen[-1]
    assert step == CHANGE + 4 * 5 - 1, "five skips for each rollback and for the halt"
    assert isinstance(last, Halt)
    assert key in last.reason


def test_norms_that_come_back_are_accepted_after_five_skips(make_facts: MakeFacts) -> None:
    """Going back would lead to the same weights, which skipped updates leave alone; some updates lead away."""
    seen = list(actions(make_facts, 2.0, 10.0, large_updates=3))
    assert len(seen) == CHANGE + 200
    assert all(action == Continue() for _, _, action in seen)
    assert [step for step, applied, _ in seen if not applied] == list(
        range(CHANGE, CHANGE + 5 + AHEAD - 1)
    )


def test_as_many_large_updates_are_applied_as_were_skipped(make_facts: MakeFacts) -> None:
    """Five, although a limit is decided two steps ahead: the one that is on its way counts."""
    seen = list(actions(make_facts, 2.0, 10.0))
    accepted = CHANGE + 5 + AHEAD - 1
    assert [applied for _, applied, _ in seen[CHANGE:accepted]] == [False] * 6
    assert [applied for _, applied, _ in seen[accepted : accepted + 6]] == [True] * 5 + [False]


@pytest.mark.parametrize("seed", range(20))
def test_never_more_large_updates_are_applied_than_were_announced(
    seed: int, make_facts: MakeFacts
) -> None:
    """Whatever comes between: usual norms, samples that are unfit, norms and losses that are not finite."""
    rng = np.random.default_rng([5, seed])
    monitor, limits, left, announced = GradientMonitor(max_consecutive_skips=5), {}, 0, False
    for step in range(100):
        large = step >= 40 and (step < 46 or rng.random() < 0.6)
        odd = step >= 46 and rng.random() < 0.2
        facts = make_facts(
            step, loss=2.0, grad_norm=10.0 if large else 1.0, limits=limits.get(step, Limits())
        )
        if odd:
            facts = replace(
                facts,
                **[{"bad_data": 1}, {"grad_norm": math.nan}, {"loss": 90.0}][int(rng.integers(3))],
            )
        fits = not facts.bad_data and math.isfinite(facts.grad_norm) and facts.loss == 2.0
        facts = replace(
            facts, limits=replace(facts.limits, loss=4.0), applied=fits and not facts.over_limits
        )
        left -= announced and large and facts.applied
        assert left >= 0, f"step {step}"
        verdict = monitor.observe(facts)
        limits[step + AHEAD] = verdict.limits
        if verdict.code == "gradient.accepted":
            if announced or "up to" not in verdict.text or "recurring" in (verdict.evidence or {}):
                return
            announced, left = True, int(re.findall(r"on (\d+) updates with norms", verdict.text)[0])
    assert announced


def test_a_run_on_a_card_is_skipped_accepted_and_goes_on(make_facts: MakeFacts) -> None:
    """What an H100 recorded of a bf16 run that the guard had halted before: the same steps are skipped, and no more."""
    record = json.loads((ROOT / "benchmarks" / "results" / "long_runs_h100.json").read_text())[
        "runs"
    ]["accepted"]
    monitor, limits, skipped, codes = (
        GradientMonitor(max_consecutive_skips=5),
        {},
        list[int](),
        list[str](),
    )
    values = zip(record["from_step_61"]["grad_norm"], record["from_step_61"]["loss"], strict=True)
    for step, (norm, loss) in enumerate(values, 61):
        facts = make_facts(
            step, loss=loss, grad_norm=norm, limits=replace(limits.get(step, Limits()), loss=4.0)
        )
        facts = replace(facts, applied=not facts.over_limits)
        skipped += [] if facts.applied else [step]
        verdict = monitor.observe(facts)
        limits[step + AHEAD] = verdict.limits
        codes += [verdict.code] if verdict.code != "gradient.ok" else []
        assert verdict.proposal == Continue()
    assert skipped == [133, 134, 135, 136, 137, 138]
    assert codes == [code for _, code in record["events"]]


def test_norms_that_stay_large_are_rolled_back_and_halted(make_facts: MakeFacts) -> None:
    """A tensor that FP8 cannot hold gives such norms, too: five updates are tried before every rollback."""
    seen = list(actions(make_facts, 2.0, 10.0))
    assert [type(action) for _, _, action in seen if action != Continue()] == [Rollback] * 3 + [
        Halt
    ]
    step, _, last = seen[-1]
    assert step < CHANGE + 80
    assert isinstance(last, Halt)
    assert "guard.skip_growth (5)" in last.reason


def test_a_second_row_while_norms_are_accepted_rolls_back(make_facts: MakeFacts) -> None:
    """Norms that grow fivefold every five steps are no new usual."""
    monitor = GradientMonitor(max_consecutive_skips=5)
    for step in range(40):
        monitor.observe(make_facts(step, grad_norm=1.0))
    row = [monitor.observe(over(make_facts, 40 + n, 10.0, 5.0)) for n in range(5)]
    assert [verdict.code for verdict in row] == ["gradient.skip"] * 4 + ["gradient.accepted"]
    assert row[-1].limits.norm == pytest.approx(50.0)
    assert row[-1].limits.clip == pytest.approx(3.0), "an accepted norm is clipped as before"
    assert row[-1].skip
    assert not row[-1].healthy
    again = [monitor.observe(over(make_facts, 45 + n, 60.0, 50.0)) for n in range(5)]
    assert isinstance(again[-1].proposal, Rollback)
    assert again[-1].proposal.bad == (1045, 1046, 1047, 1048, 1049)


@pytest.mark.parametrize("odd", [26.0, math.nan])
def test_one_norm_far_beyond_or_not_finite_in_the_row_rolls_back(
    odd: float, make_facts: MakeFacts
) -> None:
    monitor = GradientMonitor(max_consecutive_skips=5)
    for step in range(40):
        monitor.observe(make_facts(step, grad_norm=1.0))
    row = [
        monitor.observe(over(make_facts, 40 + n, odd if n == 2 else 10.0, 5.0)) for n in range(5)
    ]
    assert isinstance(row[-1].proposal, Rollback)


@pytest.mark.parametrize("between", ["loss", "data"])
def test_a_row_with_steps_skipped_for_another_reason_between(
    between: str, make_facts: MakeFacts
) -> None:
    """An unusual loss between large norms says that the weights are broken; unfit samples say nothing of them."""
    monitor = armed(make_facts)
    for n in range(4):
        monitor.observe(over(make_facts, 40 + n, 10.0, 5.0))
    other = over(make_facts, 44, 10.0, 5.0)
    monitor.observe(replace(other, loss=50.0) if between == "loss" else replace(other, bad_data=1))
    last = monitor.observe(over(make_facts, 45, 10.0, 5.0))
    if between == "data":
        assert last.code == "gradient.accepted"
    else:
        assert isinstance(last.proposal, Rollback)
        assert last.proposal.bad == (1040, 1041, 1042, 1043, 1045)


@pytest.mark.parametrize("loss", [0.0, -1.0, -1e6])
def test_a_loss_of_zero_or_below_is_like_any_other(loss: float, make_facts: MakeFacts) -> None:
    monitor = armed(make_facts)
    row = [over(make_facts, 40 + n, 10.0, 5.0) for n in range(5)]
    last = [monitor.observe(replace(facts, loss=loss)) for facts in row][-1]
    assert last.code == "gradient.accepted"


def test_one_step_is_no_row(make_facts: MakeFacts) -> None:
    monitor = armed(make_facts, max_consecutive_skips=1)
    proposal = monitor.observe(over(make_facts, 40, 10.0, 5.0)).proposal
    assert isinstance(proposal, Rollback)
    assert "1 update was skipped (last" in proposal.reason


def test_the_text_counts_the_row(make_facts: MakeFacts) -> None:
    monitor = armed(make_facts, max_consecutive_skips=3)
    last = [monitor.observe(over(make_facts, 40 + n, 10.0 + n, 5.0)) for n in range(3)][-1]
    assert "The last 3 in a row had norms of 10 to 12 at a loss within its limit" in last.text
    assert "From step 44 on 3 updates with norms up to 55 are applied" in last.text


def test_what_was_accepted_survives_a_checkpoint_and_ends_with_the_window(
    make_facts: MakeFacts,
) -> None:
    monitor = GradientMonitor(max_consecutive_skips=5)
    for step in range(40):
        monitor.observe(make_facts(step, grad_norm=1.0))
    for n in range(5):
        monitor.observe(over(make_facts, 40 + n, 10.0, 5.0))
    restored = GradientMonitor(max_consecutive_skips=5)
    restored.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    for each in (monitor, restored):
        limits = [each.observe(make_facts(45 + n, grad_norm=1.0)).limits.norm for n in range(45)]
        assert limits[:39] == pytest.approx([50.0] * 39)
        assert limits[40:] == pytest.approx([5.0] * 5), "what was not used by then is gone"


def armed(make_facts: MakeFacts, max_consecutive_skips: int = 5) -> GradientMonitor:
    """A monitor that has seen 40 steps with a norm of 1."""
    monitor = GradientMonitor(max_consecutive_skips=max_consecutive_skips)
    for step in range(40):
        monitor.observe(make_facts(step, grad_norm=1.0))
    return monitor


def over(make_facts: MakeFacts, step: int, norm: float, limit: float) -> StepFacts:
    facts = make_facts(step, grad_norm=norm, limits=Limits(loss=4.0, norm=limit))
    return replace(facts, applied=False)


def test_within_the_limits_it_becomes_the_new_usual(make_facts: MakeFacts) -> None:
    seen = list(actions(make_facts, 2.2, 3.0))
    assert len(seen) == CHANGE + 200
    assert all(applied and action == Continue() for _, applied, action in seen)
