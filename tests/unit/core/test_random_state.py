"""The state of random generators, restored."""

from __future__ import annotations

import torch

from harness.core.state import RandomState


def test_random_state_that_lies_inside_a_larger_block_is_restored() -> None:
    part = RandomState()
    tensors, meta = part.state_dict()
    block = torch.zeros(64 + tensors["torch"].numel(), dtype=torch.uint8)
    inside = block[64:].copy_(tensors["torch"])
    expected = torch.rand(4).tolist()
    part.load_state_dict({**tensors, "torch": inside}, meta)
    assert torch.rand(4).tolist() == expected
