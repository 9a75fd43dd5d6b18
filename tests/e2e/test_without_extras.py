"""An environment without the extras: nothing waits for MLflow in vain, and the rest works."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.core.config import load_config
from harness.core.errors import MachineError
from harness.precision.recipe import load_recipe
from harness.tools.start import Request
from harness.tools.train import train


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An import system that has neither mlflow nor deepspeed, in an empty folder."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mlflow", "deepspeed")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("mlflow", "deepspeed"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)


def start(*overrides: str) -> int:
    config = load_config("tiny", ["train.steps=2", "tracking.report=false", *overrides], "bf16")
    return train(Request(config, load_recipe("bf16"), "tiny", "bare", "never", False, "python"))


@pytest.mark.usefixtures("bare")
def test_a_run_that_wants_mlflow_is_refused_before_it_begins() -> None:
    with pytest.raises(MachineError) as refused:
        start()
    for words in ("holds no module mlflow", "pip install -e '.[mlflow]'", "tracking.mlflow=false"):
        assert words in str(refused.value)
    assert not Path("runs").exists()


@pytest.mark.usefixtures("bare")
def test_a_run_that_does_not_want_it_trains() -> None:
    assert start("tracking.mlflow=false") == 0
