"""A checkpoint that every rank writes its own rows of: it is whole or not there, and any number of ranks reads it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.checkpoint import manifest, slices, store
from harness.checkpoint.manifest import file_entry, manifest_bytes
from harness.checkpoint.meeting import CHECKED, Meeting, Writers
from harness.checkpoint.recovery import move_from_fallback
from harness.checkpoint.store import Store
from harness.core.errors import CheckpointError
from harness.core.files import dump_json
from harness.core.shards import Rows
from harness.tools import verify
from tests.support.sharded_saves import (
    META,
    assert_same,
    held_by,
    in_threads,
    save,
    stores,
    whole_state,
    writers,
)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "step-00000003"
    assert save(tmp_path, ranks) == [path] * ranks
    pieces = [f"-{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]
    assert names(tmp_path) == ["step-00000003"]
    assert names(path) == sorted(
        ["fp8.safetensors", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
        + [part + piece for part in ("model", "optimizer") for piece in pieces]
    )  # fmt: skip
    assert len({(path / name).stat().st_mode for name in names(path)}) == 1
    for readers in (1, 2, 3, 5):
        for rank in range(readers):
            expected, rows = held_by(whole_state(3), rank, readers)
            found, meta = Store(tmp_path, readonly=True).load(3, rows=rows)
            assert_same(found, expected)
            assert meta == META
            held = found["model"]["embed"]
            assert held.untyped_storage().nbytes() == held.nbytes, "the file is let go of"
    assert_same(Store(tmp_path, readonly=True).load(3)[0], whole_state(3))
    assert Store(tmp_path, readonly=True).load(3, parts=("fp8",))[0].keys() == {"fp8"}
    assert Store(tmp_path, readonly=True).metrics(3) == {"val_loss": 2.0}


def test_ranks_read_their_rows_of_what_one_process_wrote(tmp_path: Path) -> None:
    Store(tmp_path).save(3, whole_state(3), META)
    for rank in range(4):
        expected, rows = held_by(whole_state(3), rank, 4)
        found, meta = Store(tmp_path, readonly=True).load(3, rows=rows)
        assert_same(found, expected)
        assert meta == META


def test_what_one_process_writes_has_the_bytes_of_before(tmp_path: Path) -> None:
    """The hash was made by the version before ranks could share the state."""
    state = {
        "model": {"weight": torch.arange(12.0).view(3, 4), "half": torch.ones(2).bfloat16()},
        "rng": {"torch": torch.arange(5, dtype=torch.uint8)},
        "none": {},
    }
    path = Store(tmp_path, {"torch": "2.13"}).save(3, state, META, {"val_loss": 2.5})
    assert names(path) == ["manifest.json", "model.safetensors", "rng.safetensors", "state.json"]
    # The manifest has the hashes of all other files.
    digest = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    assert digest == "9752c62bc667c0582d693b92971b5a9595e03e34e8a326943026a63019a9c64c"


def test_rows_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "pieces", 2)
    Store(tmp_path / "whole").save(3, whole_state(3), META)
    rows = {"model": {"embed": Rows((12, 4), 0, 6)}}
    for root in (tmp_path / "pieces", tmp_path / "whole"):
        with pytest.raises(CheckpointError, match=r"'embed' has the shape \[11, 4\]"):
            Store(root).load(3, rows=rows)


# Rank 0 commits only what all ranks have written.


def test_rank_0_never_commits_its_own_half(tmp_path: Path) -> None:
    Store(tmp_path).save(2, whole_state(2), {**META, "step": 2})
    tensors, rows = held_by(whole_state(3), 0, 2)
    meeting = Writers(0, 2, "start", 0.3).next_try()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"rank 1 left nothing within 0\.3 s"):
        Store(tmp_path).save_piece(3, tensors, rows, meeting, META)
    assert time.monotonic() - began < 10
    assert names(tmp_path) == ["step-00000002"]


def test_without_a_sharded_tensor_there_is_nothing_to_do_together(tmp_path: Path) -> None:
    meeting = Writers(0, 2, "start", 0.3).next_try()
    with pytest.raises(CheckpointError, match="no tensor is sharded"):
        Store(tmp_path).save_piece(3, whole_state(3), {}, meeting, META)
    with pytest.raises(CheckpointError, match="'shards' is for what several ranks write"):
        Store(tmp_path).save(3, whole_state(3), {**META, "shards": {}})


def full(*ignored: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("place", ["piece", "entry", "check"])
def test_a_full_disk_of_one_rank_fails_the_save_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Much sooner than the ranks' patience, and with the reason."""
    whole, check = store._write_tensors, store._leave_check
    leave = Meeting.leave

    def write(folder: Path, contents: Any, mode: int) -> None:
        if place == "piece" and any("-00002-of" in name for name in contents):
            (folder / "model-00002-of-00003.safetensors").write_bytes(b"half")
            full()
        whole(folder, contents, mode)

    def entry(meeting: Meeting, folder: Path, kind: str, content: Any) -> None:
        if place == "entry" and meeting.rank == 2 and kind == "entry":
            full()
        leave(meeting, folder, kind, content)

    def checks(folder: Path, meeting: Meeting) -> None:
        if place == "check" and meeting.rank == 2:
            full()
        check(folder, meeting)

    monkeypatch.setattr(store, "_write_tensors", write)
    monkeypatch.setattr(store, "_leave_check", checks)
    monkeypatch.setattr(Meeting, "leave", entry)
    began = time.monotonic()
    results = save(tmp_path, 3)
    assert time.monotonic() - began < 15
    assert "rank 2 could not write its part: No space left on device" in str(results[0])
    assert names(tmp_path) == []
    monkeypatch.undo()
    assert save(tmp_path, 3)[0] == tmp_path / "step-00000003"


