"""A layer that changes its precision is the same layer to everyone else: optimizer, ties, hooks, checkpoints."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from api_support import adamw, batch, recipe, train_step
from torch import Tensor, nn

from harness import Precision

RECIPES = ("fp8_hybrid", "fp8_dynamic")


class Tied(nn.Module):
    """Two Linears that share a weight, and one of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("name", RECIPES)
def test_twelve_switches_leave_parameters_moments_ties_and_hooks_alone(name: str) -> None:
    precision = Precision(recipe(name, fallback={"enabled": False}))
    model = Tied()
    before = dict(model.named_parameters(remove_duplicate=False))
    precision.prepare(model)
    optimizer = adamw(model)
    fired: Counter[str] = Counter()
    for key, parameter in model.named_parameters():
        # What DDP hangs its reductions on.
        parameter.register_post_accumulate_grad_hook(lambda _, key=key: fired.update([key]))
    train_step(precision, model, optimizer, 0)
    moments = {id(p): optimizer.state[p]["exp_avg"].data_ptr() for p in model.parameters()}
    moved = 0
    for switch in range(12):
        layers = ["first", "second", "last"][switch % 3 :][:2]
        moved += len(precision.demote(layers) if switch % 2 == 0 else precision.promote("*"))
        train_step(precision, model, optimizer, switch + 1)
    assert moved >= 12
    after = dict(model.named_parameters(remove_duplicate=False))
    assert {key: id(value) for key, value in after.items()} == {
        key: id(value) for key, value in before.items()
    }
    assert model.first.weight is model.second.weight
    assert {id(p): optimizer.state[p]["exp_avg"].data_ptr() for p in model.parameters()} == moments
    assert set(fired.values()) == {13}
    assert all(optimizer.state[p]["step"] == 13 for p in model.parameters())


def test_a_demoted_layer_computes_what_plain_bf16_would() -> None:
    precision = Precision(recipe(fallback={"enabled": False}))
    model, plain = Tied(), Tied()
    precision.prepare(model)
    x, _ = batch(0)
    with precision.context():
        in_fp8 = model(x)
    precision.demote("*")
    with precision.context():
        demoted = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reference = plain(x)
    assert torch.equal(demoted, reference)
    assert not torch.equal(in_fp8, reference)
    precision.promote("*")
    with precision.context():
        assert torch.equal(model(x), in_fp8)


def test_a_switch_is_not_seen_in_the_models_own_state_dict() -> None:
    precision = Precision(recipe(fallback={"enabled": False}))
    model = precision.prepare(Tied())
    keys = list(model.state_dict())
    precision.demote("last")
    assert list(model.state_dict()) == keys == list(Tied().state_dict())
