"""Parquet and Arrow as their libraries may legally write them: the same rows, or refused by name; never others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from harness.core.errors import DataError
from harness.data.corpus import Tokens
from harness.data.tokens import prepare
from tests.support.matrix import rest_nightly
from tests.unit.data.token_files import config

LINES = [f"{number}: the quick brown fox" for number in range(60)]


def lines(path: Path, run: Path, **more: object) -> list[str]:
    """Of training and validation, each in its own order."""
    data = prepare(config(path, **more), run)
    found: list[str] = []
    for tokens in (data.train, data.val):
        assert isinstance(tokens, Tokens)
        ((row,), damage) = tokens.read(np.arange(len(tokens))[None])
        assert not damage
        found += row.astype(np.uint8).tobytes().decode().split("\n")
    return [line for line in found if line]


def write(path: Path, column: Any, **how: Any) -> Path:
    pa.parquet.write_table(pa.table({"text": column}), path, **how)
    return path


COLUMNS = {
    "large": pa.array(LINES, pa.large_string()),
    "view": pa.array(LINES).cast(pa.string_view()),
    "dictionary": pa.array(LINES).dictionary_encode(),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_kind_of_string_column_has_the_same_rows(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "rows.parquet", COLUMNS[kind], row_group_size=7)
    assert sorted(lines(path, tmp_path / "run")) == sorted(LINES)


REFUSED: dict[str, tuple[Any, str]] = {
    "ids": (
        pa.array([[1, 2, 3]] * 60, pa.list_(pa.int32())),
        r"list<element: int32>(.|\n)*tofile\(",
    ),
    "lists": (pa.array([["a", "b"]] * 60), "list<element: string>, not text"),
    "records": (pa.array([{"string": line} for line in LINES]), "struct<string: string>, not text"),
    "bytes": (pa.array([line.encode() for line in LINES]), "binary, not text"),
    "nulls": (
        pa.array([None, *LINES]),
        r'rows\.parquet, row 0: "text" is missing\n    fix: repair it, or set data\.bad=skip',
    ),
    "none": (pa.array([], pa.string()), "it has no rows"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_column_that_is_no_text_is_refused(tmp_path: Path, kind: str) -> None:
    column, message = REFUSED[kind]
    with pytest.raises(DataError, match=message):
        prepare(config(write(tmp_path / "rows.parquet", column)), tmp_path / "run")


def test_bytes_are_text_after_the_command_of_the_error(tmp_path: Path) -> None:
    """Spark writes such columns unless it is told that they are text."""
    column = pa.array([line.encode() for line in LINES])
    write(tmp_path / "FILE", column)
    with pytest.raises(DataError) as caught:
        prepare(config(tmp_path / "FILE", format="Parquet"), tmp_path / "run")
    command = caught.value.problems[0].fix.partition("python ")[2]
    subprocess.run(f"{sys.executable} {command}", shell=True, check=True, cwd=tmp_path)
    assert sorted(lines(tmp_path / "NEW.parquet", tmp_path / "again")) == sorted(LINES)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(LINES), pa.array(LINES)], names=["text", "text"])
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match='has 2 columns called "text"'):
        prepare(config(tmp_path / "rows.parquet"), tmp_path / "run")


def test_a_hub_folder_trains_on_its_train_split(tmp_path: Path) -> None:
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for name in ("train", "validation", "test"):
        write(
            tmp_path / "hub" / "data" / f"{name}-00000-of-00001.parquet",
            [f"{name} {line}" for line in LINES],
        )
    found = lines(tmp_path / "hub", tmp_path / "run")
    assert {line.split()[0] for line in found} == {"train", "validation"}


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "blob", LINES)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "train-00000.parquet").symlink_to("../blob")
    assert sorted(lines(tmp_path / "snapshot", tmp_path / "run")) == sorted(LINES)


def test_shuffled_and_selected_data_sets_are_read_in_their_order(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"text": LINES})
    shuffled, chosen = made.shuffle(seed=3), made.select([5, 1, 1, *range(20, 50)])
    for name, each in (("shuffled", shuffled), ("chosen", chosen)):
        each.save_to_disk(tmp_path / name)
        found = lines(tmp_path / name, tmp_path / f"run-{name}")
        wanted = list(each["text"])
        assert sorted(found) == sorted(wanted)
        assert found[:5] == wanted[:5], "in the order that was saved"


@pytest.mark.parametrize("kind", ["stream", "file", "feather"])
def test_one_arrow_file_is_read(tmp_path: Path, kind: str) -> None:
    table = pa.table({"text": LINES})
    path = tmp_path / f"rows.{'feather' if kind == 'feather' else 'arrow'}"
    if kind == "feather":
        pa.feather.write_feather(table, str(path))
    else:
        with getattr(pa.ipc, f"new_{kind}")(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=13)
    assert sorted(lines(path, tmp_path / "run")) == sorted(LINES)


def test_splits_without_a_train_are_asked_for(tmp_path: Path) -> None:
    part = datasets.Dataset.from_dict({"text": LINES})
    datasets.DatasetDict({"test": part, "unsupervised": part}).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        DataError, match=r"has no split train, but test, unsupervised(.|\n)*saved/test"
    ):
        prepare(config(tmp_path / "saved"), tmp_path / "run")
    assert sorted(lines(tmp_path / "saved" / "unsupervised", tmp_path / "run2")) == sorted(LINES)


LIMITED = """
import resource, sys
from pathlib import Path
from harness.core.errors import DataError
from harness.data.rows import Arrow, Parquet
source = {".parquet": Parquet, ".feather": Arrow}[Path(sys.argv[1]).suffix]()
(part,) = source.parts(Path(sys.argv[1]), "text", "auto").parts
(size,) = [int(line.split()[1]) << 10 for line in Path("/proc/self/status").open() if line.startswith("VmSize")]
resource.setrlimit(resource.RLIMIT_AS, (size + (50 << 20),) * 2)
try:
    list(source.read(part, "text"))
except DataError as error:
    print(error)
"""
"""Reads a file with room for 50 MiB more than the libraries take."""


@pytest.mark.parametrize("how", rest_nightly(["a dictionary", "plain", "Arrow"], "a dictionary"))
def test_a_file_that_does_not_fit_into_memory_is_named(tmp_path: Path, how: str) -> None:
    """A few kilobytes may unpack to any size."""
    column = pa.array([letter * (32 << 20) for letter in "abcd"] + ["x"] * 50)
    if how == "Arrow":
        path = tmp_path / "rows.feather"
        pyarrow.feather.write_feather(pa.table({"text": column}), path, compression="zstd")
    else:
        large = {"dictionary_pagesize_limit": (1 << 31) - 1} if how == "a dictionary" else {}
        path = write(
            tmp_path / "rows.parquet",
            column,
            compression="zstd",
            use_dictionary=how == "a dictionary",
            **large,
        )
    assert path.stat().st_size < 1 << 20
    made = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "it does not fit into memory" in made.stdout
    assert "row_group_size=1000" in made.stdout
