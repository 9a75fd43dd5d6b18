"""The settings on which bits depend are read whatever interface of torch a script has set them by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.engines.deterministic import knobs
from harness.estimate.recorder import unit


@pytest.fixture(params=["conv", "rnn"])
def operation(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One of cuDNN's operations without TF32, by torch's newer settings. allow_tf32 then cannot be read."""
    chosen: Any = getattr(torch.backends.cudnn, request.param)
    before = chosen.fp32_precision
    chosen.fp32_precision = "ieee"
    with pytest.raises(RuntimeError, match="allow_tf32"):
        assert torch.backends.cudnn.allow_tf32
    yield request.param
    chosen.fp32_precision = before


def test_knobs_list_what_a_script_has_set(operation: str) -> None:
    assert knobs(1)[f"cudnn.{operation}.fp32_precision"] == "ieee"


def test_a_convolution_is_counted_in_the_precision_that_it_has(operation: str) -> None:
    image = torch.zeros(1, 1, 4, 4)
    expected = "fp32" if operation == "conv" else "tf32"
    assert unit("convolution", [image, image], tf32=True) == expected
