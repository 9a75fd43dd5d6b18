"""What a run trains on: made from `data.path` at the first start, and the same tokens at every later one.

What lies at `data.path` decides where the tokens are kept, relative to the run's folder:

- text without a tokenizer is copied (`snapshot`): `data/train.bin`, `data/val.bin`;
- rows, and text with a tokenizer, are made into token ids (`prepare`): `data/tokens/`;
- files of token ids, and what `harness data prepare` made, stay where they are (`corpus`).

`data/corpus.json` describes the tokens with their hashes. It is written last: without it there are no data yet. The
next start reads it, compares the files with their hashes, and does not look at `data.path` again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.core.config import TEXT_COUNTS, DataConfig, Documents
from harness.core.errors import DataError, Problem, TooShortError
from harness.core.files import MAX_LARGE, home, read_json, read_mapping
from harness.data import corpus, snapshot
from harness.data.arrays import Ints
from harness.data.blocks import BLOCK, Stamp
from harness.data.corpus import EarlierRead, Vocabulary, describe_corpus
from harness.data.detect import look, no_such
from harness.data.hub import PREFIX, Fetched, fetch
from harness.data.prepare import PREPARED, Preparation, prepare_dataset, too_large
from harness.data.shards import read_shards
from harness.data.snapshot import damaged, size_of, write_snapshot
from harness.data.source import (
    MADE_COPY,
    MADE_DATASET,
    MADE_TOKENS,
    RECORD,
    files_of,
    record_of_files,
    record_of_text,
    save_record,
    stamps,
)
from harness.data.splits import (
    SECOND_LINK,
    LeftOut,
    is_validation,
    with_validation,
    without_second_links,
    without_tests,
)
from harness.data.text import MAX_BYTES, divide, read_text, standard_library
from harness.data.tokenizer import load_encoder, tokenizer_file

_TOKENIZED = 256 << 20
"""Bytes of a source that a run tokenizes by itself: the other ranks wait, and every run does it again."""

_PREPARE_FIX = "prepare it again into an empty folder, or copy it again"


class SplitTokens(Protocol):
    """The tokens of one split: `snapshot.TokenFile` or `corpus.Tokens`."""

    starts: Ints

    def __len__(self) -> int: ...

    def read(self, places: Ints) -> tuple[Ints, dict[int, str]]: ...


@dataclass(frozen=True, slots=True)
class TokenData:
    """A run's tokens, read when they are wanted.

    train, val: the splits.
    info: what corpus.json says; see `snapshot.write_snapshot` and `corpus.describe_corpus`.
    """

    train: SplitTokens
    val: SplitTokens
    info: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """Hash of the data, hex. For a snapshot of its training bytes and then its validation bytes; for a corpus of
        its description.
        """
        return self.info["sha256"]

    @property
    def vocab(self) -> int:
        """How many ids a model must know: a multiple of corpus.PADDED_TO."""
        return self.info.get("vocab", snapshot.VOCAB)

    @property
    def is_snapshot(self) -> bool:
        """Whether the run has a copy of it, as bytes."""
        return self.info["format"] == snapshot.FORMAT

    @property
    def ids(self) -> int:
        """How many ids there may be, from 0: of the tokenizer, else the largest of both splits + 1."""
        return self.info.get("ids", snapshot.VOCAB)

    def starts(self, split: str) -> Ints:
        """Places of a split's tokens where a document is known to begin, sorted."""
        return self.train.starts if split == "train" else self.val.starts


def prepare(
    config: DataConfig,
    run_dir: Path,
    global_batch: int = 1,
    lead: bool = True,
    reading: Callable[[str | None], None] = lambda path: None,
) -> TokenData:
    """The run's tokens: those it began with; at its first start, what `config.path` has now.

    With several ranks, rank 0 calls this first, and the others after a barrier without `lead`: they make and compare
    nothing. reading: see `blocks.CheckedFile`.

    Raises DataError for data that cannot be used (with all that is wrong) or have changed, a folder that cannot be
    written, and less than `global_batch` training samples and one validation sample; ConfigError for a tokenizer that
    cannot be read, or a library that is missing.
    """
    return prepare_in(config, run_dir / "data", global_batch, lead, reading)


