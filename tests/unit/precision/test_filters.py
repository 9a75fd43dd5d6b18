"""Every Linear of any model is converted or named with its reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from harness.capability.probe import MachineFacts
from harness.core.errors import ConfigError
from harness.models.gpt import build
from harness.precision.layers import repeated_blocks
from harness.precision.plan import Plan, make_plan, resolve
from harness.precision.recipe import Recipe, load_recipe


def plan_for(model: nn.Module, recipe: str = "fp8_hybrid", **layers: object) -> Plan:
    policy = Recipe.model_validate(
        {**load_recipe(recipe).model_dump(), "layers": {"min_features": 16, **layers}}
    )
    rung, verdicts = resolve(policy, MachineFacts())
    assert rung is not None
    return make_plan(policy, MachineFacts(), rung, verdicts, model)


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def tied() -> nn.Module:
    return build(dim=64, layers=2, heads=2, tied=True)


def transformer() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 2, 64), num_layers=2, enable_nested_tensor=False
    )


def one_linear_twice() -> nn.Module:
    shared = nn.Linear(32, 32)
    return nn.ModuleDict(
        {"encoder": nn.Sequential(shared, nn.ReLU()), "decoder": nn.ModuleDict({"proj": shared})}
    )


def experts() -> nn.Module:
    def block() -> nn.Module:
        mixture = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        return nn.ModuleDict({"router": nn.Linear(32, 8), "experts": mixture})

    return nn.ModuleDict(
        {"embed": nn.Embedding(64, 32), "layers": nn.ModuleList(block() for _ in range(3))}
    )


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32))


def replaced_forward() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    plain = model[0].forward
    setattr(model[0], "forward", lambda x: 2 * plain(x))  # noqa: B010
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, str]]] = {
    "gpt": (lambda: build(dim=64, layers=2, heads=2), 8, {"lm_head": "excluded by name (lm_head)"}),
    "convnet": (convnet, 1, {"5": "sizes 10x64 are not multiples of 16"}),
    "tied": (tied, 8, {"lm_head": "weight shared with embed, which is no Linear"}),
    "transformer": (
        transformer,
        4,
        {
            f"layers.{n}.self_attn.out_proj": "nn.MultiheadAttention reads its weight and does not call it"
            for n in (0, 1)
        },
    ),
    "one_linear_twice": (one_linear_twice, 1, {}),
    "experts": (
        experts,
        24,
        {f"layers.{n}.router": "sizes 8x32 are not multiples of 16" for n in range(3)},
    ),
    "lazy": (lazy, 1, {"0": "has no size before its first forward"}),
    "replaced_forward": (
        replaced_forward,
        1,
        {"0": "its forward was replaced on the object"},
    ),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(16, 16)), nn.Linear(16, 16))),
        2,
        {},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_is_converted_or_named(name: str) -> None:
    make, converted, reasons = MODELS[name]
    model = make()
    plan = plan_for(model, exclude_if_present=[] if name == "tied" else ["lm_head"])
    rows = {row.module: row for row in plan.layers}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert len(plan.fp8_layers()) == converted
    assert {name: rows[name].reason for name in linears if rows[name].precision != "fp8"} == reasons
    assert all(row.reason for row in plan.layers)
    embeddings = [
        rows[name] for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    ]
    assert all(row.precision == "fp32" and "not a Linear" in row.reason for row in embeddings)


def test_a_linear_with_two_names_has_one_row_and_goes_by_either() -> None:
    (row,) = plan_for(one_linear_twice()).layers
    assert (row.module, row.reason) == ("encoder.0", "converted, also known as decoder.proj")
    with pytest.raises(ConfigError, match=r"encoder\.0: excluded by name \(decoder\.\*\)"):
        plan_for(one_linear_twice(), exclude=["decoder.*"])


def test_blocks_at_the_ends_stay_out() -> None:
    plan = plan_for(build(dim=64, layers=4, heads=2), skip_first_blocks=1, skip_last_blocks=2)
    reasons = {row.module: row.reason for row in plan.layers if row.shape}
    assert {name.rpartition(".")[0] for name in plan.fp8_layers()} == {
        "blocks.1.attn",
        "blocks.1.mlp",
    }
    assert reasons["blocks.0.mlp.down"] == "in the first 1 of 4 blocks (skip_first_blocks)"
    assert (
        reasons["blocks.2.attn.qkv"]
        == reasons["blocks.3.attn.qkv"]
        == ("in the last 2 of 4 blocks (skip_last_blocks)")
    )
    assert "excluded by name" in reasons["lm_head"], "it is in no block"
    eleven = plan_for(
        nn.ModuleDict({"h": nn.ModuleList(nn.Linear(16, 16) for _ in range(11))}),
        skip_first_blocks=2,
    )
    assert eleven.fp8_layers() == tuple(f"h.{n}" for n in range(2, 11)), "h.1 is not h.10"


def test_blocks_that_are_not_there_are_errors_with_a_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(convnet(), skip_last_blocks=1, include=["*", "nothing"])
    assert len(caught.value.problems) == 2
    assert "Sequential has no repeated blocks" in str(caught.value)
    assert "layers.exclude" in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"skips 3 blocks of a model that has 3 \(blocks\.0 to blocks\.2\)"
    ) as all_of:
        plan_for(build(dim=64, layers=3, heads=2), skip_first_blocks=1, skip_last_blocks=2)
    assert "skip 2 at most" in str(all_of.value)
    assert plan_for(convnet(), "bf16", skip_last_blocks=1).fp8_layers() == (), (
        "only FP8 rungs have blocks to skip"
    )


def test_which_blocks_are_meant() -> None:
    assert repeated_blocks(experts()) == ["layers.0", "layers.1", "layers.2"], (
        "layers, not their experts"
    )
    assert repeated_blocks(transformer()) == ["layers.0", "layers.1"]
    assert repeated_blocks(build(dim=64, layers=1, heads=2)) == []
    tower = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    )
    assert repeated_blocks(tower) == ["1.0", "1.1"]
    uneven = nn.ModuleDict(
        {
            "few": nn.ModuleList(nn.Linear(64, 64) for _ in range(2)),
            "many": nn.ModuleList([nn.Linear(4, 4)] * 1),
        }
    )
    assert repeated_blocks(uneven) == ["few.0", "few.1"]
    lists = nn.ModuleList(nn.ModuleList(nn.Linear(n, n) for _ in range(2)) for n in (4, 8))
    assert repeated_blocks(lists) == ["1.0", "1.1"]


def test_block_scaling_wants_larger_multiples() -> None:
    recipe = load_recipe("fp8_block")
    model = nn.Sequential(nn.Linear(128, 144), nn.Linear(256, 128))
    plan = make_plan(recipe, MachineFacts(), recipe.ladder[0], [], model)
    assert plan.fp8_layers() == ("1",)
    assert plan.layers[0].reason == "sizes 144x128 are not multiples of 128"
    assert make_plan(recipe, MachineFacts(), recipe.ladder[1], [], model).fp8_layers() == ("0", "1")
