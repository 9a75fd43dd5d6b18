"""Text made into token ids, as bytes: any cut of the work gives the same, and nothing is lost, doubled or hidden."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import harness.data.prepare as module
from harness.core.errors import DataError, ExitCode
from harness.data import documents as module_of_text
from harness.data.corpus import Tokens
from harness.data.documents import PlainText
from harness.data.prepare import Preparation, Progress, prepare_dataset
from harness.data.rows import JsonLines
from harness.data.text import BadFiles, read_text
from harness.data.tokens import prepare
from tests.support.runs import harness, train
from tests.unit.data.token_files import config, headerless, some_ids


def documents(count: int = 300) -> list[str]:
    random = np.random.default_rng(3)
    return [f"{number}: " + "é" * int(random.integers(0, 200)) for number in range(count)]


def jsonl(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def read(out: Path, folder: Path) -> list[str]:
    """Every document, as a run reads it: training, then validation."""
    data = prepare(config(out, packing="documents"), folder)
    found: list[str] = []
    for split, tokens in (("train", data.train), ("val", data.val)):
        assert isinstance(tokens, Tokens)
        ((row,), damage) = tokens.read(np.arange(len(tokens))[None])
        assert not damage
        parts = np.split(row, data.starts(split)[1:])
        found += [bytes(part.astype(np.uint8).tolist()).decode() for part in parts]
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".idx")
    }


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts, tasks and pieces of some kilobytes."""
    monkeypatch.setattr(module_of_text, "RANGE", 1500)
    monkeypatch.setattr(module_of_text, "PIECE", 400)
    monkeypatch.setattr(module, "TASK_BYTES", 4000)


@pytest.mark.usefixtures("small")
def test_rows_are_neither_lost_nor_doubled_where_parts_meet(tmp_path: Path) -> None:
    texts = documents()
    source = jsonl(tmp_path / "a.jsonl", texts)
    parts = JsonLines().parts(source, "text", "auto").parts
    assert len(parts) > 20
    reader = JsonLines()
    assert [piece.text for part in parts for piece in reader.read(part, "text")] == texts
    for number in (17, 3, 9):  # also where they are not asked for in their order
        one = [piece.text for piece in reader.read(parts[number], "text")]
        assert one == [piece.text for piece in JsonLines().read(parts[number], "text")] != []
    prepare_dataset(Preparation(str(source), "JSONL"), tmp_path / "out", processes=1)
    assert len(list((tmp_path / "out").glob("train-*.bin"))) > 5
    assert sorted(read(tmp_path / "out", tmp_path / "run")) == sorted(f"{text}\n" for text in texts)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("lines", ["short", "none", "long"])
def test_text_is_cut_between_characters_and_nothing_is_lost(tmp_path: Path, lines: str) -> None:
    text = {"short": "é line\n" * 900, "none": "é" * 5000, "long": ("ü" * 1999 + "\n") * 4}[lines]
    (tmp_path / "a.txt").write_text(text)
    source = PlainText()
    parts = source.parts(tmp_path / "a.txt", "", "auto").parts
    assert len(parts) > 3
    pieces = [piece for part in parts for piece in source.read(part, "")]
    assert not any(piece.fault for piece in pieces)
    assert (
        b"".join(piece.text for piece in pieces if isinstance(piece.text, bytes)).decode() == text
    )
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_prepared_folder_that_lost_its_indexes_is_refused_by_their_names(tmp_path: Path) -> None:
    """Without its index a shard would be read as ids of any dtype, without the starts of its documents."""
    source = jsonl(tmp_path / "a.jsonl", documents())
    out = tmp_path / "out"
    prepare_dataset(Preparation(str(source), "JSONL"), out, processes=1)
    lost = sorted(out.glob("*.idx"))
    assert len(lost) == 2
    for index in lost:
        index.unlink()
    with pytest.raises(DataError) as caught:
        prepare(config(out), tmp_path / "run")
    named = [(each.what, each.where) for each in caught.value.problems]
    assert named == [
        ("is missing", f"data.path: {out / 'train-00000.idx'}"),
        ("is missing", f"data.path: {out / 'val-00000.idx'}"),
    ]


