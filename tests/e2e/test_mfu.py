"""MFU on the real loop, with a peak that is given to it: no card is here."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from harness.build import (
    build_data,
    build_plan,
    build_run,
    join_worker,
    open_store,
    open_telemetry,
    read_ledger,
)
from harness.core.config import load_config
from harness.precision.recipe import load_recipe
from harness.run import RUNG, train
from harness.tracking.console import Console
from tests.support.runs import TEXT, metrics

BATCH = 4


def test_mfu_goes_by_the_fastest_precision_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    overrides = [
        f"data.path={TEXT}",
        "train.steps=4",
        "checkpoint.every=0",
        "tracking.mlflow=false",
    ]
    config, recipe = load_config("tiny", overrides), load_recipe("fp8_hybrid")
    worker = join_worker(config, "python")
    plan, model = build_plan(config, recipe, worker)
    data = build_data(config, tmp_path, worker)
    store = open_store(tmp_path, worker)
    ledger = read_ledger(tmp_path, worker, store)
    screen = io.StringIO()
    with open_telemetry(config, tmp_path, worker, Console(4, stream=screen)) as telemetry:
        run = build_run(
            config, recipe, tmp_path, worker, plan, model, data, telemetry, ledger, store
        )
        assert run.ideal == {}, "a CPU's peak is not known"
        run.ideal = {RUNG: 1e-6, "bf16": 1e-3}
        layers = {name.rpartition(".")[0] for name in run.precision.slot_names}
        run.state.switches.append((3, sorted(layers), [], ""))
        assert train(run).status == "done"
        run.stop.uninstall()
        run.engine.close()
    shares = dict(metrics(tmp_path, "train/mfu"))
    rates = dict(metrics(tmp_path, "train/tokens_per_second"))
    assert sorted(shares) == [1, 2, 3, 4]
    for step, share in shares.items():
        seconds = BATCH * config.data.context / rates[step]
        ideal = 1e-6 if step <= 2 else 1e-3  # from the third on every layer is in BF16
        assert share == pytest.approx(BATCH * ideal / seconds), step
    assert "MFU " in screen.getvalue()
