"""The fused kernel at its edges: any length, any alignment, amax among NaN, any number of threads."""

from __future__ import annotations

import pytest
import torch

from harness.precision import scaling
from harness.precision.backends import native_kernel


def run(x: torch.Tensor, scale: float, fmt: str, amax: float = 0.0) -> tuple[torch.Tensor, float]:
    kernel, note = native_kernel.load()
    assert kernel is not None, note
    running = torch.tensor([amax])
    return kernel(x, scale, fmt, running.data_ptr(), None), running.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 31, 33, 8191, 8193, 40001])
def test_any_length_and_alignment(dtype: torch.dtype, fmt: str, length: int) -> None:
    torch.manual_seed(length)
    storage = (100 * torch.randn(length + 1)).to(dtype)
    for x in (storage[:length], storage[1:]):
        quantized, amax = run(x, 0.37, fmt)
        expected = scaling.quantize(x, 0.37, fmt)
        assert torch.equal(quantized.view(torch.int16), expected.view(torch.int16))
        assert amax == scaling.amax(x).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amax_ignores_nan_wherever_it_is_and_never_falls(dtype: torch.dtype) -> None:
    for signed in (torch.nan, -torch.nan):
        x = torch.full((101,), signed, dtype=dtype)
        quantized, amax = run(x, 1.0, "e4m3")
        assert bool(quantized.isnan().all())
        assert amax == 0.0
        x[100] = -2.0
        assert run(x, 1.0, "e4m3")[1] == 2.0
        assert run(x, 1.0, "e4m3", amax=3.0)[1] == 3.0
        x[50] = -torch.inf
        assert run(x, 1.0, "e4m3")[1] == torch.inf


def test_threads_change_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(300_001).bfloat16()
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(x, 50.0, "e5m2"))
    finally:
        torch.set_num_threads(threads)
    for quantized, amax in results[1:]:
        assert torch.equal(quantized, results[0][0])
        assert amax == results[0][1] == scaling.amax(x).item()
