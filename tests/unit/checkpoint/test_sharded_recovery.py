"""Ranks that share the state save, read and roll back together; each rank is a thread with an engine made for that."""

from __future__ import annotations

import copy
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checkpoint import manifest, store
from harness.checkpoint.failures import CannotSaveError
from harness.checkpoint.manifest import add_mark
from harness.checkpoint.meeting import Meeting
from harness.checkpoint.policy import Retention, RollbackTargets
from harness.checkpoint.recovery import Recovery
from harness.checkpoint.saver import Saver
from harness.checkpoint.shared_folder import check_shared_folder
from harness.checkpoint.staging import Staging
from harness.checkpoint.store import Store
from harness.checkpoint.together import newest_valid_together
from harness.core.config import CheckpointConfig
from harness.core.errors import CheckpointError, ExitCode
from harness.core.protocols import Meta, TensorDict
from harness.core.shards import Rows
from harness.core.state import TrainState
from harness.tracking.journal import Journal
from tests.support.matrix import rest_slow
from tests.support.runs import events
from tests.support.sharded_saves import PATIENCE, in_threads

SHAPES = {"weight": (11, 3), "bias": (2,)}


class Group:
    """Collectives of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._values: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE)

    def all(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class Engine:
    """What `Recovery` asks of an engine."""

    def __init__(self, group: Group, rank: int, sharded: bool) -> None:
        self.rank, self.world_size, self.sharded = rank, group.ranks, sharded
        self.device = torch.device("cpu")
        self._group = group

    def max(self, values: Tensor) -> Tensor:
        return torch.stack(self._group.all(self.rank, values)).amax(dim=0)

    def broadcast(self, value: Any) -> Any:
        return self._group.all(self.rank, value)[0]


class Part:
    """A part of the state: all of it, or a rank's rows."""

    def __init__(self) -> None:
        self.held: TensorDict = {}

    def fill(self, step: int, rank: int, ranks: int) -> None:
        for number, (name, shape) in enumerate(SHAPES.items()):
            count = torch.Size(shape).numel()
            whole = (torch.arange(count).float() + 1000 * step + 100 * number).view(shape)
            rows = Rows.of_rank(shape, rank, ranks)
            self.held[name] = whole[rows.begin : rows.end].clone()
        self.held["count"] = torch.tensor(float(step))

    def state_dict(self) -> tuple[TensorDict, Meta]:
        return dict(self.held), {}

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.held = {name: tensor.clone() for name, tensor in tensors.items()}


class ShardedPart(Part):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._place = (rank, ranks)

    def rows(self) -> Mapping[str, Rows]:
        return {name: Rows.of_rank(shape, *self._place) for name, shape in SHAPES.items()}


class Rank:
    """One rank of a run in `folder`."""

    def __init__(
        self, folder: Path, group: Group, rank: int, sharded: bool = True, root: str = "checkpoints", **settings: Any
    ) -> None:  # fmt: skip
        ranks = group.ranks
        self.rank, self.place = rank, (rank, ranks) if sharded else (0, 1)
        self.part = ShardedPart(rank, ranks) if sharded else Part()
        self.state = TrainState({"model": self.part})
        self.store = Store(folder / root, readonly=rank > 0)
        retention = Retention(self.store, 2)
        self.staging = Staging()
        saver = Saver(self.store, retention.prune, self.staging)
        self.journal = Journal(folder / "journal.jsonl" if rank == 0 else Path(os.devnull))
        self.recovery = Recovery(
            state=self.state,
            engine=Engine(group, rank, sharded),  # type: ignore[arg-type]
            tracker=self.journal,
            store=self.store,
            good=RollbackTargets(self.store, 1, saver.committed),
            saver=saver,
            keep_ledger=lambda ledger: None,
            wait_seconds=PATIENCE / 3,
            config=CheckpointConfig.model_validate(settings.pop("checkpoint", {})),
            **settings,
        )

    def train(self, step: int) -> None:
        self.state.step = step
        self.part.fill(step, *self.place)

    def expected(self, step: int) -> TensorDict:
        other = Part()
        other.fill(step, *self.place)
        return other.held

    def holds(self, step: int) -> bool:
        expected = self.expected(step)
        same = expected.keys() == self.part.held.keys()
        return same and all(torch.equal(expected[name], self.part.held[name]) for name in expected)


def run(folder: Path, ranks: int, work: Callable[[Rank], Any], **settings: Any) -> list[Any]:
    """What `work` gave on each rank. Raises what it raised on any."""
    group = Group(ranks)
    results = in_threads(ranks, lambda rank: work(Rank(folder, group, rank, **settings)))
    for each in results:
        if isinstance(each, Exception):
            raise each
    return results


def refused(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def states(folder: Path, state: str) -> list[int]:
    rows = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if row["kind"] == "checkpoint" and row["state"] == state]


