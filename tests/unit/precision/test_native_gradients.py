"""`fp8.weight_gradients: float32`: weight gradients as the GEMM adds them up, without a rounding to bfloat16."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from native_support import CPU, same
from torch import Tensor, nn

from harness.capability.probe import probe
from harness.precision.backends import native_triton
from harness.precision.backends.native import NativeBackend
from harness.precision.plan import make_plan
from harness.precision.recipe import Recipe
from harness.precision.scaling import quantize

# torch says these to itself while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

WIDE = {"weight_gradients": "float32"}
UNITS = pytest.mark.parametrize("fp8_units", [False, True])


def recipe(**fp8: Any) -> dict[str, Any]:
    rung = {"backend": "native", "precision": "fp8", "tiers": ["CPU"]}
    return {"name": "wide", "ladder": [rung], "layers": {"min_features": 16}, "fp8": fp8}


def backend_for(model: nn.Module, fp8_units: bool, **fp8: Any) -> NativeBackend:
    policy = Recipe.model_validate(recipe(**fp8))
    plan = make_plan(policy, probe(), policy.ladder[0], [], model)
    return NativeBackend(plan, policy, model, CPU, fp8_units)


def linear(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48, bias=False).to(dtype))


def weight_gradient(
    backend: NativeBackend, model: nn.Module, batches: int = 1, autocast: bool = False
) -> Tensor:
    """The gradient after a window of `batches` micro-batches of 20 tokens, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    model.zero_grad()
    backend.begin_window(sample=False)
    for _ in range(batches):
        x = torch.randn(20, 64, generator=generator)
        with backend.context():
            out = model(x)
            grad = torch.randn(out.shape, generator=generator).to(out.dtype)
            if autocast:
                out.backward(grad)
        if not autocast:
            with backend.backward_context():
                out.backward(grad)
        backend.end_micro_batch(same)
    (weight,) = model.parameters()
    assert weight.grad is not None
    assert weight.grad.dtype == weight.dtype
    return weight.grad.clone()


def exact(batches: int = 1) -> Tensor:
    """dy^T x of the quantised values, in float64. The first scales are 1."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(48, 64, dtype=torch.float64)
    for _ in range(batches):
        x = torch.randn(20, 64, generator=generator).bfloat16()
        grad = torch.randn(20, 48, generator=generator).bfloat16()
        total += quantize(grad, 1.0, "e5m2").double().t() @ quantize(x, 1.0, "e4m3").double()
    return total


def sqnr(found: Tensor, expected: Tensor) -> float:
    """Signal to noise in dB."""
    noise = (found.double() - expected).square().sum()
    return 10 * math.log10(float(expected.square().sum() / noise))


@UNITS
@pytest.mark.parametrize("autocast", [False, True])
def test_a_rounding_is_saved(fp8_units: bool, autocast: bool) -> None:
    """Against the exact product of what was cast: bfloat16 has 9 bits, float32 24."""
    found: dict[str, float] = {}
    for name, keys in (("bfloat16", {}), ("float32", WIDE)):
        model = linear()
        backend = backend_for(model, fp8_units=fp8_units, **keys)
        found[name] = sqnr(weight_gradient(backend, model, autocast=autocast), exact())
    assert 50 < found["bfloat16"] < 60
    assert found["float32"] > 120


@UNITS
def test_micro_batches_add_up_in_float32(fp8_units: bool) -> None:
    model = linear()
    backend = backend_for(model, fp8_units=fp8_units, **WIDE)
    assert sqnr(weight_gradient(backend, model, batches=3), exact(3)) > 120


@UNITS
def test_a_demoted_layer_gives_what_bf16_gives(fp8_units: bool) -> None:
    found: list[Tensor] = []
    for keys in ({}, WIDE):
        model = linear()
        backend = backend_for(model, fp8_units=fp8_units, **keys)
        backend.switch(["00"], [])
        found.append(weight_gradient(backend, model))
    assert torch.equal(*found)


@UNITS
def test_bfloat16_weights_keep_bfloat16_gradients(fp8_units: bool) -> None:
    found: list[Tensor] = []
    for keys in ({}, WIDE):
        model = linear(torch.bfloat16)
        backend = backend_for(model, fp8_units=fp8_units, **keys)
        found.append(weight_gradient(backend, model))
    assert torch.equal(*found)


@pytest.mark.parametrize("way", ["carriers", "compiler's casts", "own casts"])
@pytest.mark.parametrize("demoted", [False, True])
def test_compiled_layers_have_the_bits_of_eager(
    way: str, demoted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "own casts":
        kernel = partial(native_triton.quantize_pair)
        monkeypatch.setattr(native_triton, "load", lambda device: (kernel, "in its place"))
    found: list[Tensor] = []
    for compiled in (True, False):
        torch._dynamo.reset()
        model = linear()
        backend = backend_for(model, fp8_units=way != "carriers", **WIDE)
        if demoted:
            backend.switch(["00"], [])
        if compiled:
            model[0].compile(backend="aot_eager", fullgraph=True)
        found.append(weight_gradient(backend, model))
    assert torch.equal(*found)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_weight_has_none(compiled: bool) -> None:
    torch._dynamo.reset()
    model = linear().requires_grad_(False)
    backend = backend_for(model, fp8_units=True, **WIDE)
    if compiled:
        model[0].compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(20, 64, requires_grad=True)
    with backend.context():
        out = model(x)
    with backend.backward_context():
        out.sum().backward()
    assert x.grad is not None
    assert next(model.parameters()).grad is None


def test_the_key_is_in_the_hash_only_where_it_changes_something() -> None:
    plain = Recipe.model_validate(recipe())
    said = Recipe.model_validate(recipe(weight_gradients="bfloat16"))
    wide = Recipe.model_validate(recipe(**WIDE))
    assert plain.sha256() == said.sha256() != wide.sha256()
    assert "weight_gradients" in plain.model_dump_json(), "as the plan's copy of the recipe has it"


@pytest.mark.parametrize(
    ("backends", "words"),
    [
        (["transformer_engine", "native"], "transformer_engine rungs give"),
        (["native", "torchao"], "torchao rungs give"),
        ([], "needs a native rung"),
    ],
)
def test_who_cannot_refuses_by_name(backends: list[str], words: str) -> None:
    given = recipe(**WIDE)
    given["ladder"] = [
        {"backend": name, "precision": "fp8", "tiers": ["HOPPER"]} for name in backends
    ] + [{"backend": "autocast", "precision": "bf16", "tiers": ["CPU"]}]
    with pytest.raises(ValueError, match=words):
        Recipe.model_validate(given)


def test_the_plan_says_where_it_has_no_effect() -> None:
    policy = Recipe.model_validate(recipe(**WIDE))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).bfloat16())
    notes = make_plan(policy, probe(), policy.ladder[0], [], model).notes
    assert "weight gradients of FP8 layers: float32, but not of 1: their weights" in " ".join(notes)
