"""What the guard lets through and what it ends: families of courses, through its monitors and rollbacks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.families import load_families
from benchmarks.families.__main__ import FACTORS, RESULTS, curve
from benchmarks.families.course import Course, drive
from benchmarks.families.shapes import learns, regular
from harness.core.files import read_json
from tests.support.matrix import rest_nightly, rest_slow

FAMILIES = {family.name: family for family in load_families()}
HEALTHY = [name for name, family in FAMILIES.items() if family.kind == "healthy"]
HARMFUL = [name for name, family in FAMILIES.items() if family.kind == "harmful"]
FORGETS = FAMILIES["a run that forgets all"].formula()


def test_there_are_families_enough_and_each_one_that_is_let_through_says_why() -> None:
    assert len(HEALTHY) >= 20
    assert len(HARMFUL) >= 20
    assert all(bool(FAMILIES[name].key) != bool(FAMILIES[name].limit) for name in HARMFUL)


@pytest.mark.parametrize("name", rest_slow(HEALTHY, *HEALTHY[::32]))
def test_a_healthy_course_is_let_through(name: str) -> None:
    course = drive(FAMILIES[name].formula(), 1000)
    assert course.status == "done", course.reason
    assert len(course.skipped) <= 25
    assert len(course.rollbacks) <= (2 if name.startswith("tasks learned anew") else 1)


@pytest.mark.parametrize("name", rest_slow(HARMFUL, *HARMFUL[::16]))
def test_a_harmful_course_is_ended_and_the_key_is_named_or_its_limit_is(name: str) -> None:
    family = FAMILIES[name]
    course = drive(family.formula(), 2500)
    assert course.status == ("done" if family.limit else "halted")
    assert family.key in course.reason


def test_the_record_is_of_these_families_and_says_what_its_curve_says() -> None:
    record = read_json(RESULTS)
    for factor in FACTORS:
        told = {
            row["family"]: row["outcome"] for row in record["courses"] if row["factor"] == factor
        }
        assert list(told) == list(FAMILIES)
        if factor == 1:
            assert told == {
                name: "halted" if family.key else "done" for name, family in FAMILIES.items()
            }
    assert record["curve"] == curve(record["courses"], FACTORS)


SHIFTS = (-8.0, 4096.0, -1024.0)
SHIFTED = [(name, SHIFTS[at % len(SHIFTS)]) for at, name in enumerate([*HEALTHY, *HARMFUL])]


@pytest.mark.parametrize(
    ("name", "shift"),
    rest_nightly(SHIFTED, *SHIFTED[::8]),
)
def test_a_shift_of_the_loss_changes_no_decision(name: str, shift: float) -> None:
    """Losses on a grid of 2^-20: both series are exact in float64, and so are their differences."""
    formula = FAMILIES[name].formula()

    def on_grid(applied: int, window: int, by: float = 0.0) -> tuple[float, float]:
        loss, norm = formula(applied, window)
        return (round(loss * 2**20) / 2**20 + by if math.isfinite(loss) else loss), norm

    plain = drive(on_grid, 600)
    moved = drive(lambda applied, window: on_grid(applied, window, shift), 600)
    assert decisions(plain) == decisions(moved)


def decisions(course: Course) -> tuple[Any, ...]:
    return course.status, course.applied, course.skipped, course.told, course.rollbacks


def test_samples_that_recur_are_announced_once_and_their_windows_named() -> None:
    course = drive(FAMILIES["2 of 3 norms large for good"].formula(), 1500)
    accepted = [window for code, window in course.told if code == "gradient.accepted"]
    assert len(accepted) == 1
    assert all(window in course.applied for window in range(310, 1490)), (
        "nothing is skipped from then on"
    )


def test_what_recurred_is_forgotten_once_it_is_gone() -> None:
    course = drive(FAMILIES["2 of 3 norms large a while"].formula(), 1500)
    assert course.limits[400][1] > 10 * 0.6 > course.limits[1400][1]


def test_a_rise_is_told_before_it_is_acted_upon_and_what_is_lost_is_gone_back_behind() -> None:
    course = drive(FORGETS, 2500)
    told = [window for code, window in course.told if code == "loss.rise"]
    assert 450 < told[0] < 520 < told[1]
    assert len(course.rollbacks) == 3
    assert all(len(bad) == 200 for bad in course.rollbacks)
    assert min(course.rollbacks[0]) > told[0]
    assert all(400 < step <= min(course.rollbacks[0]) for step in course.returned_to)


@pytest.mark.parametrize(
    "name", ["tasks in blocks of 50", "tasks in blocks of 300", "the same without a fall before"]
)
def test_a_lasting_step_is_let_through_once_a_rollback_did_not_help(name: str) -> None:
    course = drive(FAMILIES[name].formula(), 1000)
    said = [code for code, _ in course.told if code != "loss.rise"]
    assert said == ["loss.skip"] * 9 + ["loss.accepted", "loss.skip"], "the last was on its way"
    assert len(course.rollbacks) == 1


def test_a_lasting_step_of_15_percent_is_told_and_no_more() -> None:
    """It is far from half of what the loss had fallen, and far over the spread of a quiet loss."""
    course = drive(FAMILIES["a quiet loss that steps up by 15%"].formula(), 1000)
    assert course.codes == {"loss.rise"}
    assert [500 + 200 <= window < 500 + 250 for _, window in course.told] == [True], (
        "once, after 200 updates"
    )
    assert course.skipped == []
    assert course.rollbacks == []


@pytest.mark.slow
def test_two_lasting_steps_are_no_rise() -> None:
    """The second comes when the loss has been over its first median for long."""
    course = drive(FAMILIES["a loss that steps up by 15% three times"].formula(), 2000)
    assert course.status == "done", course.reason
    assert len(course.rollbacks) <= 1


@pytest.mark.slow
def test_a_small_rise_is_reported_once_until_the_loss_was_back() -> None:
    """Between half of the limit for a rise and the limit itself, nothing is reported again."""

    def formula(applied: int, window: int) -> tuple[float, float]:
        up = 0.0 if window < 300 or 800 <= window < 900 else (0.3 if window % 100 < 80 else 0.14)
        loss, norm = learns(applied, window)
        return loss + up, norm

    course = drive(formula, 1300)
    assert [code for code, _ in course.told] == ["loss.rise"] * 2


@pytest.mark.slow
def test_reporting_alone_lets_a_rise_go_on() -> None:
    course = drive(FORGETS, 2500, loss_rise="report")
    assert course.status == "done"
    assert course.rollbacks == []
    assert [code for code, _ in course.told] == ["loss.rise"]


@pytest.mark.slow
def test_a_loss_that_rises_and_comes_back_is_told_once() -> None:
    hill = regular(of=1, bad=1, add=2.4, first=600, last=750)
    course = drive(hill, 1500, spike_sigma=100.0)
    assert course.status == "done"
    assert [code for code, _ in course.told] == ["loss.rise"]
