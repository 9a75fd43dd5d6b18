"""Faults of one step in so many, whatever the number and the phase: samples find them."""

from __future__ import annotations

import pytest
import torch
from api_support import adamw, prepared, recipe, train_step
from torch import Tensor, nn

from harness import Precision
from harness.core.facts import is_sampled

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")
FAINT = 2.0**-18
STEPS = 100


def demoted_at(
    model: nn.Sequential, precision: Precision, faint: set[int], by: float = FAINT
) -> int:
    """The first step of which the second layer ran in BF16, its input being faint in the steps of `faint`; 0: none."""
    step = 0

    def fade(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (given[0] * by if step in faint else given[0],)

    model[2].register_forward_pre_hook(fade)
    optimizer = adamw(model, lr=1e-4)
    for step in range(1, STEPS + 1):
        switch = train_step(precision, model, optimizer, step).switch
        if switch is not None:
            assert switch.demote == ("02",)
            return step + 1
    return 0


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("every", [2, 7, 10])
def test_a_fault_of_every_other_step_cannot_hide(phase: int, every: int) -> None:
    precision, model = prepared(recipe(fp8={"stats_every": every}))
    faint = {step for step in range(1, STEPS) if step % 2 == phase}
    first = next(step for step in range(3, STEPS) if is_sampled(0, step, every) and step in faint)
    assert 0 < demoted_at(model, precision, faint) <= first + 9


@pytest.mark.parametrize("every", [10, 17, 25])
def test_a_tensor_that_vanishes_now_and_then_needs_no_sample(every: int) -> None:
    """Such a step is over before the next one is looked at; but that all of it was lost, its largest value says."""
    precision, model = prepared(recipe(fp8={"stats_every": 50}))
    faint = set(range(9, STEPS, every))
    assert demoted_at(model, precision, faint, by=2.0**-24) == 9 + 2 * every + 2


def test_a_tensor_that_is_small_and_not_lost_keeps_its_layer() -> None:
    precision, model = prepared(recipe(fp8={"stats_every": 50}))
    assert not demoted_at(model, precision, set(range(9, STEPS, 10)), by=2.0**-9)


HOT = 2.0**24


@pytest.mark.parametrize("at", [1, 24])
@pytest.mark.parametrize("hot", [{"0"}, {"2"}, {"0", "2"}])
def test_every_carrier_of_a_constant_fault_leaves_within_eight_steps(
    hot: set[str], at: int
) -> None:
    """A channel that is far too large, in the input of one layer, or of both: the second is dead behind the first."""
    torch.manual_seed(0)
    precision = Precision(recipe(fallback={"max_demoted_share": 1.0}))
    model = precision.prepare(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
    step, left = 0, dict[str, int]()

    def spoil(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = given[0].clone()
        x[:, 0] = HOT if step >= at else 0.0
        return (x,)

    for name in hot:
        model.get_submodule(name).register_forward_pre_hook(spoil)
        with torch.no_grad():
            model.get_parameter(f"{name}.weight")[:, 0] = 0.0
    optimizer = adamw(model, lr=0.0)
    for step in range(1, at + 20):
        left |= {str(int(name)): step for name in precision.demoted if str(int(name)) not in left}
        train_step(precision, model, optimizer, step)
    assert set(left) == hot
    assert max(left.values()) <= at + 8
