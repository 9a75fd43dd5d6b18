"""A learning rate that would replace the weights is reported before the first step; the shipped ones are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.core.config import TrainConfig, load_config
from harness.core.files import shipped
from harness.models import build_model
from harness.optim.schedule import too_high


def train(**keys: object) -> TrainConfig:
    return TrainConfig.model_validate(keys)


# The larger ones take gigabytes to build, and their learning rates are so low that thirtyfold is not over the limit.
LARGE = {"gpt_125m", "gpt_1b", "llama3_8b", "llama3_8b_8layers"}


@pytest.mark.parametrize("name", sorted(set(shipped("configs")) - LARGE))
def test_shipped_configs_are_well_under_it_and_thirtyfold_is_over(name: str) -> None:
    config = load_config(name)
    torch.manual_seed(0)
    model = build_model(config.model)
    assert too_high(model, config.train.model_copy(update={"lr": 3 * config.train.lr})) == ""
    told = too_high(model, config.train.model_copy(update={"lr": 30 * config.train.lr}))
    assert f"train.lr {30 * config.train.lr:g}" in told


def test_the_value_it_suggests_is_taken() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    told = too_high(model, train(lr=1.0))
    suggested = float(told.rpartition("train.lr=")[2])
    assert too_high(model, train(lr=suggested)) == ""


def test_what_it_cannot_know_of() -> None:
    model = nn.Linear(8, 8)
    assert too_high(model, train(lr=10.0, optimizer="sgd")) == ""
    with torch.no_grad():
        model.weight.zero_()
    assert too_high(model, train(lr=10.0)) == ""
    assert too_high(nn.LayerNorm(8), train(lr=10.0)) == ""
