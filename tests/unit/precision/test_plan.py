"""The plan: which rung, which layer, and why."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import harness
from harness import Precision
from harness.capability.probe import Device, MachineFacts, probe
from harness.core.errors import ConfigError
from harness.models.gpt import build
from harness.precision.convert import check_half_weights
from harness.precision.plan import Plan, make_plan, pad_numbers, resolve
from harness.precision.recipe import Recipe, load_recipe


def plan_for(model: nn.Module, **layers: object) -> Plan:
    recipe = Recipe.model_validate({**load_recipe("fp8_hybrid").model_dump(), "layers": layers})
    facts = probe()
    rung, verdicts = resolve(recipe, facts)
    assert rung is not None
    return make_plan(recipe, facts, rung, verdicts, model)


def reasons(plan: Plan) -> dict[str, tuple[str, str]]:
    return {layer.module: (layer.precision, layer.reason) for layer in plan.layers}


def test_every_linear_is_converted_or_named_with_its_reason() -> None:
    class Odd(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "odd_size": nn.Linear(100, 128),
            "tiny": nn.Linear(32, 128),
            "subclass": Odd(128, 128),
            "named_out": nn.Linear(128, 128),
            "not_included": nn.Linear(128, 128),
            "lm_head": nn.Linear(128, 128),
            "embed": nn.Embedding(128, 128),
            "tied": nn.Linear(128, 128, bias=False),
            "last": nn.Linear(128, 256),
        }
    )
    model["tied"].weight = model["embed"].weight
    plan = plan_for(
        model,
        include=["[!n]*", "named_out"],
        exclude=["named*"],
        exclude_if_present=["lm_head"],
        min_features=64,
    )
    why = reasons(plan)
    assert "100 are not multiples of 16" in why["odd_size"][1]
    assert "too small" in why["tiny"][1]
    assert "Odd" in why["subclass"][1]
    assert "excluded by name (named*)" in why["named_out"][1]
    assert why["not_included"] == ("bf16", "not in layers.include")
    assert "excluded by name (lm_head)" in why["lm_head"][1]
    assert "shared with embed" in why["tied"][1]
    assert why["embed"][0] == "fp32"
    assert plan.fp8_layers() == ("last",), "layers after an odd one are still looked at"
    assert set(why) == set(model)


def test_patterns_that_match_nothing_are_errors_with_a_near_match() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(
            build(dim=64, layers=1, heads=2, ffn=176),
            include=["blocks.0.mlp.donw", "*"],
            exclude=["nothing.*"],
        )
    text = str(caught.value)
    assert 'pattern "blocks.0.mlp.donw" matches no Linear' in text
    assert 'did you mean "blocks.0.mlp.down"?' in text
    assert 'pattern "nothing.*" matches no Linear' in text


def test_a_model_without_an_fp8_layer_is_an_error_that_says_why() -> None:
    with pytest.raises(ConfigError, match="no layer of this model can run in FP8") as caught:
        plan_for(nn.Sequential(nn.Linear(10, 10)))
    assert "not multiples of 16" in str(caught.value)


def test_every_reason_is_given_once_with_the_layers_that_it_holds_for() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)), nn.Linear(32, 3))
    with pytest.raises(ConfigError) as caught:
        plan_for(model)
    text = str(caught.value)
    assert "0, 1, 2 and 2 more: too small to gain (min_features 64); 5: sizes 3x32" in text


def test_requested_and_resolved_by_card() -> None:
    cpu = probe()
    smi_free = replace(
        cpu, cuda_available=True, arch_list=("sm_70", "sm_75", "sm_80", "sm_90"), torch_cuda="13.0"
    )
    taken = {}
    for card, capability in (("V100", (7, 0)), ("T4", (7, 5)), ("A100", (8, 0)), ("H100", (9, 0))):
        facts = replace(smi_free, devices=(Device(card, capability, 2**34),))
        rung, verdicts = resolve(load_recipe("fp8_hybrid"), facts)
        assert rung is not None
        assert sum(verdict.taken for verdict in verdicts) == 1
        assert all(verdict.reason for verdict in verdicts)
        taken[card] = rung.name
    assert taken == {
        "V100": "autocast:fp16",
        "T4": "autocast:fp16",
        "A100": "autocast:bf16",
        "H100": "native:fp8",
    }


def test_the_plan_of_the_quickstart_model() -> None:
    plan = plan_for(build())
    assert len(plan.fp8_layers()) == 16
    saved = plan.as_dict()
    assert (saved["requested"], saved["resolved"], saved["effective"]) == (
        "fp8_hybrid",
        "native:fp8",
        None,
    )
    shapes = {layer["module"]: tuple(layer["shape"]) for layer in saved["layers"]}
    assert shapes["blocks.3.mlp.down"] == (256, 688)


@pytest.mark.parametrize(
    ("recipe", "capability", "expected"),
    [
        ("fp8_hybrid", (9, 0), "float32 matmul precision: high (TF32)"),
        ("bf16", (8, 0), "float32 matmul precision: high (TF32)"),
        (
            "bf16",
            (7, 5),
            "float32 matmul precision: high (would allow TF32, which this tier has not)",
        ),
        (
            "bf16",
            None,
            "float32 matmul precision: high (would allow TF32, which this tier has not)",
        ),
        ("fp32", (9, 0), "float32 matmul precision: highest (no TF32)"),
    ],
)
def test_the_plan_says_whether_float32_products_are_tf32(
    recipe: str, capability: tuple[int, int] | None, expected: str
) -> None:
    devices = (Device("card", capability, 2**34),) if capability else ()
    facts = MachineFacts(cuda_available=bool(devices), devices=devices)
    policy = load_recipe(recipe)
    rung, verdicts = resolve(policy, facts)
    assert rung is not None
    assert (
        expected
        in make_plan(policy, facts, rung, verdicts, build(dim=64, layers=1, heads=2)).as_dict()[
            "notes"
        ]
    )


@pytest.mark.usefixtures("cpu_on_purpose")
def test_float32_matmul_is_set_from_the_recipe_and_in_one_place() -> None:
    for wanted in ("highest", "high"):
        recipe = Recipe.model_validate(
            {**load_recipe("bf16").model_dump(), "float32_matmul": wanted}
        )
        Precision(recipe).prepare(nn.Sequential(nn.Linear(16, 16)))
        assert torch.get_float32_matmul_precision() == wanted
    package = Path(harness.__file__).parent
    setters = re.compile(r"[. ]set_float32_matmul_precision\(|\.(allow_tf32|fp32_precision) *=[^=]")
    found = [path for path in package.rglob("*.py") if setters.search(path.read_text())]
    # `harness eval` computes in fp32 beside the run's precision, and `doctor --card` in TF32: both put it back.
    assert sorted(found) == [
        package / "measure" / "card_device.py",
        package / "precision" / "convert.py",
        package / "tools" / "restored.py",
    ]


def test_what_an_engine_with_half_precision_weights_cannot_do_is_named() -> None:
    fp16, bf16 = load_recipe("bf16").ladder[1], load_recipe("bf16").ladder[0]
    plain, preset = load_recipe("fp16_scaler"), load_recipe("fp16_underflow")
    kept = Recipe.model_validate({**preset.model_dump(), "layers": {"keep_fp32": ["loss"]}})
    assert check_half_weights(plain, fp16) == check_half_weights(kept, bf16) == []
    assert [problem.where for problem in check_half_weights(preset, fp16)] == [
        "recipe fp16_underflow: loss_scale"
    ]
    assert len(check_half_weights(kept, fp16)) == 2


def test_padding_makes_names_sort() -> None:
    names = [pad_numbers(f"blocks.{n}.mlp.w2") for n in (0, 2, 10)]
    assert names == ["blocks.00.mlp.w2", "blocks.02.mlp.w2", "blocks.10.mlp.w2"] == sorted(names)
    assert pad_numbers("7") == "07"


def test_autocast_rungs_convert_nothing() -> None:
    model = build(dim=64, layers=1, heads=2, ffn=176)
    recipe, facts = load_recipe("bf16"), probe()
    rung, verdicts = resolve(recipe, facts)
    assert rung is not None
    plan = make_plan(recipe, facts, rung, verdicts, model)
    assert plan.fp8_layers() == ()
    assert {layer.precision for layer in plan.layers if layer.kind == "Linear"} == {"bf16"}
    assert torch.is_tensor(model.lm_head.weight)
