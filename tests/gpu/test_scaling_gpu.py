"""Casts and scale updates on a GPU give the CPU's bits."""

from __future__ import annotations

import pytest
import torch

from harness.precision import scaling

pytestmark = pytest.mark.gpu


def every_bfloat16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**20, 2.0**-20])
def test_quantize_is_bit_equal_for_every_bfloat16_value(fmt: str, scale: float) -> None:
    values = every_bfloat16()
    for x in (values, values.float() * 1.1):
        expected = scaling.quantize(x, torch.tensor(scale), fmt)
        actual = scaling.quantize(x.cuda(), torch.tensor(scale).cuda(), fmt).cpu()
        same = actual.view(torch.int16) == expected.view(torch.int16)
        assert bool((same | (actual.isnan() & expected.isnan())).all())


def test_amax_and_update_are_bit_equal() -> None:
    values = every_bfloat16()
    assert scaling.amax(values.cuda()).item() == scaling.amax(values).item() == float("inf")
    finite = values[values.isfinite()]
    assert scaling.amax(finite.cuda()).item() == scaling.amax(finite).item()

    torch.manual_seed(0)
    history, scale = 10 ** torch.empty(16, 300).uniform_(-30, 30), torch.rand(300)
    history[0, :20], history[3, 5] = 0.0, float("inf")
    expected = scaling.update(history, scale, 448.0, margin=1)
    actual = scaling.update(history.cuda(), scale.cuda(), 448.0, margin=1)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_statistics_agree() -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(1000, 100).bfloat16(), torch.tensor(200.0)
    expected = scaling.quantization_stats(x, scaling.quantize(x, scale, "e4m3"), scale, "e4m3")
    on_gpu, scale_on_gpu = x.cuda(), scale.cuda()
    actual = scaling.quantization_stats(
        on_gpu, scaling.quantize(on_gpu, scale_on_gpu, "e4m3"), scale_on_gpu, "e4m3"
    ).cpu()
    assert expected[:, 0].sum() > 0
    assert torch.equal(actual[:, :3], expected[:, :3])
    torch.testing.assert_close(actual[:, 3:], expected[:, 3:], rtol=1e-12, atol=0.0)
