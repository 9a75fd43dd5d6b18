"""Transformer Engine's layers: what they keep of a Linear, how they are shared, copied and recomputed."""

from __future__ import annotations

import copy
import pickle
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
import torch
from gpu_support import backend_on, clones, distance, same, window
from te_gpu_support import FEATURES, LENGTH, batch, gradients, largest, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.errors import MisuseError
from harness.core.protocols import PrecisionBackend
from harness.models.gpt import FeedForward, Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
    ),
]


def states(model: nn.Module) -> list[Tensor]:
    """Every history and scale of the converted layers."""
    metas: list[Any] = [
        module.fp8_meta for module in model.modules() if hasattr(module, "fp8_meta")
    ]
    found = [meta[key] for meta in metas for key in ("scaling_fwd", "scaling_bwd")]
    return [tensor for state in found for tensor in (state.amax_history, state.scale)]


def reduced_by_te() -> list[Tensor]:
    """Every history and scale in TE's global buffers."""
    manager = import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    state = getattr(manager, "quantization_state", manager)
    buffers = (state.global_amax_history_buffer, state.global_scale_buffer)
    return [tensor for buffer in buffers for listed in buffer.values() for tensor in listed]


def test_conversion_shares_parameters_draws_nothing_and_adds_no_state(
    fp8_gpu: torch.device,
) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128, bias=False)).to(fp8_gpu)
    identities = [id(parameter) for parameter in model.parameters()]
    names, random_state = set(model.state_dict()), torch.cuda.get_rng_state()
    backend = backend_on(model, "transformer_engine", fp8_gpu, amax_history_len=LENGTH)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert set(model.state_dict()) == names, "TE's pickled extra state stays out"
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    assert all(
        isinstance(module, nn.Module) and not isinstance(module, nn.Linear) for module in model
    )
    state = clones(backend)
    assert state["history"].shape == (LENGTH, 6)
    assert not state["history"].any()
    assert torch.equal(state["scale"], torch.ones(6))


def test_te_neither_reduces_nor_rolls_the_state(fp8_gpu: torch.device) -> None:
    """Its order of slots is that of first use, which ranks may not share; and it rolls all models of the process."""
    before = len(reduced_by_te())
    backend, model = make(fp8_gpu)
    window(backend, model, *batch(fp8_gpu))
    assert len(reduced_by_te()) == before
    found = [tensor.detach().clone() for tensor in states(model)]
    x, grad = batch(fp8_gpu)
    window(backend, model, 100 * x, 100 * grad)
    moved = [not torch.equal(own, old) for own, old in zip(states(model), found, strict=True)]
    assert all(moved), "what the layers hold is what the harness rolls"


