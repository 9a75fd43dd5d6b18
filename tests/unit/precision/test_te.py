"""What the Transformer Engine backend says where TE is missing. All else needs a GPU: see tests/gpu/test_te_gpu.py."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from harness.capability.probe import probe
from harness.core.errors import ExitCode, MachineError
from harness.precision.engine import build_backend
from harness.precision.plan import make_plan
from harness.precision.recipe import Recipe, Rung


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_without_transformer_engine_the_error_says_what_to_do() -> None:
    rung = Rung(backend="transformer_engine", precision="fp8", tiers=["HOPPER"])
    recipe = Recipe(name="te", ladder=[rung])
    model = nn.Sequential(nn.Linear(64, 64))
    plan = make_plan(recipe, probe(), rung, [], model)
    with pytest.raises(MachineError) as caught:
        build_backend(plan, recipe, model, torch.device("cpu"))
    (problem,) = caught.value.problems
    assert "Transformer Engine does not import" in problem.what
    assert "transformer_engine" in problem.what
    assert problem.where == "backend transformer_engine"
    assert "make setup" in problem.fix
    assert "--recipe" in problem.fix
    assert caught.value.exit_code == ExitCode.MACHINE
    assert type(model[0]) is nn.Linear, "the model is left as it was"
