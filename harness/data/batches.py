"""Batches of token ids by sample number: the data source of the loop, and its order.

Counter-based: which samples a window holds is a pure function of (seed, index). Nothing is shuffled and nothing is
remembered. Every epoch reads every sample once, in the order of a keyed permutation of [0, n): a balanced Feistel
network (Luby & Rackoff, 1988) over the next even number of bits, whose outputs beyond n are fed back in until they
fall inside (cycle walking: Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no memory and
does not know how many ranks there are.

Whatever the source, its next window is read by a thread while this one is trained on (`Prefetched`); a read that hangs
is named.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from harness.core.errors import ConfigError, DataError, Problem
from harness.core.facts import IGNORED, UNREADABLE, Window
from harness.core.health import Fault, Flawed
from harness.core.protocols import Batch, Batches
from harness.data.corpus import Tokens
from harness.data.tokens import TokenData

Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_BLOCK = 1024
_MASK64 = (1 << 64) - 1
FIRST_TOLD = 10.0
"""Seconds that a window may be waited for before it is told; then twice as many, and so on."""


def sample_numbers(seed: int, index: int, global_batch: int, n_samples: int) -> npt.NDArray[np.int64]:
    """The samples of window `index`: int64 [global_batch], each in [0, n_samples).

    Position p = index * global_batch + j of the endless order is sample permutation(seed, p // n_samples) at
    p % n_samples: a window may end one epoch and begin the next.
    """
    return ordered_samples(seed, index * global_batch, (index + 1) * global_batch, n_samples)


def ordered_samples(seed: int, begin: int, end: int, n_samples: int) -> npt.NDArray[np.int64]:
    """The samples at positions [begin, end) of the endless order, int64; see `sample_numbers`."""
    numbers = range(begin // _BLOCK, (end - 1) // _BLOCK + 1)
    blocks = [_block(seed & _MASK64, number, n_samples) for number in numbers]
    order = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    start = begin - numbers[0] * _BLOCK
    return order[start : start + end - begin].copy()


def keyed_places(seed: int, cycle: int, count: int) -> npt.NDArray[np.int64]:
    """A permutation of [0, count), int64, keyed by seed and cycle."""
    cycles = np.full(count, cycle, dtype=np.uint64)
    return _permute(np.arange(count, dtype=np.uint64), count, _round_keys(seed & _MASK64, cycles)).astype(np.int64)


@lru_cache(maxsize=64)  # a window may lie across two, of each source of a mixture
def _block(seed: int, number: int, n_samples: int) -> npt.NDArray[np.int64]:
    """Samples at positions [number * _BLOCK, (number + 1) * _BLOCK) of the order, int64; read only.

    The network takes hundreds of small operations, however few positions go through it: many windows share one pass.
    """
    positions = np.uint64(number * _BLOCK) + np.arange(_BLOCK, dtype=np.uint64)
    epochs, places = np.divmod(positions, np.uint64(n_samples))
    return _permute(places, n_samples, _round_keys(seed, epochs)).astype(np.int64)


def _permute(places: Words, n: int, keys: Words) -> Words:
    """places: uint64 [k] in [0, n); keys: uint64 [rounds, k]. A permutation of [0, n) for each column of keys."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    places = places.copy()
    outside = np.arange(len(places))
    while len(outside):
        places[outside] = _feistel(places[outside], half, keys[:, outside])
        outside = outside[places[outside] >= n]
    return places


def _feistel(values: Words, half: int, keys: Words) -> Words:
    """A bijection of 2 * `half` bits: each round swaps the halves and masks one with a hash of the other."""
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & low
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & low)
    return (left << bits) | right


def _round_keys(seed: int, epochs: Words) -> Words:
    """uint64 [rounds, k]: keys of the rounds, for each of k positions, from the seed and its epoch."""
    base = _mix(_mix(np.full_like(epochs, seed)) ^ epochs)
    return np.stack([_mix(base + np.uint64(number)) for number in range(_ROUNDS)])


