"""The native backend in all the ways that people use a Linear: shared, tied, hooked, parametrised, recomputed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from native_support import APPLY, backend_for, same, window
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from harness.core.errors import CheckpointError, MisuseError
from harness.precision.backends.native import NativeBackend, NativeLinear


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
    assert set(plain.state_dict()) == set(model.state_dict()), (
        "no FP8 state in the model's own state_dict"
    )


def test_tied_weights_have_scales_of_their_own_and_sum_their_gradients() -> None:
    def train(tied: bool) -> tuple[nn.Sequential, NativeBackend]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False)
        )
        weight = model.get_parameter("0.weight")
        model.get_submodule("2").weight = weight if tied else nn.Parameter(weight.detach().clone())
        backend = backend_for(model)
        for x in (torch.randn(16, 32), 5 * torch.randn(16, 32)):
            model.zero_grad()
            window(backend, model, x)
        return model, backend

    (tied, tied_backend), (apart, backend) = train(True), train(False)
    assert len(list(tied.parameters())) == 1
    both, first, second = (
        parameter.grad for parameter in (*tied.parameters(), *apart.parameters())
    )
    assert both is not None
    assert first is not None
    assert second is not None
    assert torch.equal(both, first + second)
    assert torch.equal(tied_backend.slot_buffers.history, backend.slot_buffers.history)
    assert tied_backend.slot_buffers.scale[0] != tied_backend.slot_buffers.scale[3], (
        "inputs of the two layers differ"
    )


def test_a_linear_called_several_times_sees_the_largest_of_its_tensors() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.cell(x)
                seen.append(x.detach())
                x.register_hook(lambda grad: grads.append(grad.detach()))
            return x

    torch.manual_seed(0)
    seen: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    model = Recurrent()
    backend = backend_for(model)
    x = torch.randn(16, 32)
    stats = window(backend, model, x)
    inputs = [x.to(torch.bfloat16), *seen[:2]]
    assert stats[0, 0] == max(tensor.abs().max() for tensor in inputs)
    assert len(grads) == 3
    assert stats[0, 2] == max(grad.abs().max() for grad in grads)
    assert (backend.slot_buffers.history > 0).sum(0).tolist() == [1, 1, 1], "three calls, one roll"
    bias = model.cell.bias.grad
    assert bias is not None
    torch.testing.assert_close(
        bias, torch.stack([grad.float().sum(0) for grad in grads]).sum(0), rtol=1e-6, atol=1e-5
    )


class Stretch(torch.autograd.Function):
    """Identity with a gradient of its own, as in straight-through estimators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 4 * grads[0]


def test_custom_functions_between_layers() -> None:
    class Model(nn.Module):
        def __init__(self, stretched: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.stretched, self.first, self.second = (
                stretched,
                nn.Linear(32, 32),
                nn.Linear(32, 32),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            return self.second(Stretch.apply(hidden) if self.stretched else hidden)

    gradients = {}
    for stretched in (True, False):
        model = Model(stretched)
        gradients[stretched] = (
            window(backend_for(model), model, torch.ones(16, 32))[0],
            model.first.bias.grad,
        )
    assert torch.equal(gradients[True][1], 4 * gradients[False][1])
    assert gradients[True][0][2] == 4 * gradients[False][0][2], (
        "amax of the first layer's grad_output"
    )
    assert gradients[True][0][5] == gradients[False][0][5]


def test_every_kind_of_hook_on_a_linear_fires() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    fired: list[str] = []
    model[0].register_forward_pre_hook(lambda _, args: (fired.append("pre"), (2 * args[0],))[1])
    backend = backend_for(model)
    layer = model[0]
    layer.register_forward_hook(lambda *_: fired.append("forward"))
    layer.register_full_backward_pre_hook(lambda *_: fired.append("backward pre"))
    layer.register_full_backward_hook(lambda *_: fired.append("backward"))
    layer.get_parameter("weight").register_post_accumulate_grad_hook(
        lambda _: fired.append("accumulated")
    )
    stats = window(backend, model, torch.full((16, 32), 3.0, requires_grad=True))
    assert sorted(fired) == ["accumulated", "backward", "backward pre", "forward", "pre"]
    assert stats[0, 0] == 6.0, "what a pre-hook returns is what is cast"


def test_a_weight_that_is_computed_in_each_forward_is_cast_each_time() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    backend = backend_for(model)
    x = torch.randn(16, 32)
    weight = model.get_parameter("0.weight").detach()
    outs: dict[bool, list[torch.Tensor]] = {}
    for training in (True, False):
        backend.begin_window(sample=False)
        with torch.set_grad_enabled(training), backend.context():
            outs[training] = [
                functional_call(model, {"0.weight": weight * factor}, x) for factor in (1, 2, 3, 4)
            ]
        assert backend.amax()[1] == (4 * weight.abs().max() if training else 0.0)
    for trained, evaluated in zip(outs[True], outs[False], strict=True):
        assert torch.equal(trained, evaluated), (
            "each weight has the address of the one before, freed by then"
        )


def test_a_parametrised_linear_keeps_its_weight_and_its_fp8() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    backend = backend_for(model)
    original = model.get_parameter("0.weight")
    parametrize.register_parametrization(model[0], "weight", Doubled())
    stats = window(backend, model, torch.randn(16, 32))
    assert stats[0, 1] == 2 * original.detach().abs().max()
    assert original.grad is not None
    with pytest.raises(
        RuntimeError, match="parametrized modules is only supported through state_dict"
    ):
        pickle.dumps(model)
    kept_out = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32)
    )
    assert backend_for(kept_out).layers == ("1",), (
        "parametrised before: the plan names it, bf16 runs it"
    )


def test_a_pickled_model_is_plain_again() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    backend = backend_for(model)
    window(backend, model, torch.randn(16, 32))
    loaded = pickle.loads(pickle.dumps(model))
    assert [type(layer) for layer in loaded] == [nn.Linear, nn.Linear]
    assert vars(loaded[0]).keys() == vars(nn.Linear(1, 1)).keys(), "nothing of ours is left"
    assert loaded[0].weight is loaded[1].weight
    x = torch.randn(4, 32)
    assert torch.equal(loaded(x), model(x))
    assert isinstance(model[0], NativeLinear)


def test_what_fp8_cannot_differentiate_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    backend = backend_for(model)
    x = torch.randn(4, 32, requires_grad=True)
    with backend.context():
        (first,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated again"):
            first.sum().backward()
        for transform in (torch.func.vmap(model), torch.func.jacrev(model)):
            with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch transforms"):
                transform(x)
    assert torch.func.vmap(model)(x).shape == (4, 32), "outside of a context it is a plain Linear"


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
        return grad, backend.slot_buffers.history.clone()

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
    assert torch.equal(fresh.slot_buffers.scale, backend.slot_buffers.scale)
    assert fresh.slot_buffers.scales == backend.slot_buffers.scales, (
        "what is derived from the scales is refreshed"
    )
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
