"""Packed samples: where documents begin, by index, by separator, by file; and no target of another document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from harness.core.errors import DataError
from harness.core.facts import IGNORED
from harness.data.batches import TokenBatches
from harness.data.tokens import prepare
from tests.unit.data.token_files import Ids, config, headerless, megatron

END = 9


def documents(count: int = 60) -> list[Ids]:
    """Of 1 to 40 tokens of 10 and more; each ends with END."""
    random = np.random.default_rng(1)
    return [np.append(random.integers(10, 50, random.integers(0, 40)), END) for _ in range(count)]


def packed(
    path: Path, run: Path, context: int = 16, micro_batch: int = 4, **more: object
) -> TokenBatches:
    settings = config(path, packing="documents", val_fraction=0.2, **more)
    return TokenBatches(prepare(settings, run), 0, context, 8, micro_batch, 8, packed=True)


def check(source: TokenBatches, docs: list[Ids], context: int = 16) -> None:
    """Against the documents themselves: which document each token of the stream is of."""
    stream = np.concatenate(docs)
    owner = np.repeat(np.arange(len(docs)), [len(each) for each in docs])
    seen = 0
    for index in range(-(-source.n_samples // 8)):
        window = source.window(index)
        samples = iter(window.samples.tolist())
        for batch in source.micro_batches(window, 0, 1):
            assert batch["segments"].dtype == torch.int64
            for row in range(len(batch["inputs"])):
                begin = next(samples) * context
                own = owner[begin : begin + context + 1]
                assert batch["inputs"][row].tolist() == stream[begin : begin + context].tolist()
                expected = np.where(
                    own[1:] == own[:-1], stream[begin + 1 : begin + context + 1], IGNORED
                )
                assert batch["targets"][row].tolist() == expected.tolist()
                assert (
                    batch["segments"][row].tolist()
                    == (np.cumsum(np.diff(own[:context], prepend=own[0]) > 0)).tolist()
                )
                seen += int((expected == IGNORED).sum())
    assert seen > 20, "documents end within samples"


def test_by_the_index(tmp_path: Path) -> None:
    docs = documents()
    check(packed(megatron(tmp_path / "train", docs), tmp_path / "run"), docs)


def test_a_batch_of_one_sample_keeps_its_inputs(tmp_path: Path) -> None:
    """Of one row, inputs and targets lie in the same memory unless they are copied."""
    docs = documents()
    data = packed(megatron(tmp_path / "train", docs), tmp_path / "run", micro_batch=1)
    check(data, docs)
    for batch in data.validation(0, 8):  # one sample for each rank
        assert batch["inputs"].shape[0] == 1
        assert (batch["inputs"] != IGNORED).all()


def test_by_the_separator(tmp_path: Path) -> None:
    docs = documents()
    check(
        packed(
            headerless(tmp_path / "train.bin", np.concatenate(docs)),
            tmp_path / "run",
            separator=END,
        ),
        docs,
    )


def test_by_the_files_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.txt").write_text("ab c\nd" * (1 + number % 5))
    data = prepare(config(folder, packing="documents"), tmp_path / "run")
    names = [file["name"] for file in data.info["files"] if file["split"] == "train"]
    texts = [(folder / name).read_bytes() + b"\n" for name in names]
    texts[-1] = texts[-1][:-1]
    check(
        TokenBatches(data, 0, 16, 8, 4, 8, packed=True),
        [np.frombuffer(text, dtype=np.uint8).astype(np.int64) for text in texts],
    )


def test_without_a_boundary_it_is_refused(tmp_path: Path) -> None:
    path = headerless(tmp_path / "train.bin", np.arange(4000) % 50)
    with pytest.raises(
        DataError, match=r"documents cannot be told apart[\s\S]*set data\.separator"
    ):
        packed(path, tmp_path / "run")


@pytest.mark.parametrize("separator", [50, 60, 70_000])
def test_a_separator_that_no_token_is_is_refused(tmp_path: Path, separator: int) -> None:
    """Every file would be one document, and packing without an effect."""
    path = headerless(tmp_path / "train.bin", np.arange(4000) % 50)
    with pytest.raises(DataError, match=rf"no token of the files is {separator}"):
        packed(path, tmp_path / "run", separator=separator)
    packed(path, tmp_path / "again", separator=49)


def test_a_validation_split_is_cut_where_a_document_begins(tmp_path: Path) -> None:
    docs = documents(300)
    data = prepare(
        config(megatron(tmp_path / "train", docs), packing="documents"), tmp_path / "run"
    )
    ends = np.cumsum([len(each) for each in docs])
    assert len(data.train) in ends


def test_a_long_document_begins_anew_in_each_sample(tmp_path: Path) -> None:
    docs = [np.append(np.full(3999, 20), END)]
    source = packed(megatron(tmp_path / "train", docs), tmp_path / "run")
    batch = source.micro_batches(source.window(0), 0, 1)[0]
    assert batch["segments"].unique().tolist() == [0]
    assert (batch["targets"] != IGNORED).all()
    assert source.masked
