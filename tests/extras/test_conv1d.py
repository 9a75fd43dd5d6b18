"""GPT-2's Conv1D, whose weight is [in, out], as an FP8 layer; experts, which have none, are named."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from harness.capability.probe import probe
from harness.core.facts import RungVerdict
from harness.models import Task
from harness.precision.api import Precision
from harness.precision.plan import make_plan, resolve
from harness.precision.recipe import load_recipe
from tests.extras.tiny_models import batch, load, save
from tests.unit.precision import fp8_oracle
from tests.unit.precision.native_support import backend_for, window


def conv(out: int, into: int) -> Conv1D:
    made = Conv1D(out, into)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return made


def as_linear(conv1d: Any) -> nn.Linear:
    made = nn.Linear(conv1d.nx, conv1d.nf)
    made.weight.data.copy_(conv1d.weight.data.t())
    made.bias.data.copy_(conv1d.bias.data)
    return made


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("units", [False, True])
def test_the_bits_of_a_linear_with_the_transposed_weight(units: bool) -> None:
    ours = nn.Sequential(conv(48, 32), nn.GELU(), conv(32, 48))
    linear = nn.Sequential(as_linear(ours[0]), nn.GELU(), as_linear(ours[2]))
    inputs = [torch.randn(3, 16, 32) for _ in range(3)]
    told = []
    for model in (ours, linear):
        backend, stats = backend_for(model, units), []
        for x in inputs:
            model.zero_grad()
            stats.append(window(backend, model, x))
        told.append((stats, [model[0].weight.grad, model[2].weight.grad], model[0].bias.grad))
    for one, other in zip(told[0][0], told[1][0], strict=True):
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))
    for one, other in zip(told[0][1], told[1][1], strict=True):
        assert torch.equal(one, other.t())
        assert one.count_nonzero() > 0
    assert torch.equal(told[0][2], told[1][2])


def test_values_and_gradients_are_those_of_the_oracle() -> None:
    """Forward, input and weight gradients from tables of FP8 values; only the order of sums is torch's."""
    model = nn.Sequential(conv(32, 16))
    backend = backend_for(model)
    x = torch.randn(16, 16, dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(16, 32, dtype=torch.bfloat16)
    window(backend, model, x.detach())  # sets the scales
    scales = backend.slot_buffers.scale.tolist()
    assert all(scale != 1 for scale in scales)
    model.zero_grad()
    backend.begin_window(sample=False)
    with backend.context():
        out = model(x)
    with backend.backward_context():
        out.backward(grad)

    def fp8(values: torch.Tensor, slot: int, fmt: str) -> np.ndarray:
        return (
            fp8_oracle.quantize(values.detach().float().numpy(), scales[slot], fmt) / scales[slot]
        )

    rows, weight, dy = fp8(x, 0, "e4m3"), fp8(model[0].weight, 1, "e4m3"), fp8(grad, 2, "e5m2")
    bias = model[0].bias.detach().to(torch.bfloat16).double().numpy()
    for got, expected in (
        (out, rows @ weight + bias),
        (x.grad, dy @ weight.T),
        (model[0].weight.grad, rows.T @ dy),
    ):
        assert got is not None
        torch.testing.assert_close(got.double(), torch.from_numpy(expected), rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(model[0].bias.grad, grad.float().sum(0), rtol=1e-5, atol=1e-5)


def test_gpt2_keeps_parameters_names_class_and_copies(tmp_path: Path) -> None:
    model: Any = load(save(tmp_path, "gpt2")).eval()
    before = dict(model.named_parameters())
    names = list(model.state_dict())
    tokens = batch()
    with torch.no_grad():
        plain = model(tokens["inputs"]).logits
    precision = Precision.from_recipe("fp8_hybrid")
    precision.prepare(model)
    converted = precision.plan.fp8_layers()
    assert "transformer.h.0.attn.c_attn" in converted
    assert len(converted) == 8
    shapes = {row.module: row.shape for row in precision.plan.layers}
    assert shapes["transformer.h.0.attn.c_attn"] == (192, 64)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == names
    layer = model.transformer.h[0].attn.c_attn
    assert isinstance(layer, Conv1D)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens["inputs"]).logits, plain)
        with precision.context():
            inside = model(tokens["inputs"]).logits
        follower = copy.deepcopy(model)
        with precision.context():
            assert torch.equal(follower(tokens["inputs"]).logits, inside)
    assert not torch.equal(inside.float(), plain)
    assert type(pickle.loads(pickle.dumps(layer))) is Conv1D


