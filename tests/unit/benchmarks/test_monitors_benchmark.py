"""The guard's benchmark measures what it says: both contenders see the same gradients, and both guards train."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.monitors import main, parameters, tutorial
from harness.core.health import grad_health


def test_the_loop_and_the_pass_agree_on_the_same_gradients() -> None:
    params = parameters(1, torch.float32)
    assert params[0].grad is not None
    params[0].grad[0, 0] = 0.0
    norm, finite, zeros = tutorial(params, zeros=True)
    assert grad_health(params, scaled=False).norm.item() == pytest.approx(norm, rel=1e-5)
    assert finite
    assert zeros >= 1
    params[0].grad[0, 0] = math.inf
    assert not tutorial(params, zeros=False)[1]


@pytest.mark.nightly
def test_a_small_benchmark_ends_with_all_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "monitors.json"
    small = ["--sizes", "1", "--step-size", "1", "--tokens", "64", "--steps", "2", "--rounds", "1"]
    main([*small, "--out", str(out)])
    results = json.loads(out.read_text())
    for dtype in ("float32", "bfloat16"):
        row = results["pass"][f"1M {dtype}"]
        assert row["norm_error"] < 1e-6
        assert row["faster"]["without zeros"]["ratio"] > 1
    step = results["step"]
    assert 0.1 < step["wall"]["on_over_off"]["ratio"] < 10
    assert step["scalar_reads"]["added"] == 0, "no monitor reads the device in a step"
    assert "UnderflowMonitor" in step["monitors"]
    printed = capsys.readouterr().out
    assert "guard on / off" in printed
    assert "1M bfloat16" in printed
