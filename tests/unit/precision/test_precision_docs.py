"""The table of recipe keys is the schema's, the recipe of recipes.md validates, and the loops of api.md train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from api_support import adamw, batch

from harness.core.schema import validate
from harness.precision.recipe import Recipe
from harness.precision.recipe import page as recipe_keys

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "guide"


def test_the_page_of_recipe_keys_is_the_schema() -> None:
    page = ROOT / "docs" / "reference" / "recipe-keys.md"
    assert page.read_text() == recipe_keys(), (
        "python -m harness.precision.recipe > docs/reference/recipe-keys.md"
    )


def code(page: str, language: str) -> list[str]:
    """The blocks of code in `language` of a page of the guide."""
    return re.findall(
        rf"```{language}\n(.*?)```", (GUIDE / page).read_text(encoding="utf-8"), re.DOTALL
    )


def test_the_recipe_validates() -> None:
    assert validate(Recipe, yaml.safe_load(*code("recipes.md", "yaml")), "docs").fp8.margin == 1


@pytest.mark.usefixtures("cpu_on_purpose")
def test_the_loop_runs(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 16)
    )
    optimizer = adamw(model)
    path = tmp_path / "state.pt"
    before = model.get_parameter("1.weight").detach().clone()
    names: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "batches": [[batch(2 * step), batch(2 * step + 1)] for step in range(3)],
        "held_out": batch(99),
        "loss_function": torch.nn.functional.mse_loss,
        "path": path,
    }
    _, plain, _, _, _ = code("api.md", "python")
    exec(plain, names)
    assert names["precision"].plan.fp8_layers() == ("1",)
    assert names["outcome"].was_applied
    assert not torch.equal(model.get_parameter("1.weight"), before)
    assert torch.load(path, weights_only=True)["meta"]["state"]["step"] == 1


@pytest.mark.usefixtures("cpu_on_purpose")
def test_the_standard_loop_runs() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 16)
    )
    optimizer = adamw(model)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "batches": [batch(step) for step in range(3)],
        "held_out": batch(99),
        "loss_function": torch.nn.functional.mse_loss,
    }
    standard, _, _, _, _ = code("api.md", "python")
    exec(standard, names)
    assert names["precision"].prepared.state.step == 3
    assert names["optimizer"].outcome.was_applied
    assert not names["validation"].requires_grad


@pytest.mark.usefixtures("cpu_on_purpose")
def test_the_loop_of_two_networks_runs() -> None:
    generator, critic = (
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)) for _ in range(2)
    )
    names: dict[str, Any] = {
        "generator": generator,
        "critic": critic,
        "optimizer_g": adamw(generator),
        "optimizer_c": adamw(critic),
        "batches": [(torch.randn(16, 64), torch.randn(16, 64)) for _ in range(3)],
        "critic_loss": lambda real, fake: (fake - real).mean(),
        "generator_loss": lambda judged: -judged.mean(),
    }
    _, _, _, both, _ = code("api.md", "python")
    exec(both, names)
    assert [names[name].prepared.state.step for name in ("generate", "judge")] == [3, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_on_purpose")
def test_the_guarded_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 16)
    )
    optimizer = adamw(model)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "batches": [batch(step) for step in range(6)],
        "loss_function": torch.nn.functional.mse_loss,
    }
    _, _, _, _, guarded = code("api.md", "python")
    assert guarded.count(", report=False") == 1
    exec(guarded.replace(", report=False", ""), names)
    assert names["guard"].step == 6
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
