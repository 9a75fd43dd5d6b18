"""What goes out of a run on a data set of one's own: nothing there is text, and nothing is said to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.core.errors import ExitCode
from tests.support.runs import harness, train

OWN = "tests.e2e.own_data"


@pytest.mark.slow
def test_sample_and_export_say_what_the_data_are(tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "r", "--recipe", "bf16", "data.path=null",
                 f"data.target={OWN}:images", f"model.target={OWN}:classifier", "train.steps=2",
                 "train.warmup_steps=1")  # fmt: skip
    assert done.returncode == 0, done.stdout
    said = harness(tmp_path, "sample", "runs/r", "x")
    assert said.returncode == ExitCode.USAGE
    assert "the run's data are no text" in said.stderr
    assert "token ids, and nobody" not in said.stderr
    out = harness(tmp_path, "export", "runs/r", "--format", "safetensors", "--out", "out")
    assert out.returncode == 0, out.stderr
    assert "tokenizer: none: the data are a data set of one's own" in out.stdout
    card = (tmp_path / "out" / "README.md").read_text()
    assert re.search(
        r"^\| training loss \| \d+\.\d{6} nats per label, after step 2 \|$", card, re.MULTILINE
    )
    assert re.search(r"^\| batch \| \d+ samples a step \|$", card, re.MULTILINE)
    assert "nats per token" not in card


def test_torchs_muon_by_name_says_which_one_fits(tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "r", "train.optimizer=torch.optim:Muon", "train.steps=2")
    assert done.returncode == ExitCode.USAGE
    assert "train.optimizer=muon" in done.stdout
