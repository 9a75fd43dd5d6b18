"""Token ids, packed and mixed, under two ranks: the same samples and the same loss per token as under one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.core.errors import ExitCode
from tests.support.runs import metrics, train, train_ranks
from tests.unit.data.token_files import headerless, megatron, some_ids

pytestmark = pytest.mark.dist

KINDS = {
    "packed": ["data.path=packed.bin", "data.packing=documents"],
    "mixed": ["data.mixture=[{path: one.bin, weight: 3}, {path: two.bin, weight: 1}]"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_does(tmp_path: Path, kind: str) -> None:
    ids = some_ids(9000)
    megatron(
        tmp_path / "packed",
        np.split(ids, np.unique(np.random.default_rng(0).integers(1, 9000, 300)).tolist()),
    )
    headerless(tmp_path / "one.bin", ids)
    headerless(tmp_path / "two.bin", some_ids(3000, 90, 1))
    fixed = [
        "--recipe",
        "fp32",
        "train.steps=4",
        "data.val_samples=5",  # three for one rank, two for the other
        "data.context=32",
        "data.path=null",
        *KINDS[kind],
    ]
    alone = train(tmp_path, "--name", "alone", *fixed)
    assert alone.returncode == ExitCode.DONE, alone.stdout
    both = train_ranks(tmp_path, 2, "--name", "both", *fixed)
    assert both.returncode == ExitCode.DONE, both.stdout
    for name in ("train/loss", "val/loss"):
        one, two = (dict(metrics(tmp_path / "runs" / run, name)) for run in ("alone", "both"))
        assert one.keys() == two.keys()
        assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-5)