def test_ranks_save_in_the_background_and_each_goes_on_with_its_rows(tmp_path: Path) -> None:
    def trains(rank: Rank) -> None:
        for step in (1, 2, 3, 4):
            rank.train(step)
            assert rank.recovery.keep({}).safe
            rank.part.held["weight"] += 1  # the next step begins at once
            rank.recovery.observe(step, True)
        rank.train(5)
        assert rank.recovery.keep({}, "end").safe
        rank.journal.close()

    run(tmp_path, 3, trains)
    assert states(tmp_path, "saved") == [1, 2, 3, 4, 5]
    assert states(tmp_path, "good") == [1, 2, 3, 4]
    assert states(tmp_path, "deleted") == [1, 2, 3]
    assert Store(tmp_path / "checkpoints", readonly=True).steps() == [4, 5]

    def resumes(rank: Rank) -> bool:
        rank.recovery.load(rank.recovery.newest_good() or 0)
        return rank.holds(rank.state.step)

    # In a group of another size as well.
    for ranks in (3, 2, 5):
        assert run(tmp_path, ranks, resumes) == [True] * ranks


@pytest.mark.parametrize("written_together", [True, False])
def test_an_engine_that_is_not_sharded_reads_what_a_sharded_one_wrote_and_the_reverse(
    tmp_path: Path, written_together: bool
) -> None:
    def saves(rank: Rank) -> bool:
        rank.train(3)
        return rank.recovery.save_and_verify({})

    def reads(rank: Rank) -> bool:
        rank.recovery.load(3)
        return rank.holds(3)

    assert run(tmp_path, 2, saves, sharded=written_together) == [True, True]
    names = os.listdir(tmp_path / "checkpoints" / "step-00000003")
    assert ("model-00001-of-00002.safetensors" in names) == written_together
    for ranks in (1, 2, 3):
        assert run(tmp_path, ranks, reads, sharded=not written_together) == [True] * ranks
        assert run(tmp_path, ranks, reads, sharded=written_together) == [True] * ranks


def full(*ignored: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def breaks(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """From now on a disk is full: rank 1's, but for one reason; rank 1's, completely; or rank 0's."""
    write, leave = store._write_tensors, Meeting.leave_failure

    def written(folder: Path, contents: Any, mode: int) -> None:
        if how != "rank 0" and any("-00001-of" in name for name in contents):
            full()
        write(folder, contents, mode)

    def left(meeting: Meeting, *rest: Any) -> None:
        if how != "in silence":
            leave(meeting, *rest)

    monkeypatch.setattr(store, "_write_tensors", written)
    monkeypatch.setattr(Meeting, "leave_failure", left)
    if how == "rank 0":
        mkdir = Path.mkdir

        def made(path: Path, *rest: Any, **named: Any) -> None:
            if ".tmp-step" in path.name:
                full()
            mkdir(path, *rest, **named)

        monkeypatch.setattr(Path, "mkdir", made)


@pytest.mark.parametrize("how", rest_slow(["with a reason", "in silence", "rank 0"], "in silence"))
@pytest.mark.parametrize("blocking", [True, False])
def test_a_failure_on_any_rank_is_one_on_all_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, blocking: bool
) -> None:
    """Long before the patience of a rank that waits for another one is over."""
    first = threading.Barrier(3, timeout=PATIENCE)

    def work(rank: Rank) -> list[Any]:
        rank.train(1)
        results: list[Any] = [rank.recovery.save_and_verify({})]
        first.wait()
        if rank.rank == 0:
            breaks(monkeypatch, how)
        first.wait()
        began = time.monotonic()
        rank.train(2)
        if blocking:
            results.append(rank.recovery.save_and_verify({}))
        else:
            assert rank.recovery.keep({}).safe
            results.append(rank.recovery._failures_so_far() == 0)
        assert time.monotonic() - began < PATIENCE / 4
        first.wait()
        if rank.rank == 0:
            monkeypatch.undo()
        first.wait()
        results.append(rank.recovery.save_and_verify({}))
        rank.recovery.load(2)
        rank.journal.close()
        return [*results, rank.holds(2)]

    assert run(tmp_path, 3, work) == [[True, False, True, True]] * 3
    (failure,) = events(tmp_path, "checkpoint.failed")
    reason = {
        "with a reason": "rank 1 could not write its part: No space left on device",
        "in silence": "rank 1 could not write its part, nor say why",
        "rank 0": "No space left on device",
    }[how]
    assert reason in failure["text"]
    assert states(tmp_path, "saved") == [1, 2]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001", "step-00000002"]


DEFECT = ValueError("a defect")


@pytest.mark.parametrize(
    ("victim", "sharded"), rest_slow([(0, True), (1, True), (0, False)], (1, True))
)
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("error", rest_slow([DEFECT, KeyError("a defect"), MemoryError()], DEFECT))
def test_a_save_that_fails_by_no_disk_ends_the_run_on_every_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    blocking: bool,
    victim: int,
    sharded: bool,
) -> None:
    """It is not waited for, as a full disk would be. Without shards rank 0 alone writes."""
    first = threading.Barrier(2, timeout=PATIENCE)
    write = store._write_tensors

    def written(folder: Path, contents: Any, mode: int) -> None:
        if victim == 0 or any("-00001-of" in name for name in contents):
            raise error
        write(folder, contents, mode)

    def work(rank: Rank) -> str:
        rank.train(1)
        assert rank.recovery.save_and_verify({})
        first.wait()
        if rank.rank == 0:
            monkeypatch.setattr(store, "_write_tensors", written)
        first.wait()
        rank.train(2)
        try:
            if not blocking:
                assert rank.recovery.keep({}).safe
                rank.train(3)
            rank.recovery.keep({}, "end" if blocking else "")
        except CannotSaveError as defect:
            rank.journal.close()
            return f"{defect.exit_code:d} {defect}"
        return "went on"

    config = {"max_failures": 1 if blocking else 3, "retry_seconds": 0.01}
    told = run(tmp_path, 2, work, sharded=sharded, checkpoint=config)
    assert told[0] == told[1]
    assert told[0].startswith(f"{ExitCode.FAILED:d} ")
    assert "step-00000002" in told[0]
    assert ("no more memory" if isinstance(error, MemoryError) else "a defect") in told[0]
    assert "    fix: " in told[0]
    assert ("rank 1 could not write its part" in told[0]) == (victim == 1)
    assert events(tmp_path, "checkpoint.paused") == []
    assert len(events(tmp_path, "checkpoint.failed")) == 1
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"], "the last good one stays"


