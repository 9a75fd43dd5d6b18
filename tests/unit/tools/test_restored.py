"""The float32 baseline of `harness eval` and `harness sample`: no operation of it may use TF32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.tools.restored import Restored


def flags() -> tuple[str, bool, str, str]:
    """The settings by which float32 products, convolutions and recurrent layers may use TF32."""
    cudnn: Any = torch.backends.cudnn
    return (
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        cudnn.conv.fp32_precision,
        cudnn.rnn.fp32_precision,
    )


@pytest.fixture(params=[True, False])
def before(request: Any) -> Iterator[tuple[str, bool, str, str]]:
    matmul, allowed = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = request.param
    yield flags()
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = allowed


def test_the_fp32_baseline_uses_no_tf32(before: tuple[str, bool, str, str]) -> None:
    nothing: Any = SimpleNamespace()
    model = nn.Linear(2, 2)
    restored = Restored(Path(), nothing, nothing, nothing, "fp32", model, nothing, 1)
    with restored.computing(fp32=True):
        assert flags() == ("highest", False, "ieee", "ieee")
    assert flags() == before
