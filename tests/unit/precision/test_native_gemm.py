"""The real FP8 GEMM (torch runs it on a CPU too) against bfloat16 carriers and float64, for all three GEMMs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.precision.backends.native_gemm import Carrier, Fp8Pair, Operand
from harness.precision.backends.native_triton import quantize_pair
from harness.precision.scaling import quantize

SCALES = {"x": 90.0, "w": 110.0, "g": 9000.0}


def pair(x: Tensor, scale: float, fmt: str) -> Fp8Pair:
    rows, columns = quantize_pair(
        x, torch.tensor([scale]), None, fmt, through_bf16=False, transpose=True
    )
    return Fp8Pair(rows, columns, 1 / torch.tensor([scale]))


def carrier(x: Tensor, scale: float, fmt: str) -> Carrier:
    return Carrier(quantize(x, scale, fmt), float(1 / torch.tensor(scale)))


def assert_close(out: Tensor, exact: Tensor) -> None:
    assert out.dtype == torch.bfloat16
    assert out.shape == exact.shape
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("gradient", ["e5m2", "e4m3"])
@pytest.mark.parametrize("tokens", [32, 20, 7, 0])
@pytest.mark.parametrize("biased", [False, True])
def test_both_kinds_of_operand_equal_float64(tokens: int, biased: bool, gradient: str) -> None:
    torch.manual_seed(0)
    tensors = {"x": torch.randn(tokens, 32), "w": torch.randn(48, 32), "g": torch.randn(tokens, 48)}
    formats = {"x": "e4m3", "w": "e4m3", "g": gradient}
    scales = SCALES if gradient == "e5m2" else {**SCALES, "g": 100.0}
    exact = {
        name: quantize(value, scales[name], formats[name]).double()
        * float(1 / torch.tensor(scales[name]))
        for name, value in tensors.items()
    }
    bias = torch.randn(48) if biased else None
    for make in (pair, carrier):
        operands: dict[str, Operand] = {
            name: make(value, scales[name], formats[name]) for name, value in tensors.items()
        }
        forward = exact["x"] @ exact["w"].t() + (
            bias.bfloat16().double() if bias is not None else 0.0
        )
        assert_close(operands["x"].nt(operands["w"], bias), forward)
        kept = {
            name: again(*saved) for name in ("x", "w") for saved, again in [operands[name].kept()]
        }
        assert_close(operands["g"].nn(kept["w"]), exact["g"] @ exact["w"])
        assert_close(operands["g"].tn(kept["x"]), exact["g"].t() @ exact["x"])


@pytest.mark.parametrize("scale", [1e-30, 3e21])
@pytest.mark.parametrize("biased", [False, True])
def test_scales_whose_product_is_no_float32(scale: float, biased: bool) -> None:
    """1 / scale^2 is over the largest float32, or so small that float32 keeps few of its bits; the product is fine."""
    torch.manual_seed(0)
    size = 2.0**-8 if scale < 1 else 2.0**7
    values = [size * torch.randn(16, 16) for _ in range(2)]
    left, right = (Carrier(quantize(value, 1.0, "e4m3"), 1 / scale) for value in values)
    bias = torch.full((16,), 2.0) if biased else None
    exact = left.values.double() @ right.values.double().t() / scale / scale + (
        2.0 if biased else 0.0
    )
    torch.testing.assert_close(left.nt(right, bias), exact.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(
        left.nn(right), (left.values.double() @ right.values.double() / scale**2).bfloat16()
    )
