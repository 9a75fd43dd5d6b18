"""Buffers that forward writes (BatchNorm's) under two ranks: a skipped step leaves them alone, and a resume is exact on
every rank, not on rank 0 alone.

Run as a script, this file is one rank of the engine that its folder is named for.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.checkpoint.store import Store
from harness.core.protocols import Engine
from harness.core.state import TrainState
from harness.engines.process_group import join, read_launch
from tests.support.ranks import CPU, make_engine, run_ranks, train

pytestmark = pytest.mark.dist


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.layers(inputs) - targets).square().mean()


def make(name: str) -> Engine:
    torch.manual_seed(0)
    return make_engine(Net(), None if name == "ddp" else int(name.removeprefix("zero")))


def state(engine: Engine) -> dict[str, Any]:
    return {
        name: tensor.tolist() for name, tensor in engine.parts()["model"].state_dict()[0].items()
    }


def validated(engine: Engine) -> float:
    """The loss of a validation batch, which every rank evaluates alike."""
    engine.module.eval()
    with torch.no_grad():
        found = engine.module(torch.ones(2, 6), torch.ones(2, 3)).item()
    engine.module.train()
    return found


def rank_main(folder: Path) -> None:
    join(read_launch(), CPU, timeout_seconds=60)
    engine = make(folder.name)
    for step in range(2):
        train(engine, step)
    saved = TrainState(
        engine.parts()
    ).state_dict()  # of all ranks, where DeepSpeed holds a part on each
    if engine.rank == 0:
        Store(folder).save(2, *saved)
    engine.barrier()
    own = state(engine)
    skipped = train(engine, 2, spoilt=math.nan)["skipped"]
    result: dict[str, Any] = {"own": own, "skipped": skipped, "after a skip": state(engine)}
    for step in range(2, 4):
        train(engine, step)
    result["undisturbed"], result["validated"] = state(engine), validated(engine)
    TrainState(engine.parts()).load_state_dict(*Store(folder, readonly=True).load(2))
    for step in range(2, 4):
        train(engine, step)
    result["resumed"] = state(engine)
    (folder / f"{engine.rank}.json").write_text(json.dumps(result))
    engine.close()


@pytest.fixture(
    scope="module",
    params=[
        "ddp",
        pytest.param("zero0", marks=pytest.mark.slow),
        pytest.param("zero1", marks=pytest.mark.nightly),
        pytest.param("zero2", marks=pytest.mark.slow),
    ],
)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("buffers") / request.param
    folder.mkdir()
    return run_ranks(__file__, folder, 2)


def test_a_resume_from_rank_0s_statistics_is_exact_on_every_rank(
    ranks: list[dict[str, Any]],
) -> None:
    first, second = ranks
    assert first["own"]["layers.1.running_mean"] != second["own"]["layers.1.running_mean"], (
        "each saw its own samples"
    )
    assert first["undisturbed"] == first["resumed"]
    assert second["undisturbed"] == second["resumed"]


def test_a_batch_that_is_not_finite_on_one_rank_stays_in_no_statistics(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert rank["skipped"] == 1.0
        assert rank["after a skip"] == rank["own"]


def test_every_rank_evaluates_with_rank_0s_statistics(ranks: list[dict[str, Any]]) -> None:
    assert math.isfinite(ranks[0]["validated"])
    assert ranks[0]["validated"] == ranks[1]["validated"]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