def test_links_and_pipes_are_treated_as_a_run_treats_them(tmp_path: Path) -> None:
    """`read_text` reads a folder that is small enough; a large one must not lose files that it would refuse."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "b.txt").write_text("elsewhere\n")
    (folder / "a.txt").write_text("here\n")
    (folder / "again.txt").symlink_to(folder / "a.txt")
    within = ("again.txt", "link within the folder")
    assert PlainText().parts(folder, "", "fail").left_out == (within,)
    assert [str(skip) for skip in read_text(folder, "fail").skipped] == ["{} ({})".format(*within)]

    (folder / "leaves.txt").symlink_to(outside / "b.txt")
    (folder / "leaves").symlink_to(outside)
    (folder / "dangling.txt").symlink_to(folder / "nowhere.txt")
    os.mkfifo(folder / "pipe.txt")
    refused = {"leaves.txt", "leaves", "dangling.txt"}
    readers: list[Callable[[BadFiles], Any]] = [
        lambda bad: PlainText().parts(folder, "", bad),
        lambda bad: read_text(folder, bad),
    ]
    for read_folder in readers:
        with pytest.raises(DataError) as caught:
            read_folder("auto")
        assert {Path(each.where).name for each in caught.value.problems} == refused
        with pytest.raises(DataError) as caught:
            read_folder("fail")
        assert {Path(each.where).name for each in caught.value.problems} == refused | {"pipe.txt"}
    left_out = dict(PlainText().parts(folder, "", "skip").left_out)
    assert left_out.keys() == refused | {"pipe.txt", "again.txt"}
    assert left_out["leaves.txt"] == f"is a link out of the folder, to {outside / 'b.txt'}"


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_number_of_processes_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl", documents())
    prepare_dataset(Preparation(str(source), "JSONL"), tmp_path / "one", processes=1)
    monkeypatch.setattr(module, "_INLINE", 0)
    told: list[Progress] = []
    prepare_dataset(Preparation(str(source), "JSONL"), tmp_path / "three", 3, told.append)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert (told[-1].finished, told[-1].done) == (told[-1].tasks, told[-1].total)


@pytest.mark.usefixtures("small")
def test_what_is_done_is_kept_and_what_is_damaged_made_again(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", documents())
    wanted = Preparation(str(source), "JSONL")
    prepare_dataset(wanted, tmp_path / "whole", processes=1)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(wanted, out, 1, lambda progress: _interrupt(progress, 3))
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("train-*.bin")}
    assert len(kept) == 3
    (out / "train-00001.bin").write_bytes(b"cut")
    (out / ".train-00003.bin.99.tmp").write_bytes(b"left by a killed worker")
    progress: list[int] = []
    prepare_dataset(wanted, out, 1, lambda each: progress.append(each.kept))
    assert progress[0] == 2
    assert contents(out) == contents(tmp_path / "whole")
    assert (out / "train-00000.bin").stat().st_mtime_ns == kept["train-00000.bin"]
    assert not list(out.glob(".*"))
    assert prepare_dataset(wanted, out)["sha256"], "what is finished is only read"


def _interrupt(progress: Progress, after: int) -> None:
    if progress.finished >= after:
        raise KeyboardInterrupt


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.4, 0.6, 0.9, 0.99])
def test_as_much_is_held_out_as_was_asked_for(tmp_path: Path, share: float) -> None:
    lines = [f"{number:07d}" for number in range(2000)]
    source = jsonl(tmp_path / "a.jsonl", lines)
    prepare_dataset(Preparation(str(source), "JSONL", val_fraction=share), tmp_path / "out")
    held = sum(file.stat().st_size for file in (tmp_path / "out").glob("val-*.bin"))
    every = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.bin"))
    assert held / every == pytest.approx(share, abs=0.02 * min(1, 10 * share))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_documents_of_both_splits_are_counted_across_tasks_and_tries(tmp_path: Path) -> None:
    texts = documents()
    source = jsonl(tmp_path / "a.jsonl", [*texts, *texts[:150]])
    wanted = Preparation(str(source), "JSONL", val_fraction=0.1)
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(wanted, tmp_path / "out", 1, lambda progress: _interrupt(progress, 3))
    made = prepare_dataset(wanted, tmp_path / "out", processes=1)
    found = read(tmp_path / "out", tmp_path / "run")
    copies, count = made["repeated_documents"]
    trained, val = found[:-count], found[-count:]
    assert copies == len([text for text in val if text in trained])
    assert (
        10
        < copies
        < count
        == sum(part["documents"] for part in made["shards"] if part["split"] == "val")
    )
    assert not list((tmp_path / "out").glob("hashes-*"))
    unique = jsonl(tmp_path / "b.jsonl", texts)
    made = prepare_dataset(Preparation(str(unique), "JSONL"), tmp_path / "b", processes=1)
    assert made["repeated_documents"][0] == 0


def test_another_preparation_in_the_folder_is_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", documents())
    prepare_dataset(Preparation(str(source), "JSONL"), tmp_path / "out")
    with pytest.raises(DataError, match="with another val_fraction"):
        prepare_dataset(Preparation(str(source), "JSONL", val_fraction=0.3), tmp_path / "out")
    with pytest.raises(DataError, match="it is not empty"):
        prepare_dataset(Preparation(str(source), "JSONL"), tmp_path)
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="is being made by another process"):
        prepare_dataset(Preparation(str(source), "JSONL"), tmp_path / "out")
    os.close(descriptor)


NO_ROWS = {
    "JSON parse error(.|\n)*jq -c": "{text}\n",
    "surrogate pair": '{"text": "a\\ud800"}\n',
    "is text in some rows, and not in others": '{"text": 3}\n',
}


@pytest.mark.parametrize("bad", ["auto", "skip"])
@pytest.mark.parametrize("fault", NO_ROWS)
def test_what_the_library_cannot_read_is_refused(tmp_path: Path, fault: str, bad: BadFiles) -> None:
    """A text among numbers above all, which the library would give as JSON, with its quotes."""
    source = jsonl(tmp_path / "a.jsonl", documents(50))
    with source.open("a") as stream:
        stream.write(NO_ROWS[fault])
    with pytest.raises(DataError, match=rf"a\.jsonl(.|\n)*{fault}"):
        prepare_dataset(Preparation(str(source), "JSONL", bad=bad), tmp_path / "out")


def test_bad_rows_are_named_or_skipped_and_counted(tmp_path: Path) -> None:
    fault = '"text" is missing'
    source = jsonl(tmp_path / "a.jsonl", documents(50))
    with source.open("a") as stream:
        stream.write('{"content": "a"}\n{"text": ""}\n')
    with pytest.raises(DataError, match=fault) as caught:
        prepare_dataset(Preparation(str(source), "JSONL"), tmp_path / "out")
    assert "a.jsonl, row 50" in caught.value.problems[0].where
    made = prepare_dataset(Preparation(str(source), "JSONL", bad="skip"), tmp_path / "skipped")
    assert made["documents"] == 50
    assert {skip["name"] for skip in made["skipped"]} == {"1 rows"}
    assert any(fault in skip["reason"] for skip in made["skipped"])
    assert any(skip["reason"] == "empty" for skip in made["skipped"])


def test_a_prepared_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_dataset(
        Preparation(str(jsonl(tmp_path / "a.jsonl", documents())), "JSONL", val_fraction=0.2), out
    )
    val = (out / "val-00000.bin").read_bytes()
    (out / "val-00000.bin").unlink()
    with pytest.raises(DataError, match=r"val-00000\.bin: is missing"):
        prepare(config(out), tmp_path / "run")
    (out / "val-00000.bin").write_bytes(bytes([val[0] ^ 1]) + val[1:])
    with pytest.raises(DataError, match="it is not what was prepared"):
        prepare(config(out), tmp_path / "run")
    (out / "val-00000.bin").write_bytes(val)
    assert prepare(config(out), tmp_path / "run").vocab == 256


@pytest.mark.slow
def test_the_command_says_what_it_made_and_what_it_will_not(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("some text\n" * 200)
    (folder / "b.txt").write_bytes(b"\0\1")
    done = harness(tmp_path, "data", "prepare", "texts", "--out", "out")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "2,001 tokens to train on" in done.stdout
    assert "left out: b.txt (binary: it has NUL bytes)" in done.stdout
    headerless(tmp_path / "train.bin", some_ids(100))
    for source, message in (
        ("train.bin", "has token ids already"),
        ("nowhere", "no such file or folder"),
    ):
        refused = harness(tmp_path, "data", "prepare", source, "--out", "other")
        assert refused.returncode == ExitCode.USAGE
        assert message in refused.stderr


@pytest.mark.slow
def test_a_validation_that_is_trained_on_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for name in ("train", "val"):
        jsonl(tmp_path / "rows" / f"{name}.jsonl", documents())
    told = "300 of the 300 documents to validate on are among those to train on, too"
    made = harness(tmp_path, "data", "prepare", "rows", "--out", "made")
    assert told in made.stdout, made.stdout + made.stderr
    done = train(tmp_path, "--recipe", "bf16", "--dry-run", "data.path=rows")
    assert f"data note: {told}" in done.stdout.replace("\n", " "), done.stdout
