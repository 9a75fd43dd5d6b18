"""What MLflow's pages of a run open on, in a real store: kind, view, description, data, the machine's figures."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from harness.core.files import write_json
from harness.tracking import shipper
from harness.tracking.journal import JOURNAL, Journal, Position, delivered, run_page

DATA = {"source": "/data/texts", "files": 3, "train_bytes": 1000, "sha256": "a" * 64}
TAGS = {
    "precision.requested": "fp8_hybrid",
    "precision.resolved": "native:fp8",
    "tier": "CPU",
    "ranks": "1",
}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    rungs = [
        {"rung": "te:fp8", "taken": False, "reason": "not | for CPU"},
        {"rung": "native:fp8", "taken": True, "reason": "ok"},
    ]
    write_json(
        folder / "plan.json",
        {"requested": "fp8_hybrid", "resolved": "native:fp8", "layers": [], "rungs": rungs},
    )
    return folder


def begun(run_dir: Path) -> Journal:
    journal = Journal(run_dir / JOURNAL)
    journal.note(
        "run", tags=TAGS, params={"a": 1}, data=DATA, where={"host": "box", "folder": str(run_dir)}
    )
    journal.metrics(1, {"train/loss": 2.0})
    return journal


def query(run_dir: Path, text: str, *values: object) -> list[tuple[Any, ...]]:
    with sqlite3.connect(run_dir.parents[1] / "mlflow.db") as store:
        rows = store.execute(text, values).fetchall()
    store.close()
    return rows


def tags(run_dir: Path) -> dict[str, str]:
    return dict(query(run_dir, "select key, value from tags"))


def experiment_tags(run_dir: Path) -> dict[str, str]:
    return dict(query(run_dir, "select key, value from experiment_tags"))


def metrics(run_dir: Path) -> set[str]:
    return {key for (key,) in query(run_dir, "select distinct key from latest_metrics")}


@pytest.mark.slow
def test_the_experiment_is_one_of_training_with_loss_first(run_dir: Path) -> None:
    begun(run_dir).close()
    assert shipper.sync(run_dir, "mine")
    found = experiment_tags(run_dir)
    assert found["mlflow.experimentKind"] == "custom_model_development"
    view = json.loads(found["mlflow.sharedViewState.harness"])
    names = [section["name"] for section in view["compareRunSections"]]
    roles = ["fp8/input", "fp8/weight", "fp8/grad_output"]
    assert names[:8] == ["loss", "train", "loss scale", *roles, "guard", "speed"]
    keys = [chart["metricKey"] for chart in view["compareRunCharts"]]
    assert keys[:3] == ["train/loss", "val/loss", "train/lr"]
    known = {section["uuid"] for section in view["compareRunSections"]}
    assert {chart["metricSectionId"] for chart in view["compareRunCharts"]} <= known
    logarithmic = [
        chart["metricKey"] for chart in view["compareRunCharts"] if chart.get("scaleType") == "log"
    ]
    assert logarithmic == [f"fp8/{role}/amax_max" for role in ("input", "weight", "grad_output")]
    assert len(found["mlflow.sharedViewState.harness"]) < 5000, "a tag's limit"
    page = run_page(run_dir)
    assert (
        page
        == f"/#/experiments/1/runs/{Position.load(run_dir).run_id}?workflowType=machine_learning"
    )


@pytest.mark.nightly
def test_a_kind_and_a_description_that_somebody_chose_stand(run_dir: Path) -> None:
    journal = begun(run_dir)
    assert shipper.sync(run_dir, "mine")
    query(
        run_dir,
        "update experiment_tags set value = 'finetuning' where key = 'mlflow.experimentKind'",
    )
    query(run_dir, "update tags set value = 'my own words' where key = 'mlflow.note.content'")
    journal.event(2, "nonfinite.skip")
    journal.close()
    assert shipper.sync(run_dir, "mine")
    assert experiment_tags(run_dir)["mlflow.experimentKind"] == "finetuning"
    assert tags(run_dir)["mlflow.note.content"] == "my own words"
    assert delivered(run_dir)


@pytest.mark.slow
def test_the_description_says_what_ran_where_and_why_and_what_happened(run_dir: Path) -> None:
    journal = begun(run_dir)
    for step in range(1, 40):
        journal.event(step, "nonfinite.skip", text=f"loss <b> of | {step}")
    assert shipper.sync(run_dir, "mine")
    text = tags(run_dir)["mlflow.note.content"]
    for part in (
        "**fp8_hybrid** on CPU",
        "native:fp8 taken: ok",
        "not \\| for CPU",
        "host box",
        "files 3",
        "not ended",
    ):
        assert part in text, text
    assert text.startswith("**fp8_hybrid** on CPU: ran as **native:fp8**"), "what ran comes first"
    assert text.index("native:fp8 taken: ok") < text.index("te:fp8 not taken: not"), (
        "then what was not taken"
    )
    assert "log axis" in text
    assert f"source_run_id = '{Position.load(run_dir).run_id}'" in text, (
        "which models are its checkpoints"
    )
    assert "nonfinite.skip x 39" in text
    assert "| 39 | nonfinite.skip | loss &lt;b> of \\| 39 |" in text, "the newest first"
    assert "| 20 | nonfinite" not in text
    write_json(run_dir / "outcome.json", {"status": "done", "step": 40, "reason": "40 steps"})
    journal.note("run", tags={"precision.effective": "fp8: 2 modules"}, params={}, data={})
    journal.note("end", status="done")
    journal.close()
    assert shipper.sync(run_dir, "mine")
    text = tags(run_dir)["mlflow.note.content"]
    assert "fp8: 2 modules" in text
    assert "done at step 40: 40 steps" in text
    assert "nonfinite.skip x 39" in text, "also what an earlier delivery counted"


@pytest.mark.nightly
def test_the_data_are_an_input_of_the_run_once(run_dir: Path) -> None:
    journal = begun(run_dir)
    assert shipper.sync(run_dir, "mine")
    journal.note("run", tags=TAGS, params={}, data=DATA)
    journal.close()
    assert shipper.sync(run_dir, "mine")
    ((name, digest, profile),) = query(
        run_dir, "select name, digest, dataset_profile from datasets"
    )
    assert (name, digest, json.loads(profile)["train_bytes"]) == ("texts", "a" * 36, 1000)
    assert query(run_dir, "select count(*) from inputs where source_type = 'DATASET'") == [(1,)]
    assert query(run_dir, "select name, value from input_tags") == [
        ("mlflow.data.context", "training")
    ]


@pytest.mark.slow
def test_the_machine_is_watched_while_the_trainer_trains(run_dir: Path) -> None:
    pytest.importorskip("psutil")
    journal = begun(run_dir)
    handle = shipper.start(run_dir, "mine", system_seconds=0.2)
    deadline = time.monotonic() + 300
    key = "system/cpu_utilization_percentage"
    while Position.load(run_dir).offset == 0 or key not in metrics(run_dir):
        assert time.monotonic() < deadline, (run_dir / "shipper.log").read_text()
        time.sleep(0.2)
    journal.note("end", status="done")
    journal.close()
    assert handle.drain(300.0)
    assert handle.process.wait(300) == 0
    assert "system/system_memory_usage_percentage" in metrics(run_dir)
    assert query(run_dir, "select status from runs") == [("FINISHED",)]
