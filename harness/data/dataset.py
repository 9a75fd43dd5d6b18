"""A data set of the user's own as a source: `data.target: "pkg.mod:fn"`, any object with `__len__` and `__getitem__`.

What a sample may be, `samples` says. Which samples a window holds is a pure function of the seed and the window, as of
text (`order`). So the data set is asked for samples by number, in any order and more than once.

Random augmentation: every `__getitem__` runs with torch's, numpy's and Python's generators seeded by (train.seed, the
sample, its epoch); an object with `set_seed(seed)` gets that seed, too. So a sample is the same whenever it is read:
after a resume, on other ranks, by the monitor that names bad samples, by `harness replay`. A data set that draws from
a generator of its own is refused before the first step.

An exception in `__getitem__`, or a sample unlike the first one, does not end a run: zeros take the sample's place, no
update is made from its window, and the sample is named (`data.unreadable`).
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from harness.core.config import DataConfig, RunConfig
from harness.core.errors import ConfigError, DataError, Problem, some
from harness.core.facts import UNREADABLE, Window
from harness.core.files import read_json, write_json
from harness.core.health import LABELS, Fault, Flawed
from harness.core.protocols import Batch
from harness.core.schema import call_target
from harness.core.state import random_numbers_apart
from harness.data.arrays import Ints
from harness.data.batches import training_rows, validation_rows
from harness.data.order import sample_numbers
from harness.data.samples import Form, OddSampleError, first_form
from harness.data.splits import is_validation

RECORD = "target.json"
"""In the run's folder `data`: the fingerprint of its data set. A resume compares it, to notice a different data set."""
PROBED = 8
"""Samples of each split whose hashes are the fingerprint, evenly spread."""
_UNREADABLE = "unreadable: "  # in place of a sample's hash
_SPLIT_KEY = 0x5EED_0F_5A3B
# Libraries whose tables take a number for a column or a label.
_TABLES = ("pandas", "polars", "pyarrow")
_FIX_ARRAYS = "return torch.utils.data.TensorDataset(X, y), or an object whose sample number i is the pair (X[i], y[i])"
_FIX_TABLE = (
    "return list(zip(table[INPUTS].to_numpy(dtype='float32'), table[LABEL].to_numpy())), with the names of columns; "
    "rows of text need no target: data.path=FILE.parquet"
)
_VALIDATION_EPOCH = 2**32 - 1  # no training sample has it


class Samples(Protocol):
    """What `data.target` returns, or a pair of these: training and validation.

    It may also have
    - `collate(samples) -> batch`, or `collate_fn`; the default stacks samples and pads texts,
    - `set_seed(seed)`, called before each sample,
    - `validation`: another such object,
    - `pad_id`: what texts are padded with, else 0,
    - `unit`: of the loss that the model returns, such as "nats per token".

    All but `validation` may also be those of the data sets that a Subset or a ConcatDataset of torch holds.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def _members(samples: Any) -> Iterator[Any]:
    """The data set, and those that it holds if it is a Subset (as random_split makes them) or a ConcatDataset."""
    yield samples
    held: Sequence[Any] = ()
    if isinstance(samples, Subset):
        held = [cast("Subset[Any]", samples).dataset]
    elif isinstance(samples, ConcatDataset):
        held = cast("ConcatDataset[Any]", samples).datasets
    for each in held:
        yield from _members(each)


def _attribute(samples: Any, *names: str) -> Any:
    """The first of these attributes that the data set has, or one that it holds; None without any."""
    for each in _members(samples):
        for name in names:
            found = getattr(each, name, None)
            if found is not None:
                return found
    return None


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a data set: samples 0 to size - 1, which are `places(0)` to `places(size - 1)` of the data set."""

    samples: Samples
    size: int
    places: Callable[[int], int] = int


