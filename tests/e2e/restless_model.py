"""A model whose compiled blocks need new code at every call, as a user's `model.target`."""

from __future__ import annotations

import torch._dynamo
from torch import Tensor, nn

from harness.models.gpt import GPT, build


class RestlessBlock(nn.Module):
    """Reads its number of calls, which torch.compile takes for a constant."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.calls = block, 0

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        self.calls += 1
        return self.block(x, rotation, mask) if self.calls > 0 else x


def restless() -> GPT:
    """With two variants of a block allowed; torch's own limit, 8, would only make the test longer."""
    torch._dynamo.config.recompile_limit = 2
    model = build(dim=64, layers=2, heads=2, ffn=176, tied=True)
    model.blocks = nn.ModuleList(RestlessBlock(block) for block in model.blocks)
    return model
