"""Snapshots in memory: copies, reused buffers, and the same rule of what is good as on disk."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from harness.checkpoint.snapshots import Snapshots, room_for_snapshots
from harness.core.protocols import Tensors
from tests.support.copy_streams import Events
from tests.support.recoveries import pin_nothing


def state(value: float) -> Tensors:
    return {
        "model": {"weight": torch.full((8,), value), "bias": torch.full((2,), value)},
        "rng": {},
    }


def earned(snapshots: Snapshots, step: int, healthy: int = 3) -> None:
    for judged in range(step, step + healthy):
        snapshots.observe(judged, True)


def test_a_snapshot_is_a_copy_of_tensors_and_meta() -> None:
    snapshots = Snapshots(healthy_steps=3)
    live, meta = state(1.0), {"parts": {"monitors": {"norms": [1.0]}}}
    snapshots.take(5, live, meta)
    live["model"]["weight"].fill_(9.0)
    meta["parts"]["monitors"]["norms"].append(2.0)
    earned(snapshots, 5)
    tensors, kept = snapshots.load()
    assert tensors["model"]["weight"].tolist() == [1.0] * 8
    assert kept == {"parts": {"monitors": {"norms": [1.0]}}}
    assert tensors.keys() == live.keys()


def test_memory_that_cannot_be_pinned_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes its time to refuse gigabytes, and the run is built meanwhile."""
    pin_nothing(monkeypatch)
    refusing = torch.empty

    def slowly(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            time.sleep(0.2)
        return refusing(*size, **options)

    monkeypatch.setattr(torch, "empty", slowly)
    events: Any = Events()
    snapshots = room_for_snapshots(64, 1, torch.device("cuda"), events, overlapped=False)
    assert snapshots is not None
    for step in (5, 10, 15):
        snapshots.take(step, state(float(step)), {})
        snapshots.observe(step, True)
    assert snapshots.load()[0]["model"]["weight"].tolist() == [15.0] * 8, "ordinary memory serves"
    ((step, code, text),) = events.seen
    assert (step, code) == (5, "snapshot.pageable")
    assert "RuntimeError: CUDA error: out of memory" in text


def test_ordinary_memory_that_was_asked_for_is_no_event() -> None:
    events: Any = Events()
    assert room_for_snapshots(64, 1, torch.device("cpu"), events, overlapped=False) is not None
    assert events.seen == []


@pytest.mark.parametrize(("ranks", "taken"), [(1, True), (4, True), (8, False)])
def test_all_ranks_of_a_machine_count(
    monkeypatch: pytest.MonkeyPatch, ranks: int, taken: bool
) -> None:
    """Each of them alone would fit: together they would take all of the memory, and the kernel would end the run."""
    monkeypatch.setattr("harness.checkpoint.snapshots.free_memory", lambda: 2048)
    monkeypatch.setattr("harness.checkpoint.snapshots.ranks_here", lambda: ranks)
    events: Any = Events()
    found = room_for_snapshots(64, 1, torch.device("cpu"), events, overlapped=False)
    assert (found is not None) is taken
    if taken:
        assert events.seen == []
    else:
        ((_, code, text),) = events.seen
        assert code == "snapshot.off"
        assert "of each of 8 ranks here" in text


def test_good_is_earned_by_healthy_steps_in_a_row() -> None:
    snapshots = Snapshots(healthy_steps=3)
    snapshots.take(5, state(1.0), {})
    for step, healthy, good in [
        (5, True, None),
        (6, True, None),
        (7, False, None),
        (8, True, None),
        (9, True, None),
    ]:
        snapshots.observe(step, healthy)
        assert snapshots.good == good, step
    snapshots.observe(10, True)
    assert snapshots.good == 5


def test_steps_before_it_do_not_count() -> None:
    snapshots = Snapshots(healthy_steps=1)
    snapshots.take(5, state(1.0), {})
    snapshots.observe(4, True)
    assert snapshots.good is None


def test_one_that_earns_its_mark_is_not_replaced_but_one_that_lost_it_is() -> None:
    snapshots = Snapshots(healthy_steps=3)
    snapshots.take(5, state(1.0), {})
    snapshots.observe(5, True)
    snapshots.take(6, state(2.0), {})
    earned(snapshots, 6, 2)
    assert snapshots.good == 5
    snapshots.take(8, state(3.0), {})
    snapshots.observe(8, False)
    snapshots.take(9, state(4.0), {})
    earned(snapshots, 9)
    assert snapshots.good == 9
    assert snapshots.load()[0]["model"]["weight"][0] == 4.0


def test_the_good_one_stands_while_the_next_is_on_its_way() -> None:
    snapshots = Snapshots(healthy_steps=2)
    for step in (5, 10, 15):
        snapshots.take(step, state(float(step)), {})
        if step < 15:
            earned(snapshots, step, 2)
    assert snapshots.good == 10
    assert snapshots.load()[0]["model"]["bias"].tolist() == [10.0, 10.0]


def test_it_serves_one_rollback() -> None:
    snapshots = Snapshots(healthy_steps=1)
    snapshots.take(5, state(1.0), {})
    snapshots.observe(5, True)
    snapshots.take(6, state(2.0), {})
    snapshots.load()
    assert snapshots.good is None
    snapshots.observe(6, True)
    assert snapshots.good is None, "the one on its way was of the branch that was left"


def test_buffers_are_reused_and_never_shared() -> None:
    snapshots = Snapshots(healthy_steps=1, size=1000)
    seen: list[Any] = []
    for step in range(6):
        snapshots.take(step + 1, state(float(step)), {})
        snapshots.observe(step + 1, True)
        seen.append(snapshots._good.tensors["model"]["weight"].data_ptr())
    assert len(set(seen)) == 2
    assert seen[0] == seen[2] == seen[4] != seen[1]


@pytest.mark.parametrize("changed", [torch.zeros(4), torch.zeros(8, dtype=torch.float64)])
def test_a_tensor_of_another_shape_or_dtype_is_kept_too(changed: torch.Tensor) -> None:
    snapshots = Snapshots(healthy_steps=1)
    for step in (1, 2, 3):
        tensors = state(1.0) if step < 3 else {"model": {"weight": changed, "bias": torch.ones(2)}}
        snapshots.take(step, tensors, {})
        snapshots.observe(step, True)
    kept = snapshots.load()[0]["model"]["weight"]
    assert kept.shape == changed.shape
    assert kept.dtype == changed.dtype
