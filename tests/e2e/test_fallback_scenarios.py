"""Faults that bf16 does not notice and FP8 cannot hold: plain FP8 loses to them, the fallback does not.

`benchmarks/fallback.py` has the scenarios and publishes them; here they are trained for fewer steps and in this
process, except in the slow test, which is the published study itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import outliers
from benchmarks.fallback import KINDS, ROOT, SCENARIOS, Scenario, prepare, read, settings
from harness import Precision
from harness.core.config import load_config
from harness.core.facts import SWITCH_DELAY
from harness.precision.recipe import Recipe, load_recipe
from harness.tools.start import Request
from harness.tools.train import train
from tests.support.runs import environment, metrics

pytestmark = pytest.mark.faults(16)

STEPS = 150
LOSES = {"growing": 0.1, "hot": 0.03, "storm": 0.015}
"""Share of bf16's validation loss that plain FP8 loses at least."""
SEVERE: dict[str, dict[str, Any]] = {
    "growing": {"layer": "blocks.0.mlp.down", "per_window": 2.0},
    "hot": {"layer": "blocks.0.attn.qkv", "channels": 4, "value": 2.0**40},
    "storm": {"layer": "blocks.0.attn.out", "factor": 2.0**40},
}
by_target = pytest.mark.parametrize(
    "scenario", SCENARIOS, ids=[scenario.target for scenario in SCENARIOS]
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenarios")
    prepare(folder)
    return folder


def run(work: Path, scenario: Scenario, kind: str) -> Path:
    """Train in this process; the run folder."""
    name, recipe = f"{scenario.target}-{kind}", KINDS[kind][0]
    with contextlib.chdir(work):
        config = load_config(
            "tiny", [*settings(scenario, kind, seed=0), f"train.steps={STEPS}"], recipe
        )
        assert (
            train(Request(config, load_recipe(recipe), "tiny", name, "never", False, "python")) == 0
        )
    return work / "runs" / name


@pytest.mark.parametrize(
    "scenario",
    SCENARIOS,
    ids=[scenario.target for scenario in SCENARIOS],
)
@pytest.mark.nightly
def test_plain_fp8_loses_and_the_fallback_saves_the_run_with_one_layer(
    work: Path, scenario: Scenario
) -> None:
    folder = run(work, scenario, "fallback")
    bf16, plain, fallback = (
        read(run(work, scenario, "bf16")),
        read(run(work, scenario, "plain")),
        read(folder),
    )
    assert bf16["switches"] == plain["switches"] == []
    assert plain["val_loss"] > (1 + LOSES[scenario.target]) * bf16["val_loss"], "the fault fired"
    assert fallback["val_loss"] == pytest.approx(bf16["val_loss"], rel=0.01)

    policy = load_recipe("fp8_hybrid").fallback
    (switch,), (verdict,) = fallback["switches"], fallback["verdicts"]
    assert switch["demote"] == list(verdict["demote"]) == [scenario.layer], (
        "the guilty layer and no other"
    )
    assert switch["step"] == verdict["step"] + SWITCH_DELAY
    assert switch["step"] + policy.dwell_steps + policy.window < STEPS, (
        "it could have come back, but the cause stays"
    )

    evidence = verdict["demote"][scenario.layer]["slots"]
    assert list(evidence) == [scenario.guilty]
    figures = evidence[scenario.guilty]["underflow"]
    assert len(figures) >= policy.hits
    assert min(figures) > policy.underflow
    assert scenario.guilty in verdict["text"]
    # That all of a gradient is under half of E5M2's smallest value is seen without a sample.
    lost = 2.0**-17 / 57344 if scenario.guilty.endswith("grad_output") else 2.0**-10 / 448
    saturation = metrics(folder, f"fp8_saturation/{scenario.guilty}")
    known = {step: 1.0 for step, value in saturation if 0 < value < lost}
    sampled = metrics(folder, f"fp8_underflow/{scenario.guilty}")
    known |= {step: value for step, value in sampled if not math.isnan(value)}
    observed = [value for step, value in sorted(known.items()) if step <= verdict["step"]]
    assert observed[-len(figures) :] == pytest.approx(figures, rel=1e-3), (
        "the event's figures are the journal's"
    )


@pytest.mark.nightly
def test_without_a_fault_no_layer_leaves_fp8(work: Path) -> None:
    found = read(run(work, SCENARIOS[0], "control"))
    assert found["switches"] == found["verdicts"] == []


def losses(recipe: Recipe, target: str, on: bool) -> tuple[list[float], dict[str, Tensor]]:
    """24 updates on random bytes: each loss, and the final parameters."""
    torch.manual_seed(0)
    model: nn.Module = getattr(outliers, target)(
        **SEVERE[target], on=on, vocab=64, dim=64, layers=1, heads=2, ffn=64
    )
    precision = Precision(recipe)
    precision.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    told: list[float] = []
    for _ in range(24):
        inputs = torch.randint(0, 64, (2, 17))
        with precision.context():
            loss = model(inputs[:, :-1], inputs[:, 1:])
        precision.backward(loss)
        precision.step(optimizer, max_grad_norm=1.0)
        optimizer.zero_grad()
        told.append(loss.item())
    return told, dict(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("target", SEVERE)
@pytest.mark.parametrize("name", ["fp32", "bf16", "plain_fp8"])
def test_only_fp8_notices_a_fault(work: Path, target: str, name: str) -> None:
    recipe = load_recipe(str(work / "plain_fp8.yaml") if name == "plain_fp8" else name)
    (losses_on, weights_on), (losses_off, weights_off) = (
        losses(recipe, target, on) for on in (True, False)
    )
    same = losses_on == losses_off and all(
        torch.equal(weights_on[key], weights_off[key]) for key in weights_off
    )
    assert same == (name != "plain_fp8"), "to the last bit of every loss and every weight"


def test_the_growth_goes_on_where_a_checkpoint_was_written() -> None:
    seen: list[float] = []

    def model() -> nn.Module:
        made = outliers.growing(
            "blocks.0.mlp.down", per_window=1.0, vocab=64, dim=64, layers=1, heads=2, ffn=64
        )
        down = made.get_submodule("blocks.0.mlp.down")
        down.register_forward_pre_hook(lambda _, given: seen.append(given[0][..., 0].max().item()))
        return made

    first, second = model(), model()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(3):
        first(tokens, tokens)
    with torch.no_grad():
        first(tokens, tokens)
    second.load_state_dict(first.state_dict())
    second(tokens, tokens)
    assert seen == [2.0, 4.0, 8.0, 8.0, 16.0], "a validation does not count"


@pytest.mark.nightly
@by_target
def test_the_published_study_holds(tmp_path: Path, scenario: Scenario) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.fallback",
        "--scenarios",
        scenario.target,
        "--out",
        str(out),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["val_loss"]["untouched"] == row["val_loss"]["bf16"]
        assert row["difference"]["plain"] > LOSES[scenario.target]
        assert abs(row["difference"]["fallback"]) < 0.01
        assert abs(row["difference"]["control"]) < LOSES[scenario.target] / 4, (
            "noise is far smaller than the loss"
        )
        assert row["demoted"] == [scenario.layer]
        assert row["promoted"] == []
        assert row["control_switches"] == 0
        assert any(scenario.guilty in text for text in row["evidence"])