def open_target(config: DataConfig) -> tuple[Split, Split, list[str]]:
    """(training, validation, names of splits that are neither) of `config.target`.

    Without a validation of its own, the share `val_fraction` of the samples is held out, by a hash of their numbers:
    the same samples whatever the run's seed.

    Raises ConfigError if the target gives no data set, with everything that is wrong with it.
    """
    assert config.target is not None
    where = f"data.target {config.target!r}"
    given = call_target("data", config.target, config.args, "data sets")
    train, val, left_out = _splits(given)

    # A pair (X, y) has all that two data sets need, and would train on X without labels.
    if arrays := _inputs_and_labels(train, val):
        what = f"it returned two arrays of one length, {arrays}: inputs and labels?"
        why = "a pair from data.target is (training, validation), each of which is asked for samples by number"
        raise ConfigError(Problem(what, where, why, _FIX_ARRAYS))

    problems = _misfit("training", train, where)
    if val is not None:
        problems += _misfit("validation", val, where)
    if problems:
        raise ConfigError(problems)
    if val is not None:
        return Split(train, len(train)), Split(val, len(val)), left_out

    # Only training data: hold a share of it out.
    size = len(train)
    held = round(size * config.val_fraction)
    if not 1 <= held < size:
        samples = "1 sample is" if size == 1 else f"{size} samples are"
        what = f"{samples} too few to hold out {config.val_fraction:g} of them"
        fix = "return a pair (training, validation), or change data.val_fraction"
        raise ConfigError(Problem(what, where, fix=fix))
    return *_divided(train, held), left_out


def _misfit(name: str, data: Any, where: str) -> list[Problem]:
    """Why `data` cannot be asked for samples by number; empty if it can. name: of the split, for the message."""
    kind = type(data)
    its = f"its {name} data, a {kind.__name__}"
    why = "samples are asked for by number, in any order"
    if (library := kind.__module__.partition(".")[0]) in _TABLES:
        what = f"{its} of {library}, have no samples by number: 0 is a column, or a label"
        return [Problem(what, where, why, _FIX_TABLE)]
    if issubclass(kind, IterableDataset) and library != "datasets":
        what = f"{its}, are read from the beginning only"
        fix = "give its class a __getitem__ (a Dataset); if all samples fit into memory: return list(data)"
        return [Problem(what, where, why, fix)]
    if isinstance(data, Mapping) and 0 not in data:
        names = some([str(each) for each in cast("Mapping[Any, Any]", data)], 3)
        what = f"{its}, are of names, not of numbers: {names}"
        return [Problem(what, where, why, f"{_FIX_ARRAYS}. Splits are called train and validation")]
    if isinstance(data, list | tuple) and any(
        isinstance(each, Dataset) for each in cast("Sequence[Any]", data)
    ):
        what = f"its {name} data are {len(cast('Sequence[Any]', data))} data sets"
        return [
            Problem(what, where, why, "return a pair (training, validation), or a ConcatDataset")
        ]

    # On the type: an instance's attribute would not make len() and [] work.
    needed = ("__len__", "__getitem__")
    lacks = [method for method in needed if not hasattr(kind, method)]
    if lacks:
        what = f"{its}, have no {' and no '.join(lacks)}"
        fix = "return an object that has them, or a pair of such (training, validation)"
        if library == "datasets":
            fix = "load it with streaming=False; rows of text need no target: data.path=hf:NAME, or its files"
        if isinstance(data, DataLoader):
            fix = "return its data set: batches are made here, of train.micro_batch samples"
        return [Problem(what, where, why, fix)]
    if not len(data):
        return [Problem(f"its {name} data have no sample", where, fix="give some")]
    return []


def _divided(samples: Samples, held: int) -> tuple[Split, Split]:
    """(training, validation): `held` of the samples, chosen by a hash of their numbers, are validation."""
    # The key is a constant, so that runs with other seeds are validated on the same samples.
    size = len(samples)
    out = np.sort(sample_numbers(_SPLIT_KEY, 0, held, size))

    # Training sample `place` comes after those held-out samples that have at most `place` training samples before them.
    before = out - np.arange(held)

    def number_of_training(place: int) -> int:
        held_before = np.searchsorted(before, place, side="right")
        return place + int(held_before)

    def number_of_validation(place: int) -> int:
        return int(out[place])

    train = Split(samples, size - held, number_of_training)
    return train, Split(samples, held, number_of_validation)


