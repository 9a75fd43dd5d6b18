"""Classifiers of transformers, and data sets in their names, as a user may bring them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "num_labels": 3,
}


def vit() -> Any:
    return ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=2, num_channels=1))


def bert() -> Any:
    return BertForSequenceClassification(BertConfig(**SMALL, vocab_size=100))


class Images:
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": torch.rand(1, 8, 8), "labels": index % 3}


class Texts(Images):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((5 + index % 7,), index), "labels": index % 3}


def images() -> Images:
    return Images()


def texts() -> Texts:
    return Texts()
