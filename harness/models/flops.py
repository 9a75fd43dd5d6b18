"""How many floating-point operations a model needs for training, counted once without computing anything."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from harness.core.protocols import Batch
from harness.models import Task


class _OnMeta(nn.Module):
    """The model, with every parameter and buffer on torch's meta device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._held = (model,)
        self._state = {
            name: torch.empty_like(tensor, device="meta")
            for named in (model.named_parameters(), model.named_buffers())
            for name, tensor in named
        }

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return torch.func.functional_call(self._held[0], self._state, inputs, named)


def training_flops(model: nn.Module, task: Task, batch: Batch) -> float:
    """FLOPs of the matrix products (convolutions, attention) of forward and backward on `batch`.

    Of the model, not of how it is computed: recomputed activations count once, and causal attention as if nothing were
    masked, which for a Transformer gives 6 N + 12 L H Q T for a token (Chowdhery et al., PaLM, arXiv 2204.02311,
    appendix B, N without embeddings). Forward is counted by torch's `FlopCounterMode` on the meta device. Backward is
    twice that: one product for the input and one for the weight; none for weights that are frozen. NaN for a model
    that cannot run without values.
    """
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            task.loss(_OnMeta(model), {name: values.to("meta") for name, values in batch.items()})
        forward = counter.get_total_flops()
    except Exception:
        return math.nan  # it reads values, or computes what has no meta kernel: its MFU is not known
    matrices: list[Tensor] = [param for param in model.parameters() if param.ndim >= 2]
    elements = sum(param.numel() for param in matrices)
    trained = sum(param.numel() for param in matrices if param.requires_grad)
    return float(forward * (2 + trained / elements)) if elements else math.nan
