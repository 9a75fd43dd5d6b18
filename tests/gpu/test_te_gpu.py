"""The Transformer Engine backend against the pure rule of `scaling.update`. Not run on a GPU yet."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
from gpu_support import backend_on, clones, distance, same, window
from torch import Tensor, nn

from harness.core.errors import CheckpointError
from harness.core.protocols import PrecisionBackend
from harness.precision import scaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
]

LENGTH = 4
FP8_MAX = torch.tensor([448.0, 448.0, 57344.0])


@pytest.fixture
def pair(fp8_gpu: torch.device) -> tuple[PrecisionBackend, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False)).to(fp8_gpu)
    return backend_on(model, "transformer_engine", fp8_gpu, amax_history_len=LENGTH), model


def batch(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return scale * torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)


def test_conversion_shares_parameters_draws_nothing_and_adds_no_state(fp8_gpu: torch.device) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False)).to(fp8_gpu)
    identities = [id(parameter) for parameter in model.parameters()]
    names, random_state = set(model.state_dict()), torch.cuda.get_rng_state()
    backend = backend_on(model, "transformer_engine", fp8_gpu, amax_history_len=LENGTH)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert set(model.state_dict()) == names, "TE's pickled extra state stays out"
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    assert all(isinstance(module, nn.Module) and not isinstance(module, nn.Linear) for module in model)
    state = clones(backend)
    assert state["history"].shape == (LENGTH, 6)
    assert not state["history"].any()
    assert torch.equal(state["scale"], torch.ones(6))


def test_amax_and_scale_follow_the_shared_rule(pair: tuple[PrecisionBackend, nn.Sequential]) -> None:
    backend, model = pair
    history, scale = torch.zeros(LENGTH, 6), torch.ones(6)
    torch.manual_seed(1)
    for number in range(2 * LENGTH):
        x, grad = batch(2.0 ** ((3 * number) % 5 - 2))
        _, stats = window(backend, model, x, grad)
        amax = stats[0].cpu()
        assert amax[0] == x.bfloat16().abs().max().cpu()
        assert amax[1] == model.get_parameter("0.weight").abs().max().cpu()
        assert amax[5] == grad.abs().max().float().cpu()
        assert torch.equal(stats[1].cpu(), scale), "the scale in use is the one before the update"
        assert torch.equal(stats[2].cpu(), amax * scale / FP8_MAX.repeat(2))
        history[0] = amax
        history, scale = scaling.update(history, scale, FP8_MAX.repeat(2))
        state = clones(backend)
        assert torch.equal(state["history"], history), number
        assert torch.equal(state["scale"], scale), number


def test_outputs_agree_with_the_native_backend(fp8_gpu: torch.device) -> None:
    """One layer: through two, a last bit of the first flips FP8 roundings in the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64)).to(fp8_gpu)
    twin = copy.deepcopy(model)
    backend = backend_on(model, "transformer_engine", fp8_gpu)
    native = backend_on(twin, "native", fp8_gpu)
    for _ in range(3):
        x, grad = batch()
        model.zero_grad()
        twin.zero_grad()
        assert distance(window(backend, model, x, grad)[0], window(native, twin, x, grad)[0]) < 5e-3
        for name, parameter in model.named_parameters():
            expected = twin.get_parameter(name).grad
            assert parameter.grad is not None
            assert expected is not None
            assert parameter.grad.dtype == parameter.dtype
            assert distance(parameter.grad, expected) < 1e-2, name
    for name, tensor in clones(native).items():
        assert torch.equal(clones(backend)[name], tensor), name