def test_hooks_and_attributes_of_the_linear_survive(fp8_gpu: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128)).to(fp8_gpu)
    seen: list[str] = []
    before = model[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[0].register_forward_hook(lambda _, __, out: seen.append("after") or out * 2)
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[0].register_buffer("mine", torch.ones(1, device=fp8_gpu))
    backend = backend_on(model, "transformer_engine", fp8_gpu)
    x, grad = batch(fp8_gpu)
    doubled = window(backend, model, x.requires_grad_(), grad)[0]
    assert seen == ["before", "after", "backward"]
    assert "0.mine" in model.state_dict()
    before.remove()
    with torch.no_grad(), backend.context():
        model(x)
    assert seen[3:] == ["after"], "the handle from before the conversion still removes its hook"
    assert doubled.shape == x.shape


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_a_layer_called_twice_shows_the_larger_amax(fp8_gpu: torch.device, kind: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(128, 128)
            self.same_one = self.layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.same_one(4 * x)

    torch.manual_seed(0)
    model = Twice().to(fp8_gpu)
    backend = backend_on(model, "transformer_engine", fp8_gpu, scaling=kind)
    assert model.layer is model.same_one
    assert len(backend.slot_names) == 3
    x, grad = batch(fp8_gpu)
    stats = window(backend, model, x, grad)[1]
    assert stats[0, 0].item() == 4 * largest(x.bfloat16())
    assert stats[0, 2].item() == largest(grad)
    gradient = gradients(model)["layer.weight"]
    expected = (5 * grad.float().t() @ x).cpu()
    assert (gradient.cpu() - expected).norm() < 0.1 * expected.norm(), (
        "gradients of both calls add up"
    )


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_layers_that_share_a_parameter_each_have_slots(fp8_gpu: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)).to(
        fp8_gpu
    )
    model[1].weight = model[0].weight
    backend = backend_on(model, "transformer_engine", fp8_gpu, scaling=kind)
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 1
    stats = window(backend, model, *batch(fp8_gpu))[1]
    assert stats[0, 1].item() == stats[0, 4].item() == largest(model.get_parameter("0.weight"))
    backend.switch(demote=["00"], promote=[])
    stats = window(backend, model, *batch(fp8_gpu))[1]
    assert stats[0, 1].item() == stats[0, 4].item()


def test_torch_checkpointing_after_scales_moved_is_refused(fp8_gpu: torch.device) -> None:
    backend, model = make(fp8_gpu, roll="micro_batch")
    backend.begin_window(sample=False)
    batches, outs = [batch(fp8_gpu) for _ in range(2)], []
    for x, _ in batches:
        with backend.context():
            outs.append(checkpoint(model, x.requires_grad_(), use_reentrant=False))
    with backend.backward_context():
        outs[0].backward(batches[0][1])
    backend.end_micro_batch(same)
    with pytest.raises(MisuseError, match="layer 0") as caught, backend.backward_context():
        outs[1].backward(batches[1][1])
    (problem,) = caught.value.problems
    assert "two forwards before a backward" in problem.what
    assert "transformer_engine.pytorch.checkpoint" in problem.fix


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("with_te", [False, True])
def test_checkpointing_changes_neither_gradients_nor_state(
    fp8_gpu: torch.device, reentrant: bool, with_te: bool
) -> None:
    compute_again = (
        import_module("transformer_engine.pytorch").checkpoint if with_te else checkpoint
    )
    found = []
    for again in (False, True):
        backend, model = make(fp8_gpu)
        torch.manual_seed(1)
        for _ in range(3):
            x, grad = batch(fp8_gpu)
            backend.begin_window(sample=False)
            with backend.context():
                inputs = x.requires_grad_()
                out = (
                    compute_again(model, inputs, use_reentrant=reentrant)
                    if again
                    else model(inputs)
                )
            with backend.backward_context():
                out.backward(grad)
            backend.end_micro_batch(same)
            backend.end_window(backend.amax(), torch.zeros((), device=fp8_gpu), same)
        found.append((gradients(model), clones(backend)))
    for half in (0, 1):
        for name, expected in found[0][half].items():
            assert torch.equal(found[1][half][name], expected), name


@pytest.mark.parametrize("kind", ["delayed", "current"])
@pytest.mark.parametrize("tokens", [0, 1, 8, 100])
def test_any_number_of_tokens_computes(fp8_gpu: torch.device, kind: str, tokens: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128)).to(fp8_gpu)
    twin = copy.deepcopy(model)
    backend, other = (
        backend_on(m, "transformer_engine", fp8_gpu, scaling=kind) for m in (model, twin)
    )
    x, grad = batch(fp8_gpu, tokens=128)
    x[tokens:], grad[tokens:] = 0, 0
    out, stats = window(backend, model, x[:tokens], grad[:tokens])
    full, expected = window(other, twin, x, grad)
    assert out.shape == (tokens, 128)
    # Another number of rows may take another algorithm of cuBLASLt, which accumulates fast in forward.
    torch.testing.assert_close(out, full[:tokens], rtol=1e-2, atol=1e-2)
    assert torch.equal(stats[:3], expected[:3])
    wanted = gradients(twin)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-2, atol=1e-2)


