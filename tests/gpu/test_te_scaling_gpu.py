"""Transformer Engine's current and block scaling: what it computes, what is measured, switching."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from gpu_support import backend_on, clones, distance, same, window
from te_gpu_support import FP8_MAX, LENGTH, batch, gradients, largest, make
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.capability.cards import tier_of
from harness.capability.probe import probe
from harness.core.errors import CheckpointError
from harness.precision import scaling
from harness.precision.backends import te_library
from harness.precision.backends.registry import can_run
from harness.precision.recipe import Fp8Config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
    ),
]


def supported() -> dict[str, bool]:
    """What this machine can do by our own rules."""
    facts = probe()
    tier, _ = tier_of(facts)
    return {
        kind: can_run("transformer_engine", "fp8", facts, tier, kind)[0]
        for kind in ("delayed", "current", "block")
    }


def kinds() -> list[str]:
    """The stateless ways of scaling that run here; both where there is no GPU, so that both are reported as skipped."""
    able = supported() if torch.cuda.is_available() else {"current": True, "block": True}
    return [kind for kind in ("current", "block") if able[kind]]


@pytest.fixture(params=kinds())
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_our_rules_are_those_of_te(fp8_gpu: torch.device) -> None:
    te = import_module("transformer_engine.pytorch")
    per_tensor, blocks = te.is_fp8_available(), te.is_fp8_block_scaling_available()
    assert supported() == {"delayed": per_tensor, "current": per_tensor, "block": blocks}


@pytest.mark.parametrize("scaling_kind", ["delayed", "current", "block"])
@pytest.mark.parametrize("fmt", ["hybrid", "e4m3"])
def test_the_recipe_classes_take_every_argument(scaling_kind: str, fmt: str) -> None:
    """`make_recipe` itself raises if one is dropped; here the values are read back once more."""
    delayed = {"margin": 2, "amax_history_len": LENGTH, "amax_compute_algo": "most_recent"}
    extra = delayed if scaling_kind == "delayed" else {}
    config = Fp8Config.model_validate({"scaling": scaling_kind, "format": fmt, **extra})
    made = te_library.make_recipe(te_library.load(), config)
    assert made.fp8_format.name == fmt.upper()
    assert {name: getattr(made, name) for name in extra} == extra
    assert (made.delayed(), made.float8_current_scaling(), made.float8_block_scaling()) == tuple(
        scaling_kind == name for name in ("delayed", "current", "block")
    )


def test_statistics_are_of_the_tensors_at_hand(kind: str, fp8_gpu: torch.device) -> None:
    backend, model = make(fp8_gpu, scaling=kind)
    for scale in (1.0, 100.0, 0.01):
        x, grad = batch(fp8_gpu, scale)
        stats = window(backend, model, x, grad)[1].cpu()
        weights = [largest(model.get_parameter(name)) for name in ("0.weight", "1.weight")]
        assert stats[0, [0, 1, 4, 5]].tolist() == [largest(x.bfloat16()), *weights, largest(grad)]
        torch.testing.assert_close(stats[2], torch.ones(6), rtol=1e-6, atol=0.0)
        assert stats[3:].isnan().all(), "not measured"
        if kind == "current":
            assert torch.equal(stats[1], FP8_MAX.repeat(2) / stats[0])
        else:
            assert stats[1].isnan().all(), "no one scale for a tensor"


@pytest.mark.parametrize("scaling_kind", ["delayed", "current"])
def test_what_casts_lose_is_measured_on_sampled_steps(
    scaling_kind: str, fp8_gpu: torch.device
) -> None:
    backend, model = make(fp8_gpu, scaling=scaling_kind)
    x, grad = batch(fp8_gpu)
    x[:, 3] = 2.0**20
    stats = torch.zeros(6, 6)
    for step in range(3):
        stats = window(backend, model, x, grad, sample=step > 0)[1].cpu()
        assert stats[3:].isnan().all() == (step == 0)
    assert stats[4, 0] > 0.5, "the hot channel makes the others underflow"
    assert (stats[4, [1, 4]] < 0.05).all(), "the weights are healthy"
    assert (stats[5, [1, 4]] > 25).all()


def test_outputs_are_those_of_fp8(kind: str, fp8_gpu: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128)).to(fp8_gpu)
    plain = copy.deepcopy(model)
    backend = backend_on(model, "transformer_engine", fp8_gpu, scaling=kind)
    x, grad = batch(fp8_gpu, 50.0)
    out, stats = window(backend, model, x, grad)
    with torch.no_grad():
        error = distance(out, plain(x))
    assert 5e-3 < error < 6e-2, "E4M3 rounding shows, and no more than that"
    if kind == "current":
        left, right = (
            scaling.quantize(tensor, stats[1, index], "e4m3").float() / stats[1, index]
            for index, tensor in enumerate((x.bfloat16(), model.get_parameter("0.weight")))
        )
        expected = torch.nn.functional.linear(left, right, model.get_parameter("0.bias").detach())
        assert distance(out, expected) < 5e-3, "the same values as by our own cast"


def test_a_demoted_layer_is_bf16_and_measured(kind: str, fp8_gpu: torch.device) -> None:
    backend, model = make(fp8_gpu, scaling=kind)
    window(backend, model, *batch(fp8_gpu))
    x, grad = batch(fp8_gpu, 5.0)
    with torch.no_grad(), backend.context():
        fp8 = model[0](x)
    backend.switch(demote=["00"], promote=[])
    with torch.no_grad(), backend.context():
        bf16 = model[0](x)
    expected = torch.nn.functional.linear(
        x.bfloat16(), *(p.detach().bfloat16() for p in model[0].parameters())
    )
    assert distance(bf16, expected) < 5e-3 < distance(fp8, expected)
    stats = window(backend, model, x, grad)[1]
    assert stats[0, 0].item() == largest(x.bfloat16())
    assert (stats[0] > 0).all()
    backend.switch(demote=[], promote=["00"])
    with torch.no_grad(), backend.context():
        assert torch.equal(model[0](x), fp8)


def test_evaluation_and_plain_calls_are_not_measured(kind: str, fp8_gpu: torch.device) -> None:
    backend, model = make(fp8_gpu, scaling=kind)
    backend.begin_window(sample=False)
    with torch.no_grad(), backend.context():
        model(batch(fp8_gpu)[0])
    model(batch(fp8_gpu)[0])
    assert not backend.amax().any()


def test_state_is_the_last_amaxes_and_who_is_in_bf16(kind: str, fp8_gpu: torch.device) -> None:
    backend, model = make(fp8_gpu, scaling=kind)
    window(backend, model, *batch(fp8_gpu))
    backend.switch(demote=["01"], promote=[])
    tensors, meta = backend.state_dict()
    assert tensors["history"].shape == (1, 6)
    fresh, _ = make(fp8_gpu, scaling=kind)
    fresh.load_state_dict(tensors, meta)
    assert fresh.demoted == ("01",)
    assert torch.equal(clones(fresh)["history"], clones(backend)["history"])
    other = {"current": "block", "block": "current"}[kind]
    with pytest.raises(CheckpointError, match=f"{other} scaling, this run has {kind}"):
        fresh.load_state_dict(tensors, {**meta, "scaling": other})


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_compute_the_same_again(
    kind: str, fp8_gpu: torch.device, reentrant: bool
) -> None:
    x, grad = batch(fp8_gpu)
    found = []
    for again in (False, True):
        backend, model = make(fp8_gpu, scaling=kind)
        backend.begin_window(sample=False)
        with backend.context():
            inputs = x.clone().requires_grad_()
            out = checkpoint(model, inputs, use_reentrant=reentrant) if again else model(inputs)
        with backend.backward_context():
            out.backward(grad)
        backend.end_micro_batch(same)
        stats = backend.end_window(backend.amax(), torch.zeros((), device=fp8_gpu), same)
        found.append((gradients(model), stats[0], inputs.grad))
    for name, expected in found[0][0].items():
        assert torch.equal(found[1][0][name], expected), name
    assert torch.equal(found[1][1], found[0][1])
    assert torch.equal(found[1][2], found[0][2])
