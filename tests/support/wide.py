"""Finds float32 tensors as wide as a vocabulary: copies of logits, or of their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Wide(TorchDispatchMode):
    """The largest float32 tensor, in elements, of those whose last dimension is `vocab`."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            logits = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[-1] == self.vocab
            if logits and leaf.dtype == torch.float32:
                self.largest = max(self.largest, leaf.numel())
        return out
