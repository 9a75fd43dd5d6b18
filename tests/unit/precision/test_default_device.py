"""A loop of one's own under `torch.set_default_device`, which many scripts for a GPU begin with.

The meta device stands for the GPU: a tensor of the harness that is made there by mistake has no values.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness import Precision

pytestmark = pytest.mark.usefixtures("cpu_on_purpose")

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


def weights_after(recipe: str, default: torch.device) -> list[torch.Tensor]:
    """The weights after some steps, trained while tensors are made on `default` unless a device is named."""
    with CPU:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        batches = torch.randn(5, 16, 32)
    with default:
        precision = Precision.from_recipe(recipe)
        model = precision.prepare(model)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        optimizer = precision.wrap(adamw, max_grad_norm=1.0)
        for batch in batches:
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "fp16_scaler"])
def test_the_default_device_changes_no_bit(recipe: str) -> None:
    usual, moved = weights_after(recipe, CPU), weights_after(recipe, ELSEWHERE)
    for expected, actual in zip(usual, moved, strict=True):
        assert torch.equal(actual, expected)
