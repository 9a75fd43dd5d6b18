"""Documents, their order and hashes of every format of rows, as they were when this project parsed rows itself.

python -m tests.extras.test_row_goldens    # writes tests/golden/rows.json
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harness.data.corpus import Tokens
from harness.data.tokens import prepare
from tests.unit.data.token_files import config

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "rows.json"


def texts(count: int, repeat: int = 1) -> list[str]:
    """Documents of 5 to 300 characters, with what formats quote and escape."""
    random = np.random.default_rng(7)
    words = [
        "fox",
        'a "quote"',
        "é",
        "back\\slash",
        "\u2028",
        "tab\t",
        "x,y",
        "\U0001f98a",
        "line\nend",
        "NA",
        "007",
    ]
    return [
        f"{number}: "
        + " ".join(words[each] for each in random.integers(0, len(words), 1 + number % 40)) * repeat
        for number in range(count)
    ]


SMALL = texts(300)
LARGE = texts(12_000, 20)
"""Over 32 MiB: several tasks of `prepare`."""


def lines(rows: list[str], ascii: bool = True) -> bytes:
    made = [
        {"text": text, "meta": {"n": number, "text": f"m{number}"}}
        for number, text in enumerate(rows)
    ]
    return "".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in made).encode()


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def folder(at: Path) -> Path:
    for number, name in enumerate(
        ("train-0.jsonl", "train-1.jsonl", "validation.jsonl", "test.jsonl")
    ):
        written(at / name, lines(SMALL[70 * number : 70 * (number + 1)]))
    return written(at / "README.md", b"card").parent


def odd(at: Path) -> Path:
    """Rows without a text, and rows of other shapes than the first."""
    extra = ['{"text": ""}', '{"text": null}', '{"other": 1}', '{"text": "a", "meta": "words"}']
    return written(
        at / "odd.jsonl", lines(SMALL[:50]) + "\n".join(extra).encode() + b"\n" + lines(SMALL[50:])
    )


def late(at: Path) -> Path:
    """Keys that no row among the first 10 MB has."""
    return written(
        at / "late.jsonl",
        lines(LARGE[:4000]) + b'{"text": "late", "new": {"a": [1]}}\n' + lines(SMALL),
    )


def parquet(rows: list[str], group: int, **how: Any) -> Callable[[Path], Path]:
    def write(at: Path) -> Path:
        table = pa.table({"n": range(len(rows)), "text": rows})
        pyarrow.parquet.write_table(table, at / "rows.parquet", row_group_size=group, **how)
        return at / "rows.parquet"

    return write


def saved(at: Path) -> Path:
    datasets.Dataset.from_dict({"text": LARGE}).save_to_disk(str(at / "saved"), num_shards=5)
    return at / "saved"


def splits(at: Path) -> Path:
    named = {"test": SMALL[:50], "validation": SMALL[50:100], "train": SMALL[100:]}
    made = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in named.items()}
    datasets.DatasetDict(made).save_to_disk(str(at / "saved"))
    return at / "saved"


def arrow(at: Path) -> Path:
    table = pa.table({"text": SMALL})
    with pa.ipc.new_stream(str(at / "rows.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=13)
    return at / "rows.arrow"


def feather(at: Path) -> Path:
    pyarrow.feather.write_feather(
        pa.table({"text": pa.array(SMALL).dictionary_encode()}), str(at / "rows.feather")
    )
    return at / "rows.feather"


def plain(at: Path) -> Path:
    for number in range(6):
        written(
            at / "texts" / f"{number}.txt",
            "\n".join(LARGE[number * 600 : (number + 1) * 600]).encode(),
        )
    return at / "texts"


def array(at: Path) -> Path:
    rows = [json.loads(line) for line in lines(SMALL).splitlines()]
    return written(at / "rows.json", json.dumps(rows, indent=1).encode())


SOURCES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "JSONL": (lambda at: written(at / "a.jsonl", lines(SMALL)), {}),
    "JSONL with its own letters": (lambda at: written(at / "a.ndjson", lines(SMALL, ascii=False)), {}),
    "JSONL of Windows": (lambda at: written(at / "a.jsonl", lines(SMALL).replace(b"\n", b"\r\n")), {}),
    "JSONL, nested key": (lambda at: written(at / "a.jsonl", lines(SMALL)), {"text_key": "meta.text"}),
    "JSONL, large": (lambda at: written(at / "a.jsonl", lines(LARGE)), {}),
    "JSONL, large, tokenized": (lambda at: written(at / "a.jsonl", lines(LARGE[:3000])), {"tokenizer": True}),
    "JSONL, odd rows": (odd, {"bad": "skip"}),
    "JSONL, empty lines": (lambda at: written(at / "a.jsonl", lines(SMALL).replace(b"\n", b"\n\n  \n")), {}),
    "JSONL, late keys": (late, {}),
    "JSONL by gzip": (lambda at: written(at / "a.jsonl.gz", gzip.compress(lines(LARGE))), {}),
    "folder of JSONL": (lambda at: folder(at / "rows"), {}),
    "JSON array": (array, {}),
    "Parquet": (parquet(SMALL, 17), {}),
    "Parquet, large": (parquet(LARGE, 700, use_dictionary=False), {}),
    "Parquet, tokenized": (parquet(SMALL, 17), {"tokenizer": True}),
    "Arrow": (saved, {}),
    "Arrow with splits": (splits, {}),
    "one Arrow file": (arrow, {}),
    "Feather": (feather, {}),
    "text": (plain, {"tokenizer": True}),
}  # fmt: skip


def tokenizer(at: Path) -> str:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(SMALL, trainer)
    made.save(str(at / "tokenizer.json"))
    return str(at / "tokenizer.json")


def taken(name: str, at: Path) -> dict[str, Any]:
    """What a run makes of a source: counts, hashes of all documents in their order, and the run's own hash."""
    make, settings = SOURCES[name]
    (at / "source").mkdir(parents=True)
    settings = {"packing": "documents", "val_fraction": 0.05, **settings}
    if settings.get("tokenizer"):
        settings["tokenizer"] = tokenizer(at)
    data = prepare(config(make(at / "source"), **settings), at / "run")
    told: dict[str, Any] = {
        "sha256": data.sha256,
        "ids": data.ids,
        "skipped": len(data.info["skipped"]),
    }
    for split, tokens in (("train", data.train), ("val", data.val)):
        assert isinstance(tokens, Tokens)
        ((row,), damage) = tokens.read(np.arange(len(tokens))[None])
        assert not damage
        starts = data.starts(split)
        hashed = hashlib.sha256(
            row.astype("<i4").tobytes() + starts.astype("<i8").tobytes()
        ).hexdigest()
        told[split] = {"tokens": len(row), "documents": len(starts), "sha256": hashed}
    return told


@pytest.mark.parametrize("name", SOURCES)
def test_documents_order_and_hashes_are_what_they_were(tmp_path: Path, name: str) -> None:
    assert taken(name, tmp_path) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        made = {
            name: taken(name, Path(scratch) / str(number)) for number, name in enumerate(SOURCES)
        }
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")