def test_a_rank_without_room_for_the_reason_says_so_with_an_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = Meeting.leave

    def nothing_fits(meeting: Meeting, *content: Any) -> None:
        if meeting.rank == 2:
            full()
        leave(meeting, *content)

    monkeypatch.setattr(Meeting, "leave", nothing_fits)
    began = time.monotonic()
    results = save(tmp_path, 3)
    assert time.monotonic() - began < 15
    assert "rank 2 could not write its part: it had no room to say why" in str(results[0])
    assert names(tmp_path) == []


def test_a_rank_that_can_write_nothing_is_named_when_its_caller_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meetings: dict[int, Meeting] = {}
    monkeypatch.setattr(Meeting, "leave_failure", lambda *ignored: None)

    def before(rank: int, meeting: Meeting) -> None:
        meetings[rank] = meeting
        if rank == 2:
            # What the ranks' collective does, once rank 1 has done its part: rank 0 then removes the folder.
            deadline = time.monotonic() + 30
            while not list(tmp_path.glob(".tmp-*/entry-00001.json")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            meetings[0].give_up("rank 2 could not write its part, nor say why")
            full()

    began = time.monotonic()
    results = save(tmp_path, 3, before=before)
    assert time.monotonic() - began < 15
    assert "rank 2 could not write its part, nor say why" in str(results[0])
    assert "is gone: rank 0 has ended this save" in str(results[1])
    assert names(tmp_path) == []


def test_a_rank_that_holds_something_else_is_named(tmp_path: Path) -> None:
    state, other = whole_state(3), whole_state(3)
    other["model"]["embed"] = other["model"]["embed"].double()
    everyone, disks = writers(2), stores(tmp_path, 2)

    def work(rank: int) -> Any:
        tensors, rows = held_by(other if rank else state, rank, 2)
        return disks[rank].save_piece(3, tensors, rows, everyone[rank].next_try(), META)

    assert "rank 1 holds other tensors than rank 0" in str(in_threads(2, work)[0])

    def wrong_rows(rank: int) -> Any:
        tensors, rows = held_by(state, 0, 2)
        return disks[rank].save_piece(3, tensors, rows, everyone[rank].next_try(), META)

    assert "rank 1 could not write its part: ValueError: rank 1 holds [6, 4]" in str(
        in_threads(2, wrong_rows)[0]
    )
    assert names(tmp_path) == []


def test_a_piece_that_changes_before_the_commit_is_found_by_the_rank_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = Meeting.gather

    def damaged(meeting: Meeting, folder: Path, kind: str) -> Any:
        if kind == "entry":
            found = gather(meeting, folder, kind)
            path = folder / "model-00001-of-00003.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            return found
        return gather(meeting, folder, kind)

    monkeypatch.setattr(Meeting, "gather", damaged)
    results = save(tmp_path, 3)
    assert "model-00001-of-00003.safetensors" in str(results[0])
    assert "differs from its SHA-256" in str(results[0])
    assert names(tmp_path) == []


def test_all_ranks_together_read_every_byte_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    whole = manifest.file_entry
    monkeypatch.setattr(
        manifest, "file_entry", lambda path: (read.append(path.name), whole(path))[1]
    )
    save(tmp_path, 3)
    assert sorted(read) == sorted(set(names(tmp_path / "step-00000003")) - {"manifest.json"})


# Nothing of a try that failed gets into a later one.


def test_a_rank_that_comes_late_brings_no_folder_back(tmp_path: Path) -> None:
    everyone, disks = writers(2, 0.2), stores(tmp_path, 2)
    parts = [held_by(whole_state(3), rank, 2) for rank in range(2)]
    late = everyone[1].next_try()
    with pytest.raises(CheckpointError, match="rank 1 left nothing"):
        disks[0].save_piece(3, *parts[0], everyone[0].next_try(), META)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="rank 0 began no save"):
        disks[1].save_piece(3, *parts[1], late, META)
    assert time.monotonic() - began < 10, "it does not wait for ever"
    assert names(tmp_path) == []


