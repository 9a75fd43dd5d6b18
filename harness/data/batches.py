"""Batches of token ids by sample number: the data source of the training loop.

Sample n of a split is its tokens [n * context, (n + 1) * context]. `inputs` are all but the last of these, `targets`
all but the first: the model predicts each token's successor. Samples lie side by side, so one epoch trains on every
target once. Which samples a window holds, `order` says; no state is kept here.

With data.packing=documents a sample is the same tokens, and has `segments`: the number of the document within the
sample, for attention. A target that belongs to another document than its input is IGNORED.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from harness.core.config import TEXT_COUNTS
from harness.core.errors import ConfigError, DataError, Problem, number_of
from harness.core.facts import IGNORED, UNREADABLE, Window
from harness.core.health import Fault, Flawed
from harness.core.protocols import Batch
from harness.data.arrays import Bools, Ints
from harness.data.order import sample_numbers
from harness.data.tokens import TokenData


def check_world(global_batch: int, micro_batch: int, world_size: int) -> None:
    """Raises ConfigError, naming a value that works, unless every rank gets equally many whole micro-batches."""
    if global_batch % (micro_batch * world_size) == 0:
        return
    ranks = number_of(world_size, "rank")
    why = f"{global_batch} samples in micro-batches of {micro_batch} cannot be shared equally by {ranks}"

    # If the ranks can share the batch, a smaller micro-batch is enough. Else the batch must grow.
    per_rank, rest = divmod(global_batch, world_size)
    if rest:
        whole = micro_batch * world_size
        fix = f"set train.global_batch={-(-global_batch // whole) * whole}"
    else:
        fits = min(micro_batch, per_rank)
        while per_rank % fits:
            fits -= 1
        fix = f"set train.micro_batch={fits}"
    where = "train.global_batch, train.micro_batch"
    raise ConfigError(Problem("the batch does not divide over the ranks", where, why, fix))


def training_rows(
    window: Window, global_batch: int, micro_batch: int, rank: int, world_size: int
) -> Ints:
    """A rank's samples of a window, int64 [micro-batches, micro_batch].

    They are micro-batches `rank`, `rank + world_size`, ... of the window, so that the window's samples do not depend on
    the number of ranks. Raises ConfigError as `check_world`.
    """
    check_world(global_batch, micro_batch, world_size)
    return window.samples.reshape(-1, micro_batch)[rank::world_size]


def validation_rows(
    wanted: int, available: int, micro_batch: int, rank: int, world_size: int
) -> list[Ints]:
    """A rank's validation samples, int64 [size] for each batch: `wanted` of `available` in all, spread evenly.

    Every rank has equally many batches, as ranks that share a model compute in step. Sizes differ by one at most, and
    none is over `micro_batch`. Every sample is in one batch of one rank; with micro-batches of one sample, the
    remainder over the ranks is in none. With fewer samples than ranks, every rank evaluates all of them.
    """
    if wanted < world_size:
        rank, world_size = 0, 1
    count = wanted
    batches = -(-wanted // (world_size * micro_batch))
    # No batch may be empty, which only micro-batches of one sample can lead to.
    if batches * world_size > wanted:
        batches = wanted // world_size
        count = batches * world_size
    samples = np.arange(count, dtype=np.int64) * available // count
    return np.array_split(samples, batches * world_size)[rank::world_size]


class Rows(NamedTuple):
    """Samples as they were read.

    tokens: int64 [samples, context + 1].
    begins: bool of that shape: whether a document begins with the token; None if the samples are not packed.
    damage: rows that could not be read, and why.
    """

    tokens: Ints
    begins: Bools | None
    damage: dict[int, str]


def as_batch(rows: Rows) -> Batch:
    """Inputs, targets and, of packed samples, segments. A batch with damage says so (`health.Flawed`)."""
    tokens = torch.from_numpy(rows.tokens)
    # Copies: of a single sample both are contiguous views of the same tokens, and targets are changed below.
    batch = {"inputs": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone()}
    if rows.begins is not None:
        # Each beginning raises the number of the document. What a document begins with cannot be predicted from the
        # one before it.
        begins = torch.from_numpy(rows.begins)
        batch["segments"] = begins[:, :-1].to(torch.int64).cumsum(1)
        batch["targets"].masked_fill_(begins[:, 1:], IGNORED)
    if not rows.damage:
        return batch
    faults = [Fault(row, UNREADABLE, text) for row, text in rows.damage.items()]
    return Flawed(batch, faults)


class TokenBatches:
    """Samples of `context` tokens and their successors, from a run's tokens.

    tokens_per_sample: context.
    masked: whether some targets are IGNORED, as of packed samples.
    vocab, ids: as of `TokenData`.
    unit: of the loss.
    n_samples, available: samples that there are to train on, and to validate on.
    """

    def __init__(
        self,
        data: TokenData,
        seed: int,
        context: int,
        global_batch: int,
        micro_batch: int,
        val_samples: int,
        packed: bool = False,
    ) -> None:
        """packed: documents are kept apart. Raises DataError if a split is shorter than one sample, or if nothing says
        where documents begin."""
        self._data = data
        self._seed = seed
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self.tokens_per_sample = context
        self.masked = packed
        self.vocab, self.ids = data.vocab, data.ids
        counted = "byte" if self.tokenizer == "" else "token"
        self.unit = f"nats per {counted}"
        self.name = f"{counted}s of {data.info['source']}"

        # n samples of `context` inputs take n * context + 1 tokens: the last target has no input of its own.
        self.n_samples = (len(data.train) - 1) // context
        self.available = (len(data.val) - 1) // context
        self._val_samples = min(val_samples, self.available)
        self._separator = _separator(data) if packed else None
        if self.n_samples < 1 or self.available < 1:
            fix = f"give more text, or lower data.context ({context})"
            raise DataError(Problem("too short for one sample", self.name, fix=fix))

    @property
    def tokenizer(self) -> str | None:
        """Its hash, empty for bytes; None if nobody said what made the ids."""
        info = self._data.info
        if info.get("kind") == "tokens" and not info["tokenizer"]:
            return None
        return info.get("tokenizer", "")

    def window(self, index: int) -> Window:
        """The window at place `index` of the data order: samples int64 [global_batch]."""
        samples = sample_numbers(self._seed, index, self._global_batch, self.n_samples)
        return Window(index, samples)

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        """This rank's `inputs` and `targets`, each int64 [micro_batch, context] on the CPU; see `training_rows`.

        Raises ConfigError if they do not divide evenly, DataError if a snapshot cannot be read any longer.
        """
        sizes = (self._global_batch, self._micro_batch)
        rows = training_rows(window, *sizes, rank, world_size)
        return [self.batch("train", samples) for samples in rows]

    def validation(self, rank: int, world_size: int) -> list[Batch]:
        """This rank's validation batches, the same at every call; see `validation_rows`.

        Raises DataError if a sample is not what it was when the run began: what is validated on never changes.
        """
        rows = validation_rows(
            self._val_samples, self.available, self._micro_batch, rank, world_size
        )
        return [self.batch("val", row) for row in rows]

    def batch(self, split: str, samples: Ints) -> Batch:
        """`samples` of a split, "train" or "val". Raises DataError as `micro_batches` and `validation` do."""
        return as_batch(self.read(split, samples))

    def read(self, split: str, samples: Ints) -> Rows:
        """`samples` of a split with their successors. Raises DataError as `micro_batches` and `validation` do."""
        # A sample has one token more than its inputs: the target of the last one.
        context = self.tokens_per_sample
        first = samples * context
        places = first[:, None] + np.arange(context + 1)
        tokens = self._data.train if split == "train" else self._data.val
        rows, damage = tokens.read(places)

        # A damaged training sample is skipped with its window. Validation must be of the same samples every time.
        if damage and split == "val":
            problems: list[Problem] = []
            for row, text in damage.items():
                what = f"sample {samples[row]} differs"
                problems.append(Problem(what, "the validation split", text))
            raise DataError(problems)
        begins = None
        if self.masked:
            begins = self._begins(split, rows, first)
        return Rows(rows, begins, damage)

    def _begins(self, split: str, rows: Ints, places: Ints) -> Bools:
        """bool [rows, width]: whether a document begins with that token; False for the first of a row."""
        # Where an index or the copy's description says it. `starts` is sorted: those within a row follow each other.
        starts = self._data.starts(split)
        width = rows.shape[1]
        found = np.zeros(rows.shape, dtype=np.bool_)
        for row, place in enumerate(places.tolist()):
            first, last = np.searchsorted(starts, [place + 1, place + width])
            found[row, starts[first:last] - place] = True

        # Where only a token says it: a document begins after each separator.
        if self._separator is not None:
            found[:, 1:] |= rows[:, :-1] == self._separator
        return found

    def facts(self) -> dict[str, Any]:
        """What this run trains on, JSON-able, for the journal; sizes in tokens, and in bytes where the run has a
        copy."""
        info = self._data.info
        # A file that was cut into both splits is listed twice.
        names = {file["name"] for file in info["files"]}
        skipped = [f"{skip['name']} ({skip['reason']})" for skip in info["skipped"]]
        facts: dict[str, Any] = {
            "source": info["source"],
            "kind": info.get("kind", "text"),
            "files": info.get("source_files", len(names)),
            "train_tokens": len(self._data.train),
            "val_tokens": len(self._data.val),
            "train_samples": self.n_samples,
            "val_samples": self._val_samples,
            "vocab": self.vocab,
            "sha256": info["sha256"],
            "skipped": skipped,
        }
        # Bytes end with a line end, and token ids of somebody else's say nothing of a tokenizer.
        if info.get("tokenizer") and info["separator"] is None:
            facts["joined"] = True
        if info.get("repeated"):
            facts["repeated"] = list(info["repeated"])
        for key in TEXT_COUNTS:
            if info.get(key):
                facts[key] = list(info[key])
        if self.masked and self._separator is None:
            starts = self._data.starts("train")
            lengths = np.diff(starts, append=len(self._data.train))
            facts["longest_document"] = int(lengths.max(initial=0))

        # Losses per byte compare in bits per byte; losses per token only within one tokenizer.
        if "ids" in info:
            facts["unigram_nats"] = info["unigram_nats"]
            facts["tokenizer"] = info["tokenizer"]
            if self.tokenizer == "":
                facts["unigram_bits_per_byte"] = info["unigram_nats"] / math.log(2)
        else:
            facts["train_bytes"] = info["train"]["bytes"]
            facts["val_bytes"] = info["val"]["bytes"]
            facts["unigram_bits_per_byte"] = info["unigram_bits_per_byte"]
        return facts


def _separator(data: TokenData) -> int | None:
    """The id that ends a document, where only that says where documents begin. None: an index or the copy says it.

    Raises DataError if nothing says it.
    """
    info = data.info
    # A copy of text: its description lists the documents.
    if "ids" not in info:
        return None
    if all(file["index"] for file in info["files"]):
        return None
    separator: int | None = info["separator"]
    where = f"data.path: {info['source']}"
    if info.get("separators") == 0:
        why = f"no token of the files is {separator}, with which documents should end"
        fix = "set data.separator to the id that ends them, or data.packing=none"
        raise DataError(Problem("documents cannot be told apart", where, why, fix))
    if separator is None:
        why = "the files have no index of their documents, and no token id is known to end one"
        fix = "set data.separator to that id, give data.tokenizer, or set data.packing=none"
        raise DataError(Problem("documents cannot be told apart", where, why, fix))
    return separator
