"""What people point data.path at: read as what it is, or refused with a way in that works; never by mistake."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import ipc, parquet

from harness.core.errors import DataError, ExitCode
from harness.data.corpus import Tokens
from harness.data.detect import look
from harness.data.prepare import Preparation, prepare_dataset
from harness.data.rows import WebDataset
from harness.data.snapshot import TokenFile
from harness.data.tokens import TokenData, prepare
from tests.support.runs import ROOT, harness, train
from tests.unit.data.token_files import config, headerless, some_ids

LINES = [f"{number}: the quick brown fox\n" for number in range(60)]
ROWS = [json.dumps({"text": line, "n": 1}) for line in LINES]


def split(data: TokenData, name: str) -> bytes:
    tokens = data.train if name == "train" else data.val
    if isinstance(tokens, Tokens):
        ((row,), damage) = tokens.read(np.arange(len(tokens))[None])
        assert not damage
        return row.astype(np.uint8).tobytes()
    assert isinstance(tokens, TokenFile)
    return b"".join(tokens.chunks())


def texts(path: Path, run: Path, **more: object) -> list[str]:
    """Lines of training and validation, sorted."""
    data = prepare(config(path, **more), run)
    return sorted(
        line
        for name in ("train", "val")
        for line in split(data, name).decode().split("\n")
        if line.strip()
    )


def left_out(data: TokenData) -> dict[str, str]:
    return {skip["name"]: skip["reason"] for skip in data.info["skipped"]}


MIXED = [json.dumps({"text": line, "n": n if n < 30 else str(n)}) for n, line in enumerate(LINES)]
EXPECTED = sorted(line.strip() for line in LINES)
JSON = {
    "mark.jsonl": b"\xef\xbb\xbf" + "\n".join(ROWS).encode(),
    "windows.jsonl": "\r\n".join(ROWS).encode(),
    "blank.jsonl": ("\n\n".join(ROWS) + "\n \n\n").encode(),
    "blank_and_mixed.jsonl": ("\n \n".join(MIXED) + "\n\n").encode(),
    "mixed_windows.jsonl": ("\r\n\r\n".join(MIXED) + "\r\n\r\n").encode(),
    "array.json": json.dumps([json.loads(row) for row in ROWS]).encode(),
    "indented.json": json.dumps([json.loads(row) for row in ROWS], indent=2).encode(),
    "lines.json": "\n".join(ROWS).encode(),
    "packed.jsonl.gz": gzip.compress("\n".join(ROWS).encode()),
    "c4.00000-of-00002.json.gz": gzip.compress("\n".join(ROWS).encode()),
}


@pytest.mark.parametrize("name", JSON)
def test_json_as_it_is_found_has_the_same_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(JSON[name])
    assert texts(tmp_path / name, tmp_path / "one") == EXPECTED
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / name).replace(folder / name)
    (folder / "README.md").write_text("about")
    assert texts(folder, tmp_path / "two") == EXPECTED


def test_a_large_array_is_refused_and_large_json_lines_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.data.rows.MAX_LARGE", 1000)
    for name in ("array.json", "lines.json"):
        (tmp_path / name).write_bytes(JSON[name])
    assert texts(tmp_path / "lines.json", tmp_path / "one") == EXPECTED
    with pytest.raises(DataError, match=r"array\.json: is too large(.|\n)*jq -c '\.\[\]'"):
        prepare(config(tmp_path / "array.json"), tmp_path / "two")


def test_a_key_may_lie_within_another(tmp_path: Path) -> None:
    path = tmp_path / "nested.jsonl"
    path.write_text("\n".join(json.dumps({"meta": {"text": line}, "a.b": line}) for line in LINES))
    assert texts(path, tmp_path / "one", text_key="meta.text") == EXPECTED
    assert texts(path, tmp_path / "two", text_key="a.b") == EXPECTED
    with pytest.raises(DataError, match=r'"text" is missing\n    why: the row has meta, a.b'):
        prepare(config(path), tmp_path / "three")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_key_may_lie_within_another_in_columns(tmp_path: Path, suffix: str) -> None:
    rows = [{"meta": {"inner": {"text": line}, "n": 1}, "a.b": line, "n": 2} for line in LINES]
    table = pyarrow.Table.from_pylist([*rows, {"meta": None}])
    path = tmp_path / f"nested.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path, row_group_size=20)
    else:
        with pyarrow.OSFile(str(path), "wb") as file, ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=20)
    nested = {"text_key": "meta.inner.text", "bad": "skip"}
    assert texts(path, tmp_path / "one", **nested) == EXPECTED
    assert texts(path, tmp_path / "two", text_key="a.b", bad="skip") == EXPECTED
    with pytest.raises(DataError, match=r'"meta.text" is missing'):
        prepare(config(path, text_key="meta.text"), tmp_path / "three")


def test_separators_of_unicode_do_not_end_a_row(tmp_path: Path) -> None:
    line = "a\u2028b\u2029c\u0085d\x0be"
    path = tmp_path / "odd.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": f"{n} {line}"}, ensure_ascii=False) for n in range(40)),
        newline="",
    )
    assert texts(path, tmp_path / "run") == sorted(f"{n} {line}" for n in range(40))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n".join(ROWS)[:-5].encode(), "cannot be read as JSONL"),
        ("\n".join(ROWS).encode("utf-16"), "cannot be read as JSONL"),
        ("\n".join(json.dumps([line]) for line in LINES).encode(), "cannot be read as JSONL"),
        (b'{"text": "\xff"}\n' * 50, "can't decode byte 0xff"),
        (
            "\n".join(json.dumps({"text": [1, 2]}) for _ in LINES).encode(),
            r"list<.*>, not text\n.*tofile\(",
        ),
    ],
)
def test_rows_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(config(tmp_path / "bad.jsonl"), tmp_path / "run")


@pytest.mark.parametrize("how", ["gz", "zst"])
@pytest.mark.parametrize("rows", [1, 2000])
def test_a_packed_file_that_was_cut_short_is_refused(tmp_path: Path, how: str, rows: int) -> None:
    content = "\n".join(ROWS * rows).encode()
    packed = (
        gzip.compress(content)
        if how == "gz"
        else pyarrow.compress(content, codec="zstd", asbytes=True)
    )
    path = tmp_path / f"cut.jsonl.{how}"
    path.write_bytes(packed[: len(packed) - 20])
    with pytest.raises(DataError, match=rf"cut\.jsonl\.{how}(.|\n)*(end-of-stream|Truncated)"):
        prepare(config(path), tmp_path / "run")


TABLE = {"csv": ",", "tsv": "\t"}
ODD = ["007", "NA", "null", "1.0", "True", "2020-01-01", 'a "quote"', " a ", "x,y\tz"]


@pytest.mark.parametrize("suffix", [*TABLE, "csv.gz", "csv.zst"])
def test_fields_of_a_table_are_texts_as_they_stand(tmp_path: Path, suffix: str) -> None:
    mark = TABLE[suffix.partition(".")[0]]
    quoted = ['"' + text.replace('"', '""') + '"' for text in [*ODD, *map(str.strip, LINES)]]
    content = f"n{mark}text\n" + "".join(
        f"{number}{mark}{text}\n" for number, text in enumerate(quoted)
    )
    packed = {
        "gz": gzip.compress,
        "zst": lambda raw: pyarrow.compress(raw, codec="zstd", asbytes=True),
    }
    raw = packed.get(suffix.partition(".")[2], bytes)(content.encode())
    path = written(tmp_path / f"table.{suffix}", raw)
    assert texts(path, tmp_path / "run") == sorted([*ODD, *EXPECTED])
    with pytest.raises(DataError, match='"story" is missing\n    why: the row has n, text'):
        prepare(config(path, text_key="story"), tmp_path / "other")


# pandas leaves the file open. Collected at once, so that no later test is blamed for it.
pandas_leaves_open = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pandas_leaves_open
@pytest.mark.parametrize(
    ("row", "message"), [("1,a,b,c", "cannot be read as csv"), ('1,"a', "line 402: unexpected end")]
)
def test_a_broken_table_is_refused(tmp_path: Path, row: str, message: str) -> None:
    path = written(tmp_path / "table.csv", "n,text\n" + "0,some words\n" * 400 + row + "\n")
    with pytest.raises(DataError, match=rf"table\.csv(.|\n)*{message}"):
        prepare(config(path), tmp_path / "run")
    gc.collect()


@pandas_leaves_open
@pytest.mark.parametrize("encoding", ["latin1", "utf-16"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_rows_in_another_encoding_name_the_command(
    tmp_path: Path, suffix: str, encoding: str
) -> None:
    rows = ["text", *LINES] if suffix == "csv" else ROWS
    content = "\n".join(rows).replace("fox", "f\u00f6x").encode(encoding)
    path = written(tmp_path / f"rows.{suffix}", content)
    with pytest.raises(DataError, match=r"can't decode(.|\n)*iconv -f utf-16 -t utf-8.*-f latin1"):
        prepare(config(path), tmp_path / "run")
    gc.collect()


@pandas_leaves_open
@pytest.mark.parametrize(
    ("names", "row"),
    [
        ("text,n", "some, words {n},{n}"),
        ("n,text", "{n},Question {n}, the short answer"),
        ("n,text", "7,Question {n}, the short answer"),
        ("n,text", "{n},words,"),
    ],
)
def test_a_table_with_more_fields_than_names_is_refused(
    tmp_path: Path, names: str, row: str
) -> None:
    """By itself pandas reads the next column in place of the one that was named."""
    rows = [row.format(n=n) for n in range(300)]
    path = written(tmp_path / "table.csv", "\n".join([names, *rows]))
    with pytest.raises(DataError, match=r"table\.csv: has more fields in a row than names"):
        prepare(config(path), tmp_path / "run")
    gc.collect()


@pytest.mark.parametrize(
    ("first", "last"), [('"Hello" he said', '"Bye" she said'), ('"unpaired', 'a nail of 6"')]
)
@pytest.mark.parametrize("suffix", ["csv", "tsv", "tsv.gz"])
def test_a_table_without_quoting_is_refused_with_a_way_in(
    tmp_path: Path, first: str, last: str, suffix: str
) -> None:
    """pandas makes one text of all rows from one quote to the next."""
    lines = [line.strip() for line in LINES]
    lines[10], lines[50] = first, last
    mark = TABLE[suffix.partition(".")[0]]
    content = f"n{mark}text\n" + "".join(f"{n}{mark}{line}\n" for n, line in enumerate(lines))
    raw = gzip.compress(content.encode()) if suffix == "tsv.gz" else content.encode()
    path = written(tmp_path / f"table.{suffix}", raw)
    message = rf"table\.{suffix}: has quotes that quote nothing(.|\n)*why: line 12"
    with pytest.raises(DataError, match=message) as caught:
        prepare(config(path), tmp_path / "run")
    command = re.search(r"python (-c .*? > NEW\.csv)", caught.value.problems[0].fix)
    assert command is not None
    if suffix != "tsv.gz" and first == '"unpaired':
        words = command[1].replace("FILE", str(path), 1).replace("NEW", str(tmp_path / "NEW"))
        subprocess.run(f"{sys.executable} {words}", shell=True, check=True)
        assert texts(tmp_path / "NEW.csv", tmp_path / "two") == sorted(lines)


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_table_with_another_separator_names_the_command(tmp_path: Path, mark: str) -> None:
    rows = [f'{n}{mark}"{line.strip()}, indeed{mark}"\n' for n, line in enumerate(LINES)]
    path = written(tmp_path / "table.csv", f"n{mark}text\n" + "".join(rows))
    with pytest.raises(DataError, match=r"between its columns, not ','") as caught:
        prepare(config(path), tmp_path / "run")
    command = caught.value.problems[0].fix.partition("python ")[2].split("; then")[0]
    words = command.replace("FILE", str(path), 1).replace("NEW", str(tmp_path / "NEW"))
    subprocess.run(f"{sys.executable} {words}", shell=True, check=True)
    expected = sorted(f"{line.strip()}, indeed{mark}".strip() for line in LINES)
    assert [each.strip() for each in texts(tmp_path / "NEW.csv", tmp_path / "two")] == expected
    single = written(tmp_path / "one.csv", f"a{mark}b\n" + "".join(LINES))
    assert texts(single, tmp_path / "three", text_key=f"a{mark}b") == EXPECTED


def test_quotes_after_a_backslash_are_refused_with_a_way_in(tmp_path: Path) -> None:
    """pandas ends the field at such a quote; the rest of the text loses its quotes, or runs into the next rows."""
    rows = [f'{n},"{line.strip()} \\"so it says\\""\n' for n, line in enumerate(LINES)]
    path = written(tmp_path / "table.csv", "n,text\n" + "".join(rows))
    with pytest.raises(DataError, match=r"line 2: ',' expected after '\"'") as caught:
        prepare(config(path), tmp_path / "run")
    command = re.search(r"python (-c .*? > NEW\.csv)", caught.value.problems[0].fix)
    assert command is not None
    words = command[1].replace("quoting=csv.QUOTE_NONE", "escapechar=chr(92), doublequote=False")
    words = words.replace("FILE", str(path), 1).replace("NEW", str(tmp_path / "NEW"))
    subprocess.run(f"{sys.executable} {words}", shell=True, check=True)
    expected = sorted(f'{line.strip()} "so it says"' for line in LINES)
    assert texts(tmp_path / "NEW.csv", tmp_path / "two") == expected


def test_commas_and_lines_within_quotes_are_text(tmp_path: Path) -> None:
    rows = [f'{n},"{n}, one\ntwo, ""three"""\r\n' for n in range(40)]
    path = written(tmp_path / "table.csv", "n,text\r\n" + "".join(rows))
    assert len(texts(path, tmp_path / "run")) == 80


