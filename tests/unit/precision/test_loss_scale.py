"""The loss scale against torch.amp.GradScaler, bit for bit within floor and cap; presets of the recipe."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from harness.capability.probe import Device, MachineFacts
from harness.core.errors import ConfigError
from harness.core.schema import validate
from harness.precision.loss_scale import LossScale
from harness.precision.plan import make_plan, resolve
from harness.precision.recipe import LossScaleConfig, load_recipe

CPU = torch.device("cpu")
PRESETS = {
    "default": (65536.0, 2.0, 0.5, 2000),
    "underflow": (131072.0, 2.0, 0.75, 1000),
    "overflow": (32768.0, 2.0, 0.5, 4000),
}


def figures(config: LossScaleConfig) -> tuple[float, float, float, int]:
    return config.init, config.growth_factor, config.backoff_factor, config.growth_interval


def grad_scaler_values(config: LossScaleConfig, skips: list[bool]) -> list[float]:
    """The scale after each step, by torch's own scaler on real gradients: infinite where a step is to be skipped."""
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=config.init,
        growth_factor=config.growth_factor,
        backoff_factor=config.backoff_factor,
        growth_interval=config.growth_interval,
    )
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    values: list[float] = []
    for skip in skips:
        weight.grad = torch.full((1,), float("inf") if skip else 1.0)
        scaler.scale(torch.zeros(()))  # the scaler makes its tensor at the first use
        scaler.step(optimizer)
        scaler.update()
        values.append(scaler.get_scale())
    return values


def our_values(config: LossScaleConfig, skips: list[bool]) -> list[float]:
    scale = LossScale(config, CPU)
    values: list[float] = []
    for skip in skips:
        scale.update(torch.tensor(float(skip)), torch.tensor(float(skip)))
        values.append(scale.value.item())
    return values


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_and_keys_that_win_over_them(preset: str) -> None:
    assert figures(LossScaleConfig.model_validate({"preset": preset})) == PRESETS[preset]
    mixed = LossScaleConfig.model_validate({"preset": preset, "init": 1024.0, "growth_interval": 7})
    assert figures(mixed) == (1024.0, 2.0, PRESETS[preset][2], 7)
    assert LossScaleConfig.model_validate(mixed.model_dump()) == mixed, (
        "what a dump says is what was resolved"
    )


def test_a_preset_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match='did you mean "underflow"'):
        validate(LossScaleConfig, {"preset": "underfow"}, "mine.yaml")
    with pytest.raises(
        ConfigError, match=r"floor <= init <= cap does not hold: 1\.0, 131072\.0, 65536\.0"
    ):
        validate(LossScaleConfig, {"preset": "underflow", "cap": 65536.0}, "mine.yaml")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("seed", range(2))
def test_bit_equal_to_grad_scaler_within_floor_and_cap(preset: str, seed: int) -> None:
    """The preset's factors with a shorter interval, so that growth, backoff and both in a row all happen."""
    config = LossScaleConfig.model_validate(
        {"preset": preset, "growth_interval": 5, "floor": 2.0**-60, "cap": 2.0**100}
    )
    rng = random.Random(seed)
    skips = [rng.random() < 0.15 for _ in range(300)]
    ours = our_values(config, skips)
    assert ours == grad_scaler_values(config, skips)
    assert {(b > a) - (b < a) for a, b in pairwise(ours)} == {-1, 0, 1}, "it moved both ways"


@pytest.mark.parametrize("preset", ["underflow", "overflow"])
@pytest.mark.slow
def test_the_presets_own_interval_against_grad_scaler(preset: str) -> None:
    config = LossScaleConfig.model_validate({"preset": preset})
    interval = config.growth_interval
    skips = [False] * (interval - 1) + [True] + [False] * interval + [True, True, False]
    ours = our_values(config, skips)
    assert ours == grad_scaler_values(config, skips)
    backoff = config.backoff_factor
    assert ours[interval - 1] == config.init * backoff, (
        "a bad step right before growth starts the count anew"
    )
    assert ours[2 * interval - 1] == 2 * config.init * backoff
    assert ours[-1] == 2 * config.init * backoff**3


@pytest.mark.parametrize("interval", [1, 3])
def test_a_skip_with_finite_gradients_changes_nothing(interval: int) -> None:
    scale = LossScale(LossScaleConfig.model_validate({"growth_interval": interval}), CPU)
    good, skipped = torch.zeros(()), torch.ones(())
    scale.update(good, good)
    before = (scale.value.clone(), scale.tracker.clone())
    for _ in range(5):
        scale.update(good, skipped)
    assert (scale.value, scale.tracker) == before
    scale.update(skipped, skipped)
    assert scale.value == before[0] * 0.5


def test_floor_and_cap_hold_where_grad_scaler_goes_on() -> None:
    config = LossScaleConfig.model_validate({"growth_interval": 1})
    bad, good = [True] * 200, [False] * 60
    assert our_values(config, bad)[-1] == 1.0
    assert grad_scaler_values(config, bad)[-1] == 0.0, "the next clean step would write NaN"
    assert our_values(config, good)[-1] == 2.0**24 < grad_scaler_values(config, good)[-1]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_plan_of_an_fp16_rung_shows_what_the_preset_came_to(preset: str) -> None:
    recipe = load_recipe("fp16_scaler" if preset == "default" else f"fp16_{preset}")
    facts = MachineFacts(cuda_available=True, devices=(Device("T4", (7, 5), 2**34),))
    init, _, backoff, interval = PRESETS[preset]
    (note,) = (note for note in notes(recipe, facts) if "loss scale" in note)
    assert (
        f"loss scale ({preset}): starts at {init:g}, x2 after {interval} good steps, x{backoff:g}"
        in note
    )
    assert not any("loss scale" in note for note in notes(load_recipe("bf16"), MachineFacts()))


def notes(recipe: Any, facts: MachineFacts) -> tuple[str, ...]:
    rung, verdicts = resolve(recipe, facts)
    assert rung is not None
    return make_plan(recipe, facts, rung, verdicts, nn.Sequential(nn.Linear(16, 16))).notes
