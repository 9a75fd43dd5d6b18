"""Where the default database of MLflow is: in the working folder, or the run is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.config import TrackingConfig
from harness.telemetry import undeliverable
from harness.tracking.journal import misplaced
from tests.support.runs import harness, train

AWAY = ("a?x=1", "b%41", "?", "100%")
FINE = ("plain", "with space", "h#ash", "ü", "a;b", "[1]")


@pytest.mark.parametrize("name", FINE)
def test_other_folders_have_the_database_in_them(tmp_path: Path, name: str) -> None:
    create_engine = pytest.importorskip("sqlalchemy").create_engine
    from harness.tracking.journal import tracking_uri

    (folder := tmp_path / name).mkdir()
    assert misplaced({}, folder) == ""
    with create_engine(tracking_uri({}, folder)).connect() as connection:
        connection.exec_driver_sql("create table t (a int)")
    assert [path.name for path in folder.iterdir()] == ["mlflow.db"]


@pytest.mark.parametrize("name", AWAY)
def test_a_folder_that_the_address_would_not_lead_to_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / name).mkdir()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(folder)
    (problem,) = undeliverable(TrackingConfig(), "tracking.mlflow=false")
    assert str(folder) in str(problem)
    assert "MLFLOW_TRACKING_URI" in problem.fix
    assert undeliverable(TrackingConfig(mlflow=False), "tracking.mlflow=false") == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somewhere?x=1")
    assert misplaced() == ""


@pytest.mark.slow
def test_the_commands_refuse_it_before_any_work(tmp_path: Path) -> None:
    (folder := tmp_path / "a?x=1").mkdir()
    refused = train(folder, "--name", "r", "train.steps=2", "tracking.mlflow=true")
    assert refused.returncode == 4, refused.stdout
    assert "would not be in this folder" in refused.stdout
    assert not (folder / "runs").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a?x=1"]
    assert train(folder, "--name", "r", "train.steps=2").returncode == 0
    told = harness(folder, "sync", "runs/r")
    assert told.returncode == 2
    assert "would not be in this folder" in told.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a?x=1"]