def _splits(given: Any) -> tuple[Any, Any, list[str]]:
    """(training, validation or None, names of other splits) of what a target returned.

    A pair, a list of two data sets (as torch splits one) or arrays, or a mapping with the names of splits (as Hugging
    Face's).
    """
    if isinstance(given, tuple) and len(cast("tuple[Any, ...]", given)) == 2:
        return *cast("tuple[Any, Any]", given), []
    if isinstance(given, list) and len(cast("list[Any]", given)) == 2:
        first, second = cast("list[Any]", given)
        for kinds in (Dataset, (torch.Tensor, np.ndarray)):
            if isinstance(first, kinds) and isinstance(second, kinds):
                return first, second, []
    if isinstance(given, Mapping) and "train" in given:
        named = cast("Mapping[str, Any]", given)
        others = [name for name in named if name != "train"]
        # The plain names first: MNLI has matched and mismatched ones, others a dev beside them.
        plain = [name for name in ("validation", "valid", "val") if name in named]
        held_out = [*plain, *(name for name in others if is_validation(str(name)))]
        left_out = [str(name) for name in others if name not in held_out[:1]]
        return named["train"], named[held_out[0]] if held_out else None, left_out
    return given, getattr(given, "validation", None), []


def _inputs_and_labels(first: Any, second: Any) -> str:
    """The shapes of a pair that is (X, y) more likely than two data sets; empty for any other."""
    arrays = (torch.Tensor, np.ndarray)
    if not isinstance(first, arrays) or not isinstance(second, arrays):
        return ""
    if not first.ndim or not second.ndim or len(first) != len(second):
        return ""

    # Arrays of one shape and dtype are two splits: labels hardly look like their inputs.
    if first.shape[1:] == second.shape[1:] and first.dtype == second.dtype:
        return ""
    return f"{list(first.shape)} and {list(second.shape)}"


