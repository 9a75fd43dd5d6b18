"""Parquet, Arrow and tokenizers that have changed since a run made its token ids of them."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from harness.data.prepare import Preparation, prepare_dataset
from harness.data.source import source_changes
from harness.data.tokens import prepare
from tests.support.runs import events, train
from tests.unit.data.token_files import config, headerless, some_ids

TEXTS = [f"{number}: the quick brown fox" for number in range(200)]


def tokenizer(folder: Path, size: int = 270) -> Path:
    folder.mkdir(exist_ok=True)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    made.save(str(folder / "tokenizer.json"))
    return folder


def parquet(path: Path, texts: list[str] = TEXTS) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    return path


def told(path: Path, run: Path, **more: object) -> str:
    prepare(config(path, **more), run)
    return "; ".join(source_changes(config(path, **more), run / "data"))


def test_parquet_that_changed_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        parquet(folder / f"part-{number}.parquet")
    assert told(folder, tmp_path / "run") == ""
    parquet(folder / "part-1.parquet")  # the same, written again
    assert told(folder, tmp_path / "run") == ""
    parquet(folder / "part-1.parquet", TEXTS[1:])
    parquet(folder / "part-3.parquet")
    said = told(folder, tmp_path / "run")
    assert "changed: part-1.parquet" in said
    assert "new: part-3.parquet" in said


def test_an_arrow_folder_that_changed_is_named(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"text": TEXTS})
    made.save_to_disk(tmp_path / "saved")
    assert told(tmp_path / "saved", tmp_path / "run") == ""
    (tmp_path / "saved" / "cache-1.arrow").write_bytes(b"what map() leaves")
    assert told(tmp_path / "saved", tmp_path / "run") == ""
    datasets.Dataset.from_dict({"text": TEXTS[1:]}).save_to_disk(tmp_path / "other")
    (tmp_path / "other" / "data-00000-of-00001.arrow").replace(
        tmp_path / "saved" / "data-00000-of-00001.arrow"
    )
    assert "changed: data-00000-of-00001.arrow" in told(tmp_path / "saved", tmp_path / "run")


def test_a_tokenizer_that_changed_is_named(tmp_path: Path) -> None:
    own = tokenizer(tmp_path / "tokenizer")
    rows = parquet(tmp_path / "rows.parquet")
    ids = headerless(tmp_path / "train.bin", some_ids(4000))
    prepare_dataset(Preparation(str(rows), "Parquet", tokenizer=str(own)), tmp_path / "ready")
    cases: dict[str, tuple[Path, str | None]] = {
        "rows": (rows, str(own)),
        "ids": (ids, str(own)),
        "ready": (tmp_path / "ready", None),
    }
    for name, (path, given) in cases.items():
        assert told(path, tmp_path / name, tokenizer=given) == "", name
    tokenizer(own, 275)
    for name, (path, given) in cases.items():
        said = told(path, tmp_path / name, tokenizer=given)
        assert f"{own / 'tokenizer.json'} has changed" in said, name


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_ids(tmp_path: Path) -> None:
    own = tokenizer(tmp_path / "tokenizer")
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    arguments = ["--name", "r", f"data.path={path}", f"data.tokenizer={own}", "data.context=16"]
    assert train(tmp_path, *arguments, "train.steps=2").returncode == 0
    tokenizer(own, 275)
    done = train(tmp_path, *arguments, "train.steps=3")
    assert done.returncode == 0, done.stdout
    (event,) = events(tmp_path / "runs" / "r", "data.source")
    assert "tokenizer.json has changed" in event["text"]
