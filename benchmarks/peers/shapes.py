"""The models that the loops train, their samples, and the config of a run that trains one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harness.core.config import RunConfig, load_config

GPT = "harness.models.gpt:build"
VIT = "harness.models.vision:vit"
LLAMA = "hf:"
# Windows of samples: so few that a model learns them by heart, and a loop that does not train is seen.
WINDOWS = 4
BETAS = (0.9, 0.95)
MAX_NORM = 1.0
# Sizes of meta-llama/Llama-3.2-1B's config.json.
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
TINY_LLAMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and what it is trained on in a step.

    batch: samples in a step, all in one forward.
    tokens: tokens of a sample; of an image, its patches.
    args: of the model's constructor; of a Hugging Face Llama, its config.json.
    data: arguments of `texts` or of `images`.
    small: whether a CPU trains it in seconds. Then it learns fast, too.
    """

    name: str
    target: str
    args: Mapping[str, Any]
    batch: int
    tokens: int
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    small: bool = False

    @property
    def what(self) -> str:
        """The model, in words."""
        return {GPT: "the shipped GPT", VIT: "the shipped ViT", LLAMA: "transformers' Llama"}[
            self.target
        ]

    @property
    def adamw(self) -> dict[str, Any]:
        """Arguments of every loop's AdamW. A large model without a warm-up takes a low learning rate."""
        lr = 1e-3 if self.small else 1e-4
        return {"lr": lr, "betas": BETAS, "weight_decay": 0.0, "fused": True}


def _shipped(name: str, config: str, batch: int, tokens: int, **more: Any) -> Shape:
    """The model of a shipped config. more: arguments of the model that replace the config's.

    The loss is never computed in chunks: torch.utils.checkpoint, which does that, fails around a head of TE's.
    """
    args = {**load_config(config).model.args, "loss_chunk": 0, **more}
    return Shape(name, GPT, args, batch, tokens, {"vocab": args["vocab"]})


def _vit(name: str, batch: int, args: Mapping[str, int], small: bool = False) -> Shape:
    tokens = (args["size"] // args["patch"]) ** 2
    data = {key: args[key] for key in ("channels", "size", "classes")}
    return Shape(name, VIT, args, batch, tokens, data, small)


_TINY = {"vocab": 256, "dim": 64, "layers": 2, "heads": 2, "tied": False}
_TINY_VIT = {
    "channels": 1,
    "size": 16,
    "patch": 2,
    "dim": 64,
    "layers": 2,
    "heads": 4,
    "classes": 10,
}
_BASE_VIT = {
    "channels": 3,
    "size": 224,
    "patch": 16,
    "dim": 768,
    "layers": 12,
    "heads": 12,
    "classes": 1000,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", GPT, _TINY, 4, 64, {"vocab": 256}, small=True),
        Shape("tiny_llama", LLAMA, TINY_LLAMA, 4, 64, {"vocab": 256}, small=True),
        _vit("tiny_vit", 8, _TINY_VIT, small=True),
        _shipped("llama3_8b_8layers", "llama3_8b_8layers", 1, 4096),
        _shipped("llama3_8b_8layers_16k", "llama3_8b_8layers", 1, 16384),
        _shipped("llama3_8b_8layers_128k", "llama3_8b_8layers", 1, 4096, vocab=128256),
        _shipped("gpt_1b", "gpt_1b", 2, 4096),
        _shipped("gpt_125m", "gpt_125m", 16, 1024),
        Shape("hf_llama_1b", LLAMA, LLAMA_1B, 1, 4096, {"vocab": 128256}),
        _vit("vit_base", 64, _BASE_VIT),
    )
}


class Held:
    """Samples in memory: pairs of arrays. Each sample is unlike the others, so a loss says which were trained on.

    validation: the same samples. Nothing is held out, as nothing is validated here.
    """

    def __init__(self, inputs: npt.NDArray[Any], targets: npt.NDArray[np.int64]) -> None:
        self.inputs, self.targets = inputs, targets

    @property
    def validation(self) -> Held:
        return self

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[npt.NDArray[Any], Any]:
        return self.inputs[number], self.targets[number]


def texts(samples: int, tokens: int, vocab: int) -> Held:
    """Token ids and the ids that follow them. A few ids, of each sample's own, make up most of it."""
    random = np.random.default_rng(0)
    rows = np.empty((samples, tokens + 1), np.int64)
    for row in rows:
        rank = vocab ** random.random(tokens + 1) ** 2 - 1
        row[:] = random.permutation(vocab)[rank.astype(np.int64)]
    return Held(rows[:, :-1].copy(), rows[:, 1:].copy())


def images(samples: int, channels: int, size: int, classes: int) -> Held:
    """Noise with a brightness of each image's own, and a class."""
    random = np.random.default_rng(0)
    noise = random.standard_normal((samples, channels, size, size))
    pixels = noise + random.standard_normal((samples, 1, 1, 1))
    return Held(pixels.astype(np.float32), random.integers(0, classes, samples))


def as_gpt(llama: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the shipped GPT that computes what a Llama with this config.json does."""
    return {
        "vocab": llama["vocab_size"],
        "dim": llama["hidden_size"],
        "layers": llama["num_hidden_layers"],
        "heads": llama["num_attention_heads"],
        "kv_heads": llama["num_key_value_heads"],
        "ffn": llama["intermediate_size"],
        "tied": llama["tie_word_embeddings"],
    }


def run_config(shape: Shape, recipe: str, folder: Path) -> RunConfig:
    """The config of `harness train`: what shape and optimizer ask for, and else the defaults.

    folder: where the config.json of a Hugging Face model goes.
    """
    target, args = shape.target, dict(shape.args)
    if target == LLAMA:
        target, args = f"hf:{_llama_folder(shape, folder)}", {"weights": "fresh"}
    made = "images" if shape.target == VIT else "texts"
    data = {"samples": WINDOWS * shape.batch, **shape.data}
    if made == "texts":
        data["tokens"] = shape.tokens
    return RunConfig.model_validate(
        {
            "recipe": recipe,
            "train": {
                "steps": 10**6,
                "global_batch": shape.batch,
                "micro_batch": shape.batch,
                "lr": shape.adamw["lr"],
                "betas": shape.adamw["betas"],
                "weight_decay": shape.adamw["weight_decay"],
                "warmup_steps": 0,
                "schedule": "constant",
                "max_grad_norm": MAX_NORM,
                "eval_every": 0,
                "threads": torch.get_num_threads(),
            },
            "data": {"target": f"{__name__}:{made}", "args": data, "context": shape.tokens},
            "model": {"target": target, "args": args},
            "checkpoint": {"every": 0},
            "tracking": {"mlflow": False},
        }
    )


def _llama_folder(shape: Shape, folder: Path) -> Path:
    made = folder / "llama"
    made.mkdir(exist_ok=True)
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (made / "config.json").write_text(json.dumps({**kind, **shape.args}))
    return made
