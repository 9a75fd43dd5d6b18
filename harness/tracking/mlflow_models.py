"""A run's checkpoints as MLflow models of type "checkpoint", to be found by metric, tag or step.

    mlflow.set_experiment("hopper-harness")
    mlflow.search_logged_models(filter_string="metrics.`checkpoint/train_loss` < 2 AND tags.good = 'true'")

The files stay in the run folder, outside of MLflow. A model's tags say where they are, and whether a rollback may use
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric, Run
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

from harness.core.files import step_name
from harness.core.screen import say
from harness.tracking.retry import Retry

# Error codes of a server from before MLflow 3, which has no models of this kind. Another try would not help.
_NO_SUCH_MODELS = ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED")


class CheckpointModels:
    """The checkpoints of one MLflow run. Sending a row twice changes nothing."""

    def __init__(self, client: MlflowClient, run: Run, retry: Retry) -> None:
        self._client = client
        self._retry = retry
        self._run = run.info
        self._ids: dict[int, str] = {}
        self._linked: set[str] = set()
        self._unsupported = False

    def note(self, row: Mapping[str, Any], milliseconds: int) -> None:
        """Carry out one "checkpoint" row of the journal. Raises what mlflow raises."""
        if self._unsupported:
            return
        try:
            self._note(row, milliseconds)
        except MlflowException as error:
            if error.error_code not in _NO_SUCH_MODELS:
                raise
            self._unsupported = True
            say(f"checkpoints: the server has no external models ({error.error_code}), skipped")

    def _note(self, row: Mapping[str, Any], milliseconds: int) -> None:
        step, state = int(row["step"]), str(row["state"])
        if state == "saved":
            self._saved(row, step, milliseconds)
            return

        # The checkpoint changed its state; one that was never sent as saved has no model.
        model = self._retry(self._find, step)
        if not model:
            return
        tags = {"state": state, "good": "false"}
        if state == "good":
            tags = {"good": "true"}
        self._retry(self._client.set_logged_model_tags, model, tags)

    def _saved(self, row: Mapping[str, Any], step: int, milliseconds: int) -> None:
        """Create the checkpoint's model, with tags, metrics and a link from the run's page."""
        # Every request here may be repeated after a kill: find before create, set what is set already.
        model = self._retry(lambda: self._find(step) or self._create(step))
        self._retry(self._client.finalize_logged_model, model, LoggedModelStatus.READY)
        tags = {
            "path": str(row["path"]),
            "step": str(step),
            "attempt": str(row["attempt"]),
            "state": "saved",
            "good": "false",
        }
        self._retry(self._client.set_logged_model_tags, model, tags)
        metrics: list[Metric] = []
        for name, value in row["metrics"].items():
            key = f"checkpoint/{name}"
            metrics.append(Metric(key, value, milliseconds, step, model_id=model))
        run_id = self._run.run_id
        self._retry(self._client.log_batch, run_id, metrics=metrics, synchronous=True)
        self._retry(self._link, model, step)

    def _create(self, step: int) -> str:
        model = self._client.create_logged_model(
            self._run.experiment_id,
            name=step_name(step),
            source_run_id=self._run.run_id,
            tags={MLFLOW_MODEL_IS_EXTERNAL: "true"},
            model_type="checkpoint",
        )
        self._ids[step] = model.model_id
        return model.model_id

    def _link(self, model: str, step: int) -> None:
        """List the model among the outputs on the run's page. Stores refuse the same output twice."""
        if model not in self._linked:
            outputs = self._client.get_run(self._run.run_id).outputs
            if outputs:
                self._linked.update(each.model_id for each in outputs.model_outputs)
        if model not in self._linked:
            self._client.log_outputs(self._run.run_id, [LoggedModelOutput(model, step)])
            self._linked.add(model)

    def _find(self, step: int) -> str | None:
        if step not in self._ids:
            mine = f"name = '{step_name(step)}' AND source_run_id = '{self._run.run_id}'"
            found = self._client.search_logged_models(
                [self._run.experiment_id], filter_string=mine, max_results=1
            )
            if not found:
                return None
            self._ids[step] = found[0].model_id
        return self._ids[step]
