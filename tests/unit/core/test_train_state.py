"""TrainState: what is optional, what is not, and limits through JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.core.errors import CheckpointError
from harness.core.facts import Limits
from harness.core.state import Incidents, TrainState


class Part:
    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"value": self.value}, {}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.value = tensors["value"].clone()


def state(**parts: float) -> TrainState:
    return TrainState({name: Part(value) for name, value in parts.items()})


def values(of: TrainState) -> dict[str, float]:
    return {name: part.state_dict()[0]["value"].item() for name, part in of.parts.items()}


@pytest.mark.parametrize("saved", [{"model": 1.0}, {"model": 1.0, "loss_scale": 2.0}])
@pytest.mark.parametrize("here", [{"model": 7.0}, {"model": 7.0, "loss_scale": 8.0}])
def test_a_loss_scale_may_come_and_go(saved: dict[str, float], here: dict[str, float]) -> None:
    run = state(**here)
    run.load_state_dict(*state(**saved).state_dict())
    kept = {"loss_scale": here["loss_scale"]} if "loss_scale" in here and "loss_scale" not in saved else {}
    assert values(run) == {name: saved.get(name, kept.get(name)) for name in here}


def test_any_other_part_must_be_on_both_sides() -> None:
    with pytest.raises(CheckpointError, match=r"only in the checkpoint \['fp8'\], only in this run \['rng'\]"):
        state(model=1.0, rng=1.0).load_state_dict(*state(model=1.0, fp8=1.0).state_dict())


def test_limits_of_the_steps_to_come_survive_json() -> None:
    run = state(model=1.0)
    run.step = 10
    run.limits = {11: Limits(loss=3.5), 12: Limits(norm=0.25, clip=1e30)}
    tensors, meta = run.state_dict()
    other = state(model=2.0)
    other.load_state_dict(tensors, json.loads(json.dumps(meta, allow_nan=False)))
    assert other.limits == run.limits
    assert other.limits[11].norm == math.inf
    other.advance()
    assert list(other.limits) == [12], "a step that is over needs no limits"


def test_rollbacks_before_a_step_are_those_of_its_branch() -> None:
    incidents = Incidents(returned_to=[40, 60])
    assert [incidents.rollbacks_before(step) for step in (40, 41, 60, 61)] == [0, 1, 1, 2]