def prepare_in(
    config: DataConfig,
    folder: Path,
    global_batch: int,
    lead: bool,
    reading: Callable[[str | None], None],
) -> TokenData:
    """As `prepare`, in a folder of the run's data."""
    # The first start. Without corpus.json nothing else counts: a start that was killed may have left anything.
    if not (folder / "corpus.json").exists():
        try:
            _make(config, folder, global_batch)
        except OSError as error:
            what = f"the text cannot be copied into the run: {error.strerror}"
            fix = "make the run folder writable, or free some space"
            raise DataError(Problem(what, str(folder), fix=fix)) from error

    # This start and every later one read the same description.
    copied: dict[str, snapshot.TokenFile] = {}
    try:
        info = read_json(folder / "corpus.json", MAX_LARGE)
        if info["format"] == snapshot.FORMAT:
            copied = snapshot.open_snapshot(folder, info)
        else:
            info = corpus.parse_corpus(info)
    except DataError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"it cannot be read as the snapshot's description: {type(error).__name__}: {error}"
        raise DataError(damaged(folder / "corpus.json", why[:300])) from error

    if copied:
        data = TokenData(copied["train"], copied["val"], info)
    else:
        data = _open_corpus(folder, info, config, lead, reading)
    source = data.info["source"]
    _check_length(source, len(data.train), len(data.val), config, global_batch)
    return data


def _open_corpus(
    folder: Path,
    written: dict[str, Any],
    config: DataConfig,
    lead: bool,
    reading: Callable[[str | None], None],
) -> TokenData:
    # The files may have moved together with `data.path`.
    source = home(config.path) if config.path else None
    info = corpus.relocate(folder, written, source)
    if lead:
        info = corpus.check_corpus(folder, info)
        if info != written:
            # The next start then hashes what was touched once more.
            with contextlib.suppress(OSError):
                corpus.save_corpus(folder, info)
    splits = corpus.open_corpus(folder, info, config.packing == "documents", reading)
    return TokenData(splits["train"], splits["val"], info)


def _make(config: DataConfig, folder: Path, global_batch: int) -> None:
    """Write corpus.json, after what it describes. Raises OSError, DataError, ConfigError."""
    (folder / RECORD).unlink(missing_ok=True)
    if config.path and config.path.startswith(PREFIX):
        _save(folder, _from_hub(config, config.path, folder), config.tokenizer)
        return

    # Plain text alone becomes a copy. All else becomes, or is, token ids. Without a path: the standard library's text.
    path = _find(config.path) if config.path else None
    kind = config.format
    if kind == "auto":
        kind = look(path) if path else "text"
    if kind == "text" and not config.tokenizer:
        _copy_text(config, path, folder, global_batch)
        return

    if path is None:
        fix = "give your own: data.path=<file or folder>"
        raise DataError(Problem("a tokenizer needs a text of yours", "data.tokenizer", fix=fix))
    tokenizer = config.tokenizer
    if kind == "tokens":
        info = _token_files(config, path, folder)
    elif kind == "prepared":
        # The record of what it was prepared from, so that a later start reports a changed source.
        info = _prepared(path, folder, _hold_out(config), config.tokenizer)
        if record := read_mapping(path / PREPARED, MAX_LARGE).get("origin"):
            save_record(folder, record, MADE_DATASET, path)
        if tokenizer is None and (path / "tokenizer.json").is_file():
            tokenizer = str(path)
    else:
        info = _tokenized(config, str(path), kind, folder)
    _save(folder, info, tokenizer)


def _find(given: str) -> Path:
    """The file or folder that `data.path` means. Raises DataError if there is none."""
    path = home(given)
    # Megatron names its pairs of files without an ending.
    with_ending = path.with_name(f"{path.name}.bin")
    if not path.exists() and with_ending.is_file():
        return with_ending
    # A link that leads nowhere counts as there: its reader has the better message.
    if not os.path.lexists(path):
        raise DataError(no_such(given, path))
    return path


def _save(folder: Path, info: Mapping[str, Any], tokenizer: str | None) -> None:
    """Write corpus.json, after a copy of the tokenizer."""
    if tokenizer:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tokenizer_file(Path(tokenizer)), folder / "tokenizer.json")
    corpus.save_corpus(folder, info)


