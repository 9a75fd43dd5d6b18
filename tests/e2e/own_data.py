"""Data sets and models as a user may bring them: `data.target` and `model.target` of runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.facts import IGNORED

VOCAB, CLASSES = 48, 4


class Texts:
    """Ids of 3 to 30, most of them a prompt whose targets have no loss: from one that counts to all of them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = 3 + 9 * (index % 4)
        ids = torch.randint(VOCAB, (length + 1,), generator=generator)
        targets = ids[1:].clone()
        targets[: (index * 7) % length] = IGNORED
        return {"inputs": ids[:-1], "targets": targets}


def texts(size: int = 64) -> Texts:
    return Texts(size)


class Uncounted(Texts):
    """Texts of which no target counts."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "targets": torch.full_like(sample["targets"], IGNORED)}


def validated_on_nothing() -> tuple[Texts, Texts]:
    return Texts(64), Uncounted(16)


def tokens() -> nn.Module:
    """Logits of each token by itself: whatever pads a text does not reach the others."""
    return nn.Sequential(
        nn.Embedding(VOCAB, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCAB)
    )


class Images:
    """Noisy images of a class, another noise each time; bad ones as asked.

    raises, nan, label: numbers of samples of which reading fails, that are NaN, or whose class there is not.
    """

    def __init__(self, size: int, **bad: list[int]) -> None:
        self.size, self.bad = size, bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index in self.bad.get("raises", ()):
            raise OSError("the disk is gone")
        image = np.zeros((1, 8, 8), dtype=np.float32)
        image[0, 2 * (index % CLASSES)] = 1.0
        image += (
            0.2 * np.random.standard_normal(image.shape).astype(np.float32) + 0.1 * random.random()
        )
        if index in self.bad.get("nan", ()):
            image[0, 3, 3] = np.nan
        return image + 0.1 * torch.rand(1, 8, 8).numpy(), 9 if index in self.bad.get(
            "label", ()
        ) else index % CLASSES


def images(size: int = 64, **bad: list[int]) -> Images:
    return Images(size, **bad)


def split_images(**bad: list[int]) -> tuple[Images, Images]:
    """A validation of its own, whose samples are bad as asked."""
    return Images(64), Images(16, **bad)


def classifier(drop: float = 0.1) -> nn.Module:
    """Linears that run in FP8, and dropout."""
    layers = [
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.Dropout(drop),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.GELU(),
    ]
    return nn.Sequential(*layers, nn.Linear(64, CLASSES))


class Summed(nn.Module):
    """A language model of bytes whose loss is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(256, 64), nn.Linear(64, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            self.out(self.embed(inputs)).flatten(0, 1), targets.flatten(), reduction="sum"
        )


def summed() -> Summed:
    return Summed()


class Forgetful(nn.Module):
    """A language model whose own loss takes masked targets for token 0."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocab, 64), nn.Linear(64, vocab)

    def forward(self, inputs: Tensor, targets: Tensor, segments: Tensor | None = None) -> Tensor:
        return F.cross_entropy(
            self.out(self.embed(inputs)).flatten(0, 1), targets.clamp(min=0).flatten()
        )


def forgetful(vocab: int = VOCAB) -> Forgetful:
    return Forgetful(vocab)


def from_file(path: str) -> Images:
    """As many images as the file says."""
    return Images(int(Path(path).read_text()))
