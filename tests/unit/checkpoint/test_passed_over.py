"""A checkpoint that is passed over because it does not verify is named, at rollbacks and where a last save lay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.checkpoint.manifest import add_mark
from harness.checkpoint.recovery import move_from_fallback
from harness.checkpoint.saver import Saver
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError
from harness.tracking.journal import Journal
from tests.support.recoveries import small_recovery
from tests.support.runs import events


def damage(store: Store, step: int) -> None:
    path = store.path(step) / "state.json"
    path.write_bytes(path.read_bytes() + b" ")


def test_a_rollback_names_the_good_checkpoints_that_it_passes_over(tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        store.save(step, {"model": {"weight": torch.ones(3)}}, {"step": step})
        add_mark(store.root, step)
    with Journal(tmp_path / "journal.jsonl") as journal:
        recovery = small_recovery(store, Saver(store, lambda good: []), journal)
        assert recovery.newest_good() == 3
        assert events(tmp_path, "checkpoint.quarantined") == [], "nothing was passed over"
        damage(store, 3)
        damage(store, 2)
        assert recovery.newest_good() == 1
    told = [event["text"] for event in events(tmp_path, "checkpoint.quarantined")]
    assert ["step 2," in told[0], "step 3," in told[1], len(told)] == [True, True, 2]
    assert all("state.json" in text for text in told), "it says which file"


def test_a_damaged_last_save_is_not_replaced_by_an_older_one_beside_it(tmp_path: Path) -> None:
    store, away = Store(tmp_path / "checkpoints"), Store(tmp_path / "fallback")
    store.save(1, {"model": {"weight": torch.ones(3)}}, {"step": 1})
    for step in (2, 3):
        away.save(step, {"model": {"weight": torch.ones(3)}}, {"step": step})
    damage(away, 3)
    with pytest.raises(CheckpointError, match="cannot be moved back"):
        move_from_fallback(store, away.root)
    assert store.steps() == [1]
    assert away.steps() == [2, 3], "nothing is deleted"
