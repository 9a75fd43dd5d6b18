"""Token ids that lie in files: every format read as what it is, or refused by name before anything is trained."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.core.errors import DataError
from harness.data.batches import TokenBatches
from harness.data.corpus import Tokens, padded_vocabulary
from harness.data.shards import read_shard, write_index
from harness.data.splits import is_validation, validation_beside, without_tests
from harness.data.tokens import TokenData, prepare
from tests.support.matrix import rest_slow
from tests.unit.data.token_files import Ids, config, headed, headerless, megatron, some_ids

IDS = some_ids(5000)
FORMATS: dict[str, Callable[[Path], Path]] = {
    "uint16": lambda folder: headerless(folder / "train.bin", IDS),
    "uint32": lambda folder: headerless(folder / "train.bin", IDS + 70_000, "uint32"),
    "header, uint16": lambda folder: headed(folder / "train.bin", IDS),
    "header, uint32": lambda folder: headed(folder / "train.bin", IDS, 20240801),
    "Megatron, uint16": lambda folder: megatron(folder / "train", np.split(IDS, [100, 100, 3000])),
    "Megatron, int32": lambda folder: megatron(folder / "train", [IDS], 4, 4),
}


def all_of(tokens: object) -> Ids:
    """Every token of a split, read in rows that cross blocks and files as they come."""
    assert isinstance(tokens, Tokens)
    places = [(start, min(start + 777, len(tokens))) for start in range(0, len(tokens), 777)]
    read = [tokens.read(np.arange(*each)[None]) for each in places]
    assert not any(damage for _, damage in read)
    return np.concatenate([rows[0] for rows, _ in read])


def both(data: TokenData) -> Ids:
    return np.concatenate([all_of(data.train), all_of(data.val)])


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_its_ids(tmp_path: Path, kind: str) -> None:
    path = FORMATS[kind](tmp_path)
    expected = IDS + 70_000 if kind == "uint32" else IDS
    data = prepare(config(path, dtype="uint32" if kind == "uint32" else "uint16"), tmp_path / "run")
    assert np.array_equal(both(data), expected)
    assert (data.ids, data.vocab) == (
        expected.max() + 1,
        padded_vocabulary(int(expected.max()) + 1),
    )
    assert data.vocab % 16 == 0
    assert len(data.val) == pytest.approx(500, abs=60 if "Megatron" in kind else 0)


def test_the_held_out_share_is_the_end(tmp_path: Path) -> None:
    data = prepare(
        config(headerless(tmp_path / "any.bin", IDS), val_fraction=0.25), tmp_path / "run"
    )
    assert np.array_equal(all_of(data.val), IDS[3750:])


@pytest.mark.parametrize(
    ("train", "val"), [("train.bin", "val.bin"), ("x_train_01.bin", "x_val_01.bin"), ("a.bin", "val.bin")]
)  # fmt: skip
def test_a_validation_file_beside_it_is_the_split(tmp_path: Path, train: str, val: str) -> None:
    headerless(tmp_path / val, some_ids(300, 90))
    data = prepare(config(headerless(tmp_path / train, IDS)), tmp_path / "run")
    assert np.array_equal(all_of(data.train), IDS)
    assert np.array_equal(all_of(data.val), some_ids(300, 90))
    assert data.ids == 90, "the largest id of both"


def test_a_folder_of_shards_is_read_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in (2, 0, 1):
        headed(folder / f"x_train_{number}.bin", IDS[1000 * number : 1000 * (number + 1)])
    headed(folder / "x_val_0.bin", IDS[3000:])
    (folder / "README.md").write_text("about")
    data = prepare(config(folder), tmp_path / "run")
    assert np.array_equal(all_of(data.train), IDS[:3000])
    assert np.array_equal(all_of(data.val), IDS[3000:])
    assert [skip["name"] for skip in data.info["skipped"]] == ["README.md"]


def test_a_pair_of_megatrons_may_be_named_without_its_suffix(tmp_path: Path) -> None:
    path = megatron(tmp_path / "web_text_document", [IDS])
    for name in (path, path.with_suffix(".idx"), path.with_suffix("")):
        data = prepare(config(name), tmp_path / f"run{name.suffix}")
        assert np.array_equal(both(data), IDS)


def test_names_that_mean_validation() -> None:
    assert all(
        map(is_validation, ["val.bin", "fineweb_val_000000.bin", "my-validation.bin", "VALID.bin"])
    )
    assert all(map(is_validation, ["dev.jsonl", "eval-00000.parquet", "x_evaluation.jsonl"]))
    assert not any(map(is_validation, ["devices.jsonl", "medieval.txt", "holdout.jsonl"]))
    assert not any(map(is_validation, ["train.bin", "values.bin", "interval.bin", "train_val.bin"]))
    assert validation_beside(Path("/nowhere/train.bin")) is None


@pytest.mark.parametrize("name", ["dev", "eval", "validation"])
def test_a_file_beside_the_training_file_validates_by_any_of_these_names(
    name: str, tmp_path: Path
) -> None:
    """Once `dev.jsonl` beside `train.jsonl` was not noticed, and in a folder it was trained on."""
    training = tmp_path / "train.jsonl"
    for each in (training, tmp_path / f"{name}.jsonl", tmp_path / "holdout.jsonl"):
        each.write_text("{}")
    assert validation_beside(training) == tmp_path / f"{name}.jsonl"
    kept, left_out = without_tests(["dev.jsonl", "train.jsonl", "holdout.jsonl"])
    assert kept == ["dev.jsonl", "train.jsonl"]
    assert [each for each, _ in left_out] == ["holdout.jsonl"]


def test_a_folder_with_text_and_ids_is_refused_as_ambiguous(tmp_path: Path) -> None:
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    headerless(folder / "train.bin", IDS)
    (folder / "input.txt").write_text("to be " * 100)
    with pytest.raises(DataError, match=r"input\.txt: either may be meant"):
        prepare(config(folder), tmp_path / "run")
    assert prepare(config(folder, format="tokens"), tmp_path / "run").ids == 57


def cut_index(folder: Path) -> Path:
    path = megatron(folder / "train", [IDS])
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-9])
    return path


def longer_index(folder: Path) -> Path:
    path = megatron(folder / "train", [IDS])
    path.write_bytes(path.read_bytes()[:-20])
    return path


def foreign_index(folder: Path) -> Path:
    path = headerless(folder / "train.bin", IDS)
    path.with_suffix(".idx").write_bytes(b"something else" * 10)
    return path


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "odd": (lambda folder: _write(folder, b"\1\0\2"), "ends within a token id"),
    "empty": (lambda folder: _write(folder, b""), "is empty"),
    "cut shard": (lambda folder: headed(folder / "train.bin", IDS, count=6000), "is cut short"),
    "longer": (
        lambda folder: headed(folder / "train.bin", IDS, count=4000),
        "longer than its header",
    ),
    "cut index": (cut_index, "is cut short"),
    "past the file": (longer_index, r"it points up to byte 10000, and train\.bin has 9980"),
    "shifted": (
        lambda folder: megatron(folder / "train", [IDS], shift=2),
        "do not lie one after the other",
    ),
    "foreign": (foreign_index, "is no index of Megatron's"),
    "wider": (
        lambda folder: headerless(folder / "train.bin", IDS, "uint32"),
        "set data.dtype=uint32",
    ),
    "gone": (lambda folder: folder / "nothing.bin", "no such file"),
}


def _write(folder: Path, content: bytes) -> Path:
    (folder / "train.bin").write_bytes(content)
    return folder / "train.bin"


@pytest.mark.parametrize("fault", REFUSED)
def test_files_that_cannot_be_right_are_refused(tmp_path: Path, fault: str) -> None:
    make, message = REFUSED[fault]
    with pytest.raises(DataError, match=message) as caught:
        prepare(config(make(tmp_path)), tmp_path / "run")
    assert all(str(tmp_path) in problem.where and problem.fix for problem in caught.value.problems)
    assert not (tmp_path / "run" / "data" / "corpus.json").exists()


def test_ids_of_another_dtype_are_refused(tmp_path: Path) -> None:
    path = headerless(tmp_path / "train.bin", some_ids(4000, 50_000))
    with pytest.raises(DataError, match=r"no vocabulary is as large.*\n.*data\.dtype"):
        prepare(config(path, dtype="uint32"), tmp_path / "run")


def test_ids_whose_dtype_is_in_the_index_are_to_be_written_again(tmp_path: Path) -> None:
    path = megatron(tmp_path / "train", [IDS], code=4, width=4)
    path.write_bytes(np.where(IDS > 50, -1, IDS).astype("<i4").tobytes())
    with pytest.raises(DataError, match="has the token id -1") as caught:
        prepare(config(path), tmp_path / "run")
    (problem,) = caught.value.problems
    assert "data.dtype" not in problem.fix


NUMPY = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4", "int64": "<i8", "big-endian uint16": ">u2",
         "big-endian uint32": ">u4", "big-endian int64": ">i8", "float32": "<f4", "float64": "<f8"}  # fmt: skip


def frequent(ids: int, count: int = 30000, seed: int = 0) -> Ids:
    """Ids below `ids`, the small ones more often, as tokenizers give them. The largest is among them."""
    made = np.minimum(np.random.default_rng(seed).pareto(0.6, count) * 8, ids - 1).astype(np.int64)
    made[count // 2] = ids - 1
    return made


VOCABULARIES = {
    "characters": np.random.default_rng(0).binomial(64, 0.4, 30000),
    "bytes": frequent(250),
    "DNA": np.random.default_rng(1).integers(0, 5, 30000),
    "300": frequent(300),
    "5000": frequent(5000),
    "GPT-2": frequent(50257),
    "Llama 3": frequent(128_000),
    "few tokens": frequent(8000, 3000),
}


@pytest.mark.parametrize("declared", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("written", NUMPY)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ids_are_read_as_what_they_are_or_refused(
    tmp_path: Path, vocabulary: str, written: str, declared: str
) -> None:
    """Ids of another width, and bytes the other way round, train without a complaint."""
    ids, file = VOCABULARIES[vocabulary], tmp_path / "train.bin"
    dtype = np.dtype(NUMPY[written])
    if dtype.kind != "f" and int(ids.max()) > np.iinfo(dtype).max:
        ids = ids[ids <= np.iinfo(dtype).max]
    ids = ids[: len(ids) // 8 * 8]  # whole numbers of every width
    file.write_bytes(ids.astype(dtype).tobytes())
    given = config(file, dtype=declared)
    if written == declared:
        assert np.array_equal(both(prepare(given, tmp_path / "run")), ids)
        return
    with pytest.raises(DataError, match=r"does not look like|no vocabulary is as large"):
        prepare(given, tmp_path / "run")


DRAW = np.random.default_rng(0)
CORPORA: dict[str, bytes] = {
    "text": b"to be, or not to be\n" * 2000,
    "pairs of digits": b"0,1,1,0," * 5000,
    "Cyrillic": "это просто русский текст, где много слов; ".encode() * 1000,
    "Chinese": "这是一个很长的中文文本没有空格".encode() * 1000,
    "documents": b"one\0two, three\0" * 3000,
    "random": DRAW.bytes(40000),
    "zeros": bytes(40000),
    "two values": DRAW.integers(0, 2, 40000).astype("u1").tobytes(),
    "sound of 16 bits": (8000 * np.sin(np.arange(40000) / 20)).astype("<i2").tobytes(),
    "a picture": DRAW.integers(0, 256, 5000).repeat(8).astype("u1").tobytes(),
    "opaque pixels": np.insert(DRAW.integers(0, 256, 30000), range(0, 30000, 3), 255)
    .astype("u1")
    .tobytes(),
    "notes and lengths": DRAW.integers((21, 0), (109, 16), (20000, 2)).astype("u1").tobytes(),
    "a program": Path(sys.executable).read_bytes()[: 1 << 20],
}


@pytest.mark.parametrize("count", [200, 2000, 1 << 20])
@pytest.mark.parametrize("corpus", CORPORA)
def test_bytes_are_not_taken_for_wider_ids(tmp_path: Path, corpus: str, count: int) -> None:
    content = CORPORA[corpus][:count]
    (tmp_path / "train.bin").write_bytes(content)
    shard = read_shard(tmp_path / "train.bin", "uint8")
    assert (shard.tokens, shard.dtype) == (len(content), "uint8")


def test_bytes_in_pairs_are_taken_with_an_index(tmp_path: Path) -> None:
    """What docs/guide/data.md says of bytes that look like wider ids and are none."""
    path = tmp_path / "train.bin"
    path.write_bytes(("to be, or not to be\n" * 2000).encode("utf-16-le"))
    with pytest.raises(DataError, match=r"bytes in pairs"):
        read_shard(path, "uint8")
    path.with_suffix(".idx").write_bytes(write_index(path, "uint8", [path.stat().st_size]))
    assert np.array_equal(
        both(prepare(config(path), tmp_path / "run")), np.frombuffer(path.read_bytes(), np.uint8)
    )


@pytest.mark.parametrize(
    "written", rest_slow(["<i8", ">i8", ">u2", ">u4", "<f4", "<f8"], ">u2", "<f4")
)
@pytest.mark.parametrize("folder", [False, True])
def test_the_command_that_an_error_names_makes_ids_that_are_read(
    tmp_path: Path, written: str, folder: bool
) -> None:
    ids = frequent(5000)
    for name, part in (("train.bin", ids[:25000]), ("val.bin", ids[25000:])):
        (tmp_path / name).write_bytes(part.astype(written).tobytes())
    with pytest.raises(DataError) as caught:
        prepare(config(tmp_path if folder else tmp_path / "train.bin"), tmp_path / "run")
    fixes = [problem.fix.split("; then ") for problem in caught.value.problems]
    for command, _ in fixes:
        subprocess.run(command, shell=True, check=True)
    (arguments,) = {arguments for _, arguments in fixes}
    path, dtype = (each.partition("=")[2] for each in arguments.split())
    data = prepare(config(path, dtype=dtype), tmp_path / "again")
    assert np.array_equal(both(data), ids)


def test_padding_below_zero_does_not_hide_the_width(tmp_path: Path) -> None:
    ids = np.where(np.arange(30000) % 50 < 10, -100, frequent(5000))
    for dtype in ("<i8", "<i4"):
        (tmp_path / "train.bin").write_bytes(ids.astype(dtype).tobytes())
        with pytest.raises(DataError, match="does not look like uint16"):
            read_shard(tmp_path / "train.bin", "uint16")


@pytest.mark.parametrize("wide", ["a.bin", "b.bin", "val.bin"])
def test_a_shard_of_another_width_is_named(tmp_path: Path, wide: str) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, name in enumerate(("a.bin", "b.bin", "val.bin")):
        headerless(
            folder / name, frequent(5000, 4000, number), "uint32" if name == wide else "uint16"
        )
    with pytest.raises(DataError) as caught:
        prepare(config(folder), tmp_path / "run")
    assert [Path(problem.where).name for problem in caught.value.problems] == [wide]


@pytest.mark.parametrize("declared", ["uint8", "uint16", "uint32"])
def test_a_header_that_is_not_known_is_no_ids(tmp_path: Path, declared: str) -> None:
    path = headed(tmp_path / "train.bin", IDS)
    content = bytearray(path.read_bytes())
    content[4] = 9  # its version
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a header of llm\.c that is not read\n.*version 9"):
        prepare(config(path, dtype=declared), tmp_path / "run")


def test_all_bad_shards_are_named_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    headed(folder / "a.bin", IDS)
    headed(folder / "b.bin", IDS, count=9000)
    headerless(folder / "c.bin", IDS)
    (folder / "d.bin").write_bytes(b"\0\1\2")
    with pytest.raises(DataError) as caught:
        prepare(config(folder), tmp_path / "run")
    assert [Path(problem.where).name for problem in caught.value.problems] == ["b.bin", "d.bin"]


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too short to train on"):
        prepare(
            config(headerless(tmp_path / "train.bin", IDS[:100])), tmp_path / "run", global_batch=32
        )


def test_nothing_is_copied_into_the_run(tmp_path: Path) -> None:
    prepare(config(headerless(tmp_path / "train.bin", IDS)), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "data").iterdir()] == ["corpus.json"]


def test_a_resume_reads_the_same_and_refuses_what_changed(tmp_path: Path) -> None:
    path = headerless(tmp_path / "train.bin", IDS)
    settings = config(path)
    first = prepare(settings, tmp_path / "run")
    again = prepare(settings, tmp_path / "run")
    assert again.sha256 == first.sha256
    assert np.array_equal(both(again), both(first))
    headerless(path, np.where(np.arange(5000) == 7, 1000, IDS))
    with pytest.raises(
        DataError, match=r"train\.bin: is not what this run began with\n.*1 of 1 blocks.* differ: 0"
    ):
        prepare(settings, tmp_path / "run")
    headerless(path, some_ids(6000))
    with pytest.raises(DataError, match="12000 bytes, and had 10000"):
        prepare(settings, tmp_path / "run")
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        prepare(settings, tmp_path / "run")


def test_a_file_that_was_only_touched_is_hashed_and_taken(tmp_path: Path) -> None:
    path = headerless(tmp_path / "train.bin", IDS)
    prepare(config(path), tmp_path / "run")
    corpus = tmp_path / "run" / "data" / "corpus.json"
    before = json.loads(corpus.read_bytes())
    os.utime(path, ns=(1, 1))
    data = prepare(config(path), tmp_path / "run")
    after = json.loads(corpus.read_bytes())
    assert (after["sha256"], after["files"][0]["mtime_ns"]) == (before["sha256"], 1)
    assert np.array_equal(both(data), IDS)


def test_a_flipped_bit_in_a_touched_file_is_found_anywhere(tmp_path: Path) -> None:
    """With its time unchanged only some blocks are looked at, at the start: reading finds the rest."""
    path = tmp_path / "train.bin"
    some_ids(40 << 17).astype("<u2").tofile(path)
    settings = config(path)
    prepare(settings, tmp_path / "run")
    with path.open("r+b") as stream:
        stream.seek(7 * (256 << 10) + 1234)
        stream.write(b"\xff")
    with pytest.raises(DataError, match=re.escape("1 of 40 blocks of 262144 bytes differ: 7")):
        prepare(settings, tmp_path / "run")


@pytest.mark.parametrize("kind", ["file", "folder", "Megatron"])
def test_a_run_finds_its_files_where_they_moved_with_it(tmp_path: Path, kind: str) -> None:
    """As on another rental: the same project in another folder."""
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "data").mkdir(parents=True)
    if kind == "Megatron":
        megatron(old / "data" / "train", np.split(IDS, [100, 3000]))
    else:
        headerless(old / "data" / "train.bin", IDS)
    headerless(old / "data" / "val.bin", some_ids(300)) if kind != "Megatron" else None
    name = "data" if kind == "folder" else "data/train.bin"
    packing = "documents" if kind == "Megatron" else "none"
    first = prepare(config(old / name, packing=packing), old / "run")
    old.rename(new)
    moved = prepare(config(new / name, packing=packing), new / "run")
    assert moved.sha256 == first.sha256
    assert np.array_equal(both(moved), both(first))
    again = prepare(config(new / name, packing=packing), new / "run", lead=False)
    assert np.array_equal(again.starts("train"), first.starts("train"))


@pytest.mark.parametrize("name", ["ids", "pieces", "sha256", "blocks", "dtype", "not JSON"])
def test_a_damaged_description_is_named(tmp_path: Path, name: str) -> None:
    settings = config(headerless(tmp_path / "train.bin", IDS))
    prepare(settings, tmp_path / "run")
    corpus = tmp_path / "run" / "data" / "corpus.json"
    info = json.loads(corpus.read_bytes())
    if name == "pieces":
        info["train"]["pieces"][0][2] += 10
    elif name == "dtype":
        info["files"][0]["dtype"] = "object"
    elif name == "blocks":
        info["files"][0]["blocks"] = "00" + info["files"][0]["blocks"][2:]
    else:
        info[name] = None
    corpus.write_text("{" if name == "not JSON" else json.dumps(info))
    with pytest.raises(DataError, match=r"corpus\.json"):
        prepare(settings, tmp_path / "run")


def test_a_copy_of_a_training_file_is_told(tmp_path: Path) -> None:
    ids = some_ids(5000)
    for name in ("train_0", "train_1", "val_0", "val_1"):
        headerless(tmp_path / f"{name}.bin", ids if name in ("train_1", "val_0") else ids[::-1])
    headerless(tmp_path / "val_1.bin", ids[:4000])
    data = prepare(config(tmp_path), tmp_path / "run")
    assert data.info["repeated"] == ["val_0.bin"]


def test_facts_say_what_is_trained_on(tmp_path: Path) -> None:
    data = prepare(config(headerless(tmp_path / "train.bin", IDS)), tmp_path / "run")
    facts = json.loads(json.dumps(TokenBatches(data, 0, 16, 4, 2, 8).facts(), allow_nan=False))
    shares = np.bincount(IDS) / len(IDS)
    assert facts["unigram_nats"] == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)
    assert (facts["kind"], facts["files"], facts["train_tokens"], facts["val_tokens"]) == (
        "tokens",
        1,
        4500,
        500,
    )
    assert facts["vocab"] == 64
    assert "unigram_bits_per_byte" not in facts
