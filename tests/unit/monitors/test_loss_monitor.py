from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from harness.core.facts import NON_FINITE_INPUT, Continue, Limits, Rollback, StepFacts
from harness.monitors.loss import LossMonitor

MakeFacts = Callable[..., StepFacts]


def falling_losses(steps: int, seed: int = 0, noise: float = 0.04) -> list[float]:
    """A byte-level run: from 5.5 to 1.5 nats, with the noise of small batches."""
    rng = np.random.default_rng(seed)
    curve = 1.5 + 4.0 * np.exp(-np.arange(steps) / 40)
    return (curve * np.exp(noise * rng.standard_normal(steps))).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_clean_run_has_no_spike(make_facts: MakeFacts, seed: int) -> None:
    monitor = LossMonitor(spike_window=64, spike_sigma=12.0, spike_steps=5)
    codes = {
        monitor.observe(make_facts(i, loss=loss)).code
        for i, loss in enumerate(falling_losses(2000, seed))
    }
    assert codes == {"loss.ok"}


def test_a_single_spike_that_rolls_back_is_no_row(make_facts: MakeFacts) -> None:
    monitor = LossMonitor(spike_window=64, spike_sigma=12.0, spike_steps=1)
    losses = [*falling_losses(100), 60.0]
    last = [monitor.observe(make_facts(step, loss=loss)) for step, loss in enumerate(losses)][-1]
    assert isinstance(last.proposal, Rollback)
    assert last.proposal.reason.startswith("the loss spiked in 1 step (last")


@pytest.mark.parametrize("at", [16, 17, 25, 40, 60, 80, 100, 150, 499])
def test_a_tenfold_loss_is_a_spike_wherever_it_is(make_facts: MakeFacts, at: int) -> None:
    monitor = LossMonitor(spike_window=64, spike_sigma=12.0, spike_steps=5)
    losses = falling_losses(500)
    losses[at] *= 10
    spikes = [
        v
        for i, loss in enumerate(losses)
        if (v := monitor.observe(make_facts(i, loss=loss))).code != "loss.ok"
    ]
    assert [(v.code, v.step, v.healthy, v.proposal) for v in spikes] == [
        ("loss.spike", at, False, Continue())
    ]


def test_the_threshold_is_the_median_and_mad_of_the_losses(make_facts: MakeFacts) -> None:
    losses = np.array(falling_losses(64))
    sigma = 1.4826 * np.median(np.abs(losses - np.median(losses)))
    edge = float(np.median(losses) + 3.0 * sigma)
    for factor, code in ((0.9999, "loss.ok"), (1.0001, "loss.spike")):
        monitor = LossMonitor(spike_window=64, spike_sigma=3.0, spike_steps=5)
        # Rising order has no falling trend to take out: the plain formula holds.
        monitor.load_state_dict({**monitor.state_dict(), "losses": sorted(losses.tolist())})
        assert monitor.observe(make_facts(64, loss=edge * factor)).code == code


def test_limits_come_with_every_verdict_from_the_32nd_loss_on(make_facts: MakeFacts) -> None:
    monitor = LossMonitor(spike_window=40, spike_sigma=12.0, spike_steps=5)
    given = [
        monitor.observe(make_facts(step, loss=5.0 if step < 16 else 2.0)).limits
        for step in range(100)
    ]
    assert given[:31] == [Limits()] * 31
    assert all(math.isfinite(limits.loss) for limits in given[31:])
    assert given[60:] == [Limits(loss=pytest.approx(2.0 + 1.5))] * 40, "half of the fall"  # type: ignore[arg-type]
    others = [
        make_facts(100, applied=False, loss=math.nan),
        make_facts(101, applied=False, loss=0.0, bad_data=NON_FINITE_INPUT),
        make_facts(102, applied=False, grad_norm=1e9, limits=Limits(norm=1.0)),
        make_facts(103, loss=30.0),
        make_facts(104, applied=False, loss=30.0, limits=Limits(loss=3.0)),
    ]
    assert [monitor.observe(facts).limits for facts in others] == [given[-1]] * 5