class DatasetBatches:
    """Batches of a data set. The only state is the form of a sample, of each split.

    Every sample is read in the calling thread, since random number generators belong to the process: see `read`.
    """

    tokens_per_sample = 1  # speed counts samples: texts may have any length
    masked = True  # the mean is one over labels that count, or over samples
    ids = 0
    vocab: int | None = None  # nothing is known of token ids

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        global_batch: int,
        micro_batch: int,
    ) -> None:
        """Opens the target and reads a few samples, twice. Raises ConfigError or DataError naming what is wrong."""
        self.name = f"data.target {config.target}"
        train, val, self._left_out = open_target(config)
        self._train, self._val = train, val
        self._seed = seed
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._val_samples = min(config.val_samples, val.size)
        self.n_samples = train.size
        self.unit = str(_attribute(train.samples, "unit") or "loss")

        # A resume compares the fingerprint, to notice a different data set.
        self._form = _first_form(train, seed, self.name)
        self._val_form = _form_of_validation(train, val, self._form, seed, self.name)
        forms = (self._form, self._val_form)
        hashes, self._faults = _probe(train, val, forms, seed, self.name, config.bad)
        described = repr((train.size, val.size, hashes))
        self.fingerprint = {
            "train_samples": train.size,
            "val_samples": val.size,
            "looked_at": hashes,
            "sha256": hashlib.sha256(described.encode()).hexdigest(),
        }

    def window(self, index: int) -> Window:
        """The window at place `index` of the data order: samples int64 [global_batch]."""
        samples = sample_numbers(self._seed, index, self._global_batch, self.n_samples)
        return Window(index, samples)

    def micro_batches(self, window: Window, rank: int, world_size: int) -> list[Batch]:
        """This rank's micro-batches, see `training_rows`. Raises ConfigError if they do not divide evenly."""
        sizes = (self._global_batch, self._micro_batch)
        rows = training_rows(window, *sizes, rank, world_size)

        # A window may end one epoch and begin the next, so every sample has an epoch of its own.
        first = window.index * self._global_batch
        positions = first + np.arange(len(window.samples))
        epochs = (positions // self.n_samples).reshape(-1, self._micro_batch)[rank::world_size]

        batches: list[Batch] = []
        for row, epochs_of_row in zip(rows, epochs, strict=True):
            batches.append(self._batch(self._train, row, epochs_of_row))
        return batches

    def validation(self, rank: int, world_size: int) -> list[Batch]:
        """This rank's validation batches, the same at every call; see `validation_rows`."""
        rows = validation_rows(
            self._val_samples, self._val.size, self._micro_batch, rank, world_size
        )
        batches: list[Batch] = []
        for row in rows:
            epochs = np.full(len(row), _VALIDATION_EPOCH)
            batches.append(self._batch(self._val, row, epochs))
        return batches

    def facts(self) -> dict[str, Any]:
        """What this run trains on, JSON-able, for the journal."""
        fields: dict[str, list[Any]] = {}
        for name, form in self._form.fields.items():
            fields[name] = [str(form.dtype), *form.shape]
        return {
            "source": self.name,
            "counted": "samples",
            **self.fingerprint,
            "val_used": self._val_samples,
            "fields": fields,
            "unreadable": self._faults,
            "skipped": [
                f"{name} (a split that is neither train nor validation)" for name in self._left_out
            ],
            "padded_unmarked": self._padded_unmarked(),
            "repeated_samples": self._repeated(),
        }

    def _padded_unmarked(self) -> list[str]:
        """Texts of any length, if no field is called as labels are: a loss over them may count the padding."""
        if any(name in LABELS for name in self._form.fields):
            return []
        return [name for name, form in self._form.fields.items() if form.group is not None]

    def _repeated(self) -> list[int]:
        """[validation samples that were looked at and equal a training sample that was; all that were looked at]."""
        hashes: dict[str, list[str]] = {"train": [], "val": []}
        for key, found in self.fingerprint["looked_at"].items():
            if not found.startswith(_UNREADABLE):
                hashes[key.partition(" ")[0]].append(found)
        return [sum(found in hashes["train"] for found in hashes["val"]), len(hashes["val"])]

    def _batch(self, split: Split, places: Ints, epochs: Ints) -> Batch:
        """A batch of the samples at `places`. Samples that cannot be read have stand-ins, and the batch says so."""
        form = self._form_of(split)
        samples: list[Any] = []
        faults: list[Fault] = []
        with random_numbers_apart():
            places_and_epochs = zip(places.tolist(), epochs.tolist(), strict=True)
            for row, (place, epoch) in enumerate(places_and_epochs):
                try:
                    given = read(split, place, self._seed, epoch)
                    samples.append(form.taken(given))
                except Exception as error:
                    why = _why(split, place, error)
                    faults.append(Fault(row, UNREADABLE, why))
                    samples.append(form.stand_in())

            # Samples that are well by themselves may not fit together, and a `collate` of the user's own may fail.
            # Name those that fail alone; if none does, the whole batch is at fault.
            try:
                batch = form.batch(samples)
            except Exception as error:
                failing = self._failing_alone(split, places, samples)
                faults += failing or [Fault(None, UNREADABLE, _text_of(error))]
                batch = form.batch([form.stand_in()] * len(samples))
        return Flawed(batch, faults) if faults else batch

    def _form_of(self, split: Split) -> Form:
        return self._form if split is self._train else self._val_form

    def _failing_alone(self, split: Split, places: Ints, samples: Sequence[Any]) -> list[Fault]:
        """The samples that make no batch even by themselves."""
        faults: list[Fault] = []
        pairs = zip(places.tolist(), samples, strict=True)
        for row, (place, sample) in enumerate(pairs):
            try:
                self._form_of(split).batch([sample])
            except Exception as error:
                why = _why(split, place, error)
                faults.append(Fault(row, UNREADABLE, why))
        return faults


def read(split: Split, place: int, seed: int, epoch: int) -> object:
    """What the data set gives for the sample at `place` of `split`, with random numbers that depend only on
    (seed, sample, epoch). The process's generators are left at that seed: see `random_numbers_apart`.
    """
    number = split.places(place)
    key = f"{seed} {number} {epoch}".encode()
    digest = hashlib.blake2b(key, digest_size=4).digest()
    own = int.from_bytes(digest, "big")  # 32 bits, since numpy's generator takes no more
    random.seed(own)
    np.random.seed(own)
    torch.default_generator.manual_seed(own)
    for each in _members(split.samples):
        set_seed = getattr(each, "set_seed", None)
        if set_seed is not None:
            set_seed(own)
    return split.samples[number]


def _why(split: Split, place: int, error: Exception) -> str:
    """Why a sample cannot be used, with its number in the user's data set if that differs from `place`."""
    text = _text_of(error)
    number = split.places(place)
    if number != place:
        text += f" (number {number} of the data set)"
    return text


def _text_of(error: Exception) -> str:
    if isinstance(error, OddSampleError):
        return str(error)
    return f"{type(error).__name__}: {str(error)[:200]}"


def _probe(
    train: Split, val: Split, forms: tuple[Form, Form], seed: int, name: str, bad: str
) -> tuple[dict[str, str], list[str]]:
    """(hashes of evenly spread samples, what is wrong with some of them), each read twice.

    forms: of the samples of both splits.

    Raises DataError with bad="fail" if a sample cannot be read; ConfigError if samples differ when they are read again.
    """
    with random_numbers_apart():
        # Each with its name in the fingerprint, its form, split, place and epoch.
        probed: list[tuple[str, Form, Split, int, int]] = []
        for place in _spread(train.size):
            key = f"train {place}"
            probed.append((key, forms[0], train, place, 0))
        for place in _spread(val.size):
            key = f"val {place}"
            probed.append((key, forms[1], val, place, _VALIDATION_EPOCH))

        hashes: dict[str, str] = {}
        faults: list[str] = []
        for key, form, split, place, epoch in probed:
            hashes[key], fault = _look_at(form, split, place, seed, epoch)
            if fault:
                word = key.partition(" ")[0]
                faults.append(f"sample {place} of {word}: {fault}")

        # Again, in another order: a generator that goes on from sample to sample gives others now.
        others: list[str] = []
        for key, form, split, place, epoch in reversed(probed):
            now, _ = _look_at(form, split, place, seed, epoch)
            if now != hashes[key]:
                others.append(key)
    if others:
        why = "a resume, other ranks and the search for bad samples read them again, and must see the same"
        fix = (
            "draw random numbers from torch, numpy.random or random themselves, which are seeded for every sample, or "
            "give the data set a set_seed(seed), which is called before each"
        )
        what = f"samples differ when they are read again: {some(others[::-1], 3)}"
        raise ConfigError(Problem(what, name, why, fix))
    if faults and bad == "fail":
        fix = "repair it, or set data.bad=skip"
        raise DataError([Problem(fault, name, fix=fix) for fault in faults])
    return hashes, faults


def _collate_of(split: Split) -> Any:
    return _attribute(split.samples, "collate", "collate_fn")


def _form_of_validation(train: Split, val: Split, form: Form, seed: int, name: str) -> Form:
    """`form`, that of training; another one if the validation has a collate of its own. Raises DataError."""
    own = _collate_of(val)
    if own is None or own == _collate_of(train):
        return form
    return _first_form(val, seed, name)


def _first_form(split: Split, seed: int, name: str) -> Form:
    """The form of the first of some samples that can be read. Raises DataError if none can."""
    collate = _collate_of(split)
    faults: dict[str, str] = {}  # one for each kind of error
    places = _spread(split.size)
    with random_numbers_apart():
        for number, place in enumerate(places):
            try:
                given = read(split, place, seed, 0)
                pad_id = int(_attribute(split.samples, "pad_id") or 0)
                others = _readable(split, places[number + 1 :], seed)
                return first_form(given, collate, pad_id, others)
            except Exception as error:
                what = f"sample {place} cannot be read: {_why(split, place, error)}"
                faults.setdefault(_text_of(error), what)
    why = f"nor can any other of the {len(places)} that were tried"
    fix = "what a sample may be: docs/guide/datasets.md"
    raise DataError([Problem(what, name, why, fix) for what in faults.values()])


def _readable(split: Split, places: Sequence[int], seed: int) -> Iterator[object]:
    """Those of the samples at `places` that can be read."""
    for place in places:
        with contextlib.suppress(Exception):
            yield read(split, place, seed, 0)


def _spread(size: int) -> list[int]:
    """PROBED places from 0 to size - 1, evenly spread."""
    return sorted({int(place) for place in np.linspace(0, size - 1, PROBED)})


def _look_at(
    form: Form,
    split: Split,
    place: int,
    seed: int,
    epoch: int,
) -> tuple[str, str]:
    """(a sample's hash, or the kind of error it gives; what is wrong with it, empty if nothing)."""
    try:
        sample = form.taken(read(split, place, seed, epoch))
        return _hash(form.batch([sample])), ""
    except Exception as error:
        return f"{_UNREADABLE}{type(error).__name__}", _why(split, place, error)


def _hash(sample: Batch) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(sample.items()):
        # The shape too: the same bytes in another shape are another sample.
        digest.update(f"{name} {value.dtype} {list(value.shape)} ".encode())
        flat = value.contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def open_dataset(
    config: RunConfig, run_dir: Path, read_only: bool = False, compare: bool = True
) -> DatasetBatches:
    """The data set of a run. The first process that opens it writes its fingerprint into the run's folder.

    read_only: write nothing.
    compare: with the fingerprint in the run's folder.

    Raises as DatasetBatches, and DataError if it is not the data set that the run began with.
    """
    train = config.train
    data = DatasetBatches(config.data, train.seed, train.global_batch, train.micro_batch)
    path = run_dir / "data" / RECORD
    if compare and path.exists():
        _compare(path, data.fingerprint, data.name)
    if read_only or path.exists():
        return data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, data.fingerprint)
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        fix = "make the run folder writable, or free some space"
        raise DataError(Problem(what, str(path), fix=fix)) from error
    return data


