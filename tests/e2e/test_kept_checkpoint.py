"""A run of the first version that promises it was stopped: every later version goes on from its checkpoint.

tests/golden/checkpoint is that run: its folder, text and recipe, and the losses after the checkpoint. Once 0.1.0 is
released it is not written anew: a version that changes what a checkpoint holds reads this one as well. Until then
`python tests/e2e/test_kept_checkpoint.py` does so; say in the commit what changed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.runs import ROOT, metrics, train

GOLDEN = ROOT / "tests" / "golden" / "checkpoint"
TEXT, RECIPE, LOSSES, RUN = "tide_gate.txt", "recipe.yaml", "losses.json", Path("runs", "kept")
SAVED, STEPS = 4, 8
# CPUs differ in the order of their sums, and in FP8 that shows early.
TOLERANCE = 2e-3
POLICY = """\
name: kept
description: FP8 on a CPU, for layers that are too small for it
ladder:
  - {backend: native, precision: fp8, tiers: [CPU]}
layers:
  min_features: 16
"""
ARGUMENTS = (
    *(
        "--recipe",
        RECIPE,
        "--name",
        RUN.name,
        f"data.path={TEXT}",
        "data.context=16",
        "tracking.fp8_every=10",
    ),
    *(f"model.args.{name}" for name in ("dim=16", "layers=1", "heads=1", "kv_heads=1", "ffn=32")),
    *("train.schedule=constant", f"checkpoint.every={SAVED}"),
)


def losses(folder: Path, steps: int) -> list[float]:
    """Train the run in `folder` up to `steps`; the losses of all its steps."""
    done = train(folder, *ARGUMENTS, f"train.steps={steps}", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout
    return [loss for _, loss in metrics(folder / RUN)]


def test_a_later_version_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    expected = json.loads((GOLDEN / LOSSES).read_text())
    found = losses(tmp_path, STEPS)
    assert len(found) == STEPS, "it did not start over"
    assert found[SAVED:] == pytest.approx(expected, rel=TOLERANCE)


def write() -> None:
    """Make the golden anew: what a resume reads, without the folders of the machine it was made on."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        shutil.copy(ROOT / "tests" / "golden" / "text" / TEXT, folder)
        (folder / RECIPE).write_text(POLICY)
        losses(folder, SAVED)
        for part in ("checkpoints", "data"):
            shutil.copytree(folder / RUN / part, GOLDEN / RUN / part)
        for name in ("config.yaml", "plan.json", "journal.jsonl", "data/source.json"):
            text = (folder / RUN / name).read_text()
            (GOLDEN / RUN / name).write_text(text.replace(str(folder), ".").replace(str(ROOT), "."))
        for name in (TEXT, RECIPE):
            shutil.copy(folder / name, GOLDEN)
        (GOLDEN / LOSSES).write_text(json.dumps(losses(folder, STEPS)[SAVED:], indent=1) + "\n")


if __name__ == "__main__":
    write()
    sys.stdout.write((GOLDEN / LOSSES).read_text())