def test_a_rank_without_memory_for_a_copy_makes_all_wait_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(staging: Staging, tensors: Any) -> Any:
        if "model" in tensors and tensors["model"]["count"] == 2:
            raise MemoryError
        return copy.deepcopy(tensors)

    monkeypatch.setattr(Staging, "copy", copied)

    def work(rank: Rank) -> list[int]:
        seen = []
        for step in (1, 2):
            rank.train(step)
            rank.recovery.keep({})
            seen.append(len(Store(tmp_path / "checkpoints", readonly=True).steps()))
            rank.part.held["weight"].fill_(-1)
        rank.recovery.wait()
        rank.recovery.load(2)
        assert rank.holds(2)
        return seen[1:]

    assert run(tmp_path, 2, work) == [[2], [2]], "committed before `keep` returns"


def saved(
    folder: Path, ranks: int = 3, steps: tuple[int, ...] = (1, 2), root: str = "checkpoints"
) -> None:
    def work(rank: Rank) -> None:
        for step in steps:
            rank.train(step)
            assert rank.recovery.save_and_verify({})

    run(folder, ranks, work, root=root)


def damage(folder: Path, step: int, name: str) -> None:
    path = folder / "checkpoints" / f"step-{step:08d}" / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    "name", ["model-00002-of-00003.safetensors", "model.safetensors", "state.json"]
)
def test_a_damaged_file_is_named_on_every_rank(tmp_path: Path, name: str) -> None:
    """Each byte is read by one rank alone; still no rank goes on."""
    saved(tmp_path)
    damage(tmp_path, 2, name)
    told = run(tmp_path, 3, lambda rank: refused(lambda: rank.recovery.load(2)))
    assert all(name in each for each in told)
    assert sum("differs from its SHA-256" in each for each in told) == 1
    # All ranks parse state.json.
    others = 0 if name == "state.json" else 2
    assert sum("another rank has read it" in each for each in told) == others


def test_a_rank_with_another_folder_or_none_is_found_by_the_manifest(tmp_path: Path) -> None:
    """What the ranks hold differs anyway, so that it is not compared."""
    saved(tmp_path)
    saved(tmp_path, steps=(1,), root="elsewhere")
    group = Group(3)

    def reads(rank: int, step: int) -> str:
        mine = Rank(tmp_path, group, rank, root="elsewhere" if rank == 2 else "checkpoints")
        told = refused(lambda: mine.recovery.load(step))
        assert told or mine.holds(step)
        return told

    assert in_threads(3, lambda rank: reads(rank, 1)) == ["", "", ""], "equal copies are the same"
    told = in_threads(3, lambda rank: reads(rank, 2))
    assert "another rank cannot read the checkpoint of step 2" in told[0]
    assert "manifest" in told[2]
    (tmp_path / "elsewhere" / "step-00000001").rename(tmp_path / "elsewhere" / "step-00000009")
    saved(tmp_path, ranks=2, steps=(1,), root="elsewhere")
    told = in_threads(3, lambda rank: reads(rank, 1))
    assert all("different checkpoints of step 1" in each or not each for each in told)
    assert "different checkpoints of step 1" in told[2]
    assert not any(each == "" for each in told), "no rank goes on"


