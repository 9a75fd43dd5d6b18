"""`harness doctor --config`: findings on a run's data and model, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.errors import ConfigError
from harness.precision.backends.registry import BACKENDS
from harness.precision.recipe import load_recipe
from harness.tools.doctor import command
from tests.support import runs

Doctor = Callable[..., tuple[int, dict[str, Any]]]

MODULE = """
import torch
import torch.nn.functional as F
from torch import nn

IMAGES = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) / 4096


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.up = nn.Linear(64, 63 if how == "odd" else 64)
        self.head = nn.Linear(self.up.out_features, 4)

    def forward(self, images, labels):
        x = F.relu(self.up(images))
        if self.how == "values" and x.sum() > -1:
            x = x * 2
        if self.how == "wrong":
            x = x.reshape(3, -1)
        logits = self.head(x)
        if self.how == "unsafe":
            return F.nll_loss(torch.log(logits.softmax(-1)), labels)
        return F.cross_entropy(logits, labels)


def net(how="right"):
    return Net(how)


def data(classes=4, val=0.003):
    labels = torch.arange(64) % classes
    rows = [{"images": image, "labels": label} for image, label in zip(IMAGES, labels)]
    others = [{"images": image + val, "labels": label} for image, label in zip(IMAGES, labels)]
    return rows, others
"""
CONFIG = """
recipe: bf16
train: {steps: 4, global_batch: 8, micro_batch: 4}
data: {target: "mine_doctor:data"}
model: {target: "mine_doctor:net"}
tracking: {mlflow: false}
"""


@pytest.fixture
def doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Doctor:
    """Runs `harness doctor --json --config mine.yaml` with overrides: (exit code, what it printed)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_doctor.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(CONFIG)

    def files() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__")

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        before = files()
        code = command(list(words), "mine.yaml", None, True)
        assert files() == before, "it leaves no file behind"
        found = json.loads(capsys.readouterr().out)
        assert found["exit_code"] == code
        for finding in found["findings"]:
            assert set(finding) == {"code", "severity", "where", "what", "why", "fix"}
            assert all(finding.values()), finding
        return code, found

    return run


def codes(found: dict[str, Any]) -> list[str]:
    return [finding["code"] for finding in found["findings"]]


def test_a_sound_run_has_no_finding(doctor: Doctor) -> None:
    code, found = doctor()
    assert (code, codes(found)) == (0, [])
    assert found["resolved"] == "autocast:bf16"
    answers = {each["precision"]: each["answer"] for each in found["decision"]}
    assert answers == {"fp8": "no", "bf16": "taken", "fp16": "not asked", "fp32": "not asked"}


def test_a_model_that_leaves_the_rung_of_the_machine_says_why(doctor: Doctor) -> None:
    _, found = doctor("recipe=fp8_hybrid")
    assert (found["resolved"], found["resolved_why"]) == ("native:fp8", "")
    _, found = doctor("recipe=fp8_hybrid", "model.args={how: odd}")
    assert found["resolved"] == "autocast:bf16"
    assert "not native:fp8: no layer of this model can run in FP8" in found["resolved_why"]


def test_a_warning_names_module_and_line_and_leaves_exit_code_0(doctor: Doctor) -> None:
    code, found = doctor("model.args={how: unsafe}")
    assert (code, codes(found)) == (0, ["numerics.log_softmax"])
    line = 1 + MODULE.splitlines().index(
        "            return F.nll_loss(torch.log(logits.softmax(-1)), labels)"
    )
    assert f"mine_doctor.py:{line}" in found["findings"][0]["where"]


def test_a_model_that_reads_values_is_traced_on_a_sample(doctor: Doctor) -> None:
    assert codes(doctor("model.args={how: values}")[1]) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.args={how: wrong}"], "model.fails"),
        (["model.args={width: 3}"], "model.refused"),
        (["data.args={classes: 5}"], "data.out_of_range"),
        (["data.target=mine_doctor:nothing"], "data.refused"),
        (["train.global_batch=9"], "config.refused"),
        (["train.colour=3"], "config.refused"),
    ],
)
def test_what_would_end_the_start_is_exit_code_2(
    doctor: Doctor, words: list[str], expected: str
) -> None:
    code, found = doctor(*words)
    assert code == 2
    assert expected in codes(found)
    errors = [each for each in found["findings"] if each["severity"] == "error"]
    assert expected in [each["code"] for each in errors]


def test_fused_blocks_that_would_be_compiled_are_named_as_in_a_start(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        BACKENDS, "native", replace(BACKENDS["native"], fuses=("delayed",), fuses_casts=False)
    )
    recipe = load_recipe("fp8_hybrid").model_dump(mode="json")
    recipe["layers"]["fuse"] = True
    (tmp_path / "fused.yaml").write_text(json.dumps(recipe))
    code, found = doctor("recipe=./fused.yaml", "engine.compile=blocks")
    assert code == 2
    told = [each["what"] for each in found["findings"] if each["code"] == "config.engine"]
    assert "layers.fuse does not go with torch.compile on native:fp8" in told


def test_several_defects_are_found_at_once(doctor: Doctor) -> None:
    code, found = doctor(
        "model.args={how: unsafe}",
        "data.args={val: 0.0}",
        "train.optimizer_args={eps: 0}",
    )
    assert code == 0
    assert sorted(codes(found)) == ["data.leak", "numerics.log_softmax", "optimizer.eps"]


def test_a_model_that_does_not_fit_here_is_exit_code_4(doctor: Doctor) -> None:
    words = ("model.target=harness.models.gpt:build", "model.args={dim: 65536, layers: 8, heads: 512}",
             "data.target=null")  # fmt: skip
    code, found = doctor(*words)
    assert code == 4
    assert {"machine.memory", "machine.disk"} <= set(codes(found))


def test_the_disk_is_that_of_the_runs(doctor: Doctor) -> None:
    # A folder in which nobody can write.
    Path("runs").symlink_to("/proc")
    code, found = doctor()
    assert (code, codes(found)) == (4, ["machine.disk", "machine.disk"])
    # A warning of the machine, and what refuses this run.
    assert [each["where"] for each in found["findings"]] == ["folder of runs", "runs"]


def test_an_override_needs_a_config() -> None:
    with pytest.raises(ConfigError, match="--config"):
        command(["train.steps=3"])


def test_the_screen_shows_findings_and_the_tree(tmp_path: Path) -> None:
    (tmp_path / "mine_doctor.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    done = runs.harness(tmp_path, "doctor", "--config", "mine.yaml", "model.args={how: unsafe}")
    assert done.returncode == 0
    assert "warning numerics.log_softmax" in done.stdout
    assert "fix: F.log_softmax" in done.stdout
    assert "> bf16? taken" in done.stdout.replace("   ", " ").replace("  ", " ")