def test_a_rank_that_did_not_read_its_share_is_not_taken_at_its_empty_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = Meeting.leave

    def spoilt(self: Meeting, folder: Path, kind: str, content: Mapping[str, Any]) -> None:
        leave(self, folder, kind, {} if kind == CHECKED else content)

    monkeypatch.setattr(Meeting, "leave", spoilt)
    meetings, disks = [each.next_try() for each in writers(2)], stores(tmp_path, 2)

    def work(rank: int) -> None:
        tensors, rows = held_by(whole_state(1), rank, 2)
        disks[rank].save_piece(3, tensors, rows, meetings[rank], META)

    lead, _ = in_threads(2, work)
    assert "rank 1 did not say that it read these files" in str(lead)
    assert disks[0].steps() == []


def test_a_piece_of_a_try_that_failed_is_in_no_later_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes its piece of the first try and is lost; the folder cannot be removed. The state then changes."""
    everyone, disks = writers(2, 0.3), stores(tmp_path, 2)
    old, new = whole_state(1), whole_state(2)
    first = [each.next_try() for each in everyone]
    discard = Store._discard
    monkeypatch.setattr(Store, "_discard", lambda self, folder: None)
    monkeypatch.setattr(Store, "_remove_leftovers", lambda self, but: None)

    def lost(rank: int) -> None:
        tensors, rows = held_by(old, rank, 2)
        if rank == 0:
            disks[0].save_piece(3, tensors, rows, first[0], META)
            return
        folder = tmp_path / ".tmp-step-00000003-start-1"
        first[1].await_folder(folder)
        store._leave_pieces(folder, tensors, rows, first[1], [])

    failed, _ = in_threads(2, lost)
    assert "rank 1 left nothing" in str(failed)
    assert "model-00001-of-00002.safetensors" in names(tmp_path / ".tmp-step-00000003-start-1")

    monkeypatch.undo()
    monkeypatch.setattr(Store, "_discard", discard)
    second = [each.next_try() for each in everyone]
    for rank in (0, 1):  # rank 1 is slower: what lies there from before must not stand in for it
        second[rank]._seconds = 20.0

    def again(rank: int) -> Any:
        if rank:
            time.sleep(0.5)
        tensors, rows = held_by(new, rank, 2)
        return disks[rank].save_piece(3, tensors, rows, second[rank], META)

    assert in_threads(2, again)[0] == tmp_path / "step-00000003"
    assert_same(Store(tmp_path).load(3)[0], new)
    assert names(tmp_path) == ["step-00000003"], "the leftover is gone too"


def test_a_file_that_nobody_named_stops_the_commit(tmp_path: Path) -> None:
    def before(rank: int, meeting: Meeting) -> None:
        if rank == 1:
            folder = tmp_path / f".tmp-step-00000003-{meeting.name}"
            meeting.await_folder(folder)
            (folder / "model-00002-of-00002.safetensors").write_bytes(b"")

    assert "came or went meanwhile" in str(save(tmp_path, 2, before=before)[0])
    assert names(tmp_path) == []


def test_a_rank_that_fails_after_its_last_word_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rename reports an error and has happened, as on a network: rank 0 may have committed by then."""
    leave = Meeting.leave
    seen = threading.Event()

    def reported_late(meeting: Meeting, folder: Path, kind: str, content: Any) -> None:
        leave(meeting, folder, kind, content)
        if meeting.rank == 1 and kind == "checked":
            assert seen.wait(20)
            raise OSError(5, "Input/output error")

    gather = Meeting.gather

    def slow(meeting: Meeting, folder: Path, kind: str) -> Any:
        found = gather(meeting, folder, kind)
        if kind == "checked":
            seen.set()
            assert failures.wait(20)  # rank 1 is done with what it does about the error
        return found

    failures, leave_failure = threading.Event(), Meeting.leave_failure

    def left(meeting: Meeting, *rest: Any) -> None:
        leave_failure(meeting, *rest)
        failures.set()

    monkeypatch.setattr(Meeting, "leave", reported_late)
    monkeypatch.setattr(Meeting, "gather", slow)
    monkeypatch.setattr(Meeting, "leave_failure", left)
    assert save(tmp_path, 2)[0] == tmp_path / "step-00000003"
    assert Store(tmp_path).verify(3) == []


