"""Builds the model of a run from `model.target: "pkg.mod:fn"`.

fn(**model.args) returns an nn.Module. On text, inputs and targets are int64 [batch, time], and its forward is one of:

- forward(inputs, targets), which returns the mean loss in nats per token as a 0-d tensor;
- forward(inputs), which returns logits [batch, time, vocab]. The harness then computes the cross-entropy.

`models/task.py` says what else forward may take and return. If the model has an int `vocab_size`, samples with larger
token ids are reported before they reach its embedding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from harness.core import deferred
from harness.core.config import ModelConfig
from harness.core.errors import ConfigError, Problem
from harness.core.schema import call_target
from harness.models import huggingface
from harness.models.gpt import GPT
from harness.models.room import watched
from harness.models.task import Task

__all__ = ["Task", "build_deferred", "build_model", "check_vocab", "recompute_setting"]


def build_model(config: ModelConfig) -> nn.Module:
    """Import the target and call it.

    Raises ConfigError if it is missing, fails, returns no Module, or takes all of this machine's memory.
    """
    model = _call(config)
    huggingface.check(model, _where(config))
    return model


def build_deferred(config: ModelConfig, device: torch.device, tried: bool = True) -> nn.Module:
    """As `build_model`, but the model is on the meta device: see `core/deferred.py`.

    device: where `deferred.computing` is to compute.
    tried: try a model of transformers on a few tokens, see `deferred.try_model`.

    Raises deferred.CannotDeferError for a model that has to be built whole. Raises ConfigError for a folder whose
    weights do not fit.
    """
    model = deferred.build(partial(_call, config), device, final=huggingface.FolderError)
    if tried:
        check = partial(huggingface.check, model, _where(config))
        deferred.try_model(model, check)
    return model


def _where(config: ModelConfig) -> str:
    return f"model.target {config.target!r}"


def _call(config: ModelConfig) -> nn.Module:
    """What the target returns. Raises ConfigError, see `build_model`."""
    where = _where(config)
    # A model that does not fit is refused as it grows, before the kernel kills the process without a word.
    with watched(where):
        if config.target.startswith(huggingface.PREFIX):
            folder = config.target.removeprefix(huggingface.PREFIX)
            model: Any = huggingface.build(folder, config.args)
        else:
            model = call_target("model", config.target, config.args, "models")
    if not isinstance(model, nn.Module):
        what = f"returned a {type(model).__name__}, not an nn.Module"
        raise ConfigError(Problem(what, where, fix="return a Module"))
    _check(model, where)
    return model


def _check(model: nn.Module, where: str) -> None:
    """Raise ConfigError for a model that cannot be trained as it is."""
    odd: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            odd.append(f"{name} ({parameter.dtype})")
    if odd:
        why = "precisions are chosen by the recipe, over float32 parameters"
        what = f"{len(odd)} trainable parameters are not float32, such as {odd[0]}"
        raise ConfigError(Problem(what, where, why, "return model.float()"))
    if next(model.parameters(), None) is None:
        what = "returned a model without parameters"
        raise ConfigError(Problem(what, where, fix="return a trainable Module"))


def check_vocab(model: nn.Module, ids: int, target: str) -> None:
    """Raise ConfigError if the model has a `vocab_size` and it is less than `ids`, the number of the data's ids."""
    size = Task(model, target).vocab_size
    if size is not None and size < ids:
        what = f"its vocab_size {size} is too small"
        why = f"the data has token ids up to {ids - 1}"
        fix = f"build it with at least {ids}, or give data of its own tokenizer"
        raise ConfigError(Problem(what, f"model.target {target!r}", why, fix))


def recompute_setting(config: ModelConfig, model: nn.Module) -> str | None:
    """The override under which backward computes this model's blocks again; empty if it does so already.

    None: there is no such key, as for a model of the user's own. Whether it recomputes is not known then.
    """
    if config.target.startswith(huggingface.PREFIX):
        if config.args.get("gradient_checkpointing"):
            return ""
        supported = getattr(model, "supports_gradient_checkpointing", False)
        if supported:
            return "model.args.gradient_checkpointing=true"
        return None
    if isinstance(model, GPT) and config.target.startswith("harness.models."):
        if model.settings.recompute == "none":
            return "model.args.recompute=block"
        return ""
    return None
