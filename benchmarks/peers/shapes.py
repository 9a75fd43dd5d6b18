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
# Steps until the samples repeat: so few that a model learns them by heart, and the loss of a loop that does not train
# stands out.
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
    """A model, and the samples of a step.

    target: GPT, VIT or LLAMA.
    args: arguments of the model's constructor; for a Hugging Face Llama, its config.json.
    batch: samples in a step, all in one forward.
    tokens: tokens of a sample; for an image, its patches.
    data: arguments of `texts` or of `images`.
    small: whether a CPU trains it in seconds. Such a model takes a higher learning rate.
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
        """Arguments of every loop's AdamW. There is no warm-up, so a large model needs a low learning rate."""
        lr = 1e-3 if self.small else 1e-4
        return {"lr": lr, "betas": BETAS, "weight_decay": 0.0, "fused": True}


def _shipped(name: str, config: str, batch: int, tokens: int, **more: Any) -> Shape:
    """The model of a shipped config. more: arguments of the model that replace the config's.

    The loss is never computed in chunks: a head of TE's needs torch.utils.checkpoint for that, which fails around it.
    """
    args = {**load_config(config).model.args, "loss_chunk": 0, **more}
    return Shape(name, GPT, args, batch, tokens, {"vocab": args["vocab"]})


def _vit(name: str, batch: int, args: Mapping[str, int], small: bool = False) -> Shape:
    """The shipped ViT on images of `args["size"]` pixels a side."""
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
    """A data set in memory: pairs of arrays. The samples differ, so the loss shows which of them a loop trains on.

    validation: the same samples. A data set must have some, but nothing is validated here.
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
    """Token ids and the ids that follow them. In each sample a few ids are frequent, others than in other samples."""
    random = np.random.default_rng(0)
    rows = np.empty((samples, tokens + 1), np.int64)
    for row in rows:
        # Ranks from 0 to vocab - 1. An evenly spread exponent makes low ranks frequent, and its square even more so.
        exponent = random.random(tokens + 1) ** 2
        ranks = (vocab**exponent - 1).astype(np.int64)
        # Which id has which rank is chosen anew for each sample.
        ids_by_rank = random.permutation(vocab)
        row[:] = ids_by_rank[ranks]
    return Held(rows[:, :-1].copy(), rows[:, 1:].copy())


def images(samples: int, channels: int, size: int, classes: int) -> Held:
    """Images of noise, each with a brightness and a class of its own.

    The images are float32 [samples, channels, size, size].
    """
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
    """The config of `harness train` for this shape and its optimizer; all other keys keep their defaults.

    folder: gets the config.json of a Hugging Face model.
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
    """A folder with the config.json of a Llama without weights."""
    made = folder / "llama"
    made.mkdir(exist_ok=True)
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (made / "config.json").write_text(json.dumps({**kind, **shape.args}))
    return made
