"""Bring your own model: `model.target: "pkg.mod:fn"`, and the loss contract it must meet.

fn(**model.args) returns an nn.Module. Either its forward takes (inputs, targets) and returns the mean loss in nats
per token as a 0-d tensor, or it takes (inputs) and returns logits [batch, time, vocab], over which the harness takes
the cross-entropy. inputs and targets are int64 [batch, time] byte values. A model that has an int `vocab_size` gets no
token outside of it: such samples are named before they reach an embedding.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.core.config import ModelConfig
from harness.core.errors import ConfigError, HarnessError, Problem, near_match
from harness.core.protocols import Batch
from harness.models import huggingface


def build_model(config: ModelConfig) -> nn.Module:
    """Import the target and call it. Raises ConfigError if it is missing, fails, or returns no Module."""
    module_name, _, function_name = config.target.partition(":")
    where = f"model.target {config.target!r}"
    if config.target.startswith(huggingface.PREFIX):
        return _checked(huggingface.build(config.target.removeprefix(huggingface.PREFIX), config.args), where)
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        # Such as os:system. A config names code to run; this much of it can never be a model.
        raise ConfigError(
            Problem("is of Python's own library, which has no models", where, fix="name your own function")
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # console scripts do not have the working folder on their path
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            Problem(f"cannot import: {error}", where, fix="check the module path; the working folder is searched too")
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigError(Problem(f'no function "{function_name}"', where, fix=near_match(function_name, names)))
    try:
        model = function(**config.args)
    except HarnessError:
        raise
    except TypeError as error:
        accepted = list(inspect.signature(function).parameters)
        raise ConfigError(
            Problem(f"does not accept model.args: {error}", where, fix=f"it takes: {', '.join(accepted) or 'nothing'}")
        ) from error
    except Exception as error:
        raise ConfigError(
            Problem(
                f"failed: {type(error).__name__}: {error}", where, fix=f"call {config.target} with model.args alone"
            )
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(Problem(f"returned a {type(model).__name__}, not an nn.Module", where, fix="return a Module"))
    return _checked(model, where)


def _checked(model: nn.Module, where: str) -> nn.Module:
    odd = [
        f"{name} ({p.dtype})" for name, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32
    ]
    if odd:
        why = "precisions are chosen by the recipe, over float32 parameters"
        what = f"{len(odd)} trainable parameters are not float32, such as {odd[0]}"
        raise ConfigError(Problem(what, where, why, "return model.float()"))
    if next(model.parameters(), None) is None:
        raise ConfigError(Problem("returned a model without parameters", where, fix="return a trainable Module"))
    huggingface.check(model, where)
    return model


def check_vocab(model: nn.Module, ids: int, target: str) -> None:
    """Raises ConfigError if a model that tells its `vocab_size` cannot take `ids` different token ids."""
    known = Task(model, target).vocab_size
    if known is not None and known < ids:
        why = f"the data has token ids up to {ids - 1}"
        fix = f"build it with at least {ids}, or give data of its own tokenizer"
        raise ConfigError(Problem(f"its vocab_size {known} is too small", f"model.target {target!r}", why, fix))


class Task:
    """The loss of a model on a batch, whatever wrapper (DDP, DeepSpeed) it is called through."""

    def __init__(self, model: nn.Module, target: str) -> None:
        try:
            inspect.signature(model.forward).bind(None, None)
            self.takes_targets = True
        except TypeError:
            self.takes_targets = False
        self.target = target
        self._causal_lm = huggingface.causal_lm(model)
        vocab_size = getattr(self._causal_lm or model, "vocab_size", None)
        self.vocab_size = vocab_size if isinstance(vocab_size, int) else None

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Mean loss over the targets that have one, float 0-d, nats per token; what the batch has beside inputs and
        targets goes to the model by name. Raises ConfigError if the model's output meets no contract."""
        if self._causal_lm is not None:
            return self._causal_lm.loss(module, batch)
        rest = dict(batch)
        inputs, targets = rest.pop("inputs"), rest.pop("targets")
        if self.takes_targets:
            loss = module(inputs, targets, **rest)
            if isinstance(loss, Tensor) and loss.ndim == 0:
                return loss
            raise self._broken(f"forward(inputs, targets) returned {_shape(loss)}, not a 0-d loss")
        logits = module(inputs, **rest)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != targets.shape:
            raise self._broken(f"forward(inputs) returned {_shape(logits)}, not logits [batch, time, vocab]")
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    def _broken(self, what: str) -> ConfigError:
        fix = "return a 0-d mean loss from forward(inputs, targets), or logits from forward(inputs)"
        return ConfigError(Problem(what, f"model.target {self.target!r}", fix=fix))


def _shape(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
