"""What a sample of a data set of the user's own may be, and how samples become a batch.

A sample is a dict of tensors, arrays and numbers, a pair (`inputs`, `targets`), or one tensor (`inputs`). The first
sample that can be read gives the form, and every other must have it. Samples are stacked, and texts padded
(`Stacked`); or the data set's own `collate` makes the batch (`Collated`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    length: number of the group of texts whose lengths are alike; None: all samples have `shape`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    length: int | None = None


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


def first_form(first: object, collate: Callable[[list[Any]], object] | None, pad_id: int) -> Form:
    """The form of a data set, from one of its samples. Raises OddSampleError if that is no sample."""
    return Stacked(first, pad_id) if collate is None else Collated(first, collate)


class Stacked:
    """Every sample has the form of the first. Samples are stacked, and texts padded.

    A text is a one-dimensional field of whole numbers. It may have another length in every sample; texts that are
    equally long in the first sample must be so in every sample.
    """

    def __init__(self, first: object, pad_id: int = 0) -> None:
        """Raises OddSampleError if `first` is no sample."""
        self._pad_id = pad_id
        lengths: dict[int, int] = {}
        self.fields = {
            name: Field(value.dtype, tuple(value.shape), _group(value, lengths))
            for name, value in as_sample(first).items()
        }

    def taken(self, given: object) -> Batch:
        """A sample as tensors. Raises OddSampleError naming everything in which it is not like the first."""
        sample = as_sample(given)
        wrong: list[str] = []
        if missing := [name for name in self.fields if name not in sample]:
            wrong.append(f"it has no {', '.join(missing)}")
        if more := [name for name in sample if name not in self.fields]:
            wrong.append(f"it has {', '.join(more)}, which the first sample does not have")
        lengths: dict[int, tuple[str, int]] = {}
        for name, value in sample.items():
            form = self.fields.get(name)
            if form is None:
                continue
            if value.dtype != form.dtype:
                wrong.append(
                    f"{name} is of {value.dtype}, that of the first sample of {form.dtype}"
                )
            elif form.length is None and tuple(value.shape) != form.shape:
                wrong.append(
                    f"{name} has shape {list(value.shape)}, that of the first sample {list(form.shape)}"
                )
            elif form.length is not None and value.ndim != 1:
                wrong.append(f"{name} has shape {list(value.shape)}, not one dimension")
            elif form.length is not None:
                other, length = lengths.setdefault(form.length, (name, len(value)))
                if length != len(value):
                    wrong.append(f"{name} has {len(value)} values, {other} has {length}")
                elif not length:
                    wrong.append(f"{name} is empty")
        if wrong:
            raise OddSampleError("; ".join(wrong))
        return sample

    def stand_in(self) -> Batch:
        """A sample of zeros."""
        return {
            name: torch.zeros(field.shape, dtype=field.dtype) for name, field in self.fields.items()
        }

    def batch(self, samples: Sequence[Batch]) -> Batch:
        """Samples as a batch. Texts of different lengths are padded on the right: labels with IGNORED, masks with 0,
        others with `pad_id`. Where there is no mask yet, an `attention_mask` is added: 1 for text, 0 for padding.
        """
        batch: Batch = {}
        for name, form in self.fields.items():
            values = [sample[name] for sample in samples]
            lengths = [len(value) for value in values] if form.length is not None else [0]
            if min(lengths) == max(lengths):
                batch[name] = torch.stack(values)
                continue
            width = -(-max(lengths) // MULTIPLE) * MULTIPLE
            fill = self._pad_id
            if name in LABELS:
                fill = IGNORED
            elif name.endswith("mask"):
                fill = 0
            batch[name] = torch.full((len(values), width), fill, dtype=form.dtype)
            for row, value in zip(batch[name], values, strict=True):
                row[: len(value)] = value
            if _MASK not in self.fields and name not in LABELS and _MASK not in batch:
                batch[_MASK] = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        return batch


class Collated:
    """Samples of any kind, of which the data set's own `collate` makes a batch: a dict, or a pair."""

    def __init__(self, first: object, collate: Callable[[list[Any]], object]) -> None:
        """Raises whatever `collate` raises for the sample alone; OddSampleError if it makes no batch of it."""
        self._first, self._collate = first, collate
        batch = self.batch([first])
        self.fields = {
            name: Field(value.dtype, tuple(value.shape[1:])) for name, value in batch.items()
        }

    def taken(self, given: object) -> object:
        """The sample as it is."""
        return given

    def stand_in(self) -> object:
        """The first sample."""
        return self._first

    def batch(self, samples: Sequence[Any]) -> Batch:
        """What `collate` makes of them. Raises OddSampleError if that is no batch, and whatever `collate` does."""
        batch = as_sample(self._collate(list(samples)))
        odd = [
            f"{name} {list(value.shape)}"
            for name, value in batch.items()
            if value.shape[:1] != (len(samples),)
        ]
        if odd:
            told = (
                f"{', '.join(odd)} of {len(samples)} samples: the first dimension must count them"
            )
            raise OddSampleError(f"collate made {told}")
        return batch


def _group(value: Tensor, lengths: dict[int, int]) -> int | None:
    """The number of a text's group; `lengths` has the groups so far, by length. None if the value is no text."""
    text = (
        value.ndim == 1
        and not value.is_floating_point()
        and value.dtype not in (torch.uint8, torch.bool)
    )
    return lengths.setdefault(len(value), len(lengths)) if text else None


def as_sample(given: object) -> Batch:
    """What a data set gave for one sample, as tensors by name. Raises OddSampleError naming what can be no tensor.

    float64 becomes float32, which models compute in; whole numbers become int64, but for arrays of uint8 (pixels).
    """
    if isinstance(given, Mapping):
        items = {str(name): value for name, value in cast("Mapping[Any, Any]", given).items()}
    elif isinstance(given, tuple | list) and len(cast("Sequence[Any]", given)) == 2:
        items = dict(zip(("inputs", "targets"), cast("Sequence[Any]", given), strict=True))
    else:
        items = {"inputs": given}
    sample: Batch = {}
    wrong: list[str] = []
    for name, value in items.items():
        try:
            sample[name] = _tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            wrong.append(f"{name} is {_described(value)}, which is no tensor, array or number")
    if wrong or not sample:
        raise OddSampleError("; ".join(wrong) or "it is empty")
    return sample


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(array.dtype)
        tensor = torch.from_numpy(np.array(array, order="C"))
    if tensor.dtype == torch.float64:
        return tensor.float()
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return tensor.long() if whole and (tensor.dtype != torch.uint8 or not tensor.ndim) else tensor


def _described(value: object) -> str:
    if isinstance(value, tuple | list) and value:
        return f"a {type(value).__name__} such as {str(cast('Sequence[Any]', value)[0])[:40]!r}"
    return "None" if value is None else f"a {type(value).__name__}"
