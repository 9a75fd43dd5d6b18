"""A tensor that begins at zero grows by factors that say nothing: it keeps its layer, and a fault in it is seen."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from fallback_support import LAYERS, drive, make_facts

from harness.core.config import FallbackConfig
from harness.core.facts import StepFacts, Switch
from harness.monitors.fallback import FallbackController

Row = tuple[float, float, float, float]
"""Amax, scale, clipped share and even_db of one step."""
nan = math.nan

# The first steps of slots in runs that end where bf16 ends, every step sampled.
HEALTHY: dict[str, tuple[str, tuple[Row, ...]]] = {
    "zero output projection, AdamW, rate 3e-3, 20 warm-up steps": (
        "weight",
        (
            *((0.0, 1.0, nan, nan), (1.5e-4, 1.0, 0.0, 0.0), (4.504e-4, 2.987e6, 0.8849, 4.569)),
            *(
                (9.02e-4, 9.947e5, 0.8005, 8.143),
                (1.506e-3, 4.967e5, 0.7355, 11.07),
                (2.263e-3, 2.975e5, 0.6752, 13.58),
            ),
            *(
                (3.173e-3, 1.98e5, 0.6194, 15.8),
                (4.233e-3, 1.412e5, 0.5659, 17.88),
                (5.436e-3, 1.058e5, 0.5151, 19.8),
            ),
            *((6.813e-3, 8.242e4, 0.4664, 21.55), (8.324e-3, 6.576e4, 0.4089, 23.52)),
        ),
    ),
    "zero output projection of a GPT, AdamW, rate 3e-4, no warm-up": (
        "weight",
        (
            *((0.0, 1.0, nan, nan), (3e-4, 1.0, 0.0, 0.0), (6.004e-4, 1.493e6, 0.8705, 7.349)),
            *(
                (9.015e-4, 7.462e5, 0.7572, 12.39),
                (1.203e-3, 4.97e5, 0.6552, 16.31),
                (1.506e-3, 3.723e5, 0.5561, 19.67),
            ),
            *((1.81e-3, 2.975e5, 0.4655, 22.58), (2.115e-3, 2.476e5, 0.3891, 24.98)),
        ),
    ),
    "behind a head that is zero, too: one step later; SGD": (
        "weight",
        (
            *(
                (0.0, 1.0, nan, nan),
                (0.0, 1.0, nan, nan),
                (1.538e-6, 1.0, 0.0, 0.0),
                (8.417e-6, 2.913e8, 0.1946, 16.91),
            ),
            *(
                (2.042e-5, 5.323e7, 0.02173, 27.54),
                (4.422e-5, 2.194e7, 0.0166, 27.86),
                (8.562e-5, 1.013e7, 0.01, 29.1),
            ),
            *((1.492e-4, 5.233e6, 0.006592, 29.94), (2.596e-4, 3.002e6, 0.005371, 30.3)),
        ),
    ),
    "input behind a gate that is zero": (
        "input",
        (
            *(
                (0.0, 1.0, nan, nan),
                (2.003e-4, 1.0, 0.0, 0.0),
                (3.109e-4, 2.237e6, 0.001968, 31.33),
            ),
            *(
                (6.676e-5, 1.441e6, 0.0, 30.85),
                (3.738e-4, 1.441e6, 0.00015, 31.49),
                (1.083e-3, 1.198e6, 0.02394, 27.09),
            ),
            *(
                (2.029e-3, 4.135e5, 0.002823, 31.0),
                (2.899e-3, 2.208e5, 0.00093, 31.39),
                (4.852e-3, 1.545e5, 0.001, 31.4),
            ),
        ),
    ),
    "gradient behind a weight that is zero": (
        "grad_output",
        (
            *((0.0, 1.0, nan, nan), (2.861e-6, 1.0, 0.0, 0.0), (2.325e-6, 2.004e10, 0.0, 25.58)),
            *(
                (4.739e-6, 2.004e10, 0.06224, 22.71),
                (8.941e-6, 1.21e10, 0.08087, 21.57),
                (1.681e-5, 6.414e9, 0.0196, 24.0),
            ),
            *((1.562e-5, 3.412e9, 0.0, 25.57), (2.372e-5, 3.412e9, 0.000885, 25.02)),
        ),
    ),
}
SPARSE = HEALTHY["zero output projection, AdamW, rate 3e-3, 20 warm-up steps"][1]
LARGEST = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


def facts_of(
    role: str, row: Row, step: int, unit: float = 1.0, demoted: tuple[str, ...] = ()
) -> StepFacts:
    """A step in which one slot has this row, in another unit; the other slots are well."""
    slot = f"{LAYERS[1]}.{role}"
    amax, scale, clipped, even_db = row
    amax, scale = amax * unit, scale / unit if scale != 1 else scale
    facts = make_facts(
        step,
        {slot: amax * scale / LARGEST[role]},
        demoted=demoted,
        applied_steps=step,
        amax={slot: amax},
        clipped={slot: clipped},
        even_db={slot: even_db},
    )
    assert facts.slots is not None
    facts.slots.scale[facts.slots.names.index(slot)] = scale
    return facts


def left(
    role: str, rows: Sequence[Row], unit: float = 1.0, controller: FallbackController | None = None
) -> list[int]:
    """Steps at which the layer is demoted."""
    found = drive(
        controller or FallbackController(FallbackConfig(), LAYERS),
        lambda step, demoted: facts_of(role, rows[step - 1], step, unit, demoted),
        range(1, len(rows) + 1),
    )
    return [step for step, switch in found if switch.demote == (LAYERS[1],)]


def grown(amaxes: Sequence[float], even_db: float = 31.0, history: int = 16) -> list[Row]:
    """Rows of these amaxes, under the rule of delayed scaling; even_db of steps in which nothing is clipped."""
    rows: list[Row] = []
    for step, amax in enumerate(amaxes):
        known = [value for value in amaxes[max(0, step - history) : step] if value > 0]
        scale = 448 / max(known) if known else 1.0
        rows.append((amax, scale, 0.3 if known and amax > max(known) else 0.0, even_db))
    return rows


@pytest.mark.parametrize("unit", [1.0, 2.0**-60, 2.0**40])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_tensor_that_grows_from_zero_keeps_its_layer(name: str, unit: float) -> None:
    role, rows = HEALTHY[name]
    assert left(role, rows, unit) == []


@pytest.mark.parametrize("idle", [1, 6, 29])
def test_an_expert_that_gets_no_samples_for_a_while_grows_by_its_uses(idle: int) -> None:
    rows: list[Row] = []
    for row in SPARSE:
        rows += [row, *[(0.0, row[1], nan, nan)] * idle]
    assert left("weight", rows) == []


def test_growth_from_zero_goes_through_a_resume() -> None:
    """Saved and loaded after every step."""
    for role, rows in HEALTHY.values():
        controller = FallbackController(FallbackConfig(), LAYERS)
        for step, row in enumerate(rows, start=1):
            assert not isinstance(controller.observe(facts_of(role, row, step)).proposal, Switch)
            state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
            controller = FallbackController(FallbackConfig(), LAYERS)
            controller.load_state_dict(state)


@pytest.mark.parametrize(
    ("rows", "latest"),
    [
        pytest.param(
            grown([0.0] + [1.0] * 12, even_db=10.0), 6, id="small values are lost, none is clipped"
        ),
        pytest.param(
            grown([0.0] + [1.0, 3.0] * 12, history=1), 14, id="an overflow at every other step"
        ),
        pytest.param(
            grown([0.0] + ([1.0] * 3 + [128.0]) * 4, history=1),
            14,
            id="an overflow at every fourth step",
        ),
        pytest.param(
            grown([0.0] + [4.0**step for step in range(40)]),
            26,
            id="growth by four a step that never ends",
        ),
        pytest.param(
            [(0.0, 1.0, nan, nan)] + [(1.6, 448.0, 0.2, 31.0)] * 8,
            6,
            id="a scale that does not follow",
        ),
    ],
)
def test_a_fault_in_a_tensor_that_began_at_zero_is_seen(rows: Sequence[Row], latest: int) -> None:
    steps = left("weight", rows)
    assert steps
    assert steps[0] <= latest


def test_what_clipping_cannot_have_lost_is_judged_while_a_tensor_grows() -> None:
    """A cut by 2, 1.5 and 1.33 of 88%, 76% and 66% of the values loses 0.22, 0.08 and 0.04: 6.6, 10.7 and 13.8 dB."""
    role, rows = HEALTHY["zero output projection of a GPT, AdamW, rate 3e-4, no warm-up"]
    worse = [(amax, scale, clipped, even - 6) for amax, scale, clipped, even in rows]
    assert left(role, worse) == [6]


def test_a_tensor_that_was_not_zero_has_the_headroom_of_before() -> None:
    rows = list(HEALTHY["zero output projection, AdamW, rate 3e-3, 20 warm-up steps"][1])
    rows[0] = (5e-5, 1.0, 0.0, 31.0)
    assert left("weight", rows) == [5]