def _mix(words: Words) -> Words:
    """The splitmix64 generator's output for state `words` (Steele, Lea & Flood, 2014): every bit moves every bit."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def check_world(global_batch: int, micro_batch: int, world_size: int) -> None:
    """Raises ConfigError, naming a value that works, unless every rank gets equally many whole micro-batches."""
    if global_batch % (micro_batch * world_size) == 0:
        return
    why = f"{global_batch} samples in micro-batches of {micro_batch} cannot be shared equally by {world_size} ranks"
    per_rank, rest = divmod(global_batch, world_size)
    if rest:
        whole = micro_batch * world_size
        fix = f"set train.global_batch={-(-global_batch // whole) * whole}"
    else:
        fits = max(size for size in range(1, min(micro_batch, per_rank) + 1) if per_rank % size == 0)
        fix = f"set train.micro_batch={fits}"
    raise ConfigError(
        Problem("the batch does not divide over the ranks", "train.global_batch, train.micro_batch", why, fix)
    )


class TokenBatches:
    """Samples of `context` tokens and their successors, cut side by side from a run's tokens; holds no state.

    Sample n is tokens [n * context, (n + 1) * context] of the split: inputs are all but the last, targets all but the
    first. packed: a sample has `segments` too, and a target that belongs to another document than its input is IGNORED.
    Raises DataError if a split is shorter than one sample, or nothing says where documents begin.
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
        self.tokens_per_sample = context
        self.masked = packed
        self._data = data
        self.vocab, self.ids = data.vocab, data.ids
        self.unit = "nats per byte" if self.tokenizer == "" else "nats per token"
        self.name = f"{'bytes' if self.tokenizer == '' else 'tokens'} of {data.info['source']}"
        self.n_samples = (len(data.train) - 1) // context
        self._available = (len(data.val) - 1) // context
        self._seed = seed
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._val_samples = min(val_samples, self._available)
        self._splits = {split: _Split(data, split, packed) for split in ("train", "val")}
        if self.n_samples < 1 or self._available < 1:
            raise DataError(
                Problem("too short for one sample", self.name, fix=f"give more text, or lower data.context ({context})")
            )

    def window(self, index: int) -> Window:
        """The window at place `index` of the data order: samples int64 [global_batch]."""
        return Window(index, sample_numbers(self._seed, index, self._global_batch, self.n_samples))

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        """This rank's `inputs` and `targets`, each int64 [micro_batch, context] on the CPU: micro-batches `rank`,
        `rank + world_size`, ... of the window, so that the window's samples do not depend on the number of ranks.

        Of a sample that is not what it was when the run began the batch says so, with the file (`health.Flawed`).
        Raises ConfigError if they do not divide evenly, DataError if a snapshot cannot be read any longer.
        """
        check_world(self._global_batch, self._micro_batch, world_size)
        rows = window.samples.reshape(-1, self._micro_batch)
        return [self.batch("train", row) for row in rows[rank::world_size]]

    def validation(self, rank: int, world_size: int) -> list[Batch]:
        """This rank's validation batches, `inputs` and `targets` int64 [size, context], the same at every call.

        All batches of all ranks have one size, at most micro_batch, and every rank has equally many, so that a mean
        of means weighs every token alike; the few samples that this leaves over are dropped. The samples are spread
        evenly over the split. With fewer samples than ranks, every rank evaluates all of them. Raises DataError if one
        is not what it was when the run began: what is validated on never changes.
        """
        rows = validation_rows(self._val_samples, self._available, self._micro_batch, rank, world_size)
        return [self.batch("val", row) for row in rows]

    def batch(self, split: str, samples: npt.NDArray[np.int64]) -> Batch:
        """`samples` of a split, "train" or "val". Raises DataError as `micro_batches` and `validation` do."""
        return as_batch(self.read(split, samples))

    @property
    def available(self) -> int:
        """Validation samples that there are."""
        return self._available

    def facts(self) -> dict[str, Any]:
        """What this run trains on, JSON-able, for the journal; sizes in bytes, or in tokens."""
        info = self._data.info
        facts: dict[str, Any] = {
            "source": info["source"],
            "kind": info.get("kind", "text"),
            "files": info.get("source_files", len({file["name"] for file in info["files"]})),
            "train_tokens": len(self._data.train),
            "val_tokens": len(self._data.val),
            "train_samples": self.n_samples,
            "val_samples": self._val_samples,
            "vocab": self.vocab,
            "sha256": info["sha256"],
            "skipped": _readable(info["skipped"]),
        }
        if info.get("repeated"):
            facts["repeated"] = list(info["repeated"])
        if self.masked and (longest := self._splits["train"].longest()) is not None:
            facts["longest_document"] = longest
        if "ids" in info:
            facts |= {"unigram_nats": info["unigram_nats"], "tokenizer": info["tokenizer"]}
            return facts | (
                {"unigram_bits_per_byte": info["unigram_nats"] / math.log(2)} if self.tokenizer == "" else {}
            )
        return facts | {
            "train_bytes": info["train"]["bytes"],
            "val_bytes": info["val"]["bytes"],
            "unigram_bits_per_byte": info["unigram_bits_per_byte"],
        }

    @property
    def tokenizer(self) -> str | None:
        """Its hash, empty for bytes; None if nobody said what made the ids."""
        info = self._data.info
        return None if info.get("kind") == "tokens" and not info["tokenizer"] else info.get("tokenizer", "")

    def read(self, split: str, samples: npt.NDArray[np.int64]) -> Rows:
        """`samples` of a split with their successors. Raises DataError as `micro_batches` and `validation` do."""
        context, source = self.tokens_per_sample, self._splits[split]
        rows, damage = source.read(samples[:, None] * context + np.arange(context + 1))
        if damage and split == "val":
            where = "the validation split"
            problems = [Problem(f"sample {samples[row]} differs", where, text) for row, text in damage.items()]
            raise DataError(problems)
        return Rows(rows, source.begins(rows, samples * context) if self.masked else None, damage)


