"""After the job MLflow has every series of every slot, once, with tags, config, plan and the heat map."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pandas
import pytest

from harness.core.facts import sampled_step
from tests.support.runs import harness, metrics, start, train, wait_for_step

ARGUMENTS = ("--name", "r", "train.steps=24", "checkpoint.every=6", "tracking.mlflow=true", "tracking.report=true",
             "tracking.drain_seconds=500")  # fmt: skip
SLOTS = [
    f"blocks.{block:02d}.{layer}.{role}"
    for block in range(2)
    for layer in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
    for role in ("input", "weight", "grad_output")
]


def query(folder: Path, text: str, *values: object) -> list[tuple]:
    with sqlite3.connect(f"file:{folder / 'mlflow.db'}?mode=ro", uri=True) as database:
        return database.execute(text, values).fetchall()


def series(folder: Path, key: str) -> list[tuple[int, float]]:
    return query(
        folder, "select step, value from metrics where key = ? order by step, timestamp", key
    )


@pytest.mark.faults(18)
@pytest.mark.slow
def test_everything_arrives_once_although_the_run_was_killed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    process = start(tmp_path, *ARGUMENTS)
    wait_for_step(run, 10, process)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = train(tmp_path, *ARGUMENTS)
    assert done.returncode == 0, done.stdout
    assert "delivered" in done.stdout
    assert series(tmp_path, "train/loss") == metrics(run), "every loss once, to the last bit"
    assert [step for step, _ in series(tmp_path, "train/loss")] == list(range(1, 25))
    for statistic in ("amax", "scale", "saturation"):
        for slot in SLOTS:
            found = series(tmp_path, f"fp8_{statistic}/{slot}")
            assert [step for step, _ in found] == list(range(1, 25)), (statistic, slot)
            assert all(value > 0 for _, value in found)
    sampled = [step for step, _ in series(tmp_path, f"fp8_underflow/{SLOTS[0]}")]
    usual = [sampled_step(0, block, 10) for block in range(2)]
    assert set(usual) <= set(sampled), (
        "one of stats_every steps is sampled, and more for a while after a bad sample"
    )
    assert not set(sampled) & {1, 2}, "whose scales are not set yet"
    assert len(sampled) < 24
    for key in ("train/lr", "train/grad_norm", "train/loss_scale", "train/step_applied", "train/tokens_per_second",
                "val/loss", "guard/skipped", "guard/demoted_layers", "guard/rollbacks"):  # fmt: skip
        assert series(tmp_path, key), key
    tags = dict(query(tmp_path, "select key, value from tags"))
    assert tags["precision.requested"] == "fp8_hybrid"
    assert tags["precision.resolved"] == "native:fp8"
    assert "fp8: 8" in tags["precision.effective"]
    assert tags["tier"] == "CPU"
    assert len(tags["recipe.sha256"]) == 64
    params = dict(query(tmp_path, "select key, value from params"))
    assert params["train.steps"] == "24"
    assert query(tmp_path, "select status from runs") == [("FINISHED",)]
    assert {value for _, value in series(tmp_path, "guard/attempt")} == {1.0}
    models = query(tmp_path, "select name, model_type from logged_models order by name")
    assert models == [(f"step-{step:08d}", "checkpoint") for step in (6, 12, 18, 24)]
    (best,) = query(
        tmp_path,
        "select metric_value from logged_model_metrics where metric_name = 'checkpoint/val_loss'",
    )
    assert best == (metrics(run, "val/loss")[-1][1],)
    artifacts = {path.name for path in (tmp_path / "mlruns").rglob("*") if path.is_file()}
    kept = {
        "config.yaml",
        "plan.json",
        "outcome.json",
        "fp8_saturation.png",
        "report.html",
        "fp8_telemetry.parquet",
    }
    assert kept <= artifacts
    (table,) = (tmp_path / "mlruns").rglob("fp8_telemetry.parquet")
    figures = pandas.read_parquet(table)
    assert sorted(figures.step) == [step for step in range(1, 25) for _ in SLOTS], (
        "each once, also around the kill"
    )
    one = figures[figures.layer.astype(str).str.cat(figures.role.astype(str), ".") == SLOTS[5]]
    assert list(zip(one.step, one.amax, strict=True)) == series(tmp_path, f"fp8_amax/{SLOTS[5]}")


@pytest.mark.nightly
@pytest.mark.faults(18)
def test_a_refusing_tracking_server_costs_nothing_and_is_synced_later(tmp_path: Path) -> None:
    short = ("--name", "r", "train.steps=6", "tracking.mlflow=true", "tracking.drain_seconds=1")
    done = train(tmp_path, *short, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert done.returncode == 0, done.stdout
    assert "harness sync" in done.stdout
    assert len(metrics(tmp_path / "runs" / "r")) == 6
    assert not (tmp_path / "mlflow.db").exists()

    later = harness(tmp_path, "sync", "runs/r", "--elsewhere")
    assert later.returncode == 0, later.stdout + later.stderr
    assert series(tmp_path, "train/loss") == metrics(tmp_path / "runs" / "r")
