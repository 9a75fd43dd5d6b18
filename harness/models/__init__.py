"""Bring your own model: `model.target: "pkg.mod:fn"`, and the loss contract it must meet.

fn(**model.args) returns an nn.Module. On text either its forward takes (inputs, targets) and returns the mean loss in
nats per token as a 0-d tensor, or it takes (inputs) and returns logits [batch, time, vocab], over which the harness
takes the cross-entropy; inputs and targets are int64 [batch, time]. What else it may take and return: `models/task.py`.
A model that has an int `vocab_size` gets no token outside of it: such samples are named before they reach an embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from harness.core.config import ModelConfig
from harness.core.errors import ConfigError, Problem
from harness.core.schema import call_target
from harness.models import huggingface
from harness.models.room import watched
from harness.models.task import Task

__all__ = ["Task", "build_model", "check_vocab"]


def build_model(config: ModelConfig) -> nn.Module:
    """Import the target and call it. Raises ConfigError if it is missing, fails, returns no Module, or takes all of
    this machine's memory."""
    where = f"model.target {config.target!r}"
    with watched(where):
        if config.target.startswith(huggingface.PREFIX):
            model: Any = huggingface.build(
                config.target.removeprefix(huggingface.PREFIX), config.args
            )
        else:
            model = call_target("model", config.target, config.args, "models")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            Problem(
                f"returned a {type(model).__name__}, not an nn.Module", where, fix="return a Module"
            )
        )
    return _checked(model, where)


def _checked(model: nn.Module, where: str) -> nn.Module:
    odd = [
        f"{name} ({p.dtype})"
        for name, p in model.named_parameters()
        if p.requires_grad and p.dtype != torch.float32
    ]
    if odd:
        why = "precisions are chosen by the recipe, over float32 parameters"
        what = f"{len(odd)} trainable parameters are not float32, such as {odd[0]}"
        raise ConfigError(Problem(what, where, why, "return model.float()"))
    if next(model.parameters(), None) is None:
        raise ConfigError(
            Problem("returned a model without parameters", where, fix="return a trainable Module")
        )
    huggingface.check(model, where)
    return model


def check_vocab(model: nn.Module, ids: int, target: str) -> None:
    """Raises ConfigError if a model that tells its `vocab_size` cannot take `ids` different token ids."""
    known = Task(model, target).vocab_size
    if known is not None and known < ids:
        why = f"the data has token ids up to {ids - 1}"
        fix = f"build it with at least {ids}, or give data of its own tokenizer"
        raise ConfigError(
            Problem(f"its vocab_size {known} is too small", f"model.target {target!r}", why, fix)
        )
