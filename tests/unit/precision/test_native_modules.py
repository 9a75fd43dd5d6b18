"""The native backend in all the ways that people use a Linear: shared, tied, frozen, recomputed, any shape."""

from __future__ import annotations

import copy

import pytest
import torch
from native_support import APPLY, backend_for, same, window
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.core.errors import CheckpointError, MisuseError
from harness.precision.backends.native import NativeLinear


def test_parameters_hooks_and_ties_survive_conversion() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
            self.b.weight = self.a.weight
            self.alias = self.a

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.alias(self.b(self.a(x)))

    model = Tied()
    identities = [id(parameter) for parameter in model.parameters()]
    calls = []
    model.a.register_forward_hook(lambda *_: calls.append(1))
    backend = backend_for(model)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert isinstance(model.a, NativeLinear)
    assert model.alias is model.a
    assert model.a.weight is model.b.weight
    stats = window(backend, model, torch.randn(16, 32))
    assert len(calls) == 2, "the hook moved along, and a is called twice"
    assert (stats[0] > 0).all()
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    assert set(plain.state_dict()) == set(model.state_dict()), "no FP8 state in the model's own state_dict"


@pytest.mark.parametrize("shape", [(32,), (0, 32), (5, 32), (2, 3, 32), (2, 2, 3, 32)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(32, 48))
    backend = backend_for(model)
    x = torch.randn(shape, requires_grad=True)
    backend.begin_window(sample=False)
    with backend.context():
        out = model(x)
    out.float().sum().backward()
    backend.end_window(backend.amax(), APPLY, same)
    assert out.shape == (*shape[:-1], 48)
    assert x.grad is not None
    assert x.grad.shape == shape


def test_frozen_weights_and_inputs_without_gradient() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight.requires_grad_(False)
    backend = backend_for(model)
    window(backend, model, torch.randn(8, 32))
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None
    assert model[1].weight.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_computes_the_same_and_rolls_once(reentrant: bool) -> None:
    def run(recompute: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        backend = backend_for(model)
        for _ in range(3):
            x = torch.randn(16, 32, requires_grad=True)
            model.zero_grad()
            backend.begin_window(sample=False)
            with backend.context():
                out = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
                loss = out.float().square().sum()
            with backend.backward_context():
                loss.backward()
            backend.end_window(backend.amax(), APPLY, same)
        grad = model.get_parameter("0.weight").grad
        assert grad is not None
        return grad, backend.arena.history.clone()

    plain, recomputed = run(False), run(True)
    assert torch.equal(plain[0], recomputed[0])
    assert torch.equal(plain[1], recomputed[1])


def test_state_round_trip_and_refusal_of_another_models_state() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    backend = backend_for(model)
    window(backend, model, torch.randn(16, 32))
    backend.switch(demote=["01"], promote=[])
    tensors, meta = copy.deepcopy(backend.state_dict())
    fresh = backend_for(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    fresh.load_state_dict(tensors, meta)
    assert fresh.demoted == ("01",)
    assert torch.equal(fresh.arena.scale, backend.arena.scale)
    assert fresh.arena.scales == backend.arena.scales, "what is derived from the scales is refreshed"
    with pytest.raises(CheckpointError, match="6 slots"):
        backend_for(nn.Sequential(nn.Linear(32, 32))).load_state_dict(tensors, meta)


def test_contexts_do_not_nest_and_outside_of_one_layers_are_plain() -> None:
    linear = nn.Linear(32, 32)
    model = nn.Sequential(linear)
    backend = backend_for(model)
    x = torch.randn(4, 32)
    assert torch.equal(model(x), nn.functional.linear(x, linear.weight, linear.bias))
    with pytest.raises(MisuseError, match="nest"), backend.context(), backend.context():
        pass
