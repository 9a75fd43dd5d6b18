"""What a sample of a data set of the user's own may be, and how samples become a batch.

A sample is a dict of tensors, arrays and numbers, a pair (`inputs`, `targets`), or one tensor (`inputs`). The first
sample that can be read gives the form, and every other must have it. Samples are stacked, and texts padded
(`Stacked`); or the data set's own `collate` makes the batch (`Collated`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from harness.core.facts import IGNORED
from harness.core.health import LABELS
from harness.core.protocols import Batch

MULTIPLE = 16
"""Padded lengths are multiples of this: FP8's matrix products want them."""
_MASK = "attention_mask"


class OddSampleError(ValueError):
    """What a data set gave is no sample, or is unlike the first one."""


@dataclass(frozen=True, slots=True)
class Field:
    """One name of a sample.

    dtype, shape: of the first sample.
    group: number of the group of texts that are equally long in a sample; None: all samples have `shape`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    group: int | None = None


class Form(Protocol):
    """What samples look like and how they become a batch."""

    fields: dict[str, Field]
    """By name; shapes are of one sample."""

    def taken(self, given: object) -> Any:
        """A sample as `batch` wants it. Raises OddSampleError naming what is wrong with it."""
        ...

    def stand_in(self) -> Any:
        """What takes the place of a sample that cannot be read, as `batch` wants it."""
        ...

    def batch(self, samples: Sequence[Any]) -> Batch:
        """Samples as a batch, whose first dimension counts them."""
        ...


def first_form(
    first: object,
    collate: Callable[[list[Any]], object] | None,
    pad_id: int,
    others: Iterable[object],
) -> Form:
    """The form of a data set, from one of its samples; `others` as for `Stacked`.

    Raises OddSampleError if `first` is no sample.
    """
    return Stacked(first, pad_id, others) if collate is None else Collated(first, collate)


class Stacked:
    """Every sample has the form of the first. Samples are stacked, and texts padded.

    A text is a one-dimensional field of whole numbers. It may have another length in every sample; texts that are
    equally long in the first sample, and in most of the others that are looked at, must be so in every sample.
    """

    def __init__(self, first: object, pad_id: int = 0, others: Iterable[object] = ()) -> None:
        """others: some more samples, read if texts of the first are equally long: by chance, if in most of these they
        are not.

        Raises OddSampleError if `first` is no sample.
        """
        self._pad_id = pad_id
        sample = as_sample(first)
        groups = _groups(sample, others)
        self.fields: dict[str, Field] = {}
        for name, value in sample.items():
            self.fields[name] = Field(value.dtype, tuple(value.shape), groups.get(name))

    def taken(self, given: object) -> Batch:
        """A sample as tensors. Raises OddSampleError naming everything in which it is not like the first."""
        sample = as_sample(given)

        # The same names.
        wrong: list[str] = []
        if missing := [name for name in self.fields if name not in sample]:
            wrong.append(f"it has no {', '.join(missing)}")
        if more := [name for name in sample if name not in self.fields]:
            wrong.append(f"it has {', '.join(more)}, which the first sample does not have")

        # Under each name the same dtype, and the same shape; texts of a group may have another length, all of them one.
        lengths: dict[int, tuple[str, int]] = {}
        for name, value in sample.items():
            form = self.fields.get(name)
            if form is None:
                continue
            shape = list(value.shape)
            if value.dtype != form.dtype:
                expected = f"that of the first sample of {form.dtype}"
                wrong.append(f"{name} is of {value.dtype}, {expected}")
            elif form.group is None and tuple(shape) != form.shape:
                expected = f"that of the first sample {list(form.shape)}"
                wrong.append(f"{name} has shape {shape}, {expected}")
            elif form.group is not None and value.ndim != 1:
                wrong.append(f"{name} has shape {shape}, not one dimension")
            elif form.group is not None:
                other, length = lengths.setdefault(form.group, (name, len(value)))
                if length != len(value):
                    wrong.append(f"{name} has {len(value)} values, {other} has {length}")
                elif not length:
                    wrong.append(f"{name} is empty")
        if wrong:
            raise OddSampleError("; ".join(wrong))
        return sample

    def stand_in(self) -> Batch:
        """A sample of zeros."""
        sample: Batch = {}
        for name, field in self.fields.items():
            sample[name] = torch.zeros(field.shape, dtype=field.dtype, device="cpu")
        return sample

    def batch(self, samples: Sequence[Batch]) -> Batch:
        """Samples as a batch. Texts of different lengths are padded on the right: labels with IGNORED, masks with 0,
        others with `pad_id`. Where there is no mask yet, an `attention_mask` is added: 1 for text, 0 for padding.
        """
        batch: Batch = {}
        for name, form in self.fields.items():
            values = [sample[name] for sample in samples]
            if form.group is None:
                batch[name] = torch.stack(values)
                continue
            lengths = [len(value) for value in values]
            if min(lengths) == max(lengths):
                batch[name] = torch.stack(values)
                continue

            # Texts of different lengths: what fills them up must count neither in the loss nor in attention.
            width = -(-max(lengths) // MULTIPLE) * MULTIPLE
            fill = self._pad_id
            if name in LABELS:
                fill = IGNORED
            elif name.endswith("mask"):
                fill = 0
            filled = torch.full((len(values), width), fill, dtype=form.dtype, device="cpu")
            for row, value in zip(filled, values, strict=True):
                row[: len(value)] = value
            batch[name] = filled

            # One mask for the batch, from the first padded field that is no label.
            if _MASK not in self.fields and name not in LABELS and _MASK not in batch:
                is_text = (
                    torch.arange(width, device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
                )
                batch[_MASK] = is_text.long()
        return batch


class Collated:
    """Samples of any kind, of which the data set's own `collate` makes a batch: a dict, or a pair."""

    def __init__(self, first: object, collate: Callable[[list[Any]], object]) -> None:
        """Raises whatever `collate` raises for the sample alone; OddSampleError if it makes no batch of it."""
        self._first, self._collate = first, collate
        self.fields: dict[str, Field] = {}
        for name, value in self.batch([first]).items():
            shape = tuple(value.shape[1:])
            self.fields[name] = Field(value.dtype, shape)

    def taken(self, given: object) -> object:
        """The sample as it is."""
        return given

    def stand_in(self) -> object:
        """The first sample."""
        return self._first

    def batch(self, samples: Sequence[Any]) -> Batch:
        """What `collate` makes of them. Raises OddSampleError if that is no batch, and whatever `collate` does."""
        batch = as_sample(self._collate(list(samples)))
        count = len(samples)
        odd: list[str] = []
        for name, value in batch.items():
            shape = list(value.shape)
            if shape[:1] != [count]:
                odd.append(f"{name} {shape}")
        if odd:
            why = "the first dimension must count them"
            raise OddSampleError(f"collate made {', '.join(odd)} of {count} samples: {why}")
        return batch


