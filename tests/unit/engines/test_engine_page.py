"""docs/reference/engines.md is made from the declarations, and a refused cell is refused when a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.build import ENGINES, refusals
from harness.optim.optimizers import OPTIMIZERS
from harness.precision.backends.registry import BACKENDS
from harness.precision.recipe import Rung
from harness.tools.engine_page import (
    DEVICES,
    Variant,
    cell,
    limits,
    nearest,
    page,
    recipe_of,
    rung_of,
    rungs,
    variants,
    works,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "engines.md"
BF16 = rung_of("autocast", "bf16")


def cells(working: bool) -> list[tuple[Variant, Rung, str]]:
    found: list[tuple[Variant, Rung, str]] = []
    for device in DEVICES:
        for rung in rungs(device):
            fitting = [each for each in variants() if works(each, rung, device) is working]
            found += [(variant, rung, device) for variant in fitting]
    return found


def test_the_page_is_made_from_the_declarations() -> None:
    made = "python -m harness.tools.engine_page > docs/reference/engines.md"
    assert PAGE.read_text() == page(), made


def test_every_engine_rung_and_optimizer_is_on_the_page() -> None:
    text = PAGE.read_text()
    for variant in variants():
        assert f"`{variant.name}`" in text
    for backend, declared in BACKENDS.items():
        for precision in declared.computes:
            assert f"| `{backend}:{precision}` |" in text
    assert {variant.engine for variant in variants()} == set(ENGINES)
    assert all(f"| `{name}` |" in text for name in OPTIMIZERS)


@pytest.mark.parametrize(
    ("variant", "rung", "device"),
    [
        pytest.param(*each, id=f"{each[1].name}, {each[0].name}, {each[2]}")
        for each in cells(working=False)
    ],
)
def test_a_refused_cell_is_refused_with_what_works_in_the_message(
    variant: Variant, rung: Rung, device: str
) -> None:
    problems = refusals(variant.engine, variant.config(), recipe_of(rung), rung, device)
    other = nearest(variant, rung, device)
    assert works(other, rung, device)
    assert cell(variant, rung, device).startswith("refused: take ")
    # The last message decides: who follows an earlier one meets it next.
    fix = problems[-1].fix
    if other.engine == "ddp":
        assert "torchrun" in fix
    else:
        assert "engine.zero_stage" in fix
        assert str(other.settings["zero_stage"]) in fix


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "torch.optim:RMSprop"])
def test_optimizers_are_refused_by_the_engines_that_say_so(engine: str, optimizer: str) -> None:
    variant = next(each for each in variants() if each.engine == engine)
    fused = optimizer in ("adamw", "sgd")
    assert works(variant, BF16, "cpu", optimizer) is (ENGINES[engine].any_optimizer or fused)
    if not works(variant, BF16, "cpu", optimizer):
        config = variant.config(optimizer)
        (problem,) = refusals(engine, config, recipe_of(BF16), BF16, "cpu")
        assert repr(optimizer) in problem.where
        assert "engine ddp" in problem.fix
        assert nearest(variant, BF16, "cpu", optimizer) == Variant("ddp")


def test_limits_are_those_that_the_classes_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another declaration makes another page: nothing is written twice."""
    ddp = Variant("ddp")
    assert limits(ddp, BF16) == []
    monkeypatch.setattr(ENGINES["ddp"], "snapshots", False)
    (limit,) = limits(ddp, BF16)
    assert "snapshots" in limit
    assert PAGE.read_text() != page()


def test_an_engine_that_refuses_more_makes_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ENGINES["deepspeed"].refusals
    monkeypatch.setattr(ENGINES["fsdp"], "refusals", refused)
    sharded = Variant("fsdp", {"gradient_sync": "window"})
    assert cell(sharded, rung_of("autocast", "fp16"), "cpu") == "refused: take `ddp`"
