"""The damage of the drill's exercise `rollback`: once, and in the step that the evidence names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.drill.nan_weight import Damage
from harness.optim.optimizers import MuonAdamW


def test_an_optimizer_of_several_is_damaged_in_its_own_step(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence.json"
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    whole = MuonAdamW([torch.optim.SGD([weight], lr=0.1) for weight in weights])
    # As when an optimizer is tried on a copy before the run.
    copy = nn.Parameter(torch.ones(3))
    tried = torch.optim.SGD([copy], lr=0.1)
    handle = register_optimizer_step_post_hook(Damage(3, evidence))
    try:
        copy.grad = torch.ones(3)
        for _ in range(2):
            tried.step()
        for step in range(1, 6):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            whole.step()
            finite = [bool(weight.isfinite().all()) for weight in weights]
            assert finite == [step < 3, True], f"after step {step}"
    finally:
        handle.remove()
    assert copy.isfinite().all()
    assert json.loads(evidence.read_text()) == {"step": 3, "shape": [3]}
