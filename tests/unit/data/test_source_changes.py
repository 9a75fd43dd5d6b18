"""Sources that changed since the data were made are reported by file at the next start; touched ones are not."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core.errors import DataError
from harness.data.prepare import Preparation, prepare_dataset
from harness.data.source import source_changes
from harness.data.tokens import prepare
from tests.support.runs import events, train
from tests.unit.data.token_files import config

LINE = "the quick brown fox jumps over the lazy dog\n"


def text(folder: Path, files: int = 4) -> Path:
    folder.mkdir()
    for number in range(files):
        (folder / f"{number}.txt").write_text(f"{number} {LINE * 20}")
    return folder


def rows(folder: Path, files: int = 4) -> Path:
    folder.mkdir()
    for number in range(files):
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": f"{number} {LINE}"}) + "\n")
        with (folder / f"{number}.jsonl").open("a") as stream:
            stream.writelines(json.dumps({"text": LINE * 3}) + "\n" for _ in range(30))
    return folder


KINDS = [(text, "txt"), (rows, "jsonl")]


def told(path: Path, run: Path, **more: object) -> str:
    """What the start says once the run's data are made."""
    prepare(config(path, **more), run)
    return "; ".join(source_changes(config(path, **more), run / "data"))


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    # By a relative name: a socket's path has 107 characters at most.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


# A link that leads nowhere or out of the folder is refused in a folder of text.
ODD = [(text, "txt", _fifo), (text, "txt", _socket)]
ODD += [
    (rows, "jsonl", make)
    for make in (_fifo, _socket, _link_to_nothing, _link_to_itself, _link_to_a_device)
]


@pytest.mark.parametrize(("source", "suffix", "make"), ODD)
def test_what_is_no_file_is_no_change(
    tmp_path: Path, source: Callable[[Path], Path], suffix: str, make: Callable[[Path], None]
) -> None:
    path = source(tmp_path / "source")
    odd = path / f"odd.{suffix}"
    make(odd)
    assert told(path, tmp_path / "run") == ""
    assert told(path, tmp_path / "run") == ""
    odd.unlink()
    assert told(path, tmp_path / "run") == ""
    make(odd)
    assert told(path, tmp_path / "run") == ""
    odd.unlink()
    odd.write_text(json.dumps({"text": LINE}))
    assert f"new: {odd.name}" in told(path, tmp_path / "run")


@pytest.mark.parametrize(("make", "suffix"), KINDS)
def test_nothing_is_told_of_a_source_that_is_the_same(
    tmp_path: Path, make: Callable[[Path], Path], suffix: str
) -> None:
    path = make(tmp_path / "source")
    assert told(path, tmp_path / "run") == ""
    assert told(path, tmp_path / "run") == ""
    os.utime(path / f"1.{suffix}", (1, 1))
    (path / f"2.{suffix}").replace(path / ".kept")
    shutil.copyfile(path / ".kept", path / f"2.{suffix}")  # another inode and time
    assert told(path, tmp_path / "run") == "", "touched and copied files have the same content"
    shutil.rmtree(path)
    assert told(path, tmp_path / "run") == "", "a run that moved goes on without its source"


@pytest.mark.parametrize(("make", "suffix"), KINDS)
def test_what_changed_is_named(tmp_path: Path, make: Callable[[Path], Path], suffix: str) -> None:
    path = make(tmp_path / "source")
    before = prepare(config(path), tmp_path / "run").sha256
    changed = path / f"1.{suffix}"
    status = changed.stat()
    changed.write_bytes(changed.read_bytes().replace(b"fox", b"cat"))  # as long as it was
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    (path / f"2.{suffix}").unlink()
    shutil.copyfile(path / f"0.{suffix}", path / f"new.{suffix}")
    said = told(path, tmp_path / "run")
    assert str(path) in said
    for word in (f"changed: 1.{suffix}", f"gone: 2.{suffix}", f"new: new.{suffix}"):
        assert word in said
    assert f"0.{suffix}" not in said
    assert f"3.{suffix}" not in said
    assert prepare(config(path), tmp_path / "run").sha256 == before, (
        "the run goes on with what it has"
    )


def test_one_file_that_changed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(LINE * 60)
    assert told(path, tmp_path / "run") == ""
    path.write_text(LINE * 61)
    assert "changed: book.txt" in told(path, tmp_path / "run")


def test_files_that_are_no_text_may_change(tmp_path: Path) -> None:
    path = text(tmp_path / "source")
    (path / "picture.png").write_bytes(b"\0" * 10)
    assert told(path, tmp_path / "run") == ""
    (path / "picture.png").write_bytes(b"\0" * 11)
    assert told(path, tmp_path / "run") == ""


