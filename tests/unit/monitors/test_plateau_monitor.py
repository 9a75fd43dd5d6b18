from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from harness.core.facts import Continue, StepFacts, Verdict
from harness.monitors.loss import PlateauMonitor
from tests.support.matrix import rest_slow

MakeFacts = Callable[..., StepFacts]


def told(
    make_facts: MakeFacts, losses: np.ndarray, norms: np.ndarray | float = 1.0
) -> list[Verdict]:
    """What the monitor says of updates 1, 2, ..."""
    monitor = PlateauMonitor()
    pairs = zip(losses.tolist(), np.broadcast_to(norms, losses.shape).tolist(), strict=True)
    verdicts = [
        monitor.observe(make_facts(step, applied_steps=step, loss=loss, grad_norm=norm))
        for step, (loss, norm) in enumerate(pairs, start=1)
    ]
    return [verdict for verdict in verdicts if verdict.code != "loss.ok"]


def noise(steps: int, seed: int, sigma: float = 0.03) -> np.ndarray:
    return np.exp(sigma * np.random.default_rng(seed).standard_normal(steps))


@pytest.mark.parametrize("seed", rest_slow(range(6), 0))
def test_a_clean_run_of_slow_progress_is_silent(make_facts: MakeFacts, seed: int) -> None:
    steps = np.arange(1, 9000)
    losses = (1.2 + 4.3 * np.exp(-steps / 60) + 2.0 * steps**-0.3) * noise(len(steps), seed)
    norms = (0.3 + 9.0 * np.exp(-steps / 30)) * noise(len(steps), seed + 100, 0.3)
    norms[seed] = 1e4  # the first gradient of an unlucky initialisation
    norms[4000] = 5e3
    assert told(make_facts, losses, norms) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_stands_still_is_told_once_at_a_doubling(
    make_facts: MakeFacts, seed: int
) -> None:
    steps = np.arange(1, 5000)
    losses = np.where(steps < 700, 5.0 * steps**-0.1, 2.6) * noise(len(steps), seed, 0.005)
    (verdict,) = told(make_facts, losses)
    assert (verdict.code, verdict.step) == ("loss.plateau", 2048)
    assert verdict.healthy
    assert verdict.proposal == Continue()
    assert "between updates 1024 and 2048" in verdict.text
    assert verdict.evidence["loss"] == pytest.approx(2.6, rel=0.01)


def test_a_run_that_never_learns_is_told_at_512(make_facts: MakeFacts) -> None:
    assert [(v.code, v.step) for v in told(make_facts, 5.545 * noise(600, 0, 0.002))] == [
        ("loss.plateau", 512)
    ]


@pytest.mark.parametrize("to", [0.0, 1e-6, 9e-4])
def test_vanished_gradients_with_a_flat_loss_are_told_once(
    make_facts: MakeFacts, to: float
) -> None:
    steps = np.arange(1, 480)
    norms = np.where(steps < 250, 2.0, 2.0 * to) * noise(len(steps), 1, 0.05)
    losses = np.where(steps < 250, 4.0 * steps**-0.1, 2.3)
    (verdict,) = told(make_facts, losses, norms)
    assert verdict.code == "gradient.vanished"
    assert 250 + 64 <= verdict.step <= 250 + 128 + 16
    assert verdict.healthy
    assert verdict.evidence["largest"] == pytest.approx(2.0, rel=0.05)


def test_small_gradients_of_a_falling_loss_are_no_alarm(make_facts: MakeFacts) -> None:
    steps = np.arange(1, 500)
    assert told(make_facts, 4.0 * np.exp(-steps / 50), 2.0 * np.exp(-steps / 25)) == []


def test_a_norm_of_a_hundredth_is_no_alarm(make_facts: MakeFacts) -> None:
    steps = np.arange(1, 500)
    assert (
        told(make_facts, np.where(steps < 200, 4.0, 2.3), np.where(steps < 200, 1.0, 0.011)) == []
    )


def test_it_tells_again_after_a_recovery(make_facts: MakeFacts) -> None:
    steps = np.arange(1, 1000)
    alive = (steps // 250) % 2 == 0
    verdicts = told(make_facts, np.full(len(steps), 2.0), np.where(alive, 1.0, 1e-5))
    assert [verdict.code for verdict in verdicts].count("gradient.vanished") == 2


def test_skipped_and_non_finite_steps_count_for_nothing(make_facts: MakeFacts) -> None:
    plain, fed = PlateauMonitor(), PlateauMonitor()
    for step in range(1, 700):
        facts = make_facts(
            step, applied_steps=step, loss=3.0, grad_norm=1.0 if step < 300 else 1e-6
        )
        expected = plain.observe(facts)
        for bad in (
            make_facts(step, applied=False, applied_steps=step, loss=9.0),
            make_facts(step, applied_steps=step, loss=math.nan),
            make_facts(step, applied_steps=step, grad_norm=math.inf),
        ):
            assert fed.observe(bad).code == "loss.ok"
        assert fed.observe(facts) == expected
    assert fed.state_dict() == plain.state_dict()


@pytest.mark.parametrize("shift", [-8.0, 1024.0])
@pytest.mark.parametrize("flat", [True, False])
def test_a_shift_of_the_loss_changes_no_word(
    make_facts: MakeFacts, flat: bool, shift: float
) -> None:
    """On a grid of 2^-20, where shifts are exact."""
    steps = np.arange(1, 2100)
    losses = np.where(steps < 700, 5.0 * steps**-0.1, 2.6) if flat else 1.2 + 5 * steps**-0.3
    losses = np.round(losses * noise(len(steps), 3, 0.005) * 2**20) / 2**20
    norms = np.where(flat & (steps > 1500), 1e-5, 1.0)
    plain, moved = told(make_facts, losses, norms), told(make_facts, losses + shift, norms)
    assert [(verdict.code, verdict.step) for verdict in plain] == [
        (verdict.code, verdict.step) for verdict in moved
    ]
    assert [verdict.code for verdict in plain] == (
        ["gradient.vanished", "loss.plateau"] if flat else []
    )


@pytest.mark.parametrize("cut", [100, 300, 400, 511, 512])
def test_a_restored_monitor_says_the_same(make_facts: MakeFacts, cut: int) -> None:
    trace = [
        make_facts(step, applied_steps=step, loss=3.0, grad_norm=1.0 if step < 300 else 1e-6)
        for step in range(1, 1100)
    ]
    live, resumed = PlateauMonitor(), PlateauMonitor()
    for facts in trace[:cut]:
        live.observe(facts)
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    verdicts = [live.observe(facts) for facts in trace[cut:]]
    assert [resumed.observe(facts) for facts in trace[cut:]] == verdicts
    assert any(verdict.text for verdict in verdicts) == (cut < 512)


@pytest.mark.parametrize("from_step", [1, 40])
def test_a_gradient_of_exactly_zero_is_told_though_no_larger_one_was_seen(
    make_facts: MakeFacts, from_step: int
) -> None:
    steps = np.arange(1, 700)
    norms = np.where(steps < from_step, 1.0, 0.0)
    vanished, plateau = told(make_facts, 3.0 * noise(len(steps), 0, 0.002), norms)
    assert (vanished.code, vanished.step, plateau.code) == (
        "gradient.vanished",
        128,
        "loss.plateau",
    )
    assert "the gradient norm is 0 (median of 64 steps)" in vanished.text
    assert vanished.evidence["largest"] == 0.0
