"""A fresh record of Transformer Engine on this card against the native backend, bit for bit."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product

import pytest
import torch

from benchmarks import te_golden

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
    ),
]


@pytest.mark.parametrize("case", te_golden.CASES, ids=str)
def test_sequences(fp8_gpu: torch.device, case: dict[str, object]) -> None:
    assert (
        te_golden.disagreements({"sequences": [te_golden.record_sequence(case)], "casts": []}) == []
    )


@pytest.mark.parametrize(("fmt", "scale"), list(product(te_golden.FORMATS, te_golden.SCALES)))
def test_casts(fp8_gpu: torch.device, fmt: str, scale: float) -> None:
    assert (
        te_golden.disagreements({"sequences": [], "casts": [te_golden.record_cast(fmt, scale)]})
        == []
    )
