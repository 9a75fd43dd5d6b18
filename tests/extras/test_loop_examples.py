"""The examples with Lightning, Hugging Face's Trainer and accelerate give the losses of the one without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loop_support import amaxes

from tests.support.matrix import rest_nightly
from tests.support.runs import ROOT, program

PLAIN = "standard_loop"


def last_loss(example: str, recipe: str, folder: Path) -> str:
    """What the example prints of its last loss, after everything that has to happen has happened."""
    folder.mkdir()
    store = f"sqlite:///{folder}/mlflow.db"
    script = ROOT / "examples" / f"{example}.py"
    done = program(script, folder, recipe, options=(), timeout=900, MLFLOW_TRACKING_URI=store)
    assert "guard.rollback x 1, nonfinite.skip x 6" in done.stdout
    assert ("precision.demote x 1" in done.stdout) == (recipe == "fp8_hybrid")
    assert re.search(r"peak memory \d\.\d\d GiB", done.stdout)
    assert (len(amaxes(folder / "mlflow.db")) > 3) == (recipe == "fp8_hybrid")
    (run,) = (folder / "runs").iterdir()
    assert (run / "report.html").exists()
    return re.findall(r"last loss (\S+),", done.stdout)[0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", rest_nightly(["fp8_hybrid", "fp16_scaler"], "fp8_hybrid"))
def test_every_library_gives_the_same_losses(recipe: str, tmp_path: Path) -> None:
    found = {
        example: last_loss(example, recipe, tmp_path / example)
        for example in (PLAIN, "with_lightning", "with_trainer", "with_accelerate")
    }
    assert len(set(found.values())) == 1, found