def _copy_text(
    config: DataConfig,
    path: Path | None,
    folder: Path,
    global_batch: int,
) -> None:
    # Stamps from before the reading show a file that changes while it is read.
    before = stamps(files_of(path, None)) if path else {}
    text = read_text(path, config.bad) if path else standard_library()
    text, train, val = divide(text, config.val_fraction)
    _check_length(text.source, size_of(train), size_of(val), config, global_batch)
    if path:
        save_record(folder, record_of_text(path, before, text.documents), MADE_COPY)
    write_snapshot(folder, text, train, val)


def _from_hub(config: DataConfig, given: str, folder: Path) -> dict[str, Any]:
    most = _TOKENIZED if config.tokenizer else MAX_BYTES

    def check(size: int, kind: str) -> None:
        if size > most:
            raise too_large(given, kind, most, config.tokenizer)

    hub = fetch(given, config, config.cache, check)
    if config.format not in ("auto", hub.kind):
        fix = "leave data.format out"
        raise DataError(Problem(f"is {hub.kind}", f"data.path: {given}", fix=fix))
    return _tokenized(config, hub.folder, hub.kind, folder, hub)


def _tokenized(
    config: DataConfig, source: str, kind: Documents, folder: Path, hub: Fetched | None = None
) -> dict[str, Any]:
    """Make token ids in `folder`/tokens; what corpus.json says of them."""
    wanted = Preparation(
        source, kind, config.text_key, config.bad, config.tokenizer, config.val_fraction, hub
    )
    most = _TOKENIZED if config.tokenizer else MAX_BYTES
    made = prepare_dataset(wanted, folder / "tokens", most=most, overwrite=True)
    if record := made.get("origin"):
        save_record(folder, record, MADE_TOKENS)
    return _prepared(folder / "tokens", folder, _hold_out(config), None)


def _token_files(config: DataConfig, path: Path, folder: Path) -> dict[str, Any]:
    """What corpus.json says of files of token ids, or a folder of them."""
    vocabulary: Vocabulary | None = None
    if config.tokenizer:
        vocabulary = load_encoder(config.tokenizer).vocabulary
    separator = config.separator
    if separator is None and vocabulary is not None:
        separator = vocabulary.separator

    left_out: LeftOut = []
    if path.is_dir():
        train, val, left_out = _shards_of(path)
    else:
        path = path.with_suffix(".bin") if path.suffix.lower() == ".idx" else path
        first, *val = [file for file, _ in with_validation(path)]
        train = [first]
    if not train:
        fix = "name one without val in its name"
        raise DataError(Problem("has no training files", f"data.path: {path}", fix=fix))

    shards = read_shards(train, val, config.dtype, left_out)
    info = describe_corpus(
        folder, str(path), "tokens", shards, vocabulary, separator, _hold_out(config)
    )
    # Files to validate on that are copies of one to train on. Training files come first.
    content = [(file["dtype"], file["offset"], file["blocks"]) for file in info["files"]]
    trained = set(content[: len(train)])
    copies: list[str] = []
    for file, own in zip(val, content[len(train) :], strict=True):
        if own in trained:
            copies.append(file.name)
    if copies:
        info["repeated"] = copies

    # The ids are not copied and have hashes of their own: only a change of the tokenizer is to be reported.
    if config.tokenizer:
        file = tokenizer_file(Path(config.tokenizer)).resolve()
        tokenizer = (str(file), info["tokenizer"])
        record = record_of_files(path, None, False, {}, tokenizer)
        save_record(folder, record, MADE_TOKENS)
    return info


def _shards_of(folder: Path) -> tuple[list[Path], list[Path], LeftOut]:
    """(training files, validation files, what is left out) of a folder of token ids."""
    in_folder = sorted(folder.iterdir())
    every = [file for file in in_folder if file.suffix.lower() == ".bin"]
    left_out: LeftOut = []

    files, links = without_second_links(every)

    names, tests = without_tests([file.name for file in files])
    train = [folder / name for name in names if not is_validation(name)]
    val = [folder / name for name in names if is_validation(name)]

    # An .idx belongs to its .bin, and is not listed as left out.
    left_out += tests
    left_out += [(file.name, SECOND_LINK) for file in links]
    pairs: set[Path] = set()
    for file in every:
        pairs |= {file, file.with_suffix(".idx")}
    for other in in_folder:
        if other not in pairs and not other.name.startswith("."):
            left_out.append((other.name, "not a .bin"))
    return train, val, left_out