class Rows(NamedTuple):
    """Samples as they were read. tokens: int64 [samples, context + 1]. begins: bool of that shape, whether a document
    begins with the token; None if the samples are not packed. damage: rows that could not be read, and why."""

    tokens: npt.NDArray[np.int64]
    begins: npt.NDArray[np.bool_] | None
    damage: dict[int, str]


def as_batch(read: Rows) -> Batch:
    """Inputs, targets and, of packed samples, segments."""
    tokens = torch.from_numpy(read.tokens)
    made = {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    if read.begins is not None:
        begins = torch.from_numpy(read.begins)
        made["segments"] = begins[:, :-1].to(torch.int64).cumsum(1)
        made["targets"].masked_fill_(begins[:, 1:], IGNORED)
    return Flawed(made, [Fault(row, UNREADABLE, text) for row, text in read.damage.items()]) if read.damage else made


class _Split:
    """A split's tokens, and where its documents begin."""

    def __init__(self, data: TokenData, split: str, packed: bool) -> None:
        self.tokens = data.train if split == "train" else data.val
        if not packed:
            return
        info = data.info
        self._starts = data.starts(split)
        indexed = "ids" not in info or all(file["index"] for file in info["files"])
        self._separator: int | None = None if indexed else info["separator"]
        if not indexed and self._separator is None:
            why = "the files have no index of their documents, and no token id is known to end one"
            fix = "set data.separator to that id, give data.tokenizer, or set data.packing=none"
            raise DataError(Problem("documents cannot be told apart", f"data.path: {info['source']}", why, fix))

    def longest(self) -> int | None:
        """Tokens of the longest document, of packed data; None if only their separator tells where they begin."""
        if self._separator is not None:
            return None
        return int(np.diff(self._starts, append=len(self.tokens)).max(initial=0))

    def read(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], dict[int, str]]:
        """As `corpus.Tokens.read`."""
        return (
            self.tokens.read(places) if isinstance(self.tokens, Tokens) else (self.tokens[places].astype(np.int64), {})
        )

    def begins(self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """bool [rows, width]: whether a document begins with that token; False for the first of a row."""
        found = np.zeros(rows.shape, dtype=np.bool_)
        for row, place in enumerate(places.tolist()):
            first, last = np.searchsorted(self._starts, [place + 1, place + rows.shape[1]])
            found[row, self._starts[first:last] - place] = True
        if self._separator is not None:
            found[:, 1:] |= rows[:, :-1] == self._separator
        return found


def validation_rows(wanted: int, available: int, micro_batch: int, rank: int, world_size: int) -> npt.NDArray[np.int64]:
    """int64 [batches, size]: a rank's validation samples, `wanted` of `available` in all; see `TokenBatches`."""
    if wanted < world_size:
        rank, world_size = 0, 1
    per_rank = wanted // world_size
    batches = -(-per_rank // micro_batch)
    size = per_rank // batches
    count = size * batches * world_size
    samples = np.arange(count, dtype=np.int64) * available // count
    return samples.reshape(-1, size)[rank::world_size]


def _readable(skipped: Iterable[dict[str, str]]) -> list[str]:
    return [f"{skip['name']} ({skip['reason']})" for skip in skipped]


class Source(Batches, Protocol):
    """Token data as a run has them."""

    ids: int
    vocab: int
    n_samples: int

    @property
    def available(self) -> int: ...

    def batch(self, split: str, samples: npt.NDArray[np.int64]) -> Batch: ...

    def facts(self) -> dict[str, Any]: ...


class Watch:
    """Which file is being read, and since when. Given to every file of a run (`blocks.CheckedFile`)."""

    def __init__(self) -> None:
        self._reading: dict[int, tuple[str, float]] = {}

    def __call__(self, path: str | None) -> None:
        """A thread begins to read `path`, or has ended."""
        if path is None:
            self._reading.pop(threading.get_ident(), None)
        else:
            self._reading[threading.get_ident()] = (path, time.monotonic())

    def longest(self) -> str:
        """The file that is read for longest, and for how long; empty if none is."""
        now = time.monotonic()
        current = sorted(self._reading.values(), key=lambda each: each[1])
        return f"{current[0][0]}, for {now - current[0][1]:.0f} s" if current else ""


@dataclass(slots=True)
class _Job:
    key: tuple[int, int, int]
    window: Window | None = None
    done: threading.Event = field(default_factory=threading.Event)
    batches: list[Batch] = field(default_factory=list)
    error: BaseException | None = None


class Prefetched:
    """A data source whose next window is being read; it says whatever the source itself says.

    waited: seconds that `micro_batches` has taken in all. tell: is told of reads that take long.
    """

    def __init__(self, source: Source, watch: Watch) -> None:
        self.source, self._watch = source, watch
        self.name, self.tokens_per_sample, self.masked = source.name, source.tokens_per_sample, source.masked
        self.ids, self.vocab, self.unit = source.ids, source.vocab, source.unit
        self.n_samples, self.available = source.n_samples, source.available
        self.waited = 0.0
        self.tell: Callable[[str], None] = lambda text: None
        self.first_told = FIRST_TOLD
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._ahead: _Job | None = None
        self._missed: tuple[int, int, int] | None = None
        self._thread: threading.Thread | None = None

    def window(self, index: int) -> Window:
        """As the source's."""
        return self.source.window(index)

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        """As the source's, and begins to read the window after this one."""
        begin = time.monotonic()
        key = (window.index, rank, world_size)
        job, ahead = self._ahead, self._ahead is None
        if job is not None and job.key == key:
            ahead, self._missed = True, None
        else:
            # Who looks back at a window must not undo what is read ahead; who goes on from there is to have it again.
            ahead |= self._missed == (window.index - 1, rank, world_size)
            job, self._missed = self._start(_Job(key, window)), key
        self._wait(job)
        if ahead:
            self._ahead = self._start(_Job((window.index + 1, rank, world_size)))
        self.waited += time.monotonic() - begin
        if job.error is not None:
            raise job.error
        return job.batches

    def validation(self, rank: int, world_size: int) -> Any:
        """As the source's."""
        return self.source.validation(rank, world_size)

    def batch(self, split: str, samples: npt.NDArray[np.int64]) -> Batch:
        """As the source's."""
        return self.source.batch(split, samples)

    def facts(self) -> dict[str, Any]:
        """As the source's."""
        return self.source.facts()

    def _start(self, job: _Job) -> _Job:
        if self._thread is None or not self._thread.is_alive():  # not alive: this process was forked
            self._thread = threading.Thread(target=self._read, args=(self._jobs,), daemon=True, name="data")
            self._thread.start()
        self._jobs.put(job)
        return job

    def _wait(self, job: _Job) -> None:
        patience = self.first_told
        begin = time.monotonic()
        while not job.done.wait(patience):
            reading = self._watch.longest() or "nothing: the source itself is busy"
            waited = time.monotonic() - begin
            self.tell(f"window {job.key[0]} is waited for since {waited:.0f} s; being read: {reading}")
            patience *= 2

    def _read(self, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            job = jobs.get()
            try:
                index, rank, world_size = job.key
                window = job.window or self.source.window(index)
                job.batches = list(self.source.micro_batches(window, rank, world_size))
            except BaseException as error:
                job.error = error
            job.done.set()
