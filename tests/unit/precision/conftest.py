"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def cpu_on_purpose(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same plans on machines with a GPU; recipes set a global precision, which other tests must not inherit."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
