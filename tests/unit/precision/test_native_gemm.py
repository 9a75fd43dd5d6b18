"""The real FP8 GEMM (torch runs it on a CPU too) against bfloat16 carriers and float64, for all three GEMMs."""

from __future__ import annotations

import pytest
import torch

from harness.precision.backends.native_gemm import matmul
from harness.precision.scaling import quantize


@pytest.mark.parametrize("tokens", [32, 20, 7, 0])
@pytest.mark.parametrize("biased", [False, True])
def test_scaled_mm_equals_carriers(tokens: int, biased: bool) -> None:
    torch.manual_seed(0)
    scales = {"x": torch.tensor(90.0), "w": torch.tensor(110.0), "g": torch.tensor(9000.0)}
    inverse = {name: 1 / scale for name, scale in scales.items()}
    x = quantize(torch.randn(tokens, 32), scales["x"], "e4m3")
    w = quantize(torch.randn(48, 32), scales["w"], "e4m3")
    g = quantize(torch.randn(tokens, 48), scales["g"], "e5m2")
    bias = torch.randn(48) if biased else None
    cases = (
        (x, w.t(), "x", "w", ("e4m3", "e4m3"), bias),
        (g, w, "g", "w", ("e5m2", "e4m3"), None),
        (g.t(), x, "g", "x", ("e5m2", "e4m3"), None),
    )
    for left, right, a, b, formats, add in cases:
        real = matmul(left, right, inverse[a], inverse[b], formats, add)
        carried = matmul(left, right, float(inverse[a]), float(inverse[b]), formats, add)
        exact = left.double() @ right.double() * float(inverse[a]) * float(inverse[b])
        exact = exact + add.bfloat16().double() if add is not None else exact
        assert real.shape == carried.shape == exact.shape
        assert real.dtype == carried.dtype == torch.bfloat16
        for out in (real, carried):
            torch.testing.assert_close(out.double(), exact, rtol=2.0**-7, atol=1e-3)
