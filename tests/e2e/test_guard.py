"""The guard on the real job: skip, roll back, halt, demote and promote, each asserted to have fired."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from harness.core.files import find
from harness.tracking.history import RunHistory
from tests.support.runs import ROOT, events, metrics, train

pytestmark = pytest.mark.faults(11, 13)


def run_faulty(folder: Path, target: str, args: str, *arguments: str) -> tuple[Path, Any]:
    shutil.copy(ROOT / "tests" / "e2e" / "faulty_models.py", folder)
    fixed = ["--name", "r", "train.global_batch=2", "train.micro_batch=2"]
    config = yaml.safe_load(find("configs", "tiny").read_text())
    config["model"] = {"target": f"faulty_models:{target}", "args": yaml.safe_load(args)}
    (folder / "faulty.yaml").write_text(yaml.safe_dump(config))
    done = train(folder, *fixed, "--config", "faulty.yaml", *arguments)
    return folder / "runs" / "r", done


@pytest.mark.slow
def test_bad_batches_are_skipped_before_the_weights(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "golden" / "text" / "chapters.txt").read_bytes()
    (tmp_path / "text.txt").write_bytes(text[:1000] + b"\x07" + text[1000:6000])
    # Two samples a step: one that is merely odd (6 times the usual gradient norm) is not what this is about.
    settings = ("train.steps=120", "guard.skip_growth=100", f"data.path={tmp_path / 'text.txt'}")
    run, done = run_faulty(tmp_path, "poisoned", "{}", *settings)
    assert done.returncode == 0, done.stdout
    skipped = [step for step, applied in metrics(run, "train/step_applied") if applied == 0.0]
    bad = [event["step"] for event in events(run, "nonfinite.skip")]
    assert 1 <= len(bad) <= 3, "one sample has the byte; it comes once an epoch"
    spikes = [
        event["step"] for code in ("gradient.skip", "loss.skip") for event in events(run, code)
    ]
    assert sorted(bad + spikes) == skipped
    assert len(spikes) <= 2, "two samples a step: a real spike now and then"
    assert all(math.isnan(loss) for step, loss in metrics(run) if step in bad)
    assert all(math.isfinite(loss) for step, loss in metrics(run) if step not in bad)
    assert metrics(run, "guard/skipped")[-1][1] == len(skipped)
    lr = dict(metrics(run, "train/lr"))
    assert lr[skipped[0]] == lr[skipped[0] + 1], "a skipped step does not advance the schedule"


def first_bad_steps(windows: list[int]) -> list[int]:
    """Before any window was passed over, step n consumed window n - 1."""
    return [window + 1 for window in windows]


def test_a_broken_run_rolls_back_passes_over_the_bad_windows_and_finishes(tmp_path: Path) -> None:
    run, done = run_faulty(
        tmp_path,
        "nan_between",
        "{first: 23, last: 29}",
        "train.steps=40",
        "train.eval_every=15",
        "checkpoint.every=5",
        "checkpoint.healthy_steps=4",
    )
    assert done.returncode == 0, done.stdout
    rollbacks = events(run, "guard.rollback")
    assert len(rollbacks) == 1
    first = rollbacks[0]
    assert first["to_step"] == 15, "step 20's checkpoint had not earned it yet"
    assert first["passed_over"] == [23, 24, 25, 26, 27]
    before, after = (dict(metrics(run, attempt=attempt)) for attempt in (1, 2))
    assert list(before) == list(range(1, 29))
    assert list(after) == list(range(16, 41))
    for step in range(16, 24):
        assert before[step] == after[step], (
            "same state, same windows: bit for bit up to the first one passed over"
        )
    assert all(math.isnan(before[step]) for step in first_bad_steps(first["passed_over"]))
    assert all(math.isfinite(loss) for loss in after.values())
    validated = [step for step, _ in metrics(run, "val/loss")]
    assert validated == [15, 30, 40], "the step that it returned to is not validated again"
    assert list(RunHistory.read(run).points("train/loss")) == list(range(1, 41))
    ledger = json.loads((run / "incidents.json").read_text())
    assert ledger["rollbacks"] == 1
    assert ledger["skipped_windows"] == first["passed_over"]
    progress = [
        line
        for line in done.stdout.splitlines()
        if line.startswith("step ") and "  skipped " in line
    ][-1]
    (summed,) = re.findall(r"applied, (\d+) skipped", done.stdout)
    assert f"  skipped {summed} " in progress, "the progress counts as the summary does"
    assert list((run / "checkpoints").glob("rolledback-*")), "the newer branch is kept aside"


@pytest.mark.slow
def test_a_fault_that_stays_halts_within_budget(tmp_path: Path) -> None:
    run, done = run_faulty(
        tmp_path, "nan_from", "{first: 23}", "train.steps=400", "checkpoint.every=5", "checkpoint.healthy_steps=4",
        "guard.max_rollbacks=2",
    )  # fmt: skip
    assert done.returncode == 3, done.stdout
    outcome = json.loads((run / "outcome.json").read_text())
    assert outcome["status"] == "halted"
    assert "guard.max_rollbacks (2)" in outcome["reason"]
    assert len(events(run, "guard.rollback")) == 2
    assert events(run, "guard.halt")
    assert max(step for step, _ in metrics(run)) < 60
    assert "halted" in done.stdout


@pytest.mark.slow
def test_a_rollback_that_has_nowhere_to_go_is_not_counted(tmp_path: Path) -> None:
    run, done = run_faulty(
        tmp_path, "nan_from", "{first: 3}", "train.steps=40", "checkpoint.every=5"
    )
    assert done.returncode == 3, done.stdout
    assert events(run, "guard.rollback") == []
    assert "rollbacks 1" not in done.stdout
    assert json.loads((run / "outcome.json").read_text())["rollbacks"] == 0


@pytest.mark.slow
def test_without_the_guard_nothing_rolls_back(tmp_path: Path) -> None:
    run, done = run_faulty(
        tmp_path, "nan_from", "{first: 6}", "train.steps=20", "guard.enabled=false"
    )
    assert done.returncode == 0, done.stdout
    assert events(run, "guard.rollback") == []
    applied = dict(metrics(run, "train/step_applied"))
    assert applied[6] == 1.0
    assert {applied[step] for step in range(7, 21)} == {0.0}, (
        "the gate alone still protects the weights"
    )
    states = [
        load_file(path / "model.safetensors")
        for path in sorted((run / "checkpoints").glob("step-*"))[-2:]
    ]
    assert all((states[0][name] == states[1][name]).all() for name in states[0])


def recipe_with(folder: Path, fallback: Mapping[str, Any]) -> str:
    recipe = yaml.safe_load(find("recipes", "fp8_hybrid").read_text())
    recipe["fallback"] = dict(fallback)
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return "mine.yaml"


@pytest.mark.slow
def test_a_layer_that_keeps_saturating_goes_to_bf16_and_comes_back(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, {"dwell_steps": 12})
    run, done = run_faulty(
        tmp_path,
        "growing_outlier",
        "{first: 10, last: 14}",
        "--recipe",
        recipe,
        "train.steps=60",
        "train.lr=1e-4",
    )
    assert done.returncode == 0, done.stdout
    switches = events(run, "precision.switched")
    guilty = ["gpt.blocks.00.mlp.down", "gpt.blocks.00.mlp.gate_up"]
    down = {layer: event["step"] for event in switches for layer in event["demote"]}
    up = {layer: event["step"] for event in switches for layer in event["promote"]}
    assert sorted(down) == sorted(up) == guilty, "these two and no other, once each"
    saturation = {
        guilty[0]: dict(metrics(run, f"fp8_saturation/{guilty[0]}.input")),
        guilty[1]: dict(metrics(run, f"fp8_saturation/{guilty[1]}.weight")),
    }
    demoted = dict(metrics(run, "guard/demoted_layers"))
    for layer in guilty:
        assert max(saturation[layer].values()) > 1.5, "the fault fired"
        assert 12 <= down[layer] <= 10 + 8 + 2, "within the window of the policy, and the delay"
        assert up[layer] >= down[layer] + 12
        assert any(layer in event["text"] for event in events(run, "precision.demote")), (
            "the switch names its layer"
        )
    assert demoted[min(down.values()) - 1] == 0.0
    assert demoted[max(down.values())] == 2.0
    assert demoted[max(up.values())] == 0.0
    plan = json.loads((run / "plan.json").read_text())
    assert plan["effective_layers"]["gpt.blocks.0.mlp.down"] == "fp8"


@pytest.mark.slow
def test_with_fallback_off_the_same_layer_stays_clipped(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, {"enabled": False})
    run, done = run_faulty(
        tmp_path,
        "growing_outlier",
        "{first: 10, last: 14}",
        "--recipe",
        recipe,
        "train.steps=30",
        "train.lr=1e-4",
    )
    assert done.returncode == 0, done.stdout
    assert events(run, "precision.switched") == []
    saturation = dict(metrics(run, "fp8_saturation/gpt.blocks.00.mlp.down.input"))
    assert sum(value > 1.5 for value in saturation.values()) >= 4