def test_the_next_start_removes_what_dead_ranks_left(tmp_path: Path) -> None:
    save(tmp_path, 2)
    for name in (".tmp-step-00000006-abc-1", ".tmp-trash-step-00000006-abc-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00002.safetensors").write_bytes(b"half")
    Store(tmp_path, readonly=True)
    assert len(names(tmp_path)) == 3
    Store(tmp_path)
    assert names(tmp_path) == ["step-00000003"]


def test_a_whole_step_is_kept_and_a_damaged_one_is_set_aside(tmp_path: Path) -> None:
    save(tmp_path, 2)
    # Rank 0 returns at once; the other one would wait for it.
    results = save(tmp_path, 2, state=whole_state(99), seconds=0.3)
    assert results[0] == tmp_path / "step-00000003"
    assert_same(Store(tmp_path).load(3)[0], whole_state(3))
    (tmp_path / "step-00000003" / "model-00001-of-00002.safetensors").unlink()
    assert save(tmp_path, 2, state=whole_state(99))[0] == tmp_path / "step-00000003"
    assert_same(Store(tmp_path).load(3)[0], whole_state(99))
    assert names(tmp_path) == ["quarantine-step-00000003-1", "step-00000003"]


# What is read is checked.


def forge(folder: Path, **changes: Any) -> None:
    """Change state.json, and make a manifest that is right about every file there is."""
    state = json.loads((folder / "state.json").read_bytes())
    (folder / "state.json").write_bytes(dump_json({**state, **changes}))
    seal(folder)


def seal(folder: Path) -> None:
    files = {name: file_entry(folder / name) for name in names(folder) if name != "manifest.json"}
    (folder / "manifest.json").write_bytes(manifest_bytes(3, files, {}))


PIECE = "model-00001-of-00003.safetensors"


def piece(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors, _ = held_by(whole_state(3), 1, 3)
    named = {
        name: tensors["model"][name].contiguous() for name in ("embed", "bias", "norm", "half")
    }
    return {name: each for name, each in {**named, **changes}.items() if each is not None}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"embed": torch.zeros(3, 4)}, r"'embed' of shape \[3, 4\], its rank holds \[4, 4\]"),
        ({"embed": torch.zeros(4, 4).double()}, "'embed' in 'F64', the first rank in 'F32'"),
        ({"embed": None}, "lacks tensors: embed"),
        ({"more": torch.zeros(1)}, "tensors that state.json does not know: more"),
    ],
)
def test_a_piece_of_something_else_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    save(tmp_path, 3)
    save_file(piece(**changes), tmp_path / "step-00000003" / PIECE)
    seal(tmp_path / "step-00000003")
    (problem,) = Store(tmp_path).verify(3)
    assert Path(problem.where).name == PIECE
    with pytest.raises(CheckpointError, match=why):
        Store(tmp_path).load(3)