@pytest.mark.parametrize("seed", range(5))
def test_the_limit_keeps_a_clean_run_and_stops_a_tenfold_loss(
    make_facts: MakeFacts, seed: int
) -> None:
    monitor = LossMonitor(spike_window=40, spike_sigma=12.0, spike_steps=5)
    losses = falling_losses(500, seed)
    limits = [
        monitor.observe(make_facts(step, loss=loss)).limits.loss for step, loss in enumerate(losses)
    ]
    assert all(losses[step] < limits[step - 2] < 10 * losses[step] for step in range(34, 500))


def test_a_loss_over_its_limit_is_told_as_skipped_and_enters_nothing(make_facts: MakeFacts) -> None:
    monitor = LossMonitor(spike_window=40, spike_sigma=12.0, spike_steps=5)
    for step in range(40):
        monitor.observe(make_facts(step, loss=2.0))
    losses = monitor.state_dict()["losses"]
    verdict = monitor.observe(make_facts(40, loss=20.0, applied=False, limits=Limits(loss=2.25)))
    assert (verdict.code, verdict.healthy, verdict.proposal) == ("loss.skip", False, Continue())
    assert verdict.text.startswith("update skipped")
    assert "loss 20 against 2 " in verdict.text
    assert "window 1040" in verdict.text
    assert monitor.state_dict()["losses"] == losses
    json.dumps(verdict.evidence, allow_nan=False)


def test_skipped_and_applied_spikes_are_one_row_the_rollback_names_the_key(
    make_facts: MakeFacts,
) -> None:
    monitor = LossMonitor(spike_window=40, spike_sigma=12.0, spike_steps=3)
    for step in range(40):
        monitor.observe(make_facts(step, loss=2.0))
    steps = [
        make_facts(40, loss=30.0),
        make_facts(41, loss=30.0, applied=False, limits=Limits(loss=2.25)),
        make_facts(42, loss=math.nan, applied=False),
        make_facts(43, loss=30.0, applied=False, limits=Limits(loss=2.25)),
    ]
    verdicts = [monitor.observe(facts) for facts in steps]
    assert [verdict.code for verdict in verdicts] == [
        "loss.spike",
        "loss.skip",
        "loss.ok",
        "loss.skip",
    ]
    assert [verdict.proposal for verdict in verdicts[:3]] == [Continue()] * 3
    proposal = verdicts[3].proposal
    assert isinstance(proposal, Rollback)
    assert proposal.bad == (1040, 1041, 1043)
    assert "guard.spike_sigma (12)" in proposal.reason


def test_a_silent_window_does_not_turn_noise_into_a_spike(make_facts: MakeFacts) -> None:
    monitor = LossMonitor(spike_window=64, spike_sigma=12.0, spike_steps=5)
    for step in range(100):
        monitor.observe(make_facts(step, loss=3.0 if step < 16 else 2.0))
    assert monitor.observe(make_facts(100, loss=2.49)).code == "loss.ok"
    assert monitor.observe(make_facts(101, loss=2.51)).code == "loss.spike", (
        "over half of what it had fallen"
    )


def test_before_sixteen_losses_nothing_is_judged(make_facts: MakeFacts) -> None:
    monitor = LossMonitor(spike_window=64, spike_sigma=12.0, spike_steps=5)
    codes = [monitor.observe(make_facts(i, loss=2.0 if i < 15 else 20.0)).code for i in range(17)]
    assert codes == ["loss.ok"] * 16 + ["loss.spike"]


