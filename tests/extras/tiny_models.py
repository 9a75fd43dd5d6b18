"""Folders of tiny models as Hugging Face saves them, with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from harness.core.config import ModelConfig
from harness.models import build_model
from tests.support import paper

VOCAB = 256
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: transformers.LlamaConfig(**_LLAMA | more),
    "qwen2": lambda **more: transformers.Qwen2Config(**_LLAMA | more),
    "qwen3": lambda **more: transformers.Qwen3Config(**_LLAMA | {"head_dim": 16} | more),
    "gpt2": lambda **more: transformers.GPT2Config(**_GPT2 | more),
    "mixtral": lambda **more: transformers.MixtralConfig(
        **_LLAMA | {"num_local_experts": 4} | more
    ),
}


def fresh(kind: str, **more: Any) -> Any:
    """A model of transformers itself, in evaluation."""
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(
        CONFIGS[kind](**more), attn_implementation="eager"
    ).eval()


def save(
    folder: Path, kind: str, dtype: torch.dtype = torch.float32, shard: str = "5GB", **more: Any
) -> Path:
    """A folder with weights; shard: size of a file at most."""
    fresh(kind, **more).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def load(folder: Path, **args: Any) -> nn.Module:
    """As a run does."""
    return build_model(ModelConfig(target=f"hf:{folder}", args=args))


def batch(rows: int = 2, time: int = 32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens and their successors, int64 [rows, time]."""
    ids = torch.randint(VOCAB, (rows, time + 1), generator=torch.Generator().manual_seed(seed))
    return {"inputs": ids[:, :-1].clone(), "targets": ids[:, 1:].clone()}


def estimated(folder: Path, card: str, context: int, args: str = "{}") -> dict[str, Any]:
    """What `harness estimate --json` says of the folder's model on `card`, with one sample of `context` tokens.

    args: model.args.
    """
    asked = ["--card", card, "--config", "tiny", "--json"]
    sizes = [f"data.context={context}", "train.micro_batch=1", "train.global_batch=1"]
    done = paper.estimate(*asked, f"model.target=hf:{folder}", f"model.args={args}", *sizes)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
