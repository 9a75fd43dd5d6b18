"""The schedule against its closed form, and its device version against its host version."""

from __future__ import annotations

import math

import pytest
import torch

from harness.core.config import TrainConfig
from harness.optim.schedule import Schedule

SCHEDULE = Schedule(lr=3e-3, warmup_steps=7, total_steps=50, min_lr_ratio=0.1)


def closed_form(n: int) -> float:
    if n < 7:
        return 3e-3 * (n + 1) / 7
    share = min(1.0, (n - 7) / (50 - 7))
    return 3e-4 + (3e-3 - 3e-4) * (1 + math.cos(math.pi * share)) / 2


@pytest.mark.parametrize("n", [0, 1, 6, 7, 8, 30, 49, 50, 1000])
def test_closed_form(n: int) -> None:
    assert SCHEDULE(n) == pytest.approx(closed_form(n), rel=1e-7)


def test_landmarks() -> None:
    peak = torch.tensor(3e-3).item()
    assert SCHEDULE(6) == SCHEDULE(7) == peak
    assert SCHEDULE(50) == SCHEDULE(51) == pytest.approx(3e-4, rel=1e-7)
    assert all(SCHEDULE(n) > SCHEDULE(n + 1) for n in range(7, 50))


def test_tensor_and_int_give_the_same_bits() -> None:
    for n in range(60):
        on_device = SCHEDULE(torch.tensor(float(n)))
        assert on_device.dtype == torch.float32
        assert on_device.ndim == 0
        assert on_device.item() == SCHEDULE(n)


def test_no_warmup_and_nothing_but_warmup() -> None:
    assert Schedule(1.0, 0, 10, 0.0)(0) == 1.0
    assert Schedule(1.0, 0, 10, 0.0)(10) == 0.0
    assert Schedule(1.0, 10, 10, 0.5)(9) == 1.0
    assert Schedule(1.0, 20, 10, 0.5)(9) == 0.5


def straight(n: int, first: int) -> float:
    return 3e-3 * (1 - 0.9 * min(1.0, max(0, n - first) / (50 - first)))


@pytest.mark.parametrize("n", [0, 6, 7, 8, 30, 39, 40, 41, 49, 50, 1000])
def test_the_other_kinds_have_their_closed_forms(n: int) -> None:
    def rate(kind: str, share: float = 0.2) -> float:
        return Schedule(3e-3, 7, 50, 0.1, kind, share)(n)

    if n < 7:
        expected = dict.fromkeys(("linear", "wsd", "constant"), 3e-3 * (n + 1) / 7)
    else:
        expected = {"linear": straight(n, 7), "wsd": straight(n, 40), "constant": 3e-3}
    for kind, value in expected.items():
        assert rate(kind) == pytest.approx(value, rel=1e-6), kind
    assert rate("wsd", 1.0) == rate("linear"), "the decay begins after the warm-up"


def test_more_steps_do_not_move_what_wsd_has_done() -> None:
    short, long = (Schedule(1.0, 5, total, 0.1, "wsd") for total in (100, 200))
    assert [short(n) for n in range(80)] == [long(n) for n in range(80)]
    cosine = [Schedule(1.0, 5, total, 0.1)(60) for total in (100, 200)]
    assert cosine[1] > 1.5 * cosine[0]


def test_a_schedule_is_the_runs_own() -> None:
    train = TrainConfig.model_validate(
        {
            "lr": 0.5,
            "warmup_steps": 3,
            "steps": 40,
            "min_lr_ratio": 0.2,
            "schedule": "wsd",
            "decay_share": 0.5,
        }
    )
    assert Schedule.of(train) == Schedule(0.5, 3, 40, 0.2, "wsd", 0.5)
    assert Schedule.of(TrainConfig()).kind == "cosine"