def _compare(path: Path, record: Mapping[str, Any], name: str) -> None:
    """Raises DataError if the run began with other data."""
    # What the run began with: the sizes, and hashes of some samples.
    try:
        before = read_json(path)
        hashes: Mapping[str, str] = before["looked_at"]
        keys = ("train_samples", "val_samples")
        sizes = {key: (before[key], record[key]) for key in keys}
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = (
            "restore the file from another copy of this run, or start a new run with another --name"
        )
        raise DataError(Problem(f"cannot be read: {error}", str(path), fix=fix)) from error

    why: list[str] = []
    for key, (was, now) in sizes.items():
        if was != now:
            why.append(f"{key} were {was}, and are {now}")
    changed: list[str] = []
    for label, sha256 in record["looked_at"].items():
        if hashes.get(label) != sha256:
            changed.append(label)

    # Other sizes change which samples are looked at, so that other hashes say nothing more then.
    if changed and not why:
        why = [f"of {len(hashes)} samples looked at, {some(changed, 3)} changed"]
    if why:
        what = "these are not the data that the run began with"
        fix = (
            "give the data set that the run began with, or start a new run: "
            "--name NEW --resume runs/<run>/checkpoints/step-<N>"
        )
        raise DataError(Problem(what, name, "; ".join(why), fix))
