"""The journal's row of a step: public metric names, and only what was measured."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from harness.core.facts import SlotStats
from harness.core.metrics import page, slot_row

NAMES = ("blocks.00.mlp.down.input", "blocks.00.mlp.down.grad_output")


def _row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def _slots(clipped: float) -> SlotStats:
    return SlotStats(
        names=NAMES,
        amax=_row(2.0, 0.5),
        scale=_row(224.0, 2.0**17),
        saturation=_row(1.0, 1.25),
        clipped=_row(clipped, 0.0),
        underflow=_row(0.0, 0.5),
        sqnr_db=_row(31.5, 25.5),
    )


def test_every_statistic_of_a_sampled_step_is_kept_under_its_public_name() -> None:
    metrics = slot_row(_slots(clipped=0.25))
    assert metrics == {
        "fp8_amax/blocks.00.mlp.down.input": 2.0,
        "fp8_amax/blocks.00.mlp.down.grad_output": 0.5,
        "fp8_scale/blocks.00.mlp.down.input": 224.0,
        "fp8_scale/blocks.00.mlp.down.grad_output": 2.0**17,
        "fp8_saturation/blocks.00.mlp.down.input": 1.0,
        "fp8_saturation/blocks.00.mlp.down.grad_output": 1.25,
        "fp8_clipped/blocks.00.mlp.down.input": 0.25,
        "fp8_clipped/blocks.00.mlp.down.grad_output": 0.0,
        "fp8_underflow/blocks.00.mlp.down.input": 0.0,
        "fp8_underflow/blocks.00.mlp.down.grad_output": 0.5,
        "fp8_sqnr_db/blocks.00.mlp.down.input": 31.5,
        "fp8_sqnr_db/blocks.00.mlp.down.grad_output": 25.5,
    }


def test_what_was_not_sampled_is_left_out() -> None:
    metrics = slot_row(_slots(clipped=math.nan))
    assert "fp8_clipped/blocks.00.mlp.down.input" not in metrics
    assert metrics["fp8_clipped/blocks.00.mlp.down.grad_output"] == 0.0


def test_the_page_is_what_is_declared() -> None:
    path = Path(__file__).resolve().parents[3] / "docs" / "reference" / "metrics.md"
    assert path.read_text() == page(), "python -m harness.core.metrics > docs/reference/metrics.md"
