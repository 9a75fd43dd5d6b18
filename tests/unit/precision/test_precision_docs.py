"""docs/guide/precision.md cannot rot: its table of recipe keys is the schema's, its recipe validates, its loop runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch
import yaml
from api_support import adamw, batch
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from harness.core.schema import validate
from harness.precision.recipe import Recipe

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "precision.md"
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null"}
LIMITS = {"ge": "at least", "gt": "over", "le": "at most", "lt": "under"}


def section(annotation: Any) -> type[BaseModel] | None:
    """The model behind a field that is a section, or a list of them."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def kind(field: FieldInfo) -> str:
    """A field's type and bounds in words."""
    annotation = field.annotation
    listed = get_origin(annotation) is list
    inner = get_args(annotation)[0] if listed else annotation
    # `Annotated[float, Field(gt=1)] | None`: the bounds hang on the inner type
    optional = NoneType in get_args(inner)
    inner = next(part for part in get_args(inner) if part is not NoneType) if optional else inner
    bounds = [
        *field.metadata,
        *(item for info in get_args(inner)[1:] for item in getattr(info, "metadata", ())),
    ]
    inner = get_args(inner)[0] if get_origin(inner) is Annotated else inner
    choices = ", ".join(f"`{value}`" for value in get_args(inner))
    text = choices if get_origin(inner) is Literal else NAMES[inner]
    limits = [
        f"{words} {getattr(item, key):g}"
        for item in bounds
        for key, words in LIMITS.items()
        if getattr(item, key, None) is not None
    ]
    return ", ".join(
        [f"list of {text}" if listed else text, *limits, *(["or null"] if optional else [])]
    )


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    return "empty" if value == "" else f"`{text}`"


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = section(field.annotation)
        if inner is None:
            yield f"| `{prefix}{name}` | {kind(field)} | {default(field)} | {field.description} |"
        else:
            suffix = "[]." if get_origin(field.annotation) is list else "."
            yield from rows(inner, f"{prefix}{name}{suffix}")


def test_the_table_of_keys_is_the_schema() -> None:
    expected = "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows(Recipe)])
    written = re.search(
        r"<!-- keys: .*? -->\n(.*?)\n?<!-- /keys -->", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert written is not None
    assert written.group(1) == expected, (
        f"put this table between the marks of {PAGE.name}:\n{expected}"
    )


def code(language: str) -> list[str]:
    """The page's blocks of code in `language`."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_recipe_validates() -> None:
    assert validate(Recipe, yaml.safe_load(*code("yaml")), "docs").fp8.margin == 1


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
    _, _, plain, _ = code("python")
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
    standard, _, _, _ = code("python")
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
    _, both, _, _ = code("python")
    exec(both, names)
    assert [names[name].prepared.state.step for name in ("generate", "judge")] == [3, 3]


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
    _, _, _, guarded = code("python")
    assert guarded.count("steps=1000") == guarded.count("< 1000") == 1
    exec(guarded.replace("steps=1000", "steps=6, mlflow=False").replace("< 1000", "< 6"), names)
    assert names["guard"].step == 6
    assert (tmp_path / "runs" / "mine" / "report.html").exists()
