from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from harness.core.facts import BAD_LABEL, Continue, Limits, Rollback, StepFacts
from harness.monitors.gradients import GradientMonitor

MakeFacts = Callable[..., StepFacts]


def test_a_skipped_step_is_unhealthy_and_left_to_the_gate(make_facts: MakeFacts) -> None:
    verdict = GradientMonitor(5).observe(
        make_facts(7, applied=False, grad_norm=math.nan, loss=math.inf)
    )
    assert (verdict.code, verdict.step, verdict.healthy) == ("nonfinite.skip", 7, False)
    assert verdict.proposal == Continue()
    assert verdict.evidence["window"] == 1007
    assert "window 1007" in verdict.text
    json.dumps(verdict.evidence, allow_nan=False)


def test_skips_in_a_row_roll_back_past_all_their_windows(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(3)
    applied = [False, False, True, False, False, False, False]
    verdicts = [
        monitor.observe(make_facts(i, applied=ok, grad_norm=math.nan))
        for i, ok in enumerate(applied)
    ]
    found = [v.proposal.bad if isinstance(v.proposal, Rollback) else None for v in verdicts]
    assert found == [None, None, None, None, None, (1003, 1004, 1005), (1003, 1004, 1005, 1006)]


@pytest.mark.parametrize(
    ("row", "text"), [(1, "1 update was not finite"), (2, "2 updates in a row were not finite")]
)
def test_a_rollback_says_how_many_updates_were_bad(
    make_facts: MakeFacts, row: int, text: str
) -> None:
    monitor = GradientMonitor(row)
    bad = [make_facts(step, applied=False, grad_norm=math.nan) for step in range(row)]
    proposal = [monitor.observe(facts).proposal for facts in bad][-1]
    assert isinstance(proposal, Rollback)
    assert proposal.reason.startswith(text)


def test_a_falling_loss_scale_is_calibration_down_to_its_floor(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(5)
    scales = [2.0**power for power in range(16, -1, -1)]
    verdicts = [
        monitor.observe(make_facts(i, applied=False, grad_norm=math.inf, loss_scale=s))
        for i, s in enumerate(scales)
    ]
    codes = [verdict.code for verdict in verdicts]
    assert (
        codes == ["scaler.calibration"] * 7 + ["nonfinite.skip"] * 10
    )  # 65536 .. 1024, then 512 ..
    assert not any(verdict.healthy for verdict in verdicts)
    rollbacks = [(v.step, v.proposal.bad) for v in verdicts if isinstance(v.proposal, Rollback)]
    # Five real skips: 512, 256, 128, 64, 32. Windows that only calibrated the scaler are not thrown away.
    assert rollbacks[0] == (11, tuple(range(1007, 1012)))


@pytest.mark.parametrize(
    ("scales", "loss", "codes"),
    [
        pytest.param(
            [8192.0, 8192.0],
            2.0,
            ["scaler.calibration", "nonfinite.skip"],
            id="scale does not fall",
        ),
        pytest.param(
            [8192.0, 4096.0], math.nan, ["nonfinite.skip"] * 2, id="loss itself not finite"
        ),
        pytest.param([1.0, 1.0], 2.0, ["nonfinite.skip"] * 2, id="no scaler"),
    ],
)
def test_what_is_not_calibration(
    make_facts: MakeFacts, scales: list[float], loss: float, codes: list[str]
) -> None:
    monitor = GradientMonitor(5)
    steps = [
        make_facts(i, applied=False, grad_norm=math.inf, loss=loss, loss_scale=s)
        for i, s in enumerate(scales)
    ]
    assert [monitor.observe(facts).code for facts in steps] == codes


def test_each_search_for_the_scale_is_calibration_anew(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(5)
    codes = [
        monitor.observe(make_facts(i, applied=i % 2 == 1, loss_scale=8192.0)).code for i in range(6)
    ]
    assert codes == ["scaler.calibration", "gradient.ok"] * 3


def test_growth_is_reported_once_a_streak_and_only_once_armed(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(5)
    norms = [50.0] + [1.0] * 20 + [9.9, 10.0, 30.0, 1.0, 12.0]
    verdicts = [
        monitor.observe(make_facts(step, grad_norm=norm)) for step, norm in enumerate(norms)
    ]
    grown = [verdict for verdict in verdicts if verdict.code == "gradient.growth"]
    assert [verdict.step for verdict in grown] == [22, 25]
    assert all(verdict.healthy and verdict.proposal == Continue() for verdict in grown)
    assert grown[0].evidence["median"] == 1.0


def test_a_skipped_norm_never_enters_the_median(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(1000)
    for step in range(200):
        monitor.observe(make_facts(2 * step, grad_norm=1.0))
        monitor.observe(
            make_facts(2 * step + 1, grad_norm=math.nan if step % 2 else 1e9, applied=False)
        )
    assert monitor.observe(make_facts(400, grad_norm=10.0)).code == "gradient.growth"


def test_a_skip_names_the_usual_norm_that_its_limit_is_a_multiple_of(make_facts: MakeFacts) -> None:
    """Norms that fall tenfold: the median of the last hundred is far over what is usual now."""
    monitor = GradientMonitor(5)
    limits = Limits()
    for step in range(101):
        norm = 10.0 ** (-step / 50)
        limits = monitor.observe(make_facts(step, grad_norm=norm)).limits
    skipped = monitor.observe(make_facts(101, applied=False, grad_norm=0.08, limits=limits))
    assert skipped.code == "gradient.skip"
    assert limits.norm == pytest.approx(0.05, rel=0.1), "5 times the norm of now"
    assert skipped.evidence["usual"] == pytest.approx(0.01, rel=0.1)
    assert f"over its limit of {limits.norm:.4g} (usual norm {skipped.evidence['usual']:.4g})" in (
        skipped.text
    )


def noisy_norms(steps: int, seed: int = 0, sigma: float = 0.2) -> list[float]:
    """Around 0.5, log-normal: as in the quickstart after warm-up."""
    return (0.5 * np.exp(sigma * np.random.default_rng(seed).standard_normal(steps))).tolist()


def fed(make_facts: MakeFacts, norms: Sequence[float], **keys: float) -> GradientMonitor:
    """A monitor that saw these norms at steps 0, 1, ..., all applied."""
    monitor = GradientMonitor(3, **keys)  # type: ignore[arg-type]
    for step, norm in enumerate(norms):
        monitor.observe(make_facts(step, grad_norm=norm))
    return monitor


def test_limits_come_with_every_verdict_from_the_32nd_applied_step_on(
    make_facts: MakeFacts,
) -> None:
    monitor = GradientMonitor(3)
    given = [monitor.observe(make_facts(step, grad_norm=1.0)).limits for step in range(40)]
    assert given[:31] == [Limits()] * 31
    assert given[31:] == [Limits(norm=pytest.approx(5.0), clip=pytest.approx(3.0))] * 9  # type: ignore[arg-type]
    others = [
        make_facts(40, applied=False, grad_norm=math.nan, loss=math.nan),
        make_facts(41, applied=False, grad_norm=math.inf, loss_scale=8192.0),
        make_facts(42, applied=False, grad_norm=30.0, limits=Limits(norm=5.0)),
        make_facts(43, applied=False, grad_norm=0.0, bad_data=BAD_LABEL),
    ]
    assert [monitor.observe(facts).limits for facts in others] == [given[-1]] * 4


def test_the_keys_set_the_limits(make_facts: MakeFacts) -> None:
    limits = fed(
        make_facts, [2.0] * 19 + [4.0], skip_growth=7.0, clip_growth=1.5, window=20
    ).observe(make_facts(20, grad_norm=2.0))
    assert (limits.limits.norm, limits.limits.clip) == (pytest.approx(14.0), pytest.approx(3.0))


def test_noisier_gradients_get_more_room(make_facts: MakeFacts) -> None:
    quiet, noisy = (
        fed(make_facts, noisy_norms(60, sigma=sigma))
        .observe(make_facts(60, grad_norm=0.5))
        .limits.norm
        for sigma in (0.1, 0.8)
    )
    assert 2.0 < quiet < 3.0
    assert noisy > 10.0


def test_a_fall_is_followed_so_that_a_tenfold_norm_stays_over_the_limit(
    make_facts: MakeFacts,
) -> None:
    norms = [4.0 * 0.95**step for step in range(60)]
    monitor, limits = GradientMonitor(3), []
    for step, norm in enumerate(norms):
        limits.append(monitor.observe(make_facts(step, grad_norm=norm)).limits.norm)
    armed = [step for step in range(60) if step >= 34]
    assert all(norms[step] < limits[step - 2] < 10 * norms[step] for step in armed)


def test_a_steady_rise_is_let_through(make_facts: MakeFacts) -> None:
    norms = [0.1 * 1.1**step for step in range(60)]
    monitor, limits = GradientMonitor(3), []
    for step, norm in enumerate(norms):
        limits.append(monitor.observe(make_facts(step, grad_norm=norm)).limits.norm)
    assert all(norms[step] < limits[step - 2] for step in range(34, 60))


def test_a_norm_over_its_limit_is_told_as_skipped(make_facts: MakeFacts) -> None:
    monitor = fed(make_facts, [1.0] * 40)
    verdict = monitor.observe(
        make_facts(40, grad_norm=12.5, applied=False, limits=Limits(norm=5.0))
    )
    assert (verdict.code, verdict.healthy, verdict.proposal) == ("gradient.skip", False, Continue())
    for part in ("12.5", "limit of 5", "usual norm 1", "window 1040"):
        assert part in verdict.text
    assert verdict.evidence["window"] == 1040
    json.dumps(verdict.evidence, allow_nan=False)


def test_skips_for_norm_and_nan_are_one_row_and_the_rollback_names_the_key(
    make_facts: MakeFacts,
) -> None:
    monitor = fed(make_facts, [1.0] * 40)
    over = {"grad_norm": 50.0, "applied": False, "limits": Limits(norm=5.0)}
    steps = [
        make_facts(40, **over),
        make_facts(41, applied=False, grad_norm=math.nan, loss=math.nan),
        make_facts(42, applied=False, bad_data=BAD_LABEL),  # the data monitor's
        make_facts(
            43, applied=False, loss=9.0, grad_norm=50.0, limits=Limits(loss=3.0, norm=5.0)
        ),  # the loss monitor's
        make_facts(44, **over),
    ]
    verdicts = [monitor.observe(facts) for facts in steps]
    codes = ["gradient.skip", "nonfinite.skip", "gradient.ok", "gradient.ok", "gradient.skip"]
    assert [verdict.code for verdict in verdicts] == codes
    assert not any(verdict.text for verdict in verdicts[2:4])
    assert [verdict.proposal for verdict in verdicts[:4]] == [Continue()] * 4
    proposal = verdicts[4].proposal
    assert isinstance(proposal, Rollback)
    assert proposal.bad == (1040, 1041, 1044)
    assert "guard.skip_growth (5)" in proposal.reason


@pytest.mark.parametrize(
    "skipped",
    [
        pytest.param({"grad_norm": math.nan, "loss": math.nan}, id="NaN"),
        pytest.param({"grad_norm": math.inf, "loss_scale": 8192.0}, id="fp16 overflow"),
        pytest.param({"grad_norm": 1e4, "limits": Limits(norm=5.0)}, id="over its limit"),
        pytest.param(
            {"grad_norm": 1e4, "loss": 90.0, "limits": Limits(loss=5.0)}, id="loss over its limit"
        ),
        pytest.param({"grad_norm": 1e4, "bad_data": BAD_LABEL}, id="bad data"),
    ],
)
def test_a_skipped_step_changes_no_later_limit_and_causes_no_later_word(
    make_facts: MakeFacts, skipped: dict[str, object]
) -> None:
    plain, hit = fed(make_facts, noisy_norms(50)), fed(make_facts, noisy_norms(50))
    hit.observe(make_facts(50, applied=False, **skipped))
    for step, norm in enumerate(noisy_norms(50, seed=1), start=51):
        assert hit.observe(make_facts(step, grad_norm=norm)) == plain.observe(
            make_facts(step, grad_norm=norm)
        )


@pytest.mark.parametrize("odd", [0.0, math.nan, math.inf])
def test_an_applied_norm_without_a_logarithm_is_left_out(make_facts: MakeFacts, odd: float) -> None:
    plain, hit = fed(make_facts, noisy_norms(50)), fed(make_facts, noisy_norms(50))
    hit.observe(make_facts(50, grad_norm=odd))
    assert hit.state_dict() == plain.state_dict()


def test_gradual_tenfold_growth_within_100_steps_is_reported(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(3)
    norms = [1.0] * 100 + [10 ** (step / 85) for step in range(100)]
    told = [
        v.step
        for i, n in enumerate(norms)
        if (v := monitor.observe(make_facts(i, grad_norm=n))).text
    ]
    assert len(told) == 1
    assert 10 <= norms[told[0]] < 13


@pytest.mark.parametrize("cut", [3, 43, 47, 50])
def test_a_restored_monitor_says_the_same(make_facts: MakeFacts, cut: int) -> None:
    norms = [1.0 + 0.1 * (i % 7) for i in range(44)] + [40.0, 50.0] + [math.nan] * 4 + [1.0, 15.0]
    trace = [
        make_facts(i, grad_norm=n, applied=math.isfinite(n), loss_scale=2.0 ** (38 - i))
        for i, n in enumerate(norms)
    ]
    trace[46] = make_facts(46, grad_norm=60.0, applied=False, limits=Limits(norm=5.0))
    live = GradientMonitor(3)
    for facts in trace[:cut]:
        live.observe(facts)
    resumed = GradientMonitor(3)
    resumed.load_state_dict(json.loads(json.dumps(live.state_dict(), allow_nan=False)))
    verdicts = [live.observe(facts) for facts in trace[cut:]]
    assert [resumed.observe(facts) for facts in trace[cut:]] == verdicts
    assert any(verdict.text for verdict in verdicts)
    if cut >= 32:
        assert verdicts[0].limits.norm < math.inf, "armed at once"


def test_recurring_norms_at_the_largest_clip_growth(make_facts: MakeFacts) -> None:
    monitor = GradientMonitor(5, clip_growth=1e300)
    limits = Limits()
    codes: list[str] = []
    for step in range(80):
        norm = 20.0 if step >= 40 and step % 4 == 0 else 1.0
        applied = norm <= limits.norm
        verdict = monitor.observe(make_facts(step, grad_norm=norm, applied=applied, limits=limits))
        codes.append(verdict.code)
        limits = verdict.limits
    assert codes.count("gradient.accepted") == 1


def test_a_limit_beyond_float32_is_none(make_facts: MakeFacts) -> None:
    facts = make_facts(7, applied=False, grad_norm=1e38, limits=Limits(loss=1e300, norm=1e300))
    assert not facts.over_limits
