"""Buffers that forward writes (BatchNorm's) under two DDP ranks: a resume is exact on every rank, not on rank 0 alone.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.checkpoint.store import Store
from harness.core.config import TrainConfig
from harness.core.state import TrainState
from harness.engines.process_group import join, read_launch
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from tests.support.ranks import run_ranks, train

CPU = torch.device("cpu")

pytestmark = pytest.mark.dist


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.layers(inputs) - targets).square().mean()


def make() -> TorchEngine:
    torch.manual_seed(0)
    model = Net()
    optimizer = build_optimizer(model, TrainConfig.model_validate({}), CPU)
    return TorchEngine(model, optimizer, Schedule(0.02, 2, 20, 0.1), 0.3, device=CPU, timeout_seconds=60)


def state(engine: TorchEngine) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in engine.parts()["model"].state_dict()[0].items()}


def rank_main(folder: Path) -> None:
    join(read_launch(), CPU, timeout_seconds=60)
    engine = make()
    for step in range(2):
        train(engine, step)
    if engine.rank == 0:
        Store(folder).save(2, *TrainState(engine.parts()).state_dict())
    engine.barrier()
    own = state(engine)
    for step in range(2, 4):
        train(engine, step)
    undisturbed = state(engine)
    TrainState(engine.parts()).load_state_dict(*Store(folder, readonly=True).load(2))
    for step in range(2, 4):
        train(engine, step)
    result = {"own": own, "undisturbed": undisturbed, "resumed": state(engine)}
    (folder / f"{engine.rank}.json").write_text(json.dumps(result))
    engine.close()


def test_a_resume_from_rank_0s_statistics_is_exact_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(__file__, tmp_path, 2)
    assert first["own"]["layers.1.running_mean"] != second["own"]["layers.1.running_mean"], "each saw its own samples"
    assert first["undisturbed"] == first["resumed"]
    assert second["undisturbed"] == second["resumed"]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
