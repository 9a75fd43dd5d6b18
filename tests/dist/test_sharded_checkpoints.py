"""Two processes share the state: they save and go on together, and notice a folder that they do not share.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from harness.checkpoint.policy import RollbackTargets
from harness.checkpoint.recovery import Recovery
from harness.checkpoint.saver import Saver
from harness.checkpoint.shared_folder import check_shared_folder
from harness.checkpoint.staging import Staging
from harness.checkpoint.store import Store
from harness.core.config import TrainConfig
from harness.core.errors import CheckpointError
from harness.core.protocols import Meta, TensorDict
from harness.core.shards import Rows
from harness.core.state import TrainState
from harness.engines.process_group import join, read_launch
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from harness.tracking.journal import Journal
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
SHAPE = (5, 2)

pytestmark = [pytest.mark.dist, pytest.mark.faults(25)]


class Sharing(TorchEngine):
    """Has the ranks and collectives of the real one."""

    sharded: ClassVar = True


class Part:
    """A rank's rows of one tensor."""

    def __init__(self, rank: int) -> None:
        self.place = Rows.of_rank(SHAPE, rank, 2)
        self.held = torch.arange(10.0).view(SHAPE)[self.place.begin : self.place.end].clone()

    def rows(self) -> Mapping[str, Rows]:
        return {"weight": self.place}

    def state_dict(self) -> tuple[TensorDict, Meta]:
        return {"weight": self.held}, {}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.held = tensors["weight"]


def rank_main(folder: Path) -> None:
    join(read_launch(), CPU, timeout_seconds=60)
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, TrainConfig.model_validate({}), CPU)
    schedule = Schedule(0.02, 2, 20, 0.1)
    engine = Sharing(model, optimizer, schedule, 0.3, device=CPU, timeout_seconds=60)
    rank, part = engine.rank, Part(engine.rank)
    store = Store(folder / "checkpoints", readonly=rank > 0)
    saver = Saver(store, lambda good: [], Staging())
    recovery = Recovery(
        state=TrainState({"model": part}, step=7),
        engine=engine,
        tracker=Journal(Path(os.devnull)),
        store=store,
        good=RollbackTargets(store, 1, saver.committed),
        saver=saver,
        keep_ledger=lambda ledger: None,
        wait_seconds=20.0,
    )
    expected = part.held.clone()
    recovery.keep({})
    part.held.fill_(-1.0)  # while the save is under way
    recovery.load(recovery.newest_good() or 7)

    refused = ""
    own = folder / f"disk-{rank}"
    own.mkdir()
    try:
        check_shared_folder(folder, rank, engine.broadcast, 20.0)
        check_shared_folder(own, rank, engine.broadcast, 0.5)
    except CheckpointError as error:
        refused = str(error)
    told = {"same": torch.equal(part.held, expected), "refused": refused}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    engine.close()


@pytest.mark.slow
def test_two_processes_save_and_load_their_rows(tmp_path: Path) -> None:
    told = run_ranks(__file__, tmp_path, 2)
    assert [each["same"] for each in told] == [True, True]
    assert all("not the folder of rank 0 on these ranks: 1 (on " in each["refused"] for each in told)  # fmt: skip
    assert all("disk-" in each["refused"] for each in told)
    tensors, _ = Store(tmp_path / "checkpoints", readonly=True).load(7)
    assert tensors["model"]["weight"].tolist() == torch.arange(10.0).view(SHAPE).tolist()


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
