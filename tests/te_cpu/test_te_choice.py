"""`fp8.backend: auto` between TE's own Python and native: both are timed, and a run keeps its choice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from te_cpu_support import MLP, inputs
from te_cpu_support import recipe as of_backend
from torch import Tensor, nn

from harness import Precision
from harness.precision.backends import te_library
from harness.precision.recipe import Recipe
from harness.tools.restored import restore
from tests.support import runs
from tests.support.runs import ROOT, train

HERE = Path(__file__).resolve().parent
RECIPE = """
name: either
ladder:
  - {backend: transformer_engine, precision: fp8, tiers: [CPU]}
  - {backend: native, precision: fp8, tiers: [CPU]}
fp8: {backend: auto}
layers: {min_features: 16}
"""
BOTH = ["transformer_engine:fp8", "native:fp8"]


def recipe(backend: str) -> Recipe:
    base = of_backend("native").model_dump()
    rungs = [{"backend": each, "tiers": ["CPU"]} for each in ("transformer_engine", "native")]
    base["ladder"] = [{**rung, "precision": "fp8"} for rung in rungs]
    base["fp8"] |= {"backend": backend, "roll": "step"}
    return Recipe.model_validate(base)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def trained(backend: str) -> tuple[Precision, list[float]]:
    torch.manual_seed(0)
    model, precision = Model(), Precision(recipe(backend))
    precision.prepare(model, forward=lambda: model(inputs(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for number in range(4):
        with precision.context():
            loss = (model(inputs(number)).float() - 1).square().mean()
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return precision, losses


def test_both_are_timed_and_training_is_that_of_the_one_by_name() -> None:
    manager = te_library.load().manager.quantization_state
    held = {key: len(value) for key, value in manager.global_amax_buffer.items()}
    precision, losses = trained("auto")
    plan = precision.plan
    assert plan.backend_choice is not None
    assert list(plan.backend_choice["seconds"]) == BOTH
    assert losses == trained(plan.rung.backend)[1]
    left = {key: len(value) for key, value in manager.global_amax_buffer.items()}
    assert left == held, "TE keeps nothing of the block that was timed"


def test_a_run_keeps_its_choice_when_it_goes_on_and_when_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "TRAIN", HERE / "train_te.py")
    policy = tmp_path / "either.yaml"
    policy.write_text(RECIPE)

    def ran(steps: int) -> tuple[str, dict[str, Any]]:
        given = ["--recipe", str(policy), "--name", "either", f"train.steps={steps}"]
        done = train(tmp_path, *given, launcher=(sys.executable,), PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stdout
        return done.stdout, json.loads((tmp_path / "runs/either/plan.json").read_text())

    _, began = ran(2)
    choice = began["backend_choice"]
    assert choice["taken"] == began["resolved"]
    assert list(choice["seconds"]) == BOTH

    # Had it been timed again, this is what would change it.
    file = tmp_path / "runs/either/plan.json"
    other = next(name for name in BOTH if name != choice["taken"])
    file.write_text(json.dumps({**began, "backend_choice": {**choice, "taken": other}}))
    said, resumed = ran(4)
    assert f"fp8.backend auto takes {other} as when this run began" in said
    assert resumed["resolved"] == other
    monkeypatch.chdir(tmp_path)
    assert restore(tmp_path / "runs/either").plan.resolved == other
