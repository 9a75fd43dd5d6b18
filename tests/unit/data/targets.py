"""Data sets as somebody may bring them, for `data.target`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SIZE = 40


class Made:
    """Samples by a function of their number."""

    def __init__(self, sample: Callable[[int], Any], size: int = SIZE, **more: Any) -> None:
        self.sample, self.size, self.asked = sample, size, list[int]()
        for name, value in more.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.sample(index)


def pairs(size: int = SIZE) -> Made:
    """An image that tells its number, and a class."""
    return Made(lambda index: (np.full((1, 4, 4), index, dtype=np.float64), index % 3), size)


def texts(labels: str = "labels", **more: Any) -> Made:
    """Ids of a length that differs, their labels under that name, and a figure."""

    def sample(index: int) -> dict[str, Any]:
        length = 5 + 7 * (index % 3)
        ids = torch.full((length,), index)
        return {"input_ids": ids, labels: ids + 1, "weight": 0.5}

    return Made(sample, **more)


def broken(index: int = 7, how: str = "raises") -> Made:
    """`pairs`, of which one is bad."""
    good = pairs().sample
    bad: dict[str, Callable[[], Any]] = {
        "shape": lambda: (np.zeros((1, 4, 5)), 0),
        "lacks": lambda: {"inputs": np.zeros((1, 4, 4))},
        "text": lambda: (np.zeros((1, 4, 4)), "seven"),
        "nan": lambda: (np.full((1, 4, 4), np.nan), 0),
        "label": lambda: (np.zeros((1, 4, 4)), 3),
    }

    def sample(number: int) -> Any:
        if number != index:
            return good(number)
        if how == "raises":
            raise OSError("the disk is gone")
        return bad[how]()

    return Made(sample)


def augmented() -> Made:
    """Noise of three generators on each image."""

    def sample(index: int) -> tuple[torch.Tensor, int]:
        noise = float(np.random.rand()) + random.random()
        return torch.full((1, 4, 4), float(index)) + noise + torch.rand(1, 4, 4), index % 3

    return Made(sample)


class Seeded(Made):
    """Noise of a generator of its own, which may be told its seed."""

    def __init__(self, tell: bool) -> None:
        self.generator = np.random.default_rng(0)
        super().__init__(lambda index: (self.generator.random((2, 2)) + index, index % 3))
        if tell:
            self.set_seed = self._seed

    def _seed(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)


def seeded(tell: bool) -> Seeded:
    return Seeded(tell)


def with_validation() -> Made:
    return Made(pairs().sample, validation=Made(lambda index: pairs().sample(1000 + index), 6))


def both() -> tuple[Made, Made]:
    return pairs(), pairs(6)


def mapping() -> dict[str, Made]:
    """As load_dataset returns it."""
    return {"test": pairs(3), "train": pairs(), "validation": pairs(6)}


def named(names: list[str]) -> dict[str, Made]:
    """Splits of these names beside one to train on; each has one sample more than the one before."""
    return {"train": pairs(), **{name: pairs(6 + number) for number, name in enumerate(names)}}


def random_split() -> Any:
    """A list of two data sets."""
    data: Any = pairs(SIZE + 6)
    return torch.utils.data.random_split(data, [SIZE, 6])


def wrapped(by: str, **more: Any) -> Any:
    """`texts`, or `seeded`, within torch's own data sets."""
    inner: Any = seeded(True) if more.pop("noise", False) else texts(**more)
    if by == "random_split":
        return torch.utils.data.random_split(inner, [30, 10])
    if by == "concat":
        return torch.utils.data.ConcatDataset([inner, torch.utils.data.Subset(inner, [1, 2, 3])])
    return inner


def collated(by: str, name: str) -> Any:
    """`lists`, whose collate has this name."""
    inner: Any = lists()
    setattr(inner, name, inner.__dict__.pop("collate"))
    return torch.utils.data.random_split(inner, [30, 10]) if by == "random_split" else inner


