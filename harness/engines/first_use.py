"""Which parameters of a model get a gradient in the first window, where `.grad` does not say so.

FSDP2 makes gradients of zero for the others. DeepSpeed's ZeRO 1 and 2 take every gradient away as soon as it is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class FirstUse:
    """Watches the parameters of `model` from its next forward to `end`.

    blocks: modules in it that FSDP2 gathers one by one.

    names: the parameters that got a gradient so far, by their names in the model.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module] = ()) -> None:
        self.names: set[str] = set()
        self._watched: set[nn.Parameter] = set()
        self._handles: list[Any] = []
        named = model.named_modules()
        paths = {id(module): f"{name}." for name, module in named if name}
        for module in (model, *blocks):
            path = paths.get(id(module), "")
            watch: Any = torch.compiler.disable(partial(self._watch, path))
            self._handles.append(module.register_forward_pre_hook(watch))

    def _watch(self, prefix: str, module: nn.Module, args: object) -> None:
        """Before a forward of `module`. What FSDP2 has just gathered are plain parameters; a DTensor has no hooks."""
        for name, param in module.named_parameters():
            if isinstance(param, DTensor) or not param.requires_grad or param in self._watched:
                continue
            self._watched.add(param)
            note = partial(self._note, prefix + name)
            self._handles.append(param.register_post_accumulate_grad_hook(note))

    def _note(self, name: str, param: Tensor) -> None:
        self.names.add(name)

    def end(self) -> None:
        """Watch no longer; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
