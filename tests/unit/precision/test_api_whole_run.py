"""`harness.Precision` leaves its rung for good when it must: fp16 that fails, FP8 that too many layers leave."""

from __future__ import annotations

import copy

import pytest
import torch
from api_support import EAGER, adamw, batch, prepared, recipe, train_step
from torch import nn

from harness import Precision
from harness.core.errors import MisuseError

LOUD = 1e5  # larger than fp16's 65504


def loud_step(
    precision: Precision, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> tuple[bool, str]:
    """One window whose activations fp16 cannot hold; (applied, what the run fell back to at its end)."""
    x, _ = batch(step)
    with precision.context():
        loss = (model(x * LOUD).float() / LOUD).square().mean()
    precision.backward(loss)
    outcome = precision.step(optimizer)
    model.zero_grad()
    return outcome.was_applied, outcome.switch.whole_run_to if outcome.switch else ""


def test_fp16_that_keeps_failing_goes_on_in_bf16() -> None:
    precision, model = prepared(recipe("fp16_scaler"))
    optimizer = adamw(model)
    seen = [loud_step(precision, model, optimizer, step) for step in range(6)]
    # The third failure is judged at the end of the fourth step.
    assert seen == [(False, "")] * 3 + [(False, "bf16")] + [(True, "")] * 2
    with precision.context():
        assert model(batch(0)[0]).dtype == torch.bfloat16
    assert float(train_step(precision, model, optimizer, 6).loss_scale) == 1.0

    state = copy.deepcopy(precision.state_dict())
    again, twin = prepared(recipe("fp16_scaler"))
    with again.context():
        assert twin(batch(0)[0]).dtype == torch.float16
    again.load_state_dict(state)
    with again.context():
        assert twin(batch(0)[0]).dtype == torch.bfloat16
    assert float(train_step(again, twin, adamw(twin), 7).loss_scale) == 1.0


def test_an_earlier_state_brings_fp16_back() -> None:
    precision, model = prepared(recipe("fp16_scaler"))
    optimizer = adamw(model)
    train_step(precision, model, optimizer, 0)
    before = precision.state_dict()
    for step in range(4):
        loud_step(precision, model, optimizer, step)
    precision.load_state_dict(before)
    with precision.context():
        assert model(batch(0)[0]).dtype == torch.float16
    assert float(train_step(precision, model, optimizer, 1).loss_scale) == 65536.0


def test_switched_off_fp16_stays() -> None:
    precision, model = prepared(recipe("fp16_scaler", fallback={"enabled": False}))
    optimizer = adamw(model)
    assert [loud_step(precision, model, optimizer, step) for step in range(6)] == [(False, "")] * 6


def test_fp8_goes_to_bf16_when_more_layers_leave_than_may() -> None:
    policy = {**EAGER, "dwell_steps": 1000, "max_demoted_share": 0.5}
    precision, model = prepared(recipe(fallback=policy))
    optimizer = adamw(model)
    switches = [train_step(precision, model, optimizer, step).switch for step in range(10)]
    told = [(len(switch.demote), switch.whole_run_to) for switch in switches if switch]
    assert told == [(1, ""), (0, "bf16")]
    assert len(precision.demoted) == 2
    with pytest.raises(MisuseError, match="whole run went to bf16"):
        precision.promote("*")


def test_over_budget_layers_stay_in_fp8_if_the_recipe_says_so() -> None:
    policy = {**EAGER, "dwell_steps": 1000, "max_demoted_share": 0.5, "over_budget": "stay"}
    precision, model = prepared(recipe(fallback=policy))
    optimizer = adamw(model)
    switches = [train_step(precision, model, optimizer, step).switch for step in range(10)]
    assert [(len(switch.demote), switch.whole_run_to) for switch in switches if switch] == [(1, "")]
