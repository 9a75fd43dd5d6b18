"""Transformer Engine's delayed scaling against the pure rule of `scaling.update`."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
from gpu_support import backend_on, clones, distance, same, window
from te_gpu_support import FP8_MAX, LENGTH, batch, largest, make
from torch import nn

from harness.core.errors import CheckpointError
from harness.core.protocols import PrecisionBackend
from harness.precision import scaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
    ),
]

Pair = tuple[PrecisionBackend, nn.Sequential]


@pytest.fixture
def pair(fp8_gpu: torch.device) -> Pair:
    return make(fp8_gpu)


def test_amax_and_scale_follow_the_shared_rule(pair: Pair, fp8_gpu: torch.device) -> None:
    backend, model = pair
    history, scale = torch.zeros(LENGTH, 6), torch.ones(6)
    torch.manual_seed(1)
    for number in range(2 * LENGTH):
        x, grad = batch(fp8_gpu, 2.0 ** ((3 * number) % 5 - 2))
        _, stats = window(backend, model, x, grad)
        amax = stats[0].cpu()
        assert amax[0] == largest(x.bfloat16())
        assert amax[1] == largest(model.get_parameter("0.weight"))
        assert amax[5] == largest(grad)
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
    model = nn.Sequential(nn.Linear(128, 128)).to(fp8_gpu)
    twin = copy.deepcopy(model)
    backend = backend_on(model, "transformer_engine", fp8_gpu)
    native = backend_on(twin, "native", fp8_gpu)
    for _ in range(3):
        x, grad = batch(fp8_gpu)
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


def test_a_demoted_layer_is_bf16_and_returns_with_a_warm_scale(
    pair: Pair, fp8_gpu: torch.device
) -> None:
    backend, model = pair
    for _ in range(2):
        window(backend, model, *batch(fp8_gpu))
    backend.switch(demote=["00"], promote=[])
    assert backend.demoted == ("00",)
    before = clones(backend)
    x, grad = batch(fp8_gpu, 8.0)
    with torch.no_grad(), backend.context():
        out = model[0](x)
    expected = torch.nn.functional.linear(
        x.bfloat16(), *(p.detach().bfloat16() for p in model[0].parameters())
    )
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    _, stats = window(backend, model, x, grad)
    after = clones(backend)
    history = before["history"].clone()
    history[0] = stats[0].cpu()  # one micro-batch: what it staged
    expected_history, expected_scale = scaling.update(history, before["scale"], FP8_MAX.repeat(2))
    assert torch.equal(after["history"], expected_history), "shadow amax rolls by the same rule"
    assert torch.equal(after["scale"], expected_scale)
    assert stats[0, 0].item() == largest(x.bfloat16())
    backend.switch(demote=[], promote=["00"])
    _, stats = window(backend, model, x, grad)
    assert stats[2, 0].item() == pytest.approx(1.0), "back in FP8, nothing is clipped"


def test_with_every_layer_in_bf16_histories_go_on(pair: Pair, fp8_gpu: torch.device) -> None:
    backend, model = pair
    window(backend, model, *batch(fp8_gpu))
    backend.fall_back("bf16")
    assert backend.demoted == ("00", "01")
    x, grad = batch(fp8_gpu, 3.0)
    window(backend, model, x, grad)
    assert clones(backend)["history"][-1, 0].item() == largest(x.bfloat16())
    assert clones(backend)["history"][-1, 5].item() == largest(grad)


def test_a_skipped_window_restores_the_state(pair: Pair, fp8_gpu: torch.device) -> None:
    backend, model = pair
    window(backend, model, *batch(fp8_gpu))
    before = clones(backend)
    x, grad = batch(fp8_gpu, 100.0)
    window(backend, model, x, grad, skip=1.0)
    for name, tensor in clones(backend).items():
        assert torch.equal(tensor, before[name]), name
    window(backend, model, x, grad)
    assert not torch.equal(clones(backend)["scale"], before["scale"]), (
        "the same window, applied, does move the state"
    )


def test_evaluation_leaves_no_trace(pair: Pair, fp8_gpu: torch.device) -> None:
    backend, model = pair
    window(backend, model, *batch(fp8_gpu))
    before = clones(backend)
    with torch.no_grad(), backend.context():
        model(batch(fp8_gpu, 1e4)[0])
    for name, tensor in clones(backend).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("roll", ["step", "micro_batch"])
def test_histories_roll_as_the_recipe_says_the_window_shows_the_largest(
    fp8_gpu: torch.device, roll: str
) -> None:
    backend, model = make(fp8_gpu, amax_history_len=LENGTH, roll=roll)
    inputs = [batch(fp8_gpu, scale) for scale in (4.0, 1.0)]
    backend.begin_window(sample=False)
    for x, grad in inputs:
        with backend.context():
            out = model(x)
        with backend.backward_context():
            out.backward(grad)
        backend.end_micro_batch(same)
    stats = backend.end_window(backend.amax(), torch.zeros((), device=fp8_gpu), same)
    amaxes = [largest(x.bfloat16()) for x, _ in inputs]
    assert clones(backend)["history"][-2:, 0].tolist() == (
        [0.0, max(amaxes)] if roll == "step" else amaxes
    )
    assert stats[0, 0].item() == max(amaxes)


def test_an_infinite_amax_is_scrubbed(pair: Pair, fp8_gpu: torch.device) -> None:
    backend, model = pair
    x, grad = batch(fp8_gpu)
    window(backend, model, x, grad)
    bad = x.clone()
    bad[0, 0] = torch.inf
    window(backend, model, bad, grad)
    assert backend.scrubbed().item() >= 1
    assert bool(clones(backend)["history"].isfinite().all())


def test_state_round_trip_before_the_first_forward(pair: Pair, fp8_gpu: torch.device) -> None:
    backend, model = pair
    window(backend, model, *batch(fp8_gpu))
    backend.switch(demote=["01"], promote=[])
    tensors, meta = backend.state_dict()
    fresh, twin = make(fp8_gpu)
    twin.load_state_dict(model.state_dict())
    fresh.load_state_dict(tensors, meta)
    assert fresh.demoted == ("01",)
    x, grad = batch(fp8_gpu)
    expected, actual = window(backend, model, x, grad)[0], window(fresh, twin, x, grad)[0]
    assert torch.equal(actual, expected)
    for name, tensor in clones(backend).items():
        assert torch.equal(clones(fresh)[name], tensor), name
    with pytest.raises(
        CheckpointError, match=f"history length {LENGTH + 1}, this run has {LENGTH}"
    ):
        fresh.load_state_dict({**tensors, "history": torch.zeros(LENGTH + 1, 6)}, meta)
    with pytest.raises(CheckpointError, match=r"01\.grad_output in e4m3, this run has e5m2"):
        fresh.load_state_dict(tensors, {**meta, "formats": [*meta["formats"][:5], "e4m3"]})
    with pytest.raises(
        CheckpointError, match=r"3 slots, this run has 6 \(01\.grad_output is in one of them only\)"
    ):
        fresh.load_state_dict(tensors, {**meta, "slots": meta["slots"][:3]})
    with pytest.raises(CheckpointError, match="in another order"):
        fresh.load_state_dict(tensors, {**meta, "slots": meta["slots"][::-1]})
    other, _ = make(fp8_gpu, scaling="current")
    with pytest.raises(CheckpointError, match="delayed scaling, this run has current"):
        other.load_state_dict(tensors, meta)