def test_a_large_file_is_the_same_or_changed_wherever(tmp_path: Path) -> None:
    """Of every file that was touched all bytes are compared."""
    path = rows(tmp_path / "source")
    large = path / "large.jsonl"
    large.write_text((json.dumps({"text": LINE * 10}) + "\n") * 10_000)
    assert told(path, tmp_path / "run") == ""
    os.utime(large, (1, 1))
    assert told(path, tmp_path / "run") == ""
    with large.open("r+b") as stream:
        stream.seek(1_234_567)
        stream.write(b"#")
    os.utime(large, (2, 2))
    assert "changed: large.jsonl" in told(path, tmp_path / "run")


def test_a_new_run_on_a_stale_preparation_is_told(tmp_path: Path) -> None:
    path = rows(tmp_path / "source")
    prepare_dataset(Preparation(str(path), "JSONL"), tmp_path / "ready")
    assert told(tmp_path / "ready", tmp_path / "first") == ""
    (path / "1.jsonl").write_text(json.dumps({"text": "another"}) + "\n")
    for run in ("first", "second"):
        said = told(tmp_path / "ready", tmp_path / run)
        assert "changed: 1.jsonl" in said
        assert f"harness data prepare {path}" in said
    shutil.rmtree(path)
    assert told(tmp_path / "ready", tmp_path / "third") == "", (
        "prepared data may have been copied to another machine"
    )


def test_preparing_again_names_what_changed(tmp_path: Path) -> None:
    path = rows(tmp_path / "source")
    prepare_dataset(Preparation(str(path), "JSONL"), tmp_path / "ready")
    (path / "1.jsonl").write_text(json.dumps({"text": "another"}) + "\n")
    (path / "new.jsonl").write_text(json.dumps({"text": "another"}) + "\n")
    with pytest.raises(DataError, match=r"these have changed: 1\.jsonl, new\.jsonl"):
        prepare_dataset(Preparation(str(path), "JSONL"), tmp_path / "ready")


def test_a_source_that_changes_while_it_is_prepared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows(tmp_path / "source")
    wanted = Preparation(str(path), "JSONL")

    def tell(progress: object) -> None:
        (path / "3.jsonl").write_text(json.dumps({"text": "another"}) + "\n")

    with pytest.raises(DataError, match=r"3\.jsonl: changed while it was prepared"):
        prepare_dataset(wanted, tmp_path / "ready", report=tell)
    assert not (tmp_path / "ready" / "dataset.json").exists()


def test_a_record_that_is_no_record_tells_nothing_wrong(tmp_path: Path) -> None:
    path = text(tmp_path / "source")
    prepare(config(path), tmp_path / "run")
    for content in ("", "[]", '{"files": 3}', '{"path": 1, "files": [[1]]}'):
        (tmp_path / "run" / "data" / "source.json").write_text(content)
        assert "cannot be read" in told(path, tmp_path / "run")
    (tmp_path / "run" / "data" / "source.json").unlink()
    assert told(path, tmp_path / "run") == "", "a run of an older version has none"


@pytest.mark.slow
def test_each_source_of_a_mixture_is_looked_at(tmp_path: Path) -> None:
    for name in ("a", "b"):
        text(tmp_path / name)
    parts = [{"path": str(tmp_path / name), "weight": 1} for name in ("a", "b")]
    arguments = [
        "--name",
        "r",
        "data.path=null",
        f"data.mixture={json.dumps(parts)}",
        "data.context=16",
    ]
    assert train(tmp_path, *arguments, "train.steps=2").returncode == 0
    (tmp_path / "b" / "1.txt").write_text("another")
    done = train(tmp_path, *arguments, "train.steps=3")
    assert done.returncode == 0, done.stdout
    (event,) = events(tmp_path / "runs" / "r", "data.source")
    assert f"{tmp_path / 'b'}" in event["text"]
    assert f"{tmp_path / 'a'}" not in event["text"]


@pytest.mark.slow
def test_a_resumed_run_says_which_file_changed(tmp_path: Path) -> None:
    path = text(tmp_path / "source")
    arguments = ["--name", "r", f"data.path={path}", "data.context=16"]
    begun = train(tmp_path, *arguments, "train.steps=2")
    assert "data.source" not in begun.stdout
    (path / "2.txt").write_text("another")
    done = train(tmp_path, *arguments, "train.steps=3")
    assert done.returncode == 0, done.stdout
    assert "data.source" in done.stdout
    (event,) = events(tmp_path / "runs" / "r", "data.source")
    assert event["step"] == 2
    assert "changed: 2.txt" in event["text"]
