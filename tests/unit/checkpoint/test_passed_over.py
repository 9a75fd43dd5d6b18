"""A checkpoint that is passed over because it does not verify is named, at rollbacks and where a last save lay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from harness.checkpoint.manifest import add_mark
from harness.checkpoint.policy import RollbackTargets
from harness.checkpoint.recovery import Recovery, bring_back
from harness.checkpoint.saver import Saver
from harness.checkpoint.store import Store
from harness.core.config import TrainConfig
from harness.core.errors import CheckpointError
from harness.core.state import TrainState
from harness.engines.torch_engine import TorchEngine
from harness.optim.optimizers import build_optimizer
from harness.optim.schedule import Schedule
from harness.tracking.journal import Journal
from tests.support.runs import events

CPU = torch.device("cpu")


def damage(store: Store, step: int) -> None:
    path = store.path(step) / "state.json"
    path.write_bytes(path.read_bytes() + b" ")


def test_a_rollback_names_the_good_checkpoints_that_it_passes_over(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, TrainConfig.model_validate({}), CPU)
    engine = TorchEngine(
        model, optimizer, Schedule(0.02, 2, 20, 0.1), 0.3, device=CPU, timeout_seconds=60
    )
    store = Store(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        store.save(step, {"model": {"weight": torch.ones(3)}}, {"step": step})
        add_mark(store.root, step)
    with Journal(tmp_path / "journal.jsonl") as journal:
        recovery = Recovery(
            state=TrainState(engine.parts()),
            engine=engine,
            tracker=journal,
            store=store,
            good=RollbackTargets(store, 1),
            saver=Saver(store, lambda good: []),
            keep_ledger=lambda ledger: None,
        )
        assert recovery.newest_good() == 3
        assert events(tmp_path, "checkpoint.quarantined") == [], "nothing was passed over"
        damage(store, 3)
        damage(store, 2)
        assert recovery.newest_good() == 1
    told = [event["text"] for event in events(tmp_path, "checkpoint.quarantined")]
    assert ["step 2," in told[0], "step 3," in told[1], len(told)] == [True, True, 2]
    assert all("state.json" in text for text in told), "it says which file"


def test_a_damaged_last_save_is_not_replaced_by_an_older_one_beside_it(tmp_path: Path) -> None:
    store, away = Store(tmp_path / "checkpoints"), Store(tmp_path / "spare")
    store.save(1, {"model": {"weight": torch.ones(3)}}, {"step": 1})
    for step in (2, 3):
        away.save(step, {"model": {"weight": torch.ones(3)}}, {"step": step})
    damage(away, 3)
    with pytest.raises(CheckpointError, match="cannot be taken back"):
        bring_back(store, away.root)
    assert store.steps() == [1]
    assert away.steps() == [2, 3], "nothing is deleted"