def test_gpt2_trains_in_fp8_near_to_bf16(tmp_path: Path) -> None:
    save(tmp_path, "gpt2", resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    ends = {}
    for recipe in ("bf16", "fp8_hybrid"):
        model = load(tmp_path)
        precision = Precision.from_recipe(recipe)
        precision.prepare(model)
        task, optimizer = (
            Task(model, "hf"),
            torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True),
        )
        for _ in range(30):
            with precision.context():
                loss = task.loss(model, batch())
            precision.backward(loss)
            precision.step(optimizer, max_grad_norm=1.0)
            optimizer.zero_grad()
        ends[recipe] = loss.item()
        if recipe == "fp8_hybrid":
            stats = precision.stats()
            assert stats is not None
            assert len(stats.amax) == 24
            assert all(amax > 0 for amax in stats.amax)
    assert ends["bf16"] < 3.5
    assert abs(ends["fp8_hybrid"] - ends["bf16"]) < 0.1 * ends["bf16"]
    assert ends["fp8_hybrid"] != ends["bf16"]


def test_a_compiled_conv1d_computes_as_an_eager_one() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = nn.ModuleList([nn.Sequential(conv(32, 32), nn.GELU(), conv(32, 32))])
        backend = backend_for(model)
        if compiled:
            model[0].compile()
        x = torch.randn(16, 32, dtype=torch.bfloat16)
        stats = [window(backend, model[0], x) for _ in range(3)]
        found.append((stats[-1][:3], model[0][0].weight.grad))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-2, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=5e-2, atol=5e-2)


def test_backends_that_cannot_say_so_by_layer(tmp_path: Path) -> None:
    model, recipe, facts = load(save(tmp_path, "gpt2")), load_recipe("fp8_dynamic"), probe()
    model.add_module("extra", nn.Linear(64, 64))  # or there would be no FP8 layer at all
    rung, verdicts = resolve(recipe, facts)
    assert rung is not None
    assert rung.backend == "torchao"
    plan = make_plan(recipe, facts, rung, verdicts, model)
    row = next(each for each in plan.layers if each.module == "transformer.h.0.mlp.c_fc")
    assert row.precision == "bf16"
    assert row.reason == "Conv1D: torchao does not compute from a weight [in, out]"
    assert plan.fp8_layers() == ("extra",)


def test_names_of_conv1d_layers_match_patterns(tmp_path: Path) -> None:
    model, facts = load(save(tmp_path, "gpt2")), probe()
    recipe = load_recipe("fp8_hybrid")
    layers = recipe.layers.model_copy(update={"exclude": ["*.c_proj"]})
    recipe = recipe.model_copy(update={"layers": layers})
    rung, _ = resolve(recipe, facts)
    assert rung is not None
    plan = make_plan(recipe, facts, rung, (RungVerdict("x", True, ""),), model)
    reasons = {row.module: row.reason for row in plan.layers}
    assert reasons["transformer.h.1.mlp.c_proj"] == "excluded by name (*.c_proj)"
    assert len(plan.fp8_layers()) == 4


def test_experts_are_named_with_the_reason_and_compute_in_bf16(tmp_path: Path) -> None:
    model: Any = load(save(tmp_path, "mixtral"))
    precision = Precision.from_recipe("fp8_hybrid")
    precision.prepare(model)
    rows = {row.module: row for row in precision.plan.layers}
    experts = rows["model.layers.0.mlp.experts"]
    assert experts.reason == (
        "3-D weights (of 4 experts): no backend has FP8 layers for those: fp32 weights, their matrix products run in "
        "bf16, but by kernels that autocast does not know"
    )
    assert rows["model.layers.0.self_attn.q_proj"].precision == "fp8"
    dtypes = []
    model.model.layers[0].mlp.experts.act_fn.register_forward_hook(
        lambda *given: dtypes.append(given[-1].dtype)
    )
    with precision.context():
        Task(model, "hf").loss(model, batch())
    assert dtypes
    assert set(dtypes) == {torch.bfloat16}