def _groups(sample: Batch, others: Iterable[object]) -> dict[str, int]:
    """The number of each text's group. A group is named by the first of its texts."""
    looked_at: list[Batch] | None = None
    leaders: list[str] = []
    groups: dict[str, int] = {}
    for name, value in sample.items():
        if not _is_text(value):
            continue
        for number, leader in enumerate(leaders):
            if len(sample[leader]) != len(value):
                continue
            if looked_at is None:
                looked_at = _readable(others)
            if _mostly_alike(leader, name, looked_at):
                groups[name] = number
                break
        else:
            groups[name] = len(leaders)
            leaders.append(name)
    return groups


def _is_text(value: Tensor) -> bool:
    """Whole numbers in a row, but neither pixels nor a mask of booleans."""
    if value.is_floating_point() or value.dtype in (torch.uint8, torch.bool):
        return False
    return value.ndim == 1


def _readable(others: Iterable[object]) -> list[Batch]:
    found: list[Batch] = []
    for other in others:
        try:
            found.append(as_sample(other))
        except OddSampleError:
            continue  # named when its turn comes
    return found


def _mostly_alike(one: str, other: str, samples: Sequence[Batch]) -> bool:
    """Whether two texts are equally long in at least half of the samples that have both."""
    have_both = [sample for sample in samples if one in sample and other in sample]
    alike = [sample for sample in have_both if sample[one].shape == sample[other].shape]
    return 2 * len(alike) >= len(have_both)


def as_sample(given: object) -> Batch:
    """What a data set gave for one sample, as tensors by name. Raises OddSampleError naming what can be no tensor.

    float64 becomes float32, which models compute in; whole numbers become int64, but for arrays of uint8 (pixels).
    """
    items: dict[str, Any] = {}
    if isinstance(given, Mapping):
        for name, value in cast("Mapping[Any, Any]", given).items():
            items[str(name)] = value
    elif isinstance(given, tuple | list) and len(cast("Sequence[Any]", given)) == 2:
        items["inputs"], items["targets"] = cast("Sequence[Any]", given)
    else:
        # A TensorDataset of one tensor gives it in a tuple.
        values = cast("tuple[Any, ...]", given) if isinstance(given, tuple) else ()
        items["inputs"] = values[0] if len(values) == 1 else given
        if len(values) > 2 and any(isinstance(value, Tensor | np.ndarray) for value in values):
            what = f"it is a tuple of {len(values)}: which of them is what?"
            raise OddSampleError(f"{what} A dict has their names, such as inputs and targets")

    # Go on after a bad value: the error names all of them.
    sample: Batch = {}
    wrong: list[str] = []
    for name, value in items.items():
        if odd := _hides_values(value):
            wrong.append(f"{name} is {odd}")
            continue
        try:
            sample[name] = _tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            wrong.append(f"{name} is {_described(value)}, which is no tensor, array or number")
    if wrong or not sample:
        raise OddSampleError("; ".join(wrong) or "it is empty")
    return sample


def _hides_values(value: object) -> str:
    """What an array is of which NumPy would give other numbers than are meant; empty for any other."""
    if getattr(value, "mode", None) in ("P", "PA"):
        return "a picture of numbers of a palette: .convert('RGB') gives colours"
    if np.ma.is_masked(value):
        return "an array with masked values: .filled(VALUE) says what they count as"
    return ""


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        # A copy: a data set may write each sample into the memory of the one before.
        tensor = value.detach().cpu().clone()
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(array.dtype)
        # A copy: torch refuses negative strides, and warns of arrays that are read-only.
        tensor = torch.from_numpy(np.array(array, order="C"))
    if tensor.dtype == torch.float64:
        return tensor.float()

    # Whole numbers are ids or labels, which models take as int64. An array of uint8 is pixels, a single uint8 is not.
    is_pixels = tensor.dtype == torch.uint8 and tensor.ndim > 0
    if is_pixels or tensor.dtype == torch.bool:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor
    return tensor.long()


def _described(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, tuple | list) and value:
        first = cast("Sequence[Any]", value)[0]
        return f"a {kind} such as {str(first)[:40]!r}"
    return f"a {kind}"
