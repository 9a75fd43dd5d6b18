"""Recipes: what is shipped validates; what is wrong is named, all of it, with the near match."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.errors import ConfigError
from harness.core.files import shipped
from harness.precision.recipe import TIERS, Recipe, load_recipe

SHIPPED = [
    *["auto", "bf16", "fp16_overflow", "fp16_scaler", "fp16_underflow", "fp32"],
    *["fp8_block", "fp8_current", "fp8_dynamic", "fp8_hybrid", "fp8_native"],
]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_cover_every_tier(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert {tier for rung in recipe.ladder for tier in rung.tiers} == set(TIERS)


def test_no_recipe_is_forgotten() -> None:
    assert shipped("recipes") == SHIPPED


def test_every_problem_is_reported_at_once_with_its_near_match(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\n"
        "ladder:\n"
        "  - {backend: nativ, precision: fp8, tiers: [CPU]}\n"
        "  - {backend: autocast, precision: fp8, tiers: [CPU]}\n"
        "fp8: {margine: 1, amax_history_len: 1, interval: 2}\n"
        "fallback: {hits: 9}\n"
        "loss_scale: {floor: 4.0, init: 2.0}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    text = str(caught.value)
    for expected in (
        "ladder[0].backend: 'nativ' is not one of",
        'did you mean "native"?',
        "backend autocast computes bf16 or fp16 or fp32, not fp8",
        'unknown key "margine"',
        'did you mean "margin"?',
        'unknown key "interval"',
        "greater than or equal to 2",
        "hits (9) is more than window (8)",
        "floor <= init <= cap does not hold",
    ):
        assert expected in text
    assert len(caught.value.problems) == 7
    assert all(str(path) in problem.where for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: !!python/object/apply:os.system ['touch canary']\n", "not plain YAML"),
        ("a: &x [1]\nb: *x\n", "aliases"),
        ("name: a\nname: b\n", "duplicate key 'name'"),
        ("- 1\n", "not a mapping"),
        ("\xff", "cannot be read"),
    ],
)
def test_hostile_yaml_is_refused(
    tmp_path: Path, text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=expected):
        load_recipe(str(path))
    assert not (tmp_path / "canary").exists()


def test_the_hash_depends_on_the_policy_and_not_on_how_it_is_written(tmp_path: Path) -> None:
    plain = tmp_path / "a.yaml"
    plain.write_text("name: x\nladder: [{backend: autocast, precision: bf16, tiers: [CPU]}]\n")
    spelled = tmp_path / "b.yaml"
    spelled.write_text(
        "# same\nladder:\n- tiers: [CPU]\n  backend: autocast\n  precision: bf16\nname: 'x'\n"
    )
    other = Recipe.model_validate({**load_recipe(str(plain)).model_dump(), "fp8": {"margin": 1}})
    assert load_recipe(str(plain)).sha256() == load_recipe(str(spelled)).sha256() != other.sha256()
