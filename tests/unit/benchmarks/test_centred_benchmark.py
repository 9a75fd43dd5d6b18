"""The benchmark of `fp8_centred_db` takes away its sums and nothing else, and trains both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import centred
from harness.precision.backends import native_kernel


def test_the_kernel_without_the_sums_differs_in_them_alone(tmp_path: Path) -> None:
    kernel, note = native_kernel.load()
    assert kernel is not None, note
    x = torch.randn(300, 48, generator=torch.Generator().manual_seed(0)) + 20
    made = {}
    for name, cast in (("with", kernel), ("without", centred.kernel_without(tmp_path))):
        amax, sums = torch.zeros(1), torch.zeros(8, dtype=torch.float64)
        quantized = cast(x, 4.0, "e4m3", amax.data_ptr(), sums.data_ptr())
        made[name] = quantized, amax, sums
    for ours, theirs in zip(made["with"][:2], made["without"][:2], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(made["with"][2][:6], made["without"][2][:6])
    assert (made["with"][2][6:] > 0).all()
    assert (made["without"][2][6:] == 0).all()


@pytest.mark.nightly
def test_both_kinds_of_casts_train_with_and_without(tmp_path: Path) -> None:
    out = tmp_path / "centred.json"
    threads = torch.get_num_threads()
    try:
        centred.main(["--sizes", "tiny", "--seconds", "0.1", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(out.read_text())["results"]
    assert [(row["casts"], row["steps"]) for row in rows] == [
        (casts, steps) for casts in ("kernel", "torch") for steps in ("sampled", "shipped")
    ]
    for row in rows:
        assert min(row["sampled with, without"]) >= row["rounds"] >= 2
        assert 0.1 < row["ratio"] < 10
