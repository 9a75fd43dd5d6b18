"""The study of FP8's cost on a real card: that what is emulated there is what is emulated on a CPU. Not run on a GPU
yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.cost import VARIANTS
from benchmarks.cost_numerics import Operand, product, round_fp8
from benchmarks.cost_training import Corpus, Size, train
from harness.models import gpt
from harness.precision import scaling

pytestmark = pytest.mark.gpu

SIZE = Size(dim=64, layers=3, heads=2, context=32, batch=4, steps=8, warmup=3, lr=3e-3, validation=16)


@pytest.mark.parametrize("name", ["bf16", "fp8", "only_fprop", "current", "block", "smooth_swiglu", "weight_residual"])
def test_a_card_and_a_cpu_train_alike(fp8_gpu: torch.device, name: str) -> None:
    corpus = Corpus.cut(Path(gpt.__file__).read_bytes(), SIZE)
    seen: list[Tensor] = []
    for device in (torch.device("cpu"), fp8_gpu):
        losses: list[Tensor] = []
        train(VARIANTS[name], SIZE, corpus.to(device), [3, 8], device, trace=lambda _, loss, to=losses: to.append(loss))
        seen.append(torch.stack(losses).cpu())
    assert (seen[0] - seen[1]).abs().max() < 0.01
    assert seen[0][-1].max() < seen[0][0].min() - 0.1


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_the_cards_cast_has_the_products_values(fp8_gpu: torch.device, fmt: str) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits[torch.isfinite(bits)][None, None]
    for scale in (1.0, 0.37, 2.0**14):
        found = round_fp8(x.to(fp8_gpu), torch.full((1, 1, 1), scale, device=fp8_gpu), fmt, card=True)
        assert torch.equal(found.cpu(), scaling.quantize(x, scale, fmt).float())


def test_tf32_products_of_fp8_values_are_exact(fp8_gpu: torch.device) -> None:
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    left, right = (
        round_fp8(torch.randn(2, 64, 512, device=fp8_gpu), torch.ones(2, 1, 1, device=fp8_gpu), "e4m3", True)
        for _ in range(2)
    )
    inverse = torch.tensor([0.3, 0.7], device=fp8_gpu)
    found = product(Operand((left,), inverse), Operand((right,), inverse), "fprop", card=True)
    wide = (left.double() @ right.double().mT) * inverse.double().square()[:, None, None]
    assert torch.allclose(found.double(), wide, rtol=2.0**-8, atol=1e-3)
