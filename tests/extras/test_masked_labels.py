"""Models of transformers leave out labels of -100, and are let through; the same with a loss that does not are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import VOCAB, fresh
from torch import nn

from harness.core.errors import ConfigError
from harness.core.facts import IGNORED
from harness.models import Task

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def bert(head: str) -> Any:
    config = transformers.BertConfig(**SMALL, vocab_size=VOCAB, num_labels=VOCAB)
    return getattr(transformers, head)(config)


MODELS = {
    "llama": lambda: fresh("llama"),
    "gpt2": lambda: fresh("gpt2"),
    "mixtral": lambda: fresh("mixtral", output_router_logits=True),
    "t5": t5,
    "masked words": lambda: bert("BertForMaskedLM"),
    "tags": lambda: bert("BertForTokenClassification"),
}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5] = labels[1, 16:] = IGNORED
    return {"input_ids": ids, "labels": labels}


class Miscounting(nn.Module):
    """The same model, whose labels somebody filled up on the way."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, labels=labels.clamp(min=0))


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers(kind: str) -> None:
    model = MODELS[kind]()
    Task(model, kind).try_masks(model, iter([batch()]), torch.bfloat16)
    wrong = Miscounting(model)
    with pytest.raises(ConfigError, match="masked labels are trained on"):
        Task(wrong, kind).try_masks(wrong, iter([batch()]), torch.bfloat16)