def test_a_piece_that_is_missing_or_foreign_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 3)
    folder = tmp_path / "step-00000003"
    of_3, of_4 = "00001-of-00003", "00001-of-00004"
    foreign = ("model-00003-of-00003", f"model-{of_4}", f"extra-{of_3}", f"model-0{of_3}")
    for other in foreign:
        shutil.copy(folder / PIECE, folder / f"{other}.safetensors")
        seal(folder)
        with pytest.raises(CheckpointError, match=f"not of these 3 ranks: {other}"):
            Store(tmp_path).load(3)
        (folder / f"{other}.safetensors").unlink()
    (folder / PIECE).rename(tmp_path / "aside")
    assert "cannot be read: No such file" in str(Store(tmp_path).verify(3)[0])
    seal(folder)
    with pytest.raises(CheckpointError, match=f"lacks pieces of its 3 ranks: {PIECE}"):
        Store(tmp_path).load(3)
    assert Store(tmp_path).steps() == [3]
    with pytest.raises(CheckpointError, match="not one of its checkpoints is whole"):
        Store(tmp_path).newest_valid()


def test_a_tensor_is_whole_or_in_pieces_not_both(tmp_path: Path) -> None:
    save(tmp_path, 3)
    folder = tmp_path / "step-00000003"
    save_file({"embed": torch.zeros(11, 4)}, folder / "model.safetensors")
    seal(folder)
    with pytest.raises(CheckpointError, match="tensors that are in the pieces too: embed"):
        Store(tmp_path).load(3)


GOOD = {"ranks": 3, "tensors": {"model": {"embed": [11, 4]}}}


@pytest.mark.parametrize(
    "shards",
    [
        None,
        [],
        {},
        {"ranks": 3},
        {**GOOD, "more": 1},
        {**GOOD, "ranks": 0},
        {**GOOD, "ranks": -3},
        {**GOOD, "ranks": True},
        {**GOOD, "ranks": 3.0},
        {**GOOD, "ranks": "3"},
        {**GOOD, "ranks": 10**9},
        {**GOOD, "ranks": 2**63},
        {**GOOD, "ranks": 2**200},
        {**GOOD, "tensors": {}},
        {**GOOD, "tensors": []},
        {**GOOD, "tensors": {"model": {}}},
        {**GOOD, "tensors": {"model": {"embed": []}}},
        {**GOOD, "tensors": {"model": {"embed": [11, -4]}}},
        {**GOOD, "tensors": {"model": {"embed": [2**62, 2**62]}}},
        {**GOOD, "tensors": {"model": {"embed": [11, 4.0]}}},
        {**GOOD, "tensors": {"model": {"embed": [1] * 65}}},
        {**GOOD, "tensors": {"model": {"embed": 44}}},
        {**GOOD, "tensors": {"../../model": {"embed": [11, 4]}}},
        {**GOOD, "tensors": {"mo/del": {"embed": [11, 4]}}},
        {**GOOD, "tensors": {"": {"embed": [11, 4]}}},
        {**GOOD, "tensors": {"model-00001-of-00003": {"embed": [11, 4]}}},
        {**GOOD, "tensors": {f"p{number}": {"w": [1]} for number in range(2000)}},
        {**GOOD, "ranks": 10**9, "tensors": {f"p{number}": {"w": [1]} for number in range(2000)}},
    ],
)
def test_a_hostile_record_of_shards_is_refused_quickly(tmp_path: Path, shards: Any) -> None:
    save(tmp_path, 3)
    forge(tmp_path / "step-00000003", shards=shards)
    began = time.monotonic()
    problems = Store(tmp_path).verify(3)
    assert time.monotonic() - began < 5
    assert problems
    assert len(str(problems[0])) < 2000
    assert Path(problems[0].where).name in ("state.json", "manifest.json")
    with pytest.raises(CheckpointError):
        Store(tmp_path).load(3)


def test_pieces_without_a_record_of_shards_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 3)
    folder = tmp_path / "step-00000003"
    state = json.loads((folder / "state.json").read_bytes())
    del state["shards"]
    (folder / "state.json").write_bytes(dump_json(state))
    seal(folder)
    with pytest.raises(CheckpointError, match="has pieces that state"):
        Store(tmp_path).load(3)


