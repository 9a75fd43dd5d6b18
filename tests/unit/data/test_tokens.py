"""The snapshot: split by file, hashed, reused even when the source has changed, refused when damaged."""

from __future__ import annotations

import collections
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.config import DataConfig
from harness.core.errors import DataError
from harness.data.corpus import entropy
from harness.data.snapshot import TokenFile
from harness.data.text import Document, split_documents
from harness.data.tokens import prepare

GOLDEN = Path(__file__).parents[2] / "golden" / "text"


def config(path: Path | None, **changes: object) -> DataConfig:
    return DataConfig.model_validate(
        {"path": None if path is None else str(path), "context": 32, **changes}
    )


def all_of(tokens: object) -> bytes:
    """A split of a snapshot."""
    assert isinstance(tokens, TokenFile)
    return b"".join(tokens.chunks())


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)


def test_the_snapshot_is_the_text(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    contents = {
        f"{number:02d}.txt": f"file {number} é\n".encode() * (number + 20) for number in range(20)
    }
    for name, content in contents.items():
        (source / name).write_bytes(content)
    (source / "image.bin").write_bytes(b"\0")
    data = prepare(config(source), tmp_path / "run")
    info = json.loads((tmp_path / "run" / "data" / "corpus.json").read_bytes())
    assert info == data.info
    for split, tokens in (("train", data.train), ("val", data.val)):
        names = [file["name"] for file in info["files"] if file["split"] == split]
        joined = b"\n".join(contents[name] for name in names)
        assert all_of(tokens) == joined
        assert info[split] == {"bytes": len(joined), "sha256": hashlib.sha256(joined).hexdigest()}
    assert sorted(file["name"] for file in info["files"]) == sorted(contents)
    assert info["skipped"] == [{"name": "image.bin", "reason": "binary: it has NUL bytes"}]
    both = all_of(data.train) + all_of(data.val)
    assert data.sha256 == hashlib.sha256(both).hexdigest()
    shares = [count / len(both) for count in collections.Counter(both).values()]
    expected = -sum(share * math.log2(share) for share in shares)
    assert data.info["unigram_bits_per_byte"] == pytest.approx(expected, rel=1e-12)


def test_entropy_of_known_distributions() -> None:
    assert entropy(np.array([7, 0, 0])) == 0
    assert entropy(np.full(256, 3)) == pytest.approx(8 * math.log(2))
    assert entropy(np.array([2, 1, 1])) == pytest.approx(1.5 * math.log(2))


def test_the_embedded_corpus_is_split_near_the_fraction(tmp_path: Path) -> None:
    data = prepare(config(None), tmp_path)
    share = len(data.val) / (len(data.val) + len(data.train))
    assert 0.05 <= share <= 0.15
    assert 3 < data.info["unigram_bits_per_byte"] < 6
    splits = {
        file["split"]: {f["name"] for f in data.info["files"] if f["split"] == file["split"]}
        for file in data.info["files"]
    }
    assert not splits["train"] & splits["val"]


def test_a_resume_uses_the_snapshot_when_the_source_has_changed_or_gone(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("the first text\n" * 100)
    first = prepare(config(source), tmp_path / "run")
    before = all_of(first.train), all_of(first.val), first.sha256
    source.write_text("another text\n" * 100)
    again = prepare(config(source), tmp_path / "run")
    assert (all_of(again.train), all_of(again.val), again.sha256) == before
    source.unlink()
    assert prepare(config(source), tmp_path / "run").sha256 == before[2]


def test_a_snapshot_that_was_not_finished_is_made_again(tmp_path: Path) -> None:
    first = prepare(config(GOLDEN), tmp_path).sha256
    (tmp_path / "data" / "corpus.json").unlink()
    (tmp_path / "data" / "val.bin").write_bytes(b"half")
    assert prepare(config(GOLDEN), tmp_path).sha256 == first


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
def test_a_flipped_bit_in_the_snapshot_is_found(tmp_path: Path, name: str, place: float) -> None:
    prepare(config(GOLDEN), tmp_path)
    path = tmp_path / "data" / name
    flip(path, int(path.stat().st_size * place) * 8 + 3)
    with pytest.raises(DataError, match="SHA-256") as caught:
        prepare(config(GOLDEN), tmp_path)
    assert {Path(problem.where).name for problem in caught.value.problems} == {name}


def test_truncated_and_missing_files_are_reported_together(tmp_path: Path) -> None:
    prepare(config(GOLDEN), tmp_path)
    train = tmp_path / "data" / "train.bin"
    train.write_bytes(train.read_bytes()[:-1])
    (tmp_path / "data" / "val.bin").unlink()
    with pytest.raises(DataError) as caught:
        prepare(config(GOLDEN), tmp_path)
    assert [Path(problem.where).name for problem in caught.value.problems] == [
        "train.bin",
        "val.bin",
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 2}'])
def test_an_unreadable_description_is_refused(tmp_path: Path, content: bytes) -> None:
    prepare(config(GOLDEN), tmp_path)
    (tmp_path / "data" / "corpus.json").write_bytes(content)
    with pytest.raises(DataError, match=r"corpus\.json"):
        prepare(config(GOLDEN), tmp_path)


def test_too_short_text_is_named_with_what_is_needed(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("0123456789\n" * 60)
    with pytest.raises(DataError, match=r"needs 641 .*train\.global_batch 20"):
        prepare(config(source), tmp_path / "run", global_batch=20)
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match="too short"):
        prepare(config(source, context=128), tmp_path / "run")
    assert len(prepare(config(source), tmp_path / "run", global_batch=10).val) >= 33


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot be copied"):
        prepare(config(GOLDEN), tmp_path / "run")


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    fraction=st.floats(0.02, 0.9),
    lines=st.integers(1, 80),
)
def test_a_split_loses_nothing_and_holds_out_about_the_fraction(
    sizes: list[int], fraction: float, lines: int
) -> None:
    documents = [
        Document(f"{number:03d}", ((b"x" * lines + b"\n") * (size // lines + 1))[:size])
        for number, size in enumerate(sizes)
    ]
    train, val = split_documents(documents, fraction)
    total, held = sum(sizes), sum(len(document.content) for document in val)
    rejoined: dict[str, bytes] = collections.defaultdict(bytes)
    for document in [*train, *val]:
        rejoined[document.name] += document.content
    assert rejoined == {document.name: document.content for document in documents}
    assert sum(len(document.content) for document in train) == total - held
    if total > 100:
        assert 0.4 * fraction * total - 2 <= held <= 1.6 * fraction * total + 2
        assert held < total


def test_one_file_is_cut_at_a_line_end_and_without_lines_anywhere() -> None:
    lines = Document("a", b"".join(b"line %d\n" % number for number in range(1000)))
    train, val = split_documents([lines], 0.1)
    assert train[0].content.endswith(b"\n")
    assert len(val[0].content) == pytest.approx(0.1 * len(lines.content), rel=0.05)
    train, val = split_documents([Document("a", b"x" * 1000)], 0.1)
    assert (len(train[0].content), len(val[0].content)) == (900, 100)


def test_the_split_does_not_depend_on_the_order_of_the_files() -> None:
    documents = [Document(f"{number}.py", b"x" * 100) for number in range(50)]
    names = {document.name for document in split_documents(documents, 0.2)[1]}
    assert names == {document.name for document in split_documents(documents[::-1], 0.2)[1]}
    assert len(names) == 10