def trained(fp8_gpu: torch.device, kind: str) -> tuple[PrecisionBackend, nn.Sequential]:
    backend, model = make(
        fp8_gpu, **({"amax_history_len": LENGTH} if kind == "delayed" else {"scaling": kind})
    )
    for _ in range(2):
        window(backend, model, *batch(fp8_gpu))
    return backend, model


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_a_deep_copy_follows_and_records_nothing(fp8_gpu: torch.device, kind: str) -> None:
    backend, model = trained(fp8_gpu, kind)
    twin = copy.deepcopy(model)
    x, grad = batch(fp8_gpu)
    with torch.no_grad(), backend.context():
        assert torch.equal(twin(x), model(x)), "FP8, by the same scales"
    assert {id(p) for p in twin.parameters()}.isdisjoint(id(p) for p in model.parameters())
    before = clones(backend)
    backend.begin_window(sample=False)
    with backend.context():
        out = twin(1000 * x)
    with backend.backward_context():
        out.backward(1000 * grad)
    assert not backend.amax().any()
    if kind == "delayed":
        for name, tensor in clones(backend).items():
            assert torch.equal(tensor, before[name]), name
    backend.switch(demote=["00", "01"], promote=[])
    with torch.no_grad(), backend.context():
        assert torch.equal(twin(x), model(x)), "BF16, as the original"


def test_a_copy_before_the_first_step_shares_the_state_and_adds_nothing(
    fp8_gpu: torch.device,
) -> None:
    backend, model = make(fp8_gpu)
    twin = copy.deepcopy(model)
    before = len(reduced_by_te())
    backend.begin_window(sample=False)
    x, grad = batch(fp8_gpu)
    with backend.context():
        out = model(x) + twin(3 * x)
    with backend.backward_context():
        out.backward(grad)
    backend.end_micro_batch(same)
    backend.end_window(backend.amax(), torch.zeros((), device=fp8_gpu), same)
    assert len(reduced_by_te()) == before
    assert [id(own) for own in states(twin)] == [id(own) for own in states(model)]
    assert clones(backend)["history"][-1, 0].item() == largest(x.bfloat16())


@pytest.mark.parametrize("kind", ["delayed", "current"])
@pytest.mark.parametrize("demoted", [False, True])
def test_a_second_backward_and_gradients_of_gradients_are_refused_by_name(
    fp8_gpu: torch.device, kind: str, demoted: bool
) -> None:
    backend, model = make(fp8_gpu, scaling=kind)
    backend.switch(demote=["00", "01"] if demoted else [], promote=[])
    x, grad = batch(fp8_gpu)
    backend.begin_window(sample=False)
    with backend.context():
        out = model(x)
    with backend.backward_context():
        out.backward(grad, retain_graph=True)
        with pytest.raises(MisuseError, match="one backward for each forward") as caught:
            out.backward(grad)
    assert "layer 1" in str(caught.value)
    with backend.context():
        out = model(x.requires_grad_())
    with pytest.raises(MisuseError, match="no gradients of gradients"):
        torch.autograd.grad(out.float().sum(), x, create_graph=True)


def test_a_pickled_layer_is_a_plain_linear(fp8_gpu: torch.device) -> None:
    backend, model = trained(fp8_gpu, "delayed")
    assert backend.layers == ("0", "1")
    plain = pickle.loads(pickle.dumps(model))
    assert type(plain[0]) is nn.Linear
    assert type(plain[1]) is nn.Linear
    assert plain[1].bias is None
    assert torch.equal(plain[0].weight, model.get_parameter("0.weight"))
    assert plain(batch(fp8_gpu)[0]).dtype == torch.float32


class Normed(nn.Module):
    """A norm and the MLP that it feeds."""

    fusible_norms: ClassVar = {"mlp.gate_up": "norm"}

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = (
            nn.RMSNorm(FEATURES, eps=1e-5),
            FeedForward(Settings(1, FEATURES, 1, 1, 1, 2 * FEATURES, False)),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm(x))
        return out


def test_a_fused_mlp_is_its_parts(fp8_gpu: torch.device) -> None:
    """The halves in their order, slots in their places: what a kernel might see otherwise than the stand-in does."""
    x, grad = batch(fp8_gpu)
    found = []
    for fuse in (True, False):
        torch.manual_seed(0)
        model = Normed().to(fp8_gpu)
        backend = backend_on(
            model, "transformer_engine", fp8_gpu, fuse=fuse, amax_history_len=LENGTH
        )
        window(backend, model, x, grad, sample=True)
        gradients(model)
        out, stats = window(backend, model, x, grad)
        kind = type(getattr(model.mlp.down, "fused", None)).__name__
        assert kind == ("LayerNormMLP" if fuse else "NoneType")
        found.append((out, *gradients(model).values(), stats[0]))
    assert all(each.abs().max() > 0 for each in found[0])
    assert max(map(distance, *found)) < 0.1