def test_a_resume_reads_every_byte_once_by_one_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, steps=(1, 2))
    folder = tmp_path / "checkpoints" / "step-00000002"
    for path in folder.iterdir():
        os.utime(path, times=(path.stat().st_mtime - 60, path.stat().st_mtime - 60))
    read: list[str] = []
    whole = manifest.file_entry
    monkeypatch.setattr(
        manifest, "file_entry", lambda path: (read.append(path.name), whole(path))[1]
    )

    def resumes(rank: Rank) -> tuple[int | None, bool]:
        newest = newest_valid_together(rank.recovery.engine, rank.store)
        assert newest is not None
        rank.recovery.load(newest)
        return newest, rank.holds(newest)

    assert run(tmp_path, 2, resumes) == [(2, True)] * 2
    assert sorted(read) == sorted(set(os.listdir(folder)) - {"manifest.json"})


def test_ranks_choose_the_newest_checkpoint_that_verifies_together(tmp_path: Path) -> None:
    def chooses(rank: Rank) -> int | None:
        newest = newest_valid_together(rank.recovery.engine, rank.store)
        if rank.rank == 0:
            rank.store.set_aside()
        return newest

    assert run(tmp_path, 3, chooses) == [None, None, None]
    saved(tmp_path, steps=(1, 2, 3))
    damage(tmp_path, 3, "model-00002-of-00003.safetensors")
    assert run(tmp_path, 3, chooses) == [2, 2, 2]
    assert "quarantine-step-00000003-1" in os.listdir(tmp_path / "checkpoints")
    damage(tmp_path, 2, "model-00001-of-00003.safetensors")
    told = run(tmp_path, 3, lambda rank: refused(lambda: chooses(rank)))
    assert all("not one of its checkpoints is whole" in each for each in told)


def test_a_rollback_skips_good_checkpoints_of_which_any_piece_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path, steps=(1, 2))
    for step in (1, 2):
        add_mark(tmp_path / "checkpoints", step)
    damage(tmp_path, 2, "model-00001-of-00003.safetensors")

    def back(rank: Rank) -> int | None:
        found = rank.recovery.newest_good()
        rank.journal.close()
        return found

    assert run(tmp_path, 3, back) == [1, 1, 1]
    (skipped,) = events(tmp_path, "checkpoint.quarantined")
    assert "step 2" in skipped["text"]
    assert "model-00001-of-00003.safetensors" in skipped["text"]


@pytest.mark.slow
def test_the_last_save_goes_to_the_fallback_folder_from_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store._write_tensors

    def own_disk_is_full(folder: Path, contents: Any, mode: int) -> None:
        if folder.parent.name == "checkpoints":
            full()
        write(folder, contents, mode)

    monkeypatch.setattr(store, "_write_tensors", own_disk_is_full)

    def work(rank: Rank) -> Any:
        rank.train(5)
        return rank.recovery.keep({}, "stop")

    config = {"max_failures": 1}
    kept = run(tmp_path, 3, work, fallback_folder=tmp_path / "fallback", checkpoint=config)
    assert [each.safe for each in kept] == [True] * 3
    assert "saved in" in kept[0].note
    assert Store(tmp_path / "fallback").load(5)[0]["model"]["weight"].shape == (11, 3)

    # A fallback folder that rank 0 cannot open.
    (tmp_path / "file").write_text("")
    kept = run(tmp_path, 3, work, fallback_folder=tmp_path / "file", checkpoint=config)
    assert [each.safe for each in kept] == [False] * 3
    assert "step" in kept[2].note


def test_a_folder_that_ranks_do_not_share_is_refused_by_name(tmp_path: Path) -> None:
    group = Group(3)
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()

    def check(rank: int, places: list[str]) -> str:
        def broadcast(value: Any) -> Any:
            return group.all(rank, value)[0]

        def gather(text: str) -> list[str]:
            return group.all(rank, text)

        folder = tmp_path / places[rank]
        return refused(lambda: check_shared_folder(folder, rank, broadcast, 0.3, gather))

    assert in_threads(3, lambda rank: check(rank, ["shared"] * 3)) == ["", "", ""]
    told = in_threads(3, lambda rank: check(rank, ["shared", "own", "missing"]))
    assert all("not the folder of rank 0 on these ranks: 1 (on " in each for each in told)
    assert all(", 2 (on " in each and "disk that all machines share" in each for each in told)
    told = in_threads(3, lambda rank: check(rank, ["missing", "own", "own"]))
    assert all("cannot be written by rank 0" in each for each in told)
    assert os.listdir(tmp_path / "shared") == os.listdir(tmp_path / "own") == []
