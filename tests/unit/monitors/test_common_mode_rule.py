"""When rows that are nearly alike cost a layer its FP8: long, for that reason alone, and never a whole run's."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from fallback_support import LAYERS, NAMES, drive, make_facts

from harness.core.config import FallbackConfig
from harness.core.facts import StepFacts
from harness.monitors.fallback import FallbackController

POLICY = FallbackConfig(centred_steps=40)
GRADIENT = f"{LAYERS[2]}.grad_output"


def sample(
    step: int,
    demoted: tuple[str, ...],
    *slots: str,
    every: int = 5,
    centred: float = 0.0,
    **others: float,
) -> StepFacts:
    """In one of `every` steps `slots` have this centred SQNR, and others as given."""
    given = {"clipped": 0.0, "sqnr_db": 31.0, "centred_db": centred} | others
    values: dict[str, Any] = {}
    if step % every == 0:
        values = {kind: dict.fromkeys(slots, value) for kind, value in given.items()}
    return make_facts(step, demoted=demoted, **values)


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_a_slot_whose_rows_stay_alike_leaves_once_that_has_lasted(role: str) -> None:
    slot = f"{LAYERS[2]}.{role}"
    switches = drive(
        FallbackController(POLICY, LAYERS), lambda step, down: sample(step, down, slot), range(200)
    )
    assert [switch.demote for _, switch in switches] == [(LAYERS[2],)], "and does not come back"
    assert 5 + 40 <= switches[0][0] <= 5 + 40 + 15
    assert f"{slot} centred_db" in switches[0][1].reason


def test_it_is_back_once_its_rows_differ_again() -> None:
    def trace(step: int, down: tuple[str, ...]) -> StepFacts:
        return sample(step, down, GRADIENT, centred=0.0 if step < 100 else 30.0)

    switches = drive(FallbackController(POLICY, LAYERS), trace, range(300))
    assert [(switch.demote, switch.promote) for _, switch in switches] == [
        ((LAYERS[2],), ()),
        ((), (LAYERS[2],)),
    ]


@pytest.mark.parametrize(
    "others",
    [
        {"centred": 5.1},  # within the limit
        {"centred": math.nan},  # nothing varies
        {"clipped": 0.06},  # cut off, which the clipped share judges
        {"sqnr_db": 2.5},  # lost without a common part, which SQNR judges
        {"clipped": math.nan},  # not known
    ],
)
def test_other_reasons_for_a_low_figure_do_not_count(others: dict[str, float]) -> None:
    controller = FallbackController(POLICY, LAYERS)
    given: dict[str, Any] = {"centred": 1.0} | others
    told: list[StepFacts] = [sample(step, (), GRADIENT, **given) for step in range(200)]
    assert not any("centred_db" in controller.observe(facts).text for facts in told)


def test_a_start_that_learns_what_all_rows_share_keeps_its_layers() -> None:
    def trace(step: int, down: tuple[str, ...]) -> StepFacts:
        return sample(step, down, *NAMES[:9], every=1, centred=-9.0 if 6 <= step < 40 else 20.0)

    assert drive(FallbackController(POLICY, LAYERS), trace, range(300)) == []


def test_a_model_whose_layers_all_have_a_common_part_keeps_the_rest_in_fp8() -> None:
    switches = drive(
        FallbackController(POLICY, LAYERS),
        lambda step, down: sample(step, down, *NAMES),
        range(400),
    )
    assert all(not switch.whole_run_to for _, switch in switches)
    assert len({layer for _, switch in switches for layer in switch.demote}) == POLICY.max_demoted(
        len(LAYERS)
    )


def test_how_long_it_has_lasted_goes_through_a_checkpoint() -> None:
    whole, first = FallbackController(POLICY, LAYERS), FallbackController(POLICY, LAYERS)
    told = [whole.observe(sample(step, (), GRADIENT)) for step in range(60)]
    for step in range(30):
        first.observe(sample(step, (), GRADIENT))
    resumed = FallbackController(POLICY, LAYERS)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    again = [resumed.observe(sample(step, (), GRADIENT)) for step in range(30, 60)]
    assert again == told[30:]
    assert any(verdict.code == "precision.demote" for verdict in again)