@pytest.mark.parametrize("share", [1, 2, 3, 20])
def test_ranks_that_share_the_reading_find_what_one_finds(tmp_path: Path, share: int) -> None:
    save(tmp_path, 3)
    folder = tmp_path / "step-00000003"
    whole = [name for name in names(folder) if name != "manifest.json"]
    for name in whole:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        found = [Store(tmp_path).verify_share(3, rank, share) for rank in range(share)]
        assert any(name in problem.where for problems in found for problem in problems), name
        (folder / name).write_bytes(data)
    assert [Store(tmp_path).verify_share(3, rank, share) for rank in range(share)] == [[]] * share


def test_verify_reads_pieces_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "checkpoints", 3)
    (tmp_path / "journal.jsonl").write_text("")
    assert verify.command(tmp_path) == 0
    assert "ok, written by 3 ranks, lowest val_loss" in capsys.readouterr().out
    (tmp_path / "checkpoints" / "step-00000003" / PIECE).unlink()
    assert verify.command(tmp_path) == 1
    assert PIECE in capsys.readouterr().out


def test_a_last_save_is_moved_back_as_it_is(tmp_path: Path) -> None:
    save(tmp_path / "fallback", 3)
    written = (tmp_path / "fallback" / "step-00000003" / "manifest.json").read_bytes()
    target = Store(tmp_path / "own")
    assert move_from_fallback(target, tmp_path / "fallback") == 3
    assert (target.path(3) / "manifest.json").read_bytes() == written
    assert_same(target.load(3)[0], whole_state(3))
    assert not (tmp_path / "fallback").exists()


# Sizes.

RANKS = 1024


@pytest.mark.nightly
def test_a_thousand_ranks_fit_and_one_tensor_is_read_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    state = {
        "model": {"embed": torch.arange(RANKS * 2.0).view(RANKS, 2), "bias": torch.arange(3.0)},
        "optimizer": {"moment": torch.arange(RANKS * 3.0).view(RANKS, 3)},
    }
    sharded = {"model": ("embed", "bias"), "optimizer": ("moment",)}
    monkeypatch.setattr("tests.support.sharded_saves.SHARDED", sharded)
    everyone = writers(RANKS, 100.0)
    meetings = [each.next_try() for each in everyone]
    folder = tmp_path / f".tmp-step-00000003-{meetings[0].name}"

    def others() -> None:
        meetings[1].await_folder(folder)
        for rank in range(1, RANKS):
            store._leave_pieces(folder, *held_by(state, rank, RANKS), meetings[rank], [])
        meetings[1].await_file(folder, "manifest.json")
        for rank in range(1, RANKS):
            # Each rank parses the manifest, which takes 0.1 s: 1,024 times are too many for one process.
            if rank in (1, 500, RANKS - 1):
                store._leave_check(folder, meetings[rank])
            else:
                said = {"manifest": manifest.read_manifest(folder)["sha256"]}
                meetings[rank].leave(folder, CHECKED, said)

    thread = threading.Thread(target=others)
    thread.start()
    path = Store(tmp_path).save_piece(3, *held_by(state, 0, RANKS), meetings[0], META)
    thread.join()
    assert len(names(path)) == 2 * RANKS + 2

    opened: list[str] = []
    really = slices.safe_open

    def counted(file: Path, **options: Any) -> Any:
        opened.append(Path(file).name)
        return really(file, **options)

    monkeypatch.setattr(slices, "safe_open", counted)
    found, _ = Store(tmp_path).load(3)
    assert_same(found, state)
    assert len(opened) == 2 * RANKS
    opened.clear()
    rows = {
        "model": {"embed": Rows((RANKS, 2), 512, 514), "bias": Rows((3,), 0, 0)},
        "optimizer": {"moment": Rows((RANKS, 3), 100, 101)},
    }
    found, _ = Store(tmp_path).load(3, rows=rows, verified=True)
    assert found["model"]["embed"].tolist() == state["model"]["embed"][512:514].tolist()
    assert found["optimizer"]["moment"].tolist() == state["optimizer"]["moment"][100:101].tolist()
    assert sorted(opened) == [
        "model-00000-of-01024.safetensors",  # for the dtype of `bias`, of which no row is wanted
        "model-00512-of-01024.safetensors",
        "model-00513-of-01024.safetensors",
        "optimizer-00100-of-01024.safetensors",
    ]
