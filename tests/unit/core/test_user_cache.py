"""The user's cache folder, and what takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.files import cache_dir


def test_under_the_users_cache_folder_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cache_dir()
    assert folder == tmp_path / "cache" / "hopper-harness"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_dir() == folder
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "hopper-harness"


def test_a_folder_that_cannot_be_made_is_replaced_by_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = cache_dir()
    assert folder.is_dir()
    assert tmp_path not in folder.parents
    folder.rmdir()


@pytest.mark.parametrize("value", ["", "a/relative/folder"])
def test_a_folder_that_is_not_absolute_does_not_count(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "hopper-harness"


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "hopper-harness"
    monkeypatch.delenv("XDG_CACHE_HOME")
    folder = cache_dir()
    assert folder.is_dir()
    folder.rmdir()
