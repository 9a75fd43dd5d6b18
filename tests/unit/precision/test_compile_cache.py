"""Half of a library in torch.compile's cache is found and removed; a whole one, or one that is in work, is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from filelock import FileLock

from harness.core.errors import MachineError
from harness.precision.compile_cache import is_finished, remove_unfinished

# A real library, and names as torch gives them.
WHOLE = Path(str(torch._C.__file__)).read_bytes()
KEY = "c" + "ab3d5" * 10 + "x"
NAMES = [f"{KEY}.main.so", f"{KEY}.so"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def library(cache: Path, name: str, content: bytes) -> Path:
    path = cache / name[1:3] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("length", [0, 1, 63, 64, 4096, len(WHOLE) // 2])
@pytest.mark.parametrize("name", NAMES)
def test_half_of_a_library_is_removed_and_reported(cache: Path, name: str, length: int) -> None:
    path = library(cache, name, WHOLE[:length])
    assert str(path) in remove_unfinished()
    assert not path.exists()
    assert remove_unfinished() == ""


def test_a_library_whose_header_is_not_there_yet_is_removed(cache: Path) -> None:
    """The linker writes it last."""
    path = library(cache, NAMES[0], bytes(64) + WHOLE[64:])
    assert str(path) in remove_unfinished()


def test_whole_libraries_and_files_of_others_stay(cache: Path) -> None:
    whole = [library(cache, name, WHOLE) for name in NAMES]
    others = [library(cache, f"{KEY}.main.cpp", b""), library(cache, "own.so", b"")]
    (cache / "triton").mkdir()
    (cache / "triton" / f"{KEY}.so").touch()
    assert remove_unfinished() == ""
    assert all(path.exists() for path in (*whole, *others, cache / "triton" / f"{KEY}.so"))


def test_a_library_that_another_process_is_compiling_now_is_left_alone(cache: Path) -> None:
    path = library(cache, NAMES[0], WHOLE[:4096])
    (cache / "locks").mkdir()
    with FileLock(cache / "locks" / f"{KEY}.lock"):
        assert remove_unfinished() == ""
        assert path.exists()
    assert str(path) in remove_unfinished()


def test_what_cannot_be_removed_is_named_with_the_fix(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    paths = [library(cache, name, b"") for name in NAMES]
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(MachineError) as caught:
        remove_unfinished()
    assert [problem.where for problem in caught.value.problems] == [str(path) for path in paths]
    assert all(f"rm {problem.where}" in problem.fix for problem in caught.value.problems)


def test_a_library_of_another_kind_is_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(WHOLE[:4] + b"\x01" + WHOLE[5:100])  # 32 bits
    assert is_finished(path)
