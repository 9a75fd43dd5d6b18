"""The first losses of every recipe on the shipped text: "same loss, or say why".

`python tests/e2e/test_golden.py` writes tests/golden/losses.json anew; say in the commit why it changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.runs import ROOT, metrics, train

GOLDEN = ROOT / "tests" / "golden" / "losses.json"
STEPS = 8
# Relative tolerances: CPUs differ in the order of their sums, and in bf16 and FP8 that shows early.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-3, "fp8_hybrid": 2e-3}


def first_losses(folder: Path, recipe: str) -> list[float]:
    done = train(
        folder, "--recipe", recipe, "--name", recipe, f"train.steps={STEPS}", "checkpoint.every=0"
    )
    assert done.returncode == 0, done.stdout
    return [loss for _, loss in metrics(folder / "runs" / recipe)]


@pytest.mark.parametrize("recipe", TOLERANCE)
def test_golden_losses(tmp_path: Path, recipe: str) -> None:
    golden = json.loads(GOLDEN.read_text())[recipe]
    assert len(golden) == STEPS
    assert golden[-1] < golden[0]
    assert first_losses(tmp_path, recipe) == pytest.approx(golden, rel=TOLERANCE[recipe])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        losses = {recipe: first_losses(Path(work), recipe) for recipe in TOLERANCE}
    GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")
    sys.stdout.write(GOLDEN.read_text())
