"""A small model under the Transformer Engine backend, and what one window feeds it."""

from __future__ import annotations

from typing import Any

import torch
from gpu_support import backend_on
from torch import Tensor, nn

from harness.core.protocols import PrecisionBackend

LENGTH = 4
FEATURES = 128
FP8_MAX = torch.tensor([448.0, 448.0, 57344.0])


def make(device: torch.device, **fp8: Any) -> tuple[PrecisionBackend, nn.Sequential]:
    """Two layers, the second without bias; delayed scaling with a short history unless `fp8` says otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES, bias=False)
    ).to(device)
    return backend_on(
        model, "transformer_engine", device, **(fp8 or {"amax_history_len": LENGTH})
    ), model


def batch(device: torch.device, scale: float = 1.0, tokens: int = 128) -> tuple[Tensor, Tensor]:
    """Input float32 and output gradient bfloat16, [tokens, FEATURES]."""
    x = scale * torch.randn(tokens, FEATURES, device=device)
    return x, torch.randn(tokens, FEATURES, device=device, dtype=torch.bfloat16)


def largest(x: Tensor) -> float:
    """max|x|."""
    return x.detach().abs().max().item()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients, which are dropped from the model."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
