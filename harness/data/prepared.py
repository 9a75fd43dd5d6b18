"""A folder that `harness data prepare` made, as a run reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.core.errors import DataError, Problem
from harness.core.files import MAX_LARGE, read_json
from harness.data.blocks import BLOCK, Stamp
from harness.data.corpus import Known, Vocabulary, write_corpus
from harness.data.registry import PREPARED
from harness.data.shards import Shards, read_files, read_shard
from harness.data.tokenizer import load_encoder

_FIX = "prepare it again into an empty folder, or copy it again"


def open_prepared(path: Path, folder: Path, held_out: Callable[[int], int], tokenizer: str | None) -> dict[str, Any]:
    """As `corpus.write_corpus`, for `folder` of a run. tokenizer: what the user gave beside it.

    Raises DataError for a folder that is not whole, or was made with another tokenizer; ConfigError, OSError.
    """
    where = f"data.path: {path}"
    try:
        info = read_json(path / PREPARED, MAX_LARGE)
        vocabulary = Vocabulary(**info["vocabulary"])
        known = {
            str(path / shard["name"]): Known(
                Stamp(shard["bytes"], shard["mtime_ns"], shard["inode"]),
                bytes.fromhex(shard["blocks"]),
                shard["largest"],
            )
            for shard in info["shards"]
        }
        names = {split: [path / each["name"] for each in info["shards"] if each["split"] == split] for split in _SPLITS}
        left_out = tuple((skip["name"], skip["reason"]) for skip in info["skipped"])
        nats, source, kind = float(info["unigram_nats"]), str(info["source"]), str(info["kind"])
        source_files = int(info["source_files"])
        ids, separator = vocabulary.ids, vocabulary.separator
        if type(ids) is not int or ids < 1 or not isinstance(separator, int | None):
            raise ValueError("its vocabulary is no number of ids")
        if info["block_bytes"] != BLOCK:
            raise ValueError(f"its blocks have {info['block_bytes']} bytes, not {BLOCK}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{PREPARED}: {type(error).__name__}: {error}"[:300]
        raise DataError(Problem("is not whole", where, why, _FIX)) from error
    if tokenizer and load_encoder(tokenizer).vocabulary.tokenizer != vocabulary.tokenizer:
        was = "with another one" if vocabulary.tokenizer else "without one, as bytes"
        fix = "leave data.tokenizer out, or prepare the source again with it"
        raise DataError(Problem("was prepared with another tokenizer", where, f"it was made {was}", fix))
    missing = [file.name for files in names.values() for file in files if not file.is_file()]
    if missing:
        raise DataError([Problem("is missing", f"{where}/{name}", fix=_FIX) for name in missing])
    shards = read_files(names["train"], names["val"], lambda file: read_shard(file, "uint16"))
    shards = Shards(shards.train, shards.val, left_out)
    made = write_corpus(folder, source, kind, shards, vocabulary, vocabulary.separator, held_out, known, nats)
    return {**made, "source_files": source_files}


_SPLITS = ("train", "val")