def test_spikes_in_a_row_roll_back_past_their_windows_until_a_good_step(
    make_facts: MakeFacts,
) -> None:
    monitor = LossMonitor(spike_window=64, spike_sigma=12.0, spike_steps=3)
    losses = [2.0] * 20 + [30.0, 30.0, 2.0, 30.0, 40.0, 50.0]
    verdicts = [monitor.observe(make_facts(i, loss=loss)) for i, loss in enumerate(losses)]
    rollbacks = [(v.step, v.proposal.bad) for v in verdicts if isinstance(v.proposal, Rollback)]
    assert rollbacks == [(25, (1023, 1024, 1025))]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_change_no_later_decision(
    make_facts: MakeFacts, bad: float
) -> None:
    plain = LossMonitor(spike_window=64, spike_sigma=12.0, spike_steps=2)
    fed = LossMonitor(spike_window=64, spike_sigma=12.0, spike_steps=2)
    losses = falling_losses(100)
    losses[60] = losses[61] = 100.0
    for step, loss in enumerate(losses):
        expected = plain.observe(make_facts(step, loss=loss))
        assert fed.observe(make_facts(step, loss=loss)) == expected
        assert fed.observe(make_facts(step, loss=bad)).code == "loss.ok"
    assert fed.state_dict() == plain.state_dict()


def test_a_step_not_applied_is_not_judged_and_enters_nothing(make_facts: MakeFacts) -> None:
    monitor = LossMonitor(spike_window=64, spike_sigma=12.0, spike_steps=5)
    for step in range(40):
        monitor.observe(make_facts(step, loss=2.0))
    before = monitor.state_dict()
    assert monitor.observe(make_facts(40, loss=50.0, applied=False)).code == "loss.ok"
    assert monitor.state_dict() == {**before, "window": 1040}


def test_a_restored_monitor_is_armed_at_once_and_says_the_same(make_facts: MakeFacts) -> None:
    losses = falling_losses(60)
    losses[50:53] = [60.0, 70.0, 80.0]
    trace = [make_facts(i, loss=loss) for i, loss in enumerate(losses)]
    live = LossMonitor(spike_window=32, spike_sigma=12.0, spike_steps=3)
    for facts in trace[:51]:
        live.observe(facts)
    resumed = LossMonitor(spike_window=32, spike_sigma=12.0, spike_steps=3)
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    verdicts = [live.observe(facts) for facts in trace[51:]]
    assert [resumed.observe(facts) for facts in trace[51:]] == verdicts
    assert isinstance(verdicts[1].proposal, Rollback)
    assert resumed.state_dict() == live.state_dict()


def test_losses_of_exactly_zero_say_nothing_about_the_first_that_is_not(
    make_facts: MakeFacts,
) -> None:
    # A margin loss of samples that are all on the right side: no loss has shown how far one may vary.
    monitor = LossMonitor(spike_window=40, spike_sigma=12.0, spike_steps=5)
    for step in range(60):
        assert monitor.observe(make_facts(step, loss=0.0)).limits == Limits()
    verdict = monitor.observe(make_facts(60, loss=0.5))
    assert (verdict.code, verdict.limits.loss) == ("loss.ok", pytest.approx(12 * 0.5 * 2**-20))


def test_a_loss_that_fell_to_exactly_zero_is_measured_by_its_fall(make_facts: MakeFacts) -> None:
    monitor = LossMonitor(spike_window=40, spike_sigma=12.0, spike_steps=5)
    losses = [2.0] * 20 + [0.0] * 80
    verdicts = [monitor.observe(make_facts(step, loss=loss)) for step, loss in enumerate(losses)]
    assert verdicts[-1].limits == Limits(loss=1.0), "half of the fall"
    assert monitor.observe(make_facts(100, loss=0.9)).code == "loss.ok"
    over = make_facts(101, applied=False, loss=1.5, limits=Limits(loss=1.0))
    for _ in range(40):
        monitor.observe(make_facts(102, loss=0.0))
    verdict = monitor.observe(over)
    assert (verdict.code, verdict.evidence["sigmas"]) == ("loss.skip", "inf")
