"""Tests that need an NVIDIA GPU: skipped, with the reason, where torch sees none.

They have passed on one H100, with Transformer Engine (docs/studies/hopper.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    reason = "needs an NVIDIA GPU: " + (
        "this torch has no CUDA" if torch.version.cuda is None else "torch sees none"
    )
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def fp8_gpu() -> torch.device:
    """The current GPU, if it has FP8 units."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip(
            f"FP8 GEMMs need compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
        )
    return torch.device("cuda", torch.cuda.current_device())
