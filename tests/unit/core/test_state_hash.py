"""The hash of a TrainState: the same for the same state, another for any change of it; random state from a view."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from harness.core.protocols import Meta, Tensors
from harness.core.state import RandomState, state_hash


def state() -> tuple[Tensors, Meta]:
    tensors: Tensors = {
        "model": {
            "a": torch.arange(6.0).view(2, 3),
            "b": torch.ones(3).bfloat16(),
            "none": torch.zeros(0),
        },
        "fp8": {"history": torch.zeros(4).to(torch.float8_e4m3fn)},
        "rng": {},
    }
    return tensors, {"step": 5, "parts": {"monitors": {"norms": [1.0, 2.0]}}}


def flip(tensors: Tensors) -> None:
    tensors["model"]["a"].view(torch.int32)[1, 2] ^= 1


def negate_zero(tensors: Tensors) -> None:
    tensors["fp8"]["history"].view(torch.uint8)[0] = 0x80


def reshape(tensors: Tensors) -> None:
    tensors["model"]["a"] = tensors["model"]["a"].view(3, 2)


def retype(tensors: Tensors) -> None:
    tensors["model"]["b"] = tensors["model"]["b"].view(torch.float16)


def rename(tensors: Tensors) -> None:
    tensors["model"]["c"] = tensors["model"].pop("a")


def drop(tensors: Tensors) -> None:
    del tensors["model"]["none"]


@pytest.mark.parametrize("change", [flip, negate_zero, reshape, retype, rename, drop])
def test_any_change_of_a_tensor_changes_it(change: Callable[[Tensors], None]) -> None:
    tensors, meta = state()
    change(tensors)
    assert state_hash(tensors, meta) != state_hash(*state())


def test_meta_counts_and_order_and_layout_do_not() -> None:
    tensors, meta = state()
    same = dict(reversed(tensors.items()))
    same["model"] = dict(reversed(tensors["model"].items()))
    same["model"]["a"] = tensors["model"]["a"].t().contiguous().t()
    assert state_hash(same, dict(reversed(meta.items()))) == state_hash(*state())
    other = copy.deepcopy(meta)
    other["parts"]["monitors"]["norms"][1] = 2.0000000000000004
    assert state_hash(tensors, other) != state_hash(*state())


def test_random_state_that_lies_inside_a_larger_block_is_restored() -> None:
    part = RandomState()
    tensors, meta = part.state_dict()
    block = torch.zeros(64 + tensors["torch"].numel(), dtype=torch.uint8)
    inside = block[64:].copy_(tensors["torch"])
    expected = torch.rand(4).tolist()
    part.load_state_dict({**tensors, "torch": inside}, meta)
    assert torch.rand(4).tolist() == expected
