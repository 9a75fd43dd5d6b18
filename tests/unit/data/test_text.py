"""Reading text: every way it can go wrong has a name, and a folder's problems come all at once."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from harness.core.errors import DataError, ExitCode
from harness.data import text as text_module
from harness.data.text import read_text, standard_library


def test_a_file_is_read_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("grüße\r\n\t終\n".encode())
    text = read_text(path)
    assert [(document.name, document.content) for document in text.documents] == [
        ("a.txt", path.read_bytes())
    ]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Notepad writes one. It was three bytes of the first document."""
    path = tmp_path / "note.txt"
    path.write_bytes(b"\xef\xbb\xbfhello\n")
    assert [each.content for each in read_text(path).documents] == [b"hello\n"]
    path.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(DataError, match="empty"):
        read_text(path)


def test_a_named_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    assert read_text(tmp_path / "link").documents[0].content == b"hello"


def test_a_folder_is_read_in_path_order_and_what_is_skipped_is_listed(tmp_path: Path) -> None:
    (tmp_path / "b" / ".git").mkdir(parents=True)
    files = {
        "z.md": b"last",
        "b/x.unknown": b"suffixes do not matter",
        "b/.hidden": b"no",
        "b/.git/config": b"no",
        "a.txt": b"first",
        "nul.txt": b"a\0b",
        "latin.txt": "é".encode("latin-1"),
        "empty.txt": b"",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "again.md").symlink_to(tmp_path / "z.md")
    os.mkfifo(tmp_path / "pipe")
    text = read_text(tmp_path)
    assert [document.name for document in text.documents] == ["a.txt", "b/x.unknown", "z.md"]
    assert {skip.name: skip.reason for skip in text.skipped} == {
        "again.md": "link within the folder",
        "empty.txt": "empty",
        "latin.txt": "binary: it is not UTF-8",
        "nul.txt": "binary: it has NUL bytes",
        "pipe": "not a regular file",
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"x" * 5000 + b"\0", "NUL"),
        (b"ok\xff", "UTF-8"),
        ("é".encode()[:1], "UTF-8"),
    ],
)
def test_an_unusable_file_is_named_with_the_reason(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        read_text(path)
    (problem,) = caught.value.problems
    assert str(path) in problem.where
    assert problem.fix
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_multibyte_character_across_read_pieces_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "_CHUNK", 3)
    (tmp_path / "a.txt").write_text("aé終b終")
    assert read_text(tmp_path / "a.txt").documents[0].content == "aé終b終".encode()


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file") as caught:
        read_text(tmp_path / "nowhere")
    assert "nowhere" in caught.value.problems[0].where


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        read_text(tmp_path / "pipe")


def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_text(Path("/proc/self/mem"))
    assert caught.value.problems[0].fix


def test_all_bad_files_of_a_folder_are_reported_together(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (folder / "good.txt").write_text("good")
    (folder / "leaves.txt").symlink_to(outside / "secret.txt")
    (folder / "leaves").symlink_to(outside)
    (folder / "dangling.txt").symlink_to(folder / "nowhere.txt")
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    with pytest.raises(DataError) as caught:
        read_text(folder)
    named = {Path(problem.where).name: problem for problem in caught.value.problems}
    assert set(named) == {"leaves.txt", "leaves", "dangling.txt", "loop.txt"}
    assert "out of the folder" in named["leaves.txt"].what
    assert all(problem.fix for problem in named.values())


@pytest.mark.parametrize("binary", [False, True])
def test_a_folder_with_nothing_left_says_what_was_skipped(tmp_path: Path, binary: bool) -> None:
    if binary:
        for number in range(30):
            (tmp_path / f"{number:02d}.bin").write_bytes(b"\0")
    with pytest.raises(DataError) as caught:
        read_text(tmp_path)
    why = caught.value.problems[0].why
    assert ("00.bin" in why and "10 more" in why) if binary else "no visible files" in why


def test_too_much_text_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "MAX_BYTES", 1 << 20)
    with (tmp_path / "sparse.txt").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(DataError, match="more than 1 MiB"):
        read_text(tmp_path / "sparse.txt")
    (tmp_path / "sparse.txt").unlink()
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x" * 600_000)
    with pytest.raises(DataError, match="more than 1 MiB"):
        read_text(tmp_path)


def test_the_embedded_corpus_is_the_top_of_the_standard_library() -> None:
    text = standard_library()
    names = [document.name for document in text.documents]
    assert {"argparse.py", "tarfile.py", "typing.py"} <= set(names)
    assert names == sorted(names)
    assert all("/" not in name and name.endswith(".py") for name in names)
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    assert text.documents[names.index("argparse.py")].content == source
    assert sum(len(document.content) for document in text.documents) > 2_000_000