def _prepared(
    path: Path, folder: Path, held_out: Callable[[int], int], tokenizer: str | None
) -> dict[str, Any]:
    """What corpus.json in `folder` says of what `harness data prepare` made at `path`.

    tokenizer: what the user gave beside it. Raises DataError for a folder that is not whole, or was made with another
    tokenizer; ConfigError, OSError.
    """
    where = f"data.path: {path}"
    try:
        made = read_json(path / PREPARED, MAX_LARGE)
        vocabulary = Vocabulary(**made["vocabulary"])
        earlier: dict[str, EarlierRead] = {}
        files: dict[str, list[Path]] = {"train": [], "val": []}
        for shard in made["shards"]:
            file = path / shard["name"]
            stamp = Stamp(shard["bytes"], shard["mtime_ns"], shard["inode"])
            digests = bytes.fromhex(shard["blocks"])
            earlier[str(file)] = EarlierRead(stamp, digests, shard["largest"])
            files[shard["split"]].append(file)
        left_out = [(skip["name"], skip["reason"]) for skip in made["skipped"]]
        nats = float(made["unigram_nats"])
        source, kind = str(made["source"]), str(made["kind"])
        source_files = int(made["source_files"])
        counted: dict[str, list[int]] = {}
        for key in TEXT_COUNTS:
            counted[key] = [int(count) for count in made.get(key, ())]
        if made["block_bytes"] != BLOCK:
            raise ValueError(f"its blocks have {made['block_bytes']} bytes, not {BLOCK}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{PREPARED}: {type(error).__name__}: {error}"[:300]
        raise DataError(Problem("is not whole", where, why, _PREPARE_FIX)) from error

    # The ids mean nothing with another tokenizer than the one that made them.
    if tokenizer and load_encoder(tokenizer).vocabulary.tokenizer != vocabulary.tokenizer:
        was = "with another one" if vocabulary.tokenizer else "without one, as bytes"
        fix = "leave data.tokenizer out, or prepare the source again with it"
        what = "was prepared with another tokenizer"
        raise DataError(Problem(what, where, f"it was made {was}", fix))

    # One error names every file that was not copied.
    needed: list[Path] = []
    for shard in (*files["train"], *files["val"]):
        needed += [shard, shard.with_suffix(".idx")]
    missing = [file for file in needed if not file.is_file()]
    if missing:
        fix = _PREPARE_FIX
        problems = [Problem("is missing", f"data.path: {file}", fix=fix) for file in missing]
        raise DataError(problems)

    # A prepared shard has an index, which names its dtype: the one given here is of files without an index.
    shards = read_shards(files["train"], files["val"], "uint16", left_out)
    separator = vocabulary.separator
    info = describe_corpus(
        folder, source, kind, shards, vocabulary, separator, held_out, earlier, nats
    )
    return {**info, "source_files": source_files, **counted}


def _hold_out(config: DataConfig) -> Callable[[int], int]:
    return lambda tokens: corpus.hold_out(tokens, config.val_fraction, config.context + 1)


def _check_length(
    source: str,
    train: int,
    val: int,
    config: DataConfig,
    global_batch: int,
) -> None:
    """n samples of `context` inputs and as many targets need n * context + 1 tokens: a target is the next input."""
    need_train = global_batch * config.context + 1
    need_val = config.context + 1
    if train >= need_train and val >= need_val:
        return
    product = f"train.global_batch {global_batch} x data.context {config.context}"
    why = f"training has {train} tokens and needs {need_train} ({product} + 1); "
    why += f"validation has {val} and needs {need_val}"
    where = f"data.path: {source}" if config.path else source
    fix = "give more text, or lower data.context or train.global_batch"
    problem = Problem("too short to train on", where, why, fix)
    raise TooShortError(problem, train, val, need_val)