def mixed() -> tuple[Made, Made]:
    """Training whose collate mixes the samples of a batch, and a validation whose collate does not."""

    def plain(samples: list[Any]) -> dict[str, torch.Tensor]:
        images = torch.stack([torch.from_numpy(image).float() for image, _ in samples])
        return {"inputs": images, "targets": torch.tensor([label for _, label in samples])}

    def mean(samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = plain(samples)
        return {**batch, "inputs": batch["inputs"].mean(0, keepdim=True).expand_as(batch["inputs"])}

    return Made(pairs().sample, collate=mean), Made(pairs().sample, 6, collate=plain)


def stream() -> Any:
    """What has no length and no places."""
    return iter([1, 2, 3])


def streaming() -> Any:
    """As load_dataset(..., streaming=True) gives it."""
    import datasets

    return datasets.Dataset.from_dict({"inputs": [1.0, 2.0]}).to_iterable_dataset()


def nothing() -> Made:
    return pairs(0)


def lists(fails: int = -1) -> Made:
    """Samples that only their own collate understands."""

    def collate(samples: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        if any(sample == f"no {fails}" for sample in samples):
            raise KeyError("it cannot be put together")
        numbers = torch.tensor([float(sample.split()[1]) for sample in samples])
        return numbers[:, None], numbers.long() % 3

    return Made(lambda index: f"no {index}", collate=collate)


def flat() -> Made:
    """A collate that forgets to count its samples."""
    return Made(lambda index: index, collate=lambda samples: {"inputs": torch.zeros(3)})


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    """As scikit-learn has them: inputs and labels."""
    return torch.zeros(40, 8), torch.zeros(40, dtype=torch.int64)


class Rows(torch.utils.data.IterableDataset[Any]):
    """Samples one after the other, of which there is a number."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Any:
        return iter([(torch.zeros(2), 0)] * SIZE)


def iterable() -> Rows:
    return Rows()


def loader() -> Any:
    data: Any = pairs()
    return torch.utils.data.DataLoader(data)


def frame(names: str = "columns") -> Any:
    """A table of 40 rows; with numbers for the names of its columns frame[0] is a column."""
    import pandas

    columns = ["a", "b", "y"] if names == "columns" else list(range(60))
    return pandas.DataFrame(np.zeros((SIZE, len(columns))), columns=columns)


def named_arrays() -> dict[str, Any]:
    return {"inputs": np.zeros((SIZE, 8)), "targets": np.zeros(SIZE)}


def listed_arrays() -> list[Any]:
    return [np.zeros((SIZE, 8)), np.zeros(SIZE)]


def three_splits() -> Any:
    data: Any = pairs()
    return torch.utils.data.random_split(data, [30, 5, 5])


def strings() -> Made:
    return Made(lambda index: {"text": f"words {index}", "label": index % 3})


def in_tuples(tensors: int) -> Any:
    """As a TensorDataset gives them: a tuple, whatever it has."""
    values = torch.arange(float(SIZE))[:, None].repeat(1, 3)
    return torch.utils.data.TensorDataset(*[values] * tensors)


def translations(alike: bool = False, odd: int = 0) -> Made:
    """Texts and their translations, which are equally long or not; in the sample `odd` it is the other way round."""

    def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = 5 + index % 7
        is_alike = alike != (index == odd)
        others = length if is_alike else length + 1 + index % 3
        return torch.full((length,), index), torch.full((others,), index)

    return Made(sample)


def one_buffer(kind: str = "tensor") -> Made:
    """Each sample is written into the memory of the one before."""
    buffer = torch.zeros(1, 4, 4)

    def sample(index: int) -> tuple[Any, int]:
        buffer.fill_(index)
        return buffer if kind == "tensor" else buffer.numpy(), index % 3

    return Made(sample)


def one_twice() -> tuple[Made, Made]:
    data = pairs()
    return data, data


def hidden(kind: str) -> Made:
    """Arrays whose plain numbers are not what is meant."""
    from PIL import Image

    picture = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    values = {
        "palette": picture.quantize(16),
        "colours": picture,
        "masked": np.ma.masked_greater(np.arange(8.0), 5),
        "unmasked": np.ma.masked_greater(np.arange(8.0), 9),
    }
    return Made(lambda index: (values[kind], index % 3))
