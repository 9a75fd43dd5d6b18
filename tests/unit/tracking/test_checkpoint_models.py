"""Checkpoints as external models in a real MLflow store (SQLite): found by metric and tag, whatever is sent twice."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    from harness.tracking.mlflow_models import CheckpointModels
    from harness.tracking.retry import Retry

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    folder = tmp_path_factory.mktemp("mlflow")
    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def row(step: int, state: str, attempt: int = 1, **fields: Any) -> Mapping[str, Any]:
    head = {"kind": "checkpoint", "attempt": attempt, "time": 1.7e9 + step + 100 * attempt}
    return {**head, "step": step, "state": state, **fields}


def saved(step: int, loss: float, attempt: int = 1) -> Mapping[str, Any]:
    return row(
        step,
        "saved",
        attempt,
        path=f"/runs/r/checkpoints/step-{step:08d}",
        metrics={"val_loss": loss},
    )


def names(client: MlflowClient, experiment: str, query: str) -> list[str]:
    return sorted(
        model.name for model in client.search_logged_models([experiment], filter_string=query)
    )


def send(client: MlflowClient, experiment: str, rows: list[Mapping[str, Any]]) -> None:
    (run,) = client.search_runs([experiment]) or [client.create_run(experiment)]
    models = CheckpointModels(client, run, Retry(None, lambda error, times: None))
    for each in rows:
        models.note(each, round(each["time"] * 1000))


def test_the_best_checkpoint_is_a_query(client: MlflowClient) -> None:
    experiment = client.create_experiment("best")
    rows = [
        saved(5, 3.0),
        saved(10, 2.0),
        row(5, "good"),
        saved(15, 2.5),
        row(10, "good"),
        row(15, "rolled back"),
        row(5, "deleted"),
    ]
    send(client, experiment, rows)
    assert names(client, experiment, "metrics.`checkpoint/val_loss` < 2.7") == [
        "step-00000010",
        "step-00000015",
    ]
    assert names(client, experiment, "tags.good = 'true'") == ["step-00000010"]
    assert names(client, experiment, "tags.state = 'rolled back'") == ["step-00000015"]
    (best,) = client.search_logged_models(
        [experiment],
        filter_string="tags.state = 'saved'",
        order_by=[{"field_name": "metrics.checkpoint/val_loss"}],
    )
    assert best.tags["path"] == "/runs/r/checkpoints/step-00000010"
    assert best.model_type == "checkpoint"


def test_what_is_sent_twice_stands_once_another_attempt_replaces_it(client: MlflowClient) -> None:
    experiment = client.create_experiment("twice")
    rows = [saved(5, 3.0), row(5, "good"), saved(10, 2.0)]
    send(client, experiment, rows)
    send(client, experiment, rows)
    assert names(client, experiment, "") == ["step-00000005", "step-00000010"]
    assert names(client, experiment, "tags.good = 'true'") == ["step-00000005"]
    send(client, experiment, [row(10, "rolled back"), saved(10, 1.0, attempt=2)])
    (again,) = client.search_logged_models([experiment], filter_string="name = 'step-00000010'")
    assert (again.tags["attempt"], again.tags["state"]) == ("2", "saved")


def test_the_run_names_its_checkpoints_each_once(client: MlflowClient) -> None:
    experiment = client.create_experiment("linked")
    rows = [saved(5, 3.0), saved(10, 2.0), row(5, "good"), saved(10, 1.0, attempt=2)]
    send(client, experiment, rows)
    send(client, experiment, [*rows, saved(15, 0.5)])
    (run,) = client.search_runs([experiment])
    outputs = client.get_run(run.info.run_id).outputs
    assert outputs is not None
    linked = [
        (client.get_logged_model(each.model_id).name, each.step) for each in outputs.model_outputs
    ]
    assert sorted(linked) == [("step-00000005", 5), ("step-00000010", 10), ("step-00000015", 15)]


def test_news_of_a_checkpoint_that_was_never_told_is_passed_over(client: MlflowClient) -> None:
    experiment = client.create_experiment("unknown")
    send(client, experiment, [row(5, "deleted")])
    assert names(client, experiment, "") == []


@pytest.mark.parametrize(
    ("code", "raises"), [("ENDPOINT_NOT_FOUND", False), ("TEMPORARILY_UNAVAILABLE", True)]
)
def test_an_old_server_does_not_hold_back_the_rest(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch, code: str, raises: bool
) -> None:
    experiment = client.create_experiment(code)
    from mlflow.protos import databricks_pb2

    def refuse(*_: object, **__: object) -> None:
        raise MlflowException("no", error_code=databricks_pb2.ErrorCode.Value(code))

    monkeypatch.setattr(client, "search_logged_models", refuse)
    if raises:
        with pytest.raises(MlflowException):
            send(client, experiment, [saved(5, 3.0)])
    else:
        send(client, experiment, [saved(5, 3.0), saved(10, 3.0)])
