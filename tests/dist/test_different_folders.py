"""Two ranks whose run folders are not the same folder: no rank trains on, and each says why.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.checkpoint.policy import RollbackTargets
from harness.checkpoint.recovery import Recovery
from harness.checkpoint.saver import Saver
from harness.checkpoint.store import Store
from harness.core.config import TrainConfig
from harness.core.errors import CheckpointError, ExitCode
from harness.core.state import TrainState
from harness.engines.process_group import join, read_launch
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from harness.tracking.journal import Journal
from tests.support.ranks import run_ranks
from tests.support.runs import train, train_ranks

CPU = torch.device("cpu")

pytestmark = [pytest.mark.dist, pytest.mark.faults(25)]


def recovery(store: Store, engine: TorchEngine) -> Recovery:
    return Recovery(
        state=TrainState(engine.parts()),
        engine=engine,
        tracker=Journal(Path(os.devnull)),
        store=store,
        good=RollbackTargets(store, 1),
        saver=Saver(store, lambda good: []),
        keep_ledger=lambda ledger: None,
    )


def rank_main(folder: Path) -> None:
    join(read_launch(), CPU, timeout_seconds=60)
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, TrainConfig.model_validate({}), CPU)
    engine = TorchEngine(
        model, optimizer, Schedule(0.02, 2, 20, 0.1), 0.3, device=CPU, timeout_seconds=60
    )
    store = Store(folder / f"disk-{engine.rank}")
    mine = recovery(store, engine)
    budgets = {"attempt": 1, "skips": 0, "switches": 0, "lowered": "", "recent_skips": []}
    for step, weight in ((1, 5.0), (2, float(engine.rank)), (3, 5.0)):
        tensors, meta = mine.state.state_dict()
        tensors["model"]["weight"] = torch.full((3, 3), weight)
        store.save(step, tensors, {**meta, "step": step, "budgets": budgets, "waiting": {}})
    if engine.rank == 1:
        (store.path(3) / "state.json").write_bytes(b"{}")
    told = {}
    for step in (1, 2, 3):
        try:
            mine.load(step)
            told[step] = ""
        except CheckpointError as error:
            told[step] = str(error)
    (folder / f"{engine.rank}.json").write_text(json.dumps(told))
    engine.close()


@pytest.mark.slow
def test_ranks_that_read_different_checkpoints_all_refuse(tmp_path: Path) -> None:
    told = run_ranks(__file__, tmp_path, 2)
    assert [each["1"] for each in told] == ["", ""], "the same checkpoint is loaded"
    assert all(
        "different checkpoints of step 2" in each["2"] and "share" in each["2"] for each in told
    )
    assert "another rank cannot read the checkpoint of step 3" in told[0]["3"]
    assert "state.json" in told[1]["3"], "the rank whose file is damaged names it"


@pytest.mark.slow
@pytest.mark.parametrize("begun", [0, 1])
def test_a_run_that_only_one_rank_has_is_refused_by_all(tmp_path: Path, begun: int) -> None:
    for rank in range(2):
        (tmp_path / f"disk-{rank}").mkdir()
    first = train(tmp_path / f"disk-{begun}", "--name", "r", "train.steps=1")
    assert first.returncode == ExitCode.DONE, first.stdout

    both = train_ranks(
        tmp_path, 2, "--name", "r", "train.steps=2", program=Path(__file__).with_name("own_disk.py")
    )
    assert both.returncode == ExitCode.USAGE, both.stdout
    assert f"folder runs/r: {'no run' if begun else 'a run'} on rank 0" in both.stdout
    assert both.stdout.count("copy the run's folder to every machine") == 2, "each rank says it"
    assert not (tmp_path / f"disk-{1 - begun}" / "runs" / "r" / "config.yaml").exists()


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
