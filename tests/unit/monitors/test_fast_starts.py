"""A tensor that grows is over its scale, which is of the steps before: growth is no fault, and hides none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fallback_support import LAYERS, drive, make_facts

from harness.core.config import FallbackConfig
from harness.core.facts import StepFacts
from harness.monitors.fallback import FallbackController
from harness.monitors.growth import Growth

SLOT = f"{LAYERS[1]}.input"
# The first amaxes of an `mlp.down.input` each, in runs whose bf16 twins train without a spike; in each of the first
# three, three of eight saturations are over 1.5.
HEALTHY = {
    "dim 64, lr 1e-2, 4 warm-up steps": (
        0.111,
        0.133,
        0.196,
        0.404,
        0.348,
        1.01,
        0.867,
        0.949,
        1.71,
        2.19,
        2.86,
        3.75,
    ),
    "its second block": (
        0.107,
        0.154,
        0.218,
        0.373,
        0.473,
        1.12,
        1.66,
        2.0,
        3.17,
        4.59,
        6.97,
        7.91,
        8.56,
        9.06,
        9.62,
    ),
    "dim 96, lr 3e-3, 4 warm-up steps": (
        0.216,
        0.221,
        0.192,
        0.205,
        0.436,
        0.531,
        0.574,
        0.695,
        1.16,
        1.29,
        2.05,
        2.4,
    ),
    "dim 192, lr 1e-2, 20 warm-up steps": (
        0.68,
        0.547,
        0.547,
        0.486,
        0.598,
        1.0,
        1.7,
        2.69,
        3.05,
        3.8,
        5.16,
        4.66,
    ),
    "dim 64, lr 1e-2, 20 warm-up steps": (
        0.449,
        0.504,
        0.68,
        0.871,
        1.06,
        1.08,
        1.79,
        3.06,
        3.8,
        2.95,
        6.91,
        8.5,
        9.3,
    ),
}


def switched(
    amaxes: Sequence[float], history: int = 16, frozen: float | None = None, clipped: float = 0.0
) -> list[tuple[str, ...]]:
    """What is demoted where the input of a layer has these amaxes, and a scale by the rule, or one that is frozen."""
    scales = [1.0] + [
        448 / max(amaxes[max(0, step - history) : step]) for step in range(1, len(amaxes))
    ]
    scales = scales if frozen is None else [448 / frozen] * len(amaxes)

    def trace(step: int, demoted: tuple[str, ...]) -> StepFacts:
        amax, scale = amaxes[step - 1], scales[step - 1]
        share = {SLOT: clipped if amax * scale > 448 else 0.0}
        facts = make_facts(
            step, {SLOT: amax * scale / 448}, demoted=demoted, applied_steps=step, clipped=share
        )
        assert facts.slots is not None
        place = facts.slots.names.index(SLOT)
        facts.slots.scale[place], facts.slots.amax[place] = scale, amax
        return facts

    found = drive(FallbackController(FallbackConfig(), LAYERS), trace, range(1, len(amaxes) + 1))
    return [switch.demote for _, switch in found]


@pytest.mark.parametrize("start", HEALTHY)
def test_a_healthy_fast_start_keeps_its_layers(start: str) -> None:
    assert switched(HEALTHY[start]) == []


def test_what_growth_takes_over_the_edge_is_no_fault() -> None:
    """An `attn.out.input`, whose values are much alike: a fifth of them is cut while it grows."""
    amaxes = (0.379, 0.453, 0.75, 1.07, 1.36, 1.68, 2.03, 2.33, 2.58, 2.81, 2.95, 3.08)
    assert switched(amaxes, clipped=0.2) == []


@pytest.mark.parametrize(
    "amaxes",
    [
        pytest.param([4.0**step for step in range(12)], id="growth by four a step"),
        pytest.param(
            [1.0, 1.1] * 4 + [1.1 * 2.5**step for step in range(8)],
            id="growth that sets in at 2.5 a step",
        ),
        pytest.param(([1.0] * 3 + [128.0]) * 6, id="an overflow at every fourth step"),
        pytest.param([1.0, 3.0] * 10, id="an overflow at every other step"),
    ],
)
def test_a_fault_is_not_taken_for_growth(amaxes: list[float]) -> None:
    assert switched(amaxes, history=1) == [(LAYERS[1],)]


def test_a_scale_that_does_not_follow_is_a_fault() -> None:
    assert switched([1.6] * 8, frozen=1.0) == [(LAYERS[1],)]
    assert switched([1.4] * 8, frozen=1.0) == []
    assert switched([1.4] * 8, frozen=1.0, clipped=0.2) == [(LAYERS[1],)], (
        "so much is cut off, and nothing grows"
    )


def test_a_move_over_all_of_float32_s_range_is_no_warning() -> None:
    controller = FallbackController(FallbackConfig(), LAYERS)
    amaxes = [1e-30] * 3 + [1e30] * 20
    drive(controller, lambda step, demoted: make_facts(step, amax={SLOT: amaxes[step]}), range(23))

    growth = Growth(window=2, warmup=0, layers=1)
    amax = np.ones((1, 3), dtype=np.float32)
    for scale in (1e30, 1e30, 1e-30):
        growth.note(np.full((1, 3), scale, dtype=np.float32), amax)
    assert (growth.headroom() > 1).all()
