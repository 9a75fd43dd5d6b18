"""Room for three checkpoints, and the right to write: asked of the file system, before any work."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from harness.checkpoint.store import lacks_room

pytestmark = pytest.mark.faults(5)


def free(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def test_a_folder_with_room_is_fine_and_left_as_it_was(tmp_path: Path) -> None:
    assert lacks_room(tmp_path, 1000, 0) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("existing", "copies"), [(0, 3), (1, 2), (2, 1), (5, 1)])
def test_a_disk_that_is_too_small_is_named_with_what_it_lacks(
    tmp_path: Path, existing: int, copies: int
) -> None:
    # Others use the disk at the same time: stay well away from the edge.
    enough, too_much = free(tmp_path) // copies // 2, free(tmp_path) * 2 // copies
    assert lacks_room(tmp_path, enough, existing) == []
    (problem,) = lacks_room(tmp_path, too_much, existing)
    assert f"needed: {copies} checkpoint(s) of" in problem.what
    assert problem.where == str(tmp_path)
    assert "free space" in problem.fix


@pytest.mark.parametrize("kind", ["gone", "file", "not a disk to write on"])
def test_a_folder_that_takes_no_files_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = {"gone": tmp_path / "gone", "file": tmp_path / "file"}.get(kind, Path("/proc"))
    (problem,) = lacks_room(folder, 1000, 0)
    assert "cannot be written" in problem.what
    assert problem.where == str(folder)
    assert problem.why
    assert "--name" not in problem.fix, "another name is on the same disk"


def test_a_disk_that_takes_no_byte_is_left_as_it_was(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        (problem,) = lacks_room(tmp_path, 1000, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written" in problem.what
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files_is_named_together_with_the_disk(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        problems = lacks_room(tmp_path, free(tmp_path) * 2, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ["ulimit" in problem.fix for problem in problems] == [False, True]
    assert "1 MB" in problems[1].what


def test_a_limit_on_the_size_of_files_is_for_the_file_of_one_rank(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        alone = lacks_room(tmp_path, 3_000_000, 0)
        together = lacks_room(tmp_path, 3_000_000, 0, ranks=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ["ulimit" in problem.fix for problem in alone] == [True]
    assert together == []


def test_files_of_all_ranks_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs(tmp_path)
    fields = list(disk)
    fields[5], fields[7] = 100_000, 1000  # inodes: of the disk, and free for us
    monkeypatch.setattr(os, "statvfs", lambda folder: os.statvfs_result(fields))
    assert lacks_room(tmp_path, 1000, 0, ranks=8) == []
    (problem,) = lacks_room(tmp_path, 1000, 0, ranks=1024)
    assert "room for 1000 more files" in problem.what
