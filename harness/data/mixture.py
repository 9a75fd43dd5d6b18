"""Several sources with weights, as one: every window has their samples in the shares that were asked for.

The positions of the data order come in cycles of 1,024. In each cycle every source has as many positions as its weight
gives it, and a keyed permutation says which. A source's positions, counted over all cycles, are those of its own order
(`order`): each of its epochs reads each of its samples once. So the samples of a window are a pure function of seed and
index here too.

Sample n of source i has the number n, plus the samples of all sources before it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.config import TEXT_COUNTS, DataConfig
from harness.core.errors import DataError, Problem
from harness.core.facts import Window
from harness.core.files import write_json
from harness.core.protocols import Batch
from harness.data.arrays import Ints
from harness.data.batches import Rows, TokenBatches, as_batch, training_rows, validation_rows
from harness.data.detect import kind_of
from harness.data.order import keyed_places, ordered_samples
from harness.data.splits import Split, with_validation
from harness.data.tokens import TokenData, prepare_in

CYCLE = 1024
"""Positions in a cycle."""
# An odd 64-bit constant (2**64 divided by the golden ratio), which keeps the sources' seeds far apart.
_STRIDE = 0x9E3779B97F4A7C15
_FORMAT = 3


def shares(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """`total` divided as `weights` say, by largest remainder; at least 1 for each."""
    exact = np.array(weights) / sum(weights) * total
    counts = np.maximum(1, np.floor(exact).astype(int))

    # Rounding down leaves some over; the least of 1 may have given too many. Correct where the error is largest.
    while counts.sum() != total:
        step = 1 if counts.sum() < total else -1
        gaps = np.where(counts + step >= 1, step * (exact - counts), -np.inf)
        counts[int(np.argmax(gaps))] += step
    return tuple(int(count) for count in counts)


class Mixture:
    """As `TokenBatches`, of several."""

    def __init__(
        self,
        parts: Sequence[TokenBatches],
        weights: Sequence[float],
        seed: int,
        global_batch: int,
        micro_batch: int,
        val_samples: int,
    ) -> None:
        """Raises DataError if the sources are of different tokenizers, as far as that is known."""
        self._parts = tuple(parts)
        self._seed = seed
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._counts = shares(weights, CYCLE)

        # Context and packing are the config's, and the tokenizer is one (`_check_tokenizers`): these are alike.
        self.tokens_per_sample = parts[0].tokens_per_sample
        self.masked = parts[0].masked
        self.unit = parts[0].unit
        self.ids = max(part.ids for part in parts)
        self.vocab = max(part.vocab for part in parts)
        self.name = " and ".join(part.name for part in parts)

        # Where the numbers of each source's samples begin.
        train_sizes = [part.n_samples for part in parts]
        val_sizes = [part.available for part in parts]
        self._offsets = np.cumsum([0, *train_sizes])
        self._val_offsets = np.cumsum([0, *val_sizes])
        self.n_samples = int(self._offsets[-1])
        self.available = int(self._val_offsets[-1])

        # Every source is validated on, however small its weight; a small one gives what it has.
        wanted = shares(weights, max(val_samples, len(parts)))
        self._val = list(map(min, wanted, val_sizes))
        _check_tokenizers(parts)

    def window(self, index: int) -> Window:
        """The window at place `index` of the data order: samples int64 [global_batch]."""
        begin = index * self._global_batch
        end = begin + self._global_batch
        samples = np.empty(end - begin, dtype=np.int64)

        # A window may lie across several cycles: of each, the positions from `first` to `last` are the window's.
        first_cycle = begin // CYCLE
        last_cycle = (end - 1) // CYCLE
        for cycle in range(first_cycle, last_cycle + 1):
            origin = cycle * CYCLE
            first = max(begin, origin)
            last = min(end, origin + CYCLE)
            sources, turns = _cycle(self._counts, self._seed, cycle)
            sources = sources[first - origin : last - origin]
            turns = turns[first - origin : last - origin]

            for number, part in enumerate(self._parts):
                here = np.flatnonzero(sources == number)
                if not len(here):
                    continue

                # `_cycle` counts a source's positions from left to right, so these are consecutive in its own order.
                place = cycle * self._counts[number] + int(turns[here[0]])
                seed = self._seed + (number + 1) * _STRIDE
                own = ordered_samples(seed, place, place + len(here), part.n_samples)
                samples[here + (first - begin)] = own + self._offsets[number]
        return Window(index, samples)

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        """As `TokenBatches.micro_batches`."""
        sizes = (self._global_batch, self._micro_batch)
        rows = training_rows(window, *sizes, rank, world_size)
        return [self.batch("train", samples) for samples in rows]

    def validation(self, rank: int, world_size: int) -> list[Batch]:
        """As `TokenBatches.validation`: every source has its share of the samples, at least one."""
        spread: list[Ints] = []
        for count, part, offset in zip(self._val, self._parts, self._val_offsets[:-1], strict=True):
            evenly = np.arange(count, dtype=np.int64) * part.available // count
            spread.append(offset + evenly)
        every = np.concatenate(spread)
        rows = validation_rows(len(every), len(every), self._micro_batch, rank, world_size)
        return [self.batch("val", every[row]) for row in rows]

    def facts(self) -> dict[str, Any]:
        """What this run trains on, JSON-able; sizes in tokens."""
        # Of each source.
        parts = [part.facts() for part in self._parts]
        sources: list[str] = []
        hashes: list[str] = []
        skipped: list[str] = []
        mixture: list[dict[str, Any]] = []
        for each, count in zip(parts, self._counts, strict=True):
            sources.append(each["source"])
            hashes.append(each["sha256"])
            skipped += each["skipped"]
            mixture.append(
                {
                    "source": each["source"],
                    "train_tokens": each["train_tokens"],
                    "train_samples": each["train_samples"],
                    "share": count / CYCLE,
                }
            )

        # Of all together, under the keys that a single source has.
        facts: dict[str, Any] = {"source": " and ".join(sources), "kind": "mixture"}
        for key in ("files", "train_tokens", "val_tokens", "train_samples"):
            facts[key] = sum(each[key] for each in parts)
        facts["val_samples"] = sum(self._val)
        facts["vocab"] = self.vocab
        facts["sha256"] = _identity(hashes, self._counts)
        facts["skipped"] = skipped
        if any(each.get("joined") for each in parts):
            facts["joined"] = True
        if copies := [name for each in parts for name in each.get("repeated", ())]:
            facts["repeated"] = copies
        for key in TEXT_COUNTS:
            counted = [each[key] for each in parts if key in each]
            if counted:
                facts[key] = [sum(column) for column in zip(*counted, strict=True)]
        facts["mixture"] = mixture
        return facts

    def batch(self, split: str, samples: Ints) -> Batch:
        """As `TokenBatches.batch`; samples of both splits are numbered source after source."""
        offsets = self._offsets if split == "train" else self._val_offsets
        sources = np.searchsorted(offsets, samples, side="right") - 1
        shape = (len(samples), self.tokens_per_sample + 1)
        tokens = np.zeros(shape, np.int64)
        begins = np.zeros(shape, np.bool_) if self.masked else None
        damage: dict[int, str] = {}

        # Each source reads its samples in one call; the results go back to the rows that asked for them.
        for number in np.unique(sources):
            here = np.flatnonzero(sources == number)
            part = self._parts[number].read(split, samples[here] - offsets[number])
            tokens[here] = part.tokens
            if begins is not None and part.begins is not None:
                begins[here] = part.begins
            for row, text in part.damage.items():
                damage[int(here[row])] = text
        return as_batch(Rows(tokens, begins, damage))


def _check_tokenizers(parts: Sequence[TokenBatches]) -> None:
    """Raises DataError if sources are of different tokenizers: by their hashes, or by ids that another cannot have."""
    what, where = "sources of different tokenizers", "data.mixture"
    hashed = [part for part in parts if part.tokenizer is not None]
    hashes = {part.tokenizer for part in hashed}
    if len(hashes) > 1:
        why = "the same id would be different text in different sources"
        raise DataError(Problem(what, where, why, "prepare all of them with one tokenizer"))
    if not hashed:
        return

    # Nobody said what made the other sources. An id beyond the tokenizer's range shows that it was another.
    least = min(hashed, key=lambda part: part.ids)
    for part in parts:
        if part.tokenizer is None and part.ids > least.ids:
            why = f"{part.name} has ids up to {part.ids - 1}, "
            why += f"and {least.name} are of {least.ids} ids"
            fix = "give text that is mixed with token ids the tokenizer that made these, in data.tokenizer"
            raise DataError(Problem(what, where, why, fix))


@lru_cache(maxsize=4)
def _cycle(counts: tuple[int, ...], seed: int, cycle: int) -> tuple[Ints, Ints]:
    """For each position of a cycle, int64 [CYCLE]: (its source, positions of that source before it)."""
    places = keyed_places(seed, cycle, CYCLE)
    sources = np.searchsorted(np.cumsum(counts), places, side="right")
    turns = np.empty(CYCLE, dtype=np.int64)
    for number in range(len(counts)):
        here = sources == number
        turns[here] = np.arange(here.sum())
    return sources, turns


def _overlapping(paths: Sequence[str]) -> list[Problem]:
    """Sources that lie within another, or that another validates on.

    Each is split by itself, so one's validation would be the other's training.
    """
    within = "lies within another source of the mixture"
    out_of_folder = "leave it out, or move it out of that folder"
    held_out = "is what another source of the mixture validates on"
    elsewhere = "leave it out, or move it to another folder to train on it"
    resolved = {path: Path(path).expanduser().resolve() for path in paths}
    problems: list[Problem] = []
    for path, inner in resolved.items():
        where = f"data.mixture: {path}"
        for other, outer in resolved.items():
            if outer in inner.parents:
                problems.append(Problem(within, where, f"of {other}", out_of_folder))
            elif (inner, "val") in _files_of(outer):
                problems.append(Problem(held_out, where, f"of {other}", elsewhere))
    return problems


def _files_of(source: Path) -> list[tuple[Path, Split]]:
    """The file that a source is, and the one beside it that it validates on; of a folder nothing."""
    if not source.is_file():
        return []
    return with_validation(source, is_text=kind_of(source) == "text")


def prepare_mixture(
    config: DataConfig, run_dir: Path, lead: bool, reading: Callable[[str | None], None]
) -> list[TokenData]:
    """The tokens of each source, as `tokens.prepare` has those of one, in `data/<number>/` of the run.

    lead: whether this is the rank that writes, as in `tokens.prepare`.
    reading: see `blocks.CheckedFile`.

    Raises what `tokens.prepare` raises, with the problems of all sources together.
    """
    folder = run_dir / "data"
    # An earlier start has written all of the sources' data; this one reads them.
    begun = (folder / "corpus.json").exists()
    data: list[TokenData] = []
    problems = _overlapping([part.path for part in config.mixture])
    for number, part in enumerate(config.mixture):
        own = folder / str(number)
        if lead and not begun:  # a start that was killed may have left data of other settings
            (own / "corpus.json").unlink(missing_ok=True)

        # The config of a run on this source alone.
        update = {**part.model_dump(exclude={"weight"}), "mixture": []}
        single = config.model_copy(update=update)
        try:
            # One training sample is enough: the sources fill a window together.
            data.append(prepare_in(single, own, 1, lead, reading))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    if begun or not lead:
        return data

    counts = shares([part.weight for part in config.mixture], CYCLE)
    hashes = [each.sha256 for each in data]
    sources = [part.model_dump() for part in config.mixture]
    info = {"format": _FORMAT, "mixture": sources, "sha256": _identity(hashes, counts)}

    # All sources have one tokenizer; the first that has its file gives the run's.
    for number, each in enumerate(data):
        tokenizer = folder / str(number) / "tokenizer.json"
        if tokenizer.is_file():
            info["tokenizer"] = each.info["tokenizer"]
            info["separator"] = each.info["separator"]
            shutil.copyfile(tokenizer, folder / "tokenizer.json")
            break

    # Written last: it says that the data of all sources are there.
    write_json(folder / "corpus.json", info)
    return data


def _identity(hashes: Sequence[str], counts: Sequence[int]) -> str:
    described = repr((list(hashes), list(counts)))
    return hashlib.sha256(described.encode()).hexdigest()
