"""What the rescue study says of a run, and that its mechanisms do what they are named for."""

from __future__ import annotations

import pytest
import torch

from benchmarks import rescue
from benchmarks.rescue import DIM, FFN, MECHANISMS, innocent, recipe_of, steps_lost


def test_steps_lost_are_those_that_bf16_did_not_need() -> None:
    bf16 = {"val": [3.0, 2.5, 2.2, 2.1, 2.0]}
    assert steps_lost(bf16, {"val": [2.0]}) == 0
    assert steps_lost(bf16, {"val": [1.9]}) == 0
    assert steps_lost(bf16, {"val": [2.3]}) == 20
    assert steps_lost(bf16, {"val": [4.0]}) == 40
    assert steps_lost(bf16, {"val": [None]}) == rescue.STEPS


def test_only_layers_that_a_mechanism_does_not_name_are_innocent() -> None:
    left = {"blocks.00.mlp.down": 9, "blocks.01.attn.qkv": 12}
    assert innocent(MECHANISMS["swiglu"], left) == ["blocks.01.attn.qkv"]
    assert innocent(MECHANISMS["rate"], left) == []


def test_arms_differ_in_the_recipe_alone() -> None:
    e4m3 = MECHANISMS["e4m3"]
    plain, saved, clean = (recipe_of(arm, e4m3) for arm in ("plain", "fallback", "clean"))
    assert not plain.fallback.enabled
    assert saved.fallback.enabled
    assert plain.fp8 == saved.fp8
    assert (plain.fp8.format, clean.fp8.format) == ("e4m3", "hybrid")


def test_a_channel_that_grows_leaves_the_function_nearly_as_it_was() -> None:
    torch.manual_seed(0)
    model = rescue.build(dim=DIM, layers=rescue.LAYERS, heads=2, ffn=FFN)
    growth = MECHANISMS["growth"]
    tokens = torch.randint(256, (4, 33))
    with torch.no_grad():
        growth.start(model, 0.02)
        for block in range(rescue.LAYERS):
            model.get_parameter(f"blocks.{block}.mlp.down.weight")[:, 0].normal_(std=0.01)
        before = model(tokens[:, :-1])
        rows = model.get_parameter("blocks.0.mlp.gate_up.weight")[[0, FFN]].norm()
        for _ in range(50):
            growth.each(model, 0.02, {name: each.clone() for name, each in model.named_parameters()})
        after = model(tokens[:, :-1])
        grown = model.get_parameter("blocks.0.mlp.gate_up.weight")[[0, FFN]].norm()
    assert float(grown) == pytest.approx(float(rows) * 1.02**50, rel=1e-4)
    assert (after - before).norm() < 0.1 * before.norm()