def test_tabs_and_lines_within_quotes_are_text(tmp_path: Path) -> None:
    rows = [f'{n}\t"{n} one\n\ttwo\tthree ""four"""\n' for n in range(40)]
    path = written(tmp_path / "table.tsv", "n\ttext\n" + "".join(rows))
    assert len(texts(path, tmp_path / "one")) == 80
    rows = [f'"{n} one\ntwo"\n' for n in range(40)]
    path = written(tmp_path / "column.tsv", "text\n" + "".join(rows))
    assert len(texts(path, tmp_path / "two")) == 80


def webdataset(path: Path, samples: list[dict[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for number, sample in enumerate(samples):
            for ending, content in sample.items():
                entry = tarfile.TarInfo(f"{number:04}.{ending}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.slow
def test_samples_of_webdataset_are_read_by_their_ending(tmp_path: Path) -> None:
    samples = [{"txt": line.strip().encode(), "json": json.dumps({"text": f"meta {line.strip()}"}).encode()}
               for line in LINES]  # fmt: skip
    path = webdataset(tmp_path / "samples.tar", samples)
    assert texts(path, tmp_path / "one", text_key="txt") == EXPECTED
    assert texts(path, tmp_path / "two", text_key="json.text") == sorted(
        f"meta {line}" for line in EXPECTED
    )
    with pytest.raises(
        DataError, match=r'has no "text"\n    why: it has txt, json\n    fix: set data.text_key'
    ):
        prepare(config(path), tmp_path / "three")
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(DataError, match="cannot be read as webdataset"):
        prepare(config(path, text_key="txt"), tmp_path / "four")


@pytest.mark.parametrize("lacking", [2, 44])
def test_a_sample_without_the_text_is_named_or_skipped(tmp_path: Path, lacking: int) -> None:
    samples = [{"txt": line.strip().encode(), "json": b"{}"} for line in LINES]
    del samples[lacking]["txt"]
    path = webdataset(tmp_path / "a.tar", samples)
    where = f'a.tar, row {lacking}, sample {lacking:04}: "txt" is missing'
    with pytest.raises(DataError, match=where):
        prepare(config(path, text_key="txt"), tmp_path / "one")
    left = sorted(line.strip() for n, line in enumerate(LINES) if n != lacking)
    assert texts(path, tmp_path / "two", text_key="txt", bad="skip") == left


def test_an_archive_that_does_not_end_as_one_is_refused(tmp_path: Path) -> None:
    """tarfile ends without an error wherever it finds no header."""
    whole = webdataset(tmp_path / "a.tar", [{"txt": line.encode()} for line in LINES]).read_bytes()
    middle = 30 * 1024  # a header and a block for each sample
    damaged = bytearray(whole)
    damaged[middle + 200] ^= 1
    broken = {
        "cut within a header": (whole[: middle + 100], "cut short or damaged after 0029.txt"),
        "cut within a text": (whole[: middle + 600], "unexpected end of data"),
        "cut after a text": (whole[:middle], r"zeros .* missing after 0029.txt(.|\n)*truncate"),
        "damaged": (bytes(damaged), "cut short or damaged after 0029.txt"),
        "joined": (whole + whole, "more behind the end"),
        "packed": (gzip.compress(whole[: middle + 100]), "cut short or damaged after 0029.txt"),
    }
    for name, (content, message) in broken.items():
        path = written(tmp_path / f"{name}.tar", content)
        with pytest.raises(DataError, match=rf"{name}\.tar: cannot(.|\n)*{message}"):
            WebDataset().parts(path, "txt", "auto")

    path = written(tmp_path / "cut after a text.tar", whole[:middle])
    subprocess.run(["truncate", "-s", "+1024", path], check=True)
    assert texts(path, tmp_path / "run", text_key="txt") == sorted(
        each.strip() for each in LINES[:30]
    )


def test_archives_of_tar_are_whole(tmp_path: Path) -> None:
    for number, line in enumerate(LINES):
        written(tmp_path / "in" / f"{'long' * 40}{number:04}.txt", line.strip())
    names = sorted(os.listdir(tmp_path / "in"))
    for options in ([], ["--format=pax"], ["-b", "1"], ["-b", "100"], ["-z"]):
        path = tmp_path / f"{''.join(options)}.tar"
        tar = ["tar", *options, "-C", str(tmp_path / "in")]
        if options == ["-z"]:
            subprocess.run([*tar, "-cf", path, *names], check=True)
        else:
            subprocess.run([*tar, "-cf", path, *names[:30]], check=True)
            subprocess.run([*tar, "--append", "-f", path, *names[30:]], check=True)
        (part,) = WebDataset().parts(path, "txt", "auto").parts
        assert len(list(WebDataset().read(part, "txt"))) == len(LINES)


def test_a_pickle_in_a_tar_stays_asleep(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path / 'canary'}",)

    trap = pickle.dumps(Trap())
    samples = [{"txt": line.strip().encode(), "pkl": trap, "pickle": trap} for line in LINES]
    assert (
        texts(webdataset(tmp_path / "a.tar", samples), tmp_path / "run", text_key="txt") == EXPECTED
    )
    for ending in ("pth", "npy"):
        path = webdataset(tmp_path / f"{ending}.tar", [{"txt": b"a", ending: trap}] * 9)
        with pytest.raises(DataError, match="cannot be read as webdataset"):
            prepare(config(path, text_key="txt"), tmp_path / ending)
    assert not (tmp_path / "canary").exists()


def test_names_are_no_patterns(tmp_path: Path) -> None:
    written(tmp_path / "a1.jsonl", '{"text": "another"}\n')
    path = written(tmp_path / "a[1]*?.jsonl", "\n".join(ROWS))
    assert texts(path, tmp_path / "run") == EXPECTED


def test_the_command_for_utf_16_works(tmp_path: Path) -> None:
    (tmp_path / "OLD").write_bytes("".join(LINES).encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16, not UTF-8") as caught:
        prepare(config(tmp_path / "OLD"), tmp_path / "run")
    command = re.search(r"iconv [^(]*", caught.value.problems[0].fix)
    assert command is not None
    subprocess.run(command[0], shell=True, check=True, cwd=tmp_path)
    assert texts(tmp_path / "NEW", tmp_path / "run") == EXPECTED


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".bin"])
def test_a_test_split_is_never_trained_on(tmp_path: Path, suffix: str) -> None:
    names = {"train-0": "train", "validation-0": "val", "test-0": "TEST"}
    for name, word in names.items():
        lines = [f"{word} {number} the quick brown fox\n" for number in range(40)]
        content = (
            "".join(lines)
            if suffix == ".txt"
            else "\n".join(json.dumps({"text": line}) for line in lines)
        )
        (tmp_path / f"{name}{suffix}").write_text(content)
        if suffix == ".bin":
            headerless(
                tmp_path / f"{name}{suffix}", np.full(2000, list(names).index(name) + 40), "uint8"
            )
    (tmp_path / "README.md").write_text("a card")
    data = prepare(config(tmp_path, dtype="uint8"), tmp_path / "runs")
    trained, validated = split(data, "train"), split(data, "val")
    if suffix == ".bin":
        assert (set(trained), set(validated)) == ({40}, {41})
    else:
        assert (b"train 3" in trained, b"train" in validated, b"TEST" in trained + validated) == (
            True,
            False,
            False,
        )
        assert (b"val 3" in validated, b"val" in trained) == (True, False)
    assert "test split" in left_out(data)[f"test-0{suffix}"]


def test_a_test_split_that_is_alone_is_the_data(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("\n".join(ROWS))
    assert texts(tmp_path, tmp_path / "run") == EXPECTED


def test_one_text_called_train_takes_what_lies_beside_it(tmp_path: Path) -> None:
    for name in ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"):
        (tmp_path / name).write_text(f"{name} {''.join(LINES)}")
    data = prepare(config(tmp_path / "wiki.train.tokens"), tmp_path / "run")
    assert split(data, "val").startswith(b"wiki.valid.tokens")
    assert b"wiki.t" not in split(data, "train")[10:]


def test_a_source_tree_is_not_split_by_its_names(tmp_path: Path) -> None:
    for name in ("train.py", "validation.py", "test_it.py", "model.py", "train.c"):
        (tmp_path / name).write_text("".join(LINES))
    data = prepare(config(tmp_path), tmp_path / "run")
    assert sorted({file["name"] for file in data.info["files"]}) == sorted(
        each.name for each in tmp_path.glob("*.*")
    )


def written(path: Path, content: bytes | str = b"\0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


PACKED = {
    "a.npy": ("tofile", "a.bin"),
    "a.txt.gz": ("gunzip -k", "a.txt"),
    "a.txt.zst": ("zstd -d", "a.txt"),
    "a.tar.gz": ("tar -xf", "a"),
    "a.zip": ("unzip", "a"),
}
NO_TEXT = ["a.npz", "a.pt", "a.h5", "a.pkl", "a.safetensors", "a.png", "a.tfrecord", "a.pdf"]


@pytest.mark.parametrize("name", PACKED)
def test_what_must_be_unpacked_says_how(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "folder" / "in" / name, b"a,b\n1,2\n")
    command, made = PACKED[name]
    for each in (path, path.parent.parent):
        with pytest.raises(DataError) as caught:
            look(each)
        assert "is not read" in str(caught.value)
        assert command in str(caught.value)
        assert re.search(rf"data\.path={path.parent / made}( |$)", caught.value.problems[0].fix)
        with pytest.raises(DataError):
            prepare(config(each), tmp_path / "run")


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_refused_with_the_way_in(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "folder" / "in" / name, b"\x89\0\1\2" * 30)
    message = rf"{name}(.|\n)*NUL bytes(.|\n)*data\.target: docs/guide/datasets\.md"
    for each in (path, path.parent.parent):
        with pytest.raises(DataError, match=message):
            prepare(config(each), tmp_path / "run")
        with pytest.raises(DataError, match=message):
            prepare_dataset(Preparation(str(each), "text"), tmp_path / "out")


def fix(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        look(path)
    return caught.value.problems[0].fix


@pytest.mark.parametrize("factor", [1, 2000])  # ids over 65535, which uint16 would wrap in silence
def test_the_command_for_token_ids_in_numpy_works(factor: int, tmp_path: Path) -> None:
    ids = some_ids(4000).astype(np.int64) * factor
    np.save(tmp_path / "ids.npy", ids.reshape(40, 100))
    command = re.search(
        r"python -c (\".*?\"); then data.path=\S+ data.dtype=(\w+)", fix(tmp_path / "ids.npy")
    )
    assert command is not None
    subprocess.run(f"{sys.executable} -c {command[1]}", shell=True, check=True)
    data = prepare(config(tmp_path / "ids.bin", dtype=command[2]), tmp_path / "run")
    assert isinstance(data.train, Tokens)
    ((row,), _) = data.train.read(np.arange(len(data.train))[None])
    assert np.array_equal(row, ids[: len(row)])


@pytest.mark.parametrize("kind", ["npz", "pt"])
@pytest.mark.slow
def test_the_lines_for_a_data_target_work(tmp_path: Path, kind: str) -> None:
    x, y = torch.randn(64, 16), torch.arange(64) % 3
    path = tmp_path / f"pairs.{kind}"
    if kind == "npz":
        np.savez(path, x=x.numpy(), y=y.numpy())
    else:
        torch.save((x, y), path)
    page = (
        (ROOT / "docs" / "guide" / "datasets.md")
        .read_text()
        .split("## Arrays and tensors")[1]
        .split("\n## ")[0]
    )
    (code,) = [
        each
        for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if f"pairs.{kind}" in each
    ]
    (tmp_path / "my_data.py").write_text(
        f"{code}\n\ndef build(**_): return torch.nn.Linear(16, 3)\n"
    )
    done = train(tmp_path, "--name", "r", "--recipe", "bf16", "data.path=null", "data.target=my_data:load",
                 "model.target=my_data:build", "train.steps=2")  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_pictures_of_the_docs_train_as_they_say(tmp_path: Path) -> None:
    page = (
        (ROOT / "docs" / "guide" / "datasets.md")
        .read_text()
        .split("## Pictures in folders")[1]
        .split("\n## ")[0]
    )
    code, command = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_data.py").write_text(code)
    for number in range(60):
        folder = tmp_path / "FOLDER" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (20, 30, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{'png' if number % 3 else 'jpg'}")
    words = shlex.split(command.replace("\\\n", " "))
    small = [
        "train.steps=2",
        "train.global_batch=8",
        "train.micro_batch=8",
        "tracking.mlflow=false",
    ]
    done = harness(tmp_path, *words[1:], *small, "tracking.report=false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "54 samples to train on" in done.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("someone/their-data", "data.path=hf:someone/their-data"),
        (
            "https://example.org/x/book.txt?raw=1",
            "curl -L -o book.txt 'https://example.org/x/book.txt?raw=1'",
        ),
        ("s3://bucket/x", "copy it"),
    ],
)
def test_an_address_or_a_name_of_the_hub_is_told_as_such(
    tmp_path: Path, given: str, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepare(config(given), tmp_path / "run")
    assert words in str(caught.value)
    assert given in str(caught.value)


def test_a_path_that_is_nearly_right_is_suggested(tmp_path: Path) -> None:
    written(tmp_path / "books" / "a.txt", "text")
    with pytest.raises(DataError, match="did you mean books"):
        prepare(config(tmp_path / "boks"), tmp_path / "run")
    done = harness(tmp_path, "data", "prepare", "boks", "--out", "x")
    assert done.returncode == ExitCode.USAGE
    assert "did you mean books" in done.stderr


@pytest.mark.slow
def test_files_of_several_kinds_are_refused_until_one_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    written(folder / "a.txt", "".join(LINES))
    written(folder / "b.jsonl", "\n".join(ROWS))
    with pytest.raises(
        DataError, match=r"several kinds(.|\n)*JSONL: b\.jsonl(.|\n)*data\.format=JSONL"
    ):
        prepare(config(folder), tmp_path / "one")
    assert texts(folder, tmp_path / "two", format="JSONL") == EXPECTED
    assert len(texts(folder, tmp_path / "three", format="text")) == 120
    done = harness(tmp_path, "data", "prepare", "mixed", "--out", "ready", "--format", "JSONL")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("beside", ["schema.yaml", "make.py", "notes.txt"])
def test_a_json_of_data_is_not_read_as_text(tmp_path: Path, beside: str) -> None:
    folder = tmp_path / "mixed"
    written(folder / "train.json", "\n".join(ROWS))
    written(folder / beside, "a: b\n")
    with pytest.raises(DataError, match=r"several kinds(.|\n)*JSONL: train\.json"):
        look(folder)
    assert texts(folder, tmp_path / "run", format="JSONL") == EXPECTED


def test_a_json_beside_json_lines_is_named_as_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    written(folder / "part1.jsonl", "\n".join(ROWS))
    written(folder / "part2.json", "\n".join(ROWS))
    data = prepare(config(folder), tmp_path / "run")
    assert "data only where there is nothing else" in left_out(data)["part2.json"]


def test_a_vocabulary_beside_token_ids_is_not_the_data(tmp_path: Path) -> None:
    folder = tmp_path / "ids"
    folder.mkdir()
    headerless(folder / "shard_0.bin", some_ids(3000))
    written(folder / "vocab.txt", "".join(LINES))
    with pytest.raises(DataError, match=r"both token ids and text(.|\n)*vocab\.txt"):
        look(folder)


def test_a_link_to_another_file_of_rows_is_read_once(tmp_path: Path) -> None:
    folder = tmp_path / "linked"
    written(folder / "b.jsonl", "\n".join(ROWS))
    (folder / "a.jsonl").symlink_to(folder / "b.jsonl")
    (folder / "latest.jsonl").symlink_to("b.jsonl")
    data = prepare(config(folder), tmp_path / "run")
    assert texts(folder, tmp_path / "run") == EXPECTED
    links = {name for name, reason in left_out(data).items() if "link" in reason}
    assert links == {"a.jsonl", "latest.jsonl"}


def test_a_little_json_in_a_tree_of_text_is_text(tmp_path: Path) -> None:
    written(tmp_path / "tree" / "big.c", "".join(LINES) * 100)
    written(tmp_path / "tree" / "fixture.jsonl", ROWS[0])
    for number in range(20):
        written(tmp_path / "code" / f"{number}.py", "".join(LINES))
    written(tmp_path / "code" / "fixture.jsonl", ROWS[0])
    assert look(tmp_path / "tree") == look(tmp_path / "code") == "text"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("".join(LINES).encode(), "is text, not token ids"),
        (
            np.random.default_rng(0).normal(size=4000).astype("<f4").tobytes(),
            "does not look like token ids",
        ),
        (b"\x93NUMPY\x01\0" + bytes(4000), "is a NumPy array"),
        (b"PK\x03\x04" + bytes(4000), "is a zip archive"),
        (gzip.compress(np.random.default_rng(0).bytes(4000)), "compressed by gzip"),
    ],
)
def test_what_is_called_bin_and_has_no_ids_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = written(tmp_path / "train.bin", content[: len(content) // 2 * 2])
    with pytest.raises(DataError, match=message):
        prepare(config(path), tmp_path / "run")


def test_letters_as_bytes_are_ids_where_that_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "train.bin", "".join(LINES))
    assert texts(path, tmp_path / "run", dtype="uint8")


def test_links_to_token_files_elsewhere_are_read(tmp_path: Path) -> None:
    headerless(tmp_path / "store.bin", some_ids(3000))
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / "train.bin").symlink_to(tmp_path / "store.bin")
    (folder / "again.bin").symlink_to(folder / "train.bin")
    data = prepare(config(folder), tmp_path / "run")
    assert len(data.train) + len(data.val) == 3000
    assert "link" in left_out(data)["train.bin"], "each file once"


CHAT = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}]
SHARED = [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "me"}]


@pytest.mark.parametrize(
    ("row", "way"),
    [
        ({"messages": CHAT}, r"AutoTokenizer.*render\(row\['messages'\].*data.tokenizer="),
        ({"conversations": SHARED}, r"jq -c '\.conversations \|= .*row\['conversations'\]"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, r"row\['prompt'\] \+ row\['completion'\]"),
        ({"instruction": "go", "input": "", "output": "ok", "id": "x"},
         r"\.instruction \+ \"\\n\" \+ \.input \+ \"\\n\" \+ \.output\)"),
        ({"title": "one", "body": "two", "n": 1}, "set data.text_key to the one that has the text"),
        ({"title": "one", "n": 1, "meta": {"by": "two", "body": "three", "n": 2}},
         "set data.text_key to the one that has the text: title, meta.by, meta.body"),
        ({"data": [{"text": "one"}, {"text": "two"}]}, r"jq -c '\.data\[\]' FILE"),
        ({"story": ["one", "two"], "n": 1}, r"jq -c '\{story: \.story\[\]\}' FILE"),
        ({"day": "2020-01-01", "n": 1, "share": 0.5, "tags": [1.5]}, "if there is one. Numbers, dates"),
    ],
)  # fmt: skip
def test_rows_without_a_text_name_the_way_to_one(
    tmp_path: Path, row: dict[str, object], way: str
) -> None:
    path = written(tmp_path / "rows.jsonl", (json.dumps(row) + "\n") * 50)
    names = ", ".join(row)
    with pytest.raises(
        DataError, match=rf'"text" is missing\n    why: .*{names}\n    fix: .*{way}'
    ):
        prepare(config(path), tmp_path / "one")
    parquet.write_table(pyarrow.Table.from_pylist([row] * 50), tmp_path / "rows.parquet")
    if "day" not in row:
        with pytest.raises(DataError, match=rf"it has {names}\n    fix: .*{way}"):
            prepare(config(tmp_path / "rows.parquet"), tmp_path / "two")
    first = next(iter(row))
    if not isinstance(row[first], str):
        with pytest.raises(DataError, match=rf'"{first}" has list<.*, not text\n    fix: .*{way}'):
            prepare(config(path, text_key=first), tmp_path / "three")


@pytest.mark.parametrize(
    ("header", "way"),
    [
        ("n,Text", "fix: set data.text_key=Text"),
        ("1,the first line is a text", "fix: .* If the first line is no line of names, write one"),
    ],
)
def test_a_csv_with_odd_names_names_the_way(tmp_path: Path, header: str, way: str) -> None:
    path = written(tmp_path / "table.csv", f"{header}\n" + "1,one more text\n" * 50)
    with pytest.raises(DataError, match=way):
        prepare(config(path), tmp_path / "run")


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet"])
def test_a_table_with_two_columns_of_the_name_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table.{suffix}"
    if suffix == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        columns = [arrow.array([f"{name} {n}" for n in range(50)]) for name in ("a", "b")]
        parquet.write_table(arrow.Table.from_arrays(columns, names=["text", "text"]), path)
    else:
        rows = "".join(f"a {n},b {n}\n" for n in range(50))
        packed = gzip.compress(f"text,text\n{rows}".encode())
        path.write_bytes(packed if suffix == "csv.gz" else gzip.decompress(packed))
    with pytest.raises(DataError, match='has 2 columns called "text"'):
        prepare(config(path), tmp_path / "run")


def test_a_table_of_dates_and_numbers_names_data_target(tmp_path: Path) -> None:
    rows = [f"{n},2020-01-{n % 28 + 1:02},2020-01-01 10:00\n" for n in range(50)]
    path = written(tmp_path / "table.csv", "n,day,time\n" + "".join(rows))
    with pytest.raises(DataError, match=r"why: the row has n, day, time\n.*data.target"):
        prepare(config(path), tmp_path / "run")


POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 12345\n"
)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.tar", "train.bin", "a.txt"])
def test_a_pointer_of_git_lfs_is_called_so(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, POINTER)
    with pytest.raises(
        DataError, match=r"pointer of Git LFS, not the file itself \(git lfs pull\)"
    ):
        prepare(config(path), tmp_path / "run")


def test_a_pointer_among_text_is_left_out(tmp_path: Path) -> None:
    written(tmp_path / "in" / "a.txt", "".join(LINES))
    written(tmp_path / "in" / "b.txt", POINTER)
    data = prepare(config(tmp_path / "in"), tmp_path / "run")
    assert "Git LFS" in left_out(data)["b.txt"]
    assert b"git-lfs" not in split(data, "train") + split(data, "val")


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.jl"])
def test_rows_of_json_under_a_name_of_text_are_refused(tmp_path: Path, name: str) -> None:
    """They would train on braces and keys."""
    path = written(tmp_path / "in" / name, "\n".join(ROWS))
    with pytest.raises(DataError, match=r"a JSON object in every line(.|\n)*data.format=JSONL"):
        prepare(config(path), tmp_path / "one")
    assert texts(path, tmp_path / "two", format="JSONL") == EXPECTED
    assert texts(path, tmp_path / "three", format="text") == sorted(ROWS)
    with pytest.raises(DataError, match=r"1 of 1 files with a JSON object(.|\n)*call them \.jsonl"):
        prepare(config(path.parent), tmp_path / "four")
    path.rename(path.with_suffix(".jsonlines"))
    assert texts(path.parent, tmp_path / "five") == EXPECTED


def test_json_that_is_no_rows_and_a_few_rows_among_text_are_text(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", "{\n" + "".join(LINES) + "}\n")
    written(tmp_path / "b.txt", "{}\nnot {}\n")
    written(tmp_path / "c.txt", "{}\n{}\n")
    assert look(tmp_path) == look(tmp_path / "a.txt") == look(tmp_path / "b.txt") == "text"
