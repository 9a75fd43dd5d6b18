"""Arithmetic of operations, against PyTorch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from harness.estimate.recorder import flops, unit

SHAPES = {
    "Conv1d": (lambda: nn.Conv1d(8, 12, 5, padding=2), (3, 8, 32)),
    "Conv2d, strided": (lambda: nn.Conv2d(4, 6, 3, stride=2), (2, 4, 17, 19)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(8, 12, 4, stride=2), (3, 8, 32)),
    "Linear": (lambda: nn.Linear(8, 12), (3, 8)),
}


class Counted(TorchDispatchMode):
    """Sum of what `flops` says of every operation; units: of those that have any."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.units = 0.0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        found = flops(name, args, [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
        if found:
            self.units.add(
                unit(
                    name,
                    [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)],
                    tf32=True,
                )
            )
        self.total += found
        return out


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_of_a_layer(name: str, dtype: torch.dtype) -> None:
    torch.set_float32_matmul_precision("highest")  # a test of another file may have asked for TF32
    make, shape = SHAPES[name]
    with torch.device("meta"):
        layer, x = make().to(dtype), torch.empty(shape, dtype=dtype, requires_grad=True)
    with FlopCounterMode(display=False) as theirs, Counted() as ours:
        layer(x).sum().backward()
    assert ours.total == theirs.get_total_flops() > 0
    expected = "half" if dtype == torch.bfloat16 else "fp32" if name == "Linear" else "tf32"
    assert ours.units == {expected}


def test_a_convolution_in_groups() -> None:
    """PyTorch's counter forgets the groups in backward."""
    with torch.device("meta"):
        layer, x = nn.Conv1d(8, 16, 3, groups=4), torch.empty(3, 8, 32)
    with Counted() as counted:
        layer(x).sum().backward()
    assert counted.total == 2 * 3 * 30 * 16 * (8 // 4) * 3 * 2, (
        "forward, and the gradient of the weight"
    )


@pytest.mark.parametrize("causal", [True, False])
def test_attention_under_a_causal_mask_has_half(causal: bool) -> None:
    q = torch.empty(2, 4, 64, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    kernels = torch.ops.aten
    with Counted() as flash:
        kernels._scaled_dot_product_flash_attention(q, q, q, 0.0, causal)[0].sum().backward()
    with Counted() as efficient:
        kernels._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0, causal)[
            0
        ].sum().backward()
    whole = (4 + 10) * 2 * 4 * 64 * 64 * 32
    assert flash.total == efficient.total == (whole / 2 if causal else whole)


def test_grouped_products() -> None:
    groups, tokens, k, n = 4, 64, 32, 16
    ends = torch.empty(groups, dtype=torch.int32, device="meta")
    rows = torch.empty(tokens, k, dtype=torch.bfloat16, device="meta")
    weights = torch.empty(groups, k, n, dtype=torch.bfloat16, device="meta")
    assert flops("_grouped_mm", (rows, weights, ends), ()) == 2 * tokens * k * n
    assert (
        flops("_grouped_mm", (rows.expand(groups, tokens, k), weights), ())
        == 2 * groups * tokens * k * n
    )


def test_nothing_else_counts() -> None:
    with Counted() as counted:
        F.relu(torch.ones(4)).sum()
    assert counted.total == 0
