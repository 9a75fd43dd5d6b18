"""What the guard lets through and what it ends: families of runs as formulas, through its monitors and rollbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.monitors.course_support import Course, Formula, drive

Numbers = tuple[float, float]


def drawn(window: int, kind: int) -> np.random.Generator:
    return np.random.default_rng([11, window, kind])


def usual(applied: int, window: int, noise: float = 0.03) -> Numbers:
    """A run that learns: from 5.5 down to 1.5, with norms that scatter by 15%."""
    loss = 1.5 + 4.0 * math.exp(-applied / 60) + noise * float(drawn(window, 0).standard_normal())
    return loss, 0.6 * math.exp(0.15 * float(drawn(window, 1).standard_normal()))


def sometimes(share: float, change: Callable[[float, float], Numbers], start: int = 0) -> Formula:
    """`usual`, with a share of the windows from `start` on changed."""

    def formula(applied: int, window: int) -> Numbers:
        loss, norm = usual(applied, window)
        return change(loss, norm) if window >= start and drawn(window, 2).random() < share else (loss, norm)

    return formula


def where(which: Callable[[int], bool], change: Callable[[float, float], Numbers]) -> Formula:
    """`usual`, with the windows that `which` names changed."""

    def formula(applied: int, window: int) -> Numbers:
        loss, norm = usual(applied, window)
        return change(loss, norm) if which(window) else (loss, norm)

    return formula


def warm_restarts(applied: int, window: int) -> Numbers:
    loss, norm = usual(applied, window)
    decay = math.exp(-(applied % 500) / 40) if applied >= 500 else 0.0
    return loss * (1 + 0.3 * decay), norm * (1 + 3 * decay)


def quiet_step(fallen: bool, factor: float) -> Formula:
    def formula(applied: int, window: int) -> Numbers:
        loss, norm = usual(applied, window, noise=0.002)
        loss = loss if fallen else 2.0 + 0.004 * float(drawn(window, 0).standard_normal())
        return (loss * factor, norm) if window > 500 else (loss, norm)

    return formula


def steps_up(applied: int, window: int) -> Numbers:
    """A quiet loss that never falls and steps up by 15% three times, for good."""
    loss = 2.0 + 0.004 * float(drawn(window, 0).standard_normal())
    return loss * 1.15 ** sum(window > at for at in (500, 900, 1400)), usual(applied, window)[1]


def shaped(loss: Callable[[int, int], float], spread: float, norm: Callable[[int], float] = lambda _: 1.0) -> Formula:
    """A loss of updates and window with normal noise, and the usual norms times a factor of the updates."""

    def formula(applied: int, window: int) -> Numbers:
        noise = spread * float(drawn(window, 0).standard_normal())
        return loss(applied, window) + noise, usual(applied, window)[1] * norm(applied)

    return formula


def forgetting(block: int) -> Formula:
    """Tasks in blocks, each learned anew: at a border the loss is where it began, and norms are fourfold."""
    began: dict[int, int] = {}

    def formula(applied: int, window: int) -> Numbers:
        number = window // block
        if applied < began.setdefault(number, applied):
            began[number] = applied  # a rollback
        new = math.exp(-(applied - began[number]) / 30)
        loss, norm = usual(10**6, window)
        return loss + 4 * new, norm * (1 + 3 * new if number else 1)

    return formula


HEALTHY: dict[str, Formula] = {
    "as usual": usual,
    "a batch in ten of another task": sometimes(0.1, lambda loss, norm: (loss + 2.5, norm * 3)),
    "the same with norms that are over their limit, too": sometimes(0.1, lambda loss, norm: (loss + 2.5, norm * 8)),
    "the same from window 300 on": sometimes(0.1, lambda loss, norm: (loss + 5, norm * 4), 300),
    "a batch in four of another task": sometimes(0.25, lambda loss, norm: (loss + 3, norm * 6)),
    "tasks in blocks of 50": where(lambda window: window // 50 % 2 == 1, lambda loss, norm: (loss + 3, norm * 2)),
    "tasks in blocks of 300": where(lambda window: window // 300 % 2 == 1, lambda loss, norm: (loss + 3, norm * 2)),
    "warm restarts": warm_restarts,
    "a quiet loss that steps up by 15%": quiet_step(True, 1.15),
    "the same without a fall before": quiet_step(False, 1.15),
    "2% of norms eightfold": sometimes(0.02, lambda loss, norm: (loss, norm * 8)),
    "8% of batches of one byte": sometimes(0.08, lambda loss, norm: (0.2, norm * 9)),
    "2 of 3 norms large a while": where(lambda w: 300 <= w < 360 and w % 3 > 0, lambda loss, norm: (loss, norm * 10)),
    "2 of 3 norms large for good": where(lambda w: w >= 300 and w % 3 > 0, lambda loss, norm: (loss, norm * 10)),
    "4 of 5 norms large for good": where(lambda w: w >= 300 and w % 5 > 0, lambda loss, norm: (loss, norm * 10)),
    "a likelihood that crosses zero": shaped(lambda n, _: 2 - 3 * (1 - math.exp(-n / 150)), 0.05),
    "a reward without bound": shaped(lambda n, _: -1e-3 * n * n, 0.3, lambda n: 1 + n / 200),
    "a cosine that comes to -1": shaped(lambda n, _: -1 + 0.9 * math.exp(-n / 50), 2e-4, lambda n: math.exp(-n / 100)),
    "returns about zero": shaped(lambda n, _: -5e-4 * n, 0.5),
    "a penalty that is annealed": shaped(lambda n, w: 3 + 4 * math.exp(-n / 60) + 1.5 * min(1, w / 400), 0.04),
    "a fall in one step": shaped(lambda n, _: 3.0 if n < 300 else 0.3, 0.02),
    "bursts of six large norms": where(lambda w: w % 100 < 6, lambda loss, norm: (loss, norm * 9)),
    "a twentieth of norms twentyfold": sometimes(0.05, lambda loss, norm: (loss, norm * 20)),
    "tasks learned anew in blocks of 100": forgetting(100),
    "tasks learned anew in blocks of 250": forgetting(250),
    "every second norm large": where(lambda w: w >= 300 and w % 2 > 0, lambda loss, norm: (loss, norm * 10)),
}  # fmt: skip


def growing(rate: float, start: int) -> Formula:
    def formula(applied: int, window: int) -> Numbers:
        loss, norm = usual(applied, window)
        scale = math.exp(rate * max(0, window - start))
        return loss * scale, norm * scale

    return formula


def lost(applied: int, window: int) -> Numbers:
    """Slowly up from window 400 on, to over where it began, and flat there."""
    loss, norm = usual(applied, window)
    return loss + 5 * min(1.0, max(0, window - 400) / 150), norm


HARMFUL: dict[str, tuple[Formula, str]] = {
    "targets that grow by 1% a step": (growing(0.02, 0), "loss"),
    "targets that grow by 2% a step": (growing(0.04, 0), "loss"),
    "targets that grow by 1% a step from 300 on": (growing(0.02, 300), "loss"),
    "a loss that grows by 0.5% a step from 300 on": (growing(0.005, 300), "loss"),
    "a loss that grows by 0.1% a step after a plateau": (growing(0.001, 400), "loss"),
    "a likelihood below zero that rises": (shaped(lambda n, w: -3 + 0.01 * max(0, w - 300), 0.03), "loss"),
    "a cosine that is lost": (
        shaped(lambda n, w: -1 + 0.9 * math.exp(-n / 50) + 1.7 * min(1, max(0, w - 400) / 300), 2e-3),
        "guard.loss_rise: report",
    ),
    "a reward that collapses": (shaped(lambda n, w: -0.01 * min(n, 400) + 0.01 * max(0, w - 400), 0.1), "guard."),
    "a loss that never falls and rises by 1%": (shaped(lambda _, w: 2 * math.exp(0.01 * w), 0.05), "guard."),
    "infinite norms in every third": (where(lambda w: w % 3 == 0, lambda loss, _: (loss, math.inf)), "guard.max_skips"),
    "a run that forgets all": (lost, "guard.loss_rise: report"),
    "all norms large for good": (where(lambda w: w > 300, lambda loss, norm: (loss, norm * 10)), "guard.skip_growth"),
    "a loss fiftyfold": (where(lambda w: w > 300, lambda loss, norm: (loss * 50, norm * 50)), "guard.spike_sigma"),
    "a loss fiftyfold at usual norms": (where(lambda w: w > 300, lambda loss, norm: (loss * 50, norm)), "spike_sigma"),
    "norms far beyond": (where(lambda w: w % 10 == 0, lambda loss, norm: (loss, norm * 300)), "guard.max_skips"),
    "NaN in a batch of ten": (sometimes(0.1, lambda loss, norm: (math.nan, norm)), "guard.max_skips"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_let_through(name: str) -> None:
    course = drive(HEALTHY[name], 1000)
    assert course.status == "done", course.reason
    assert len(course.skipped) <= 25
    assert len(course.rollbacks) <= (2 if name.startswith("tasks learned anew") else 1)


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_run_is_ended_and_the_key_is_named(name: str) -> None:
    formula, named = HARMFUL[name]
    course = drive(formula, 2500)
    assert course.status == "halted"
    assert named in course.reason


SHIFTS = (-8.0, 4096.0, -1024.0)


@pytest.mark.parametrize(
    ("name", "shift"), [(name, SHIFTS[at % len(SHIFTS)]) for at, name in enumerate([*HEALTHY, *HARMFUL])]
)
def test_a_shift_of_the_loss_changes_no_decision(name: str, shift: float) -> None:
    """Losses on a grid of 2^-20: both series are exact in float64, and so are their differences."""
    formula = HEALTHY[name] if name in HEALTHY else HARMFUL[name][0]

    def on_grid(applied: int, window: int, by: float = 0.0) -> Numbers:
        loss, norm = formula(applied, window)
        return (round(loss * 2**20) / 2**20 + by if math.isfinite(loss) else loss), norm

    plain = drive(on_grid, 600)
    moved = drive(lambda applied, window: on_grid(applied, window, shift), 600)
    assert decisions(plain) == decisions(moved)


def decisions(course: Course) -> tuple[Any, ...]:
    return course.status, course.applied, course.skipped, course.told, course.rollbacks


def test_samples_that_recur_are_announced_once_and_their_windows_named() -> None:
    course = drive(HEALTHY["2 of 3 norms large for good"], 1500)
    accepted = [window for code, window in course.told if code == "gradient.accepted"]
    assert len(accepted) == 1
    assert all(window in course.applied for window in range(310, 1490)), "nothing is skipped from then on"


def test_what_recurred_is_forgotten_once_it_is_gone() -> None:
    course = drive(HEALTHY["2 of 3 norms large a while"], 1500)
    assert course.limits[400][1] > 10 * 0.6 > course.limits[1400][1]


def test_a_rise_is_told_before_it_is_acted_upon_and_what_is_lost_is_gone_back_behind() -> None:
    course = drive(lost, 2500)
    told = [window for code, window in course.told if code == "loss.rise"]
    assert 450 < told[0] < 520 < told[1]
    assert len(course.rollbacks) == 3
    assert all(len(bad) == 200 for bad in course.rollbacks)
    assert min(course.rollbacks[0]) > told[0]
    assert all(400 < step <= min(course.rollbacks[0]) for step in course.returned_to)


@pytest.mark.parametrize("name", ["tasks in blocks of 50", "tasks in blocks of 300", "the same without a fall before"])
def test_a_lasting_step_is_let_through_once_a_rollback_did_not_help(name: str) -> None:
    course = drive(HEALTHY[name], 1000)
    said = [code for code, _ in course.told if code != "loss.rise"]
    assert said == ["loss.skip"] * 9 + ["loss.accepted", "loss.skip"], "the last was on its way"
    assert len(course.rollbacks) == 1


def test_a_lasting_step_of_15_percent_is_told_and_no_more() -> None:
    """It is far from half of what the loss had fallen, and far over the spread of a quiet loss."""
    course = drive(HEALTHY["a quiet loss that steps up by 15%"], 1000)
    assert course.codes == {"loss.rise"}
    assert [500 + 200 <= window < 500 + 250 for _, window in course.told] == [True], "once, after 200 updates"
    assert course.skipped == []
    assert course.rollbacks == []


def test_two_lasting_steps_are_no_rise() -> None:
    """The second comes when the loss has been over its first median for long."""
    course = drive(steps_up, 2000)
    assert course.status == "done", course.reason
    assert len(course.rollbacks) <= 1


def test_a_small_rise_is_told_once_until_the_loss_was_back() -> None:
    """Between half of what makes a rise and all of it nothing is told again."""

    def formula(applied: int, window: int) -> Numbers:
        up = 0.0 if window < 300 or 800 <= window < 900 else (0.3 if window % 100 < 80 else 0.14)
        loss, norm = usual(applied, window)
        return loss + up, norm

    course = drive(formula, 1300)
    assert [code for code, _ in course.told] == ["loss.rise"] * 2


def test_reporting_alone_lets_a_rise_go_on() -> None:
    course = drive(lost, 2500, loss_rise="report")
    assert course.status == "done"
    assert course.rollbacks == []
    assert [code for code, _ in course.told] == ["loss.rise"]


def test_a_loss_that_rises_and_comes_back_is_told_once() -> None:
    hill = where(lambda w: 600 <= w < 750, lambda loss, norm: (loss + 2.4, norm))
    course = drive(hill, 1500, spike_sigma=100.0)
    assert course.status == "done"
    assert [code for code, _ in course.told] == ["loss.rise"]
