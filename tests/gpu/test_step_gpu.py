"""A training step never waits for the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.build import build_data, build_plan, build_run, join_worker, open_store, open_telemetry
from harness.core.config import load_config
from harness.core.state import RunLedger
from harness.precision.recipe import Recipe, load_recipe
from harness.run import Run, train_step
from harness.tracking.console import Console

pytestmark = pytest.mark.gpu

TEXT = Path(__file__).resolve().parents[1] / "golden" / "text"


def native_recipe(stats_every: int) -> Recipe:
    base = load_recipe("fp8_hybrid").model_dump()
    base["ladder"] = [
        {"backend": "native", "precision": "fp8", "tiers": ["ADA", "HOPPER", "BLACKWELL"]}
    ]
    return Recipe.model_validate({**base, "fp8": {**base["fp8"], "stats_every": stats_every}})


@pytest.fixture
def run(tmp_path: Path, fp8_gpu: torch.device, request: pytest.FixtureRequest) -> Iterator[Run]:
    config = load_config("tiny", [f"data.path={TEXT}", "engine.compile=none"])
    recipe = native_recipe(request.param)
    worker = join_worker(config, "python")
    plan, model = build_plan(config, recipe, worker)
    data = build_data(config, tmp_path, worker)
    store = open_store(tmp_path, worker)
    with open(os.devnull, "w") as quiet:
        screen = Console(config.train.steps, stream=quiet)
        with open_telemetry(config, tmp_path, worker, screen) as telemetry:
            yield build_run(
                config, recipe, tmp_path, worker, plan, model, data, telemetry, RunLedger(), store
            )


@pytest.mark.parametrize(
    "run", [1, 1000], indirect=True, ids=["statistics-every-step", "no-statistics"]
)
def test_a_native_step_with_fused_adamw_has_no_host_sync(run: Run) -> None:
    assert run.engine.device.type == "cuda"
    windows = [run.data.window(step) for step in range(4)]
    train_step(run, windows[0])  # first calls allocate workspaces
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [train_step(run, window) for window in windows[1:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    facts = [each.facts() for each in pending]
    assert all(each.applied for each in facts)
    assert facts[-1].slots is not None
    assert (facts[-1].slots.amax > 0).all(), "FP8 really ran"


def test_the_sync_detector_detects() -> None:
    value = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
