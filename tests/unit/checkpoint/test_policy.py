"""Checkpoints become rollback targets by healthy steps in a row; retention never leaves fewer than two that verify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.checkpoint.policy import Retention, RollbackTargets, best
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError


def saved(root: Path, *steps: int) -> Store:
    store = Store(root)
    for step in steps:
        store.save(step, {"model": {"weight": torch.full((4,), float(step))}}, {"step": step})
    return store


def damage(store: Store, step: int) -> None:
    (store.path(step) / "state.json").write_bytes(b"{}")


def healthy(targets: RollbackTargets, *steps: int) -> None:
    for step in steps:
        targets.observe(step, True)


def test_a_checkpoint_is_good_after_enough_healthy_steps(tmp_path: Path) -> None:
    targets = RollbackTargets(saved(tmp_path, 10), 3)
    targets.saved(10)
    healthy(targets, 9, 10, 11)
    assert targets.newest_good() is None
    healthy(targets, 12)
    assert targets.newest_good() == 10


def test_an_unhealthy_step_starts_the_count_again(tmp_path: Path) -> None:
    targets = RollbackTargets(saved(tmp_path, 10), 3)
    targets.saved(10)
    healthy(targets, 10, 11)
    targets.observe(12, False)
    healthy(targets, 13, 14)
    assert targets.newest_good() is None
    healthy(targets, 15)
    assert targets.newest_good() == 10


def test_each_checkpoint_earns_its_own(tmp_path: Path) -> None:
    targets = RollbackTargets(saved(tmp_path, 10, 12), 3)
    targets.saved(10)
    healthy(targets, 10, 11)
    targets.saved(12)
    healthy(targets, 12)
    assert targets.newest_good() == 10
    healthy(targets, 13, 14)
    assert targets.newest_good() == 12


def test_goodness_survives_a_restart_and_waiting_is_taken_up_again(tmp_path: Path) -> None:
    targets = RollbackTargets(saved(tmp_path, 10, 20), 2)
    targets.saved(10)
    healthy(targets, 10, 11)
    targets.saved(20)
    healthy(targets, 20)
    again = RollbackTargets(Store(tmp_path), 2)
    assert again.newest_good() == 10
    again.resumed(20, {})
    healthy(again, 20, 21)
    assert RollbackTargets(Store(tmp_path), 2).newest_good() == 20


def test_without_healthy_steps_asked_for_a_save_is_good_at_once(tmp_path: Path) -> None:
    targets = RollbackTargets(saved(tmp_path, 10), 0)
    targets.saved(10)
    assert targets.newest_good() == 10


def test_a_good_checkpoint_that_is_damaged_or_gone_is_passed_over(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20, 30)
    targets = RollbackTargets(store, 0)
    for step in (10, 20, 30):
        targets.saved(step)
    damage(store, 30)
    assert targets.newest_good() == 20
    store.remove(20)
    assert targets.newest_good() == 10


def test_a_rollback_takes_the_marks_of_what_it_sets_aside(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20)
    targets = RollbackTargets(store, 2)
    for step in (10, 20):
        targets.saved(step)
        healthy(targets, step, step + 1)
    assert targets.newest_good() == 20
    store.discard_after(10)
    saved(tmp_path, 20)
    targets.saved(20)
    assert targets.newest_good() == 10
    healthy(targets, 10, 11, 12, 13, 20)
    assert targets.newest_good() == 10
    healthy(targets, 21)
    assert targets.newest_good() == 20


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"good": 3}', b'{"good": ["x"]}'])
def test_an_unreadable_list_of_marks_is_empty(tmp_path: Path, content: bytes) -> None:
    targets = RollbackTargets(saved(tmp_path, 10), 0)
    (tmp_path / "good.json").write_bytes(content)
    assert targets.newest_good() is None
    targets.saved(10)
    assert targets.newest_good() == 10


def test_a_mark_that_cannot_be_written_is_an_error_and_is_tried_again(tmp_path: Path) -> None:
    targets = RollbackTargets(saved(tmp_path, 10), 1)
    targets.saved(10)
    (tmp_path / "good.json").mkdir()
    with pytest.raises(CheckpointError, match="marked good"):
        targets.observe(10, True)
    (tmp_path / "good.json").rmdir()
    targets.observe(11, True)
    assert targets.newest_good() == 10


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, 4, 5)
    assert Retention(store, 3).prune() == [1, 2]
    assert store.steps() == [3, 4, 5]
    assert Retention(store, 3).prune() == []


def test_retention_keeps_the_newest_good_one_however_old(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, 4, 5)
    targets = RollbackTargets(store, 0)
    targets.saved(1)
    targets.saved(2)
    assert Retention(store, 2).prune() == [1, 3]
    assert store.steps() == [2, 4, 5]
    targets.saved(5)
    assert Retention(store, 2).prune() == [2]


def test_nothing_is_deleted_while_the_newest_is_damaged(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, 4)
    damage(store, 4)
    assert Retention(store, 2).prune() == []
    assert store.steps() == [1, 2, 3, 4]


def test_two_that_verify_remain_though_more_must_be_kept(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, 4, 5)
    damage(store, 4)
    damage(store, 3)
    assert Retention(store, 2).prune() == [1]
    assert store.steps() == [2, 3, 4, 5]
    assert [step for step in store.steps() if not store.verify(step)] == [2, 5]


def test_at_least_two_are_kept_whatever_is_asked(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3)
    assert Retention(store, 1).prune() == [1]


def test_the_best_by_a_metric_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: 1.0, 6: 4.0, 7: 5.0}
    for step, loss in losses.items():
        store.save(step, {"model": {"weight": torch.zeros(4)}}, {}, {"val_loss": loss})
    store.save(8, {"model": {"weight": torch.zeros(4)}}, {})
    assert best(store, "val_loss") == 5, "the newest of equals; NaN is no number to compare"
    assert best(store, "train_loss") is None
    assert Retention(store, 2, "val_loss").prune() == [1, 2, 3, 4, 6]
    assert store.steps() == [5, 7, 8]
    assert Retention(store, 2).prune() == [5]


def test_what_verified_is_not_read_again_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(tmp_path, 1, 2, 3)
    read: list[int] = []
    whole = Store.verify
    monkeypatch.setattr(
        Store, "verify", lambda self, step: (read.append(step), whole(self, step))[1]
    )
    retention = Retention(store, 2)
    assert retention.prune() == [1]
    assert sorted(read) == [2, 3]
    store.save(4, {"model": {"weight": torch.ones(4)}}, {})
    read.clear()
    assert retention.prune() == [2]
    assert read == [4]
    damage(store, 3)
    store.save(5, {"model": {"weight": torch.ones(4)}}, {})
    read.clear()
    retention.prune()
    assert store.steps() == [3, 4, 5][-2:], "step 3 may go: 4 and 5 verify"


def test_counts_go_on_where_they_were_at_the_save(tmp_path: Path) -> None:
    targets = RollbackTargets(saved(tmp_path, 10, 12), 3)
    targets.saved(10)
    healthy(targets, 10, 11)
    waiting = json.loads(json.dumps(targets.waiting()))
    targets.saved(12)
    healthy(targets, 12)
    again = RollbackTargets(Store(tmp_path), 3)
    assert again.resumed(12, {"8": 1, **waiting}) == []
    assert again.waiting() == {"12": 0}, "10 has its mark already, 8 is not there"
    (tmp_path / "good.json").unlink()
    again = RollbackTargets(Store(tmp_path), 3)
    again.resumed(12, waiting)
    healthy(again, 12)
    assert again.newest_good() == 10, "as in the run that was not stopped"


@pytest.mark.parametrize("every", [1, 2, 4])
def test_saves_that_come_faster_than_healthy_steps_still_become_good(
    tmp_path: Path, every: int
) -> None:
    store = Store(tmp_path)
    targets = RollbackTargets(store, 10)
    retention = Retention(store, 2, next_good=True)
    for step in range(1, 61):
        targets.observe(step, True)
        if step % every == 0:
            store.save(step, {"model": {"weight": torch.zeros(4)}}, {})
            targets.saved(step)
            retention.prune()
        assert len(store.steps()) <= 4, "two newest, the newest good one and the next"
        newest = targets.newest_good()
        assert (newest or 0) >= step - 20 - every
        assert newest is not None or step < 10 + every
