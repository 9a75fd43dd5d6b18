"""The schedule against its closed form, and its device version against its host version."""

from __future__ import annotations

import math

import pytest
import torch

from harness.optim import WarmupCosine

SCHEDULE = WarmupCosine(lr=3e-3, warmup_steps=7, total_steps=50, min_lr_ratio=0.1)


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
    assert WarmupCosine(1.0, 0, 10, 0.0)(0) == 1.0
    assert WarmupCosine(1.0, 0, 10, 0.0)(10) == 0.0
    assert WarmupCosine(1.0, 10, 10, 0.5)(9) == 1.0
    assert WarmupCosine(1.0, 20, 10, 0.5)(9) == 0.5