def test_a_demoted_layer_is_bf16_and_returns_with_a_warm_scale(pair: tuple[PrecisionBackend, nn.Sequential]) -> None:
    backend, model = pair
    for _ in range(2):
        window(backend, model, *batch())
    backend.switch(demote=["00"], promote=[])
    assert backend.demoted == ("00",)
    before = clones(backend)
    x, grad = batch(8.0)
    with torch.no_grad(), backend.context():
        out = model[0](x)
    expected = torch.nn.functional.linear(x.bfloat16(), *(p.detach().bfloat16() for p in model[0].parameters()))
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    _, stats = window(backend, model, x, grad)
    after = clones(backend)
    history = before["history"].clone()
    history[0] = stats[0].cpu()
    expected_history, expected_scale = scaling.update(history, before["scale"], FP8_MAX.repeat(2))
    assert torch.equal(after["history"], expected_history), "shadow amax rolls by the same rule"
    assert torch.equal(after["scale"], expected_scale)
    assert stats[0, 0].item() == x.bfloat16().abs().max().item()
    backend.switch(demote=[], promote=["00"])
    _, stats = window(backend, model, x, grad)
    assert stats[2, 0].item() == pytest.approx(1.0), "back in FP8, nothing is clipped"


def test_a_skipped_window_restores_the_state(pair: tuple[PrecisionBackend, nn.Sequential]) -> None:
    backend, model = pair
    window(backend, model, *batch())
    before = clones(backend)
    x, grad = batch(100.0)
    window(backend, model, x, grad, skip=1.0)
    for name, tensor in clones(backend).items():
        assert torch.equal(tensor, before[name]), name
    window(backend, model, x, grad)
    assert not torch.equal(clones(backend)["scale"], before["scale"]), "the same window, applied, does move the state"


def test_evaluation_leaves_no_trace(pair: tuple[PrecisionBackend, nn.Sequential]) -> None:
    backend, model = pair
    window(backend, model, *batch())
    before = clones(backend)
    with torch.no_grad(), backend.context():
        model(batch(1e4)[0])
    for name, tensor in clones(backend).items():
        assert torch.equal(tensor, before[name]), name


def test_micro_batches_roll_one_by_one_and_the_window_shows_the_largest(
    pair: tuple[PrecisionBackend, nn.Sequential],
) -> None:
    backend, model = pair
    inputs = [batch(scale) for scale in (4.0, 1.0)]
    backend.begin_window(sample=False)
    for x, grad in inputs:
        with backend.context():
            out = model(x)
        out.backward(grad)
        backend.end_micro_batch(same)
    stats = backend.end_window(backend.amax(), torch.zeros((), device="cuda"), same)
    amaxes = [x.bfloat16().abs().max().item() for x, _ in inputs]
    assert clones(backend)["history"][-2:, 0].tolist() == amaxes
    assert stats[0, 0].item() == max(amaxes)


def test_an_infinite_amax_is_scrubbed(pair: tuple[PrecisionBackend, nn.Sequential]) -> None:
    backend, model = pair
    x, grad = batch()
    window(backend, model, x, grad)
    bad = x.clone()
    bad[0, 0] = torch.inf
    window(backend, model, bad, grad)
    assert backend.scrubbed().item() >= 1
    assert bool(clones(backend)["history"].isfinite().all())


def test_state_round_trip_before_the_first_forward(
    pair: tuple[PrecisionBackend, nn.Sequential], fp8_gpu: torch.device
) -> None:
    backend, model = pair
    window(backend, model, *batch())
    backend.switch(demote=["01"], promote=[])
    tensors, meta = backend.state_dict()
    twin = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False)).to(fp8_gpu)
    twin.load_state_dict(model.state_dict())
    fresh = backend_on(twin, "transformer_engine", fp8_gpu, amax_history_len=LENGTH)
    fresh.load_state_dict(tensors, meta)
    assert fresh.demoted == ("01",)
    x, grad = batch()
    expected, actual = window(backend, model, x, grad)[0], window(fresh, twin, x, grad)[0]
    assert torch.equal(actual, expected)
    for name, tensor in clones(backend).items():
        assert torch.equal(clones(fresh)[name], tensor), name
    with pytest.raises(CheckpointError):
        fresh.load_state_dict({**tensors, "history": torch.zeros(LENGTH + 1, 6)}, meta)
