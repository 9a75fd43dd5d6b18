"""fp8.scaling: what a recipe may ask for, and what each machine makes of the shipped ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from harness.capability.probe import Device, LibraryFacts, MachineFacts, probe
from harness.core.errors import ConfigError
from harness.core.schema import validate
from harness.precision.plan import make_plan, resolve
from harness.precision.recipe import TIERS, Recipe, load_recipe

TE = {"backend": "transformer_engine", "precision": "fp8", "tiers": list(TIERS)}
NATIVE = {**TE, "backend": "native"}
TORCHAO = {**TE, "backend": "torchao"}
OK = LibraryFacts("2.20.2", True, "installed")


def recipe(ladder: list[dict[str, object]], **fp8: object) -> Recipe:
    return validate(Recipe, {"name": "mine", "ladder": ladder, "fp8": fp8}, "mine.yaml")


@pytest.mark.parametrize("scaling", ["current", "block"])
def test_a_ladder_that_would_compute_something_else_is_an_error(scaling: str) -> None:
    with pytest.raises(
        ConfigError, match=f"native rungs compute delayed scaling only, fp8.scaling is {scaling}"
    ):
        recipe([TE, NATIVE], scaling=scaling)
    with pytest.raises(ConfigError, match="needs a transformer_engine rung"):
        recipe([TORCHAO], scaling=scaling)
    assert recipe([TE, TORCHAO], scaling=scaling).fp8.scaling == scaling
    assert recipe([TE, NATIVE, TORCHAO]).fp8.scaling == "delayed"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("margin", 1),
        ("amax_history_len", 32),
        ("amax_compute_algo", "most_recent"),
        ("roll", "micro_batch"),
    ],
)
def test_a_key_without_effect_is_an_error_that_names_it(key: str, value: object) -> None:
    with pytest.raises(
        ConfigError, match=f"{key} would have no effect: scaling current has no amax history"
    ):
        recipe([TE], scaling="current", **{key: value})
    assert getattr(recipe([TE], **{key: value}).fp8, key) == value


def test_a_resolved_recipe_can_be_read_again() -> None:
    for name in ("fp8_current", "fp8_block"):
        once = load_recipe(name)
        assert validate(Recipe, once.model_dump(), "again").sha256() == once.sha256()


def machine(capability: tuple[int, int], cuda: str, te: LibraryFacts = OK) -> MachineFacts:
    return replace(
        probe(),
        cuda_available=True,
        torch_cuda=cuda,
        arch_list=("sm_70", "sm_75", "sm_80", "sm_89", "sm_90", "sm_100"),
        devices=(Device("card", capability, 2**34),),
        libraries={"transformer_engine": te, "torchao": LibraryFacts("0.17", True, "installed")},
    )


MISSING = LibraryFacts(None, False, "not installed")


@pytest.mark.parametrize(
    ("name", "facts", "expected", "told"),
    [
        ("fp8_current", machine((9, 0), "13.0"), "transformer_engine:fp8", "current scaling"),
        ("fp8_current", machine((8, 9), "12.6"), "transformer_engine:fp8", "current scaling"),
        ("fp8_current", machine((9, 0), "13.0", MISSING), "torchao:fp8", "dynamic scaling"),
        ("fp8_current", machine((8, 0), "13.0"), "autocast:bf16", "bf16"),
        ("fp8_current", machine((7, 5), "12.6"), "autocast:fp16", "fp16"),
        ("fp8_block", machine((9, 0), "12.9"), "transformer_engine:fp8", "block scaling"),
        ("fp8_block", machine((10, 0), "13.0"), "transformer_engine:fp8", "emulated with MXFP8"),
        ("fp8_block", machine((9, 0), "12.8"), "torchao:fp8", "dynamic scaling"),
        ("fp8_block", machine((8, 9), "13.0"), "autocast:bf16", "bf16"),
        ("fp8_hybrid", machine((9, 0), "13.0"), "transformer_engine:fp8", "delayed scaling"),
    ],
)
def test_what_each_machine_takes(name: str, facts: MachineFacts, expected: str, told: str) -> None:
    rung, verdicts = resolve(load_recipe(name), facts)
    assert rung is not None
    assert rung.name == expected
    (taken,) = [verdict for verdict in verdicts if verdict.taken]
    assert told in taken.reason


def test_a_rung_not_taken_for_its_scaling_says_so() -> None:
    _, verdicts = resolve(load_recipe("fp8_block"), machine((9, 0), "12.8"))
    assert "block scaling needs CUDA 12.9 or more, torch is built for 12.8" in verdicts[0].reason


def test_blocks_of_128_keep_odd_sizes_out_under_transformer_engine_only() -> None:
    model = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 176))
    policy = load_recipe("fp8_block")
    for cuda, converted in (("13.0", ("0",)), ("12.8", ("0", "1"))):
        facts = machine((9, 0), cuda)
        rung, verdicts = resolve(policy, facts)
        assert rung is not None
        plan = make_plan(policy, facts, rung, verdicts, model)
        assert plan.fp8_layers() == converted
    facts = machine((9, 0), "13.0")
    rung, verdicts = resolve(policy, facts)
    assert rung is not None
    reasons = {
        layer.module: layer.reason
        for layer in make_plan(policy, facts, rung, verdicts, model).layers
    }
    assert "176x128 are not multiples of 128" in reasons["1"]
