"""Rows of the journal into an MLflow run. Only the shipper's process imports this module, and with it mlflow.

Every row carries the journal's own timestamp, so MLflow's SQL store recognises a row that is sent again and drops it:
delivery is at least once, the result exactly once.

Checkpoints are MLflow models of type "checkpoint", kept outside of MLflow: to be found by metric, tag or step.

    mlflow.set_experiment("hopper-harness")
    mlflow.search_logged_models(filter_string="metrics.`checkpoint/train_loss` < 2 AND tags.good = 'true'")

Their tags say where the files are and whether they may be gone back to; the files themselves stay in the run folder.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric, Param, Run, RunTag
from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

from harness.core.files import step_name
from harness.core.screen import say
from harness.tracking.journal import JOURNAL, Position, read_rows
from harness.tracking.mlflow_page import Description, arrange, data_input
from harness.tracking.retry import Retry

# A server from before MLflow 3 knows no models of this kind; waiting would not teach it.
_UNKNOWN_THERE = ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED")


class CheckpointModels:
    """The checkpoints of one MLflow run. Sending a row twice changes nothing."""

    def __init__(self, client: MlflowClient, run: Run, retry: Retry) -> None:
        self._client, self._retry = client, retry
        self._run = run.info
        self._ids: dict[int, str] = {}
        self._linked: set[str] = set()
        self._unknown = False

    def note(self, row: Mapping[str, Any], milliseconds: int) -> None:
        """Carry out one "checkpoint" row of the journal. Raises what mlflow raises."""
        if self._unknown:
            return
        try:
            self._note(row, milliseconds)
        except MlflowException as error:
            if error.error_code not in _UNKNOWN_THERE:
                raise
            self._unknown = True
            say(f"checkpoints: the server has no external models ({error.error_code}), passed over")

    def _note(self, row: Mapping[str, Any], milliseconds: int) -> None:
        step, state = int(row["step"]), str(row["state"])
        if state == "saved":
            model = self._retry(lambda: self._find(step) or self._create(step))
            self._retry(self._client.finalize_logged_model, model, LoggedModelStatus.READY)
            tags = {"path": row["path"], "step": step, "attempt": row["attempt"], "state": "saved", "good": "false"}
            self._retry(self._client.set_logged_model_tags, model, {name: str(each) for name, each in tags.items()})
            metrics = [
                Metric(f"checkpoint/{name}", value, milliseconds, step, model_id=model)
                for name, value in row["metrics"].items()
            ]
            self._retry(self._client.log_batch, self._run.run_id, metrics=metrics, synchronous=True)
            self._retry(self._link, model, step)
        elif model := self._retry(self._find, step):
            tags = {"good": "true"} if state == "good" else {"state": state, "good": "false"}
            self._retry(self._client.set_logged_model_tags, model, tags)

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
        """Name the model on the run's page, among its outputs. Stores refuse to be told of one twice."""
        if model not in self._linked:
            outputs = self._client.get_run(self._run.run_id).outputs
            self._linked.update(each.model_id for each in (outputs.model_outputs if outputs else ()))
        if model not in self._linked:
            self._client.log_outputs(self._run.run_id, [LoggedModelOutput(model, step)])
            self._linked.add(model)

    def _find(self, step: int) -> str | None:
        if step not in self._ids:
            mine = f"name = '{step_name(step)}' AND source_run_id = '{self._run.run_id}'"
            found = self._client.search_logged_models([self._run.experiment_id], filter_string=mine, max_results=1)
            if not found:
                return None
            self._ids[step] = found[0].model_id
        return self._ids[step]


class MachineWatch:
    """Load and memory of this machine and its GPUs into the run, by MLflow's own collector: `system/...`.

    Raises ImportError without psutil (GPUs: nvidia-ml-py), and what mlflow raises.
    """

    def __init__(self, uri: str, run_id: str, seconds: float) -> None:
        self._monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
        # A number of seconds, whatever its annotation says; the environment's wins, as everywhere in MLflow.
        if not MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get():
            self._monitor.sampling_interval = seconds
        self._monitor.start()

    @property
    def alive(self) -> bool:
        """Whether it goes on; it gives up for good when it cannot reach the server."""
        thread = self._monitor._process
        return thread is not None and thread.is_alive()

    def finish(self) -> None:
        """End it; what was measured is delivered."""
        self._monitor.finish()


MAX_METRICS = 1000
MAX_ENTRIES = 100
MAX_NAME = 250
MAX_TAG = 8000
MAX_PARAM = 6000
LAST_EVENTS = 20
KEY_TAG = "harness.key"
STATUS = {"done": "FINISHED", "stopped": "KILLED"}
NEVER_WORKS = (FileNotFoundError, PermissionError, NotADirectoryError)


def metric_name(name: str) -> str:
    """`name` under MLflow's rules: ASCII letters, digits, `_ - . : /` and space, no empty or dotted path parts."""
    plain = re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name)[:MAX_NAME]
    return "/".join("_" if part in {"", ".", ".."} else part for part in plain.split("/"))


class Sink:
    """One run in an MLflow store: found again by id, else by key, else created. `position` is kept up to date.

    Requests that fail for the moment are repeated one by one. Raises what mlflow raises where that does not help; the
    caller goes on with a new one. store: the address of the store without secrets; what another one has counts for
    nothing here.
    """

    def __init__(
        self, uri: str, run_dir: Path, experiment: str, position: Position, retry: Retry, store: str | None = None
    ) -> None:
        self._uri = uri
        self._client = MlflowClient(tracking_uri=uri)
        self._retry = retry
        self._run_dir = run_dir
        self._position = position
        if position.store != store:
            position.store, position.offset = store, 0
        position.save(run_dir)
        run = self._retry(self._find, experiment)
        if position.run_id != run.info.run_id:
            position.run_id, position.offset = run.info.run_id, 0
            position.save(run_dir)
        self._run_id: str = run.info.run_id
        self._status: str = run.info.status
        self._retry(arrange, self._client, run.info.experiment_id)
        if position.experiment_id != run.info.experiment_id:
            position.experiment_id = run.info.experiment_id
            position.save(run_dir)
        self._models = CheckpointModels(self._client, run, retry)
        self._attempt = 0
        self._counts: Counter[str] = Counter()
        self._last: deque[str] = deque(maxlen=LAST_EVENTS)
        self._description = Description(self._client, self._run_id, run.info.experiment_id, run_dir)
        self._news = False
        if position.offset:
            for row in read_rows(run_dir / JOURNAL, position.offset, metrics=False):
                self._count(row)
                self._description.take(row)
            # Whoever sent these may have ended before the tags told of them.
            self._news = True

    def deliver(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[int]:
        """Send `rows` in order, and say after each batch how many of them the store has. If this raises, make a new
        Sink and send the rest.
        """
        metrics: list[Metric] = []
        for number, row in enumerate(rows):
            self._description.take(row)
            self._count(row)
            if row["kind"] == "event":
                continue
            if row["kind"] == "metrics":
                stamp = _milliseconds(row)
                added = [Metric(metric_name(name), value, stamp, row["step"]) for name, value in row["metrics"].items()]
                if metrics and len(metrics) + len(added) > MAX_METRICS:
                    self._send(metrics)
                    metrics = []
                    yield number
                metrics += added
                continue
            self._send(metrics)
            metrics = []
            self._note(row)
            # The last row counts as sent when the tags that tell of it are.
            if number + 1 < len(rows):
                yield number + 1
        self._send(metrics)
        self._tag_events()
        if any(row["kind"] == "end" for row in rows):
            self.rest()
        yield len(rows)

    def set_aside(self, rows: int) -> None:
        """Tell that so many rows of the journal are not here, as they are none."""
        self._tag({"rows.set_aside": rows})

    def rest(self) -> None:
        """Nothing waits to be sent: bring the description up to date."""
        self._retry(self._description.write)

    def resumed(self) -> None:
        """A trainer is there, whatever the shipper of the one before it has said last."""
        if self._status != "RUNNING":
            self._retry(self._client.update_run, self._run_id, status="RUNNING")

    def watch_machine(self, seconds: float) -> MachineWatch:
        """Begin to tell how busy this machine is."""
        return MachineWatch(self._uri, self._run_id, seconds)

    def lost(self) -> None:
        """The trainer went without an "end" row: killed. A resume sets the run RUNNING again."""
        self._retry(self._client.set_terminated, self._run_id, "KILLED")

    def _find(self, experiment: str) -> Run:
        position = self._position
        if position.run_id:
            try:
                run = self._client.get_run(position.run_id)
                if run.info.lifecycle_stage == "active":
                    return run
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            number = self._client.create_experiment(experiment)
        else:
            number = found.experiment_id
            if found.lifecycle_stage != "active":
                self._client.restore_experiment(number)
        created = self._client.search_runs([number], f"tags.`{KEY_TAG}` = '{position.key}'", max_results=1)
        if created:
            return created[0]
        # The journal's time here too: what is delivered late has not started after its end.
        first = next(read_rows(self._run_dir / JOURNAL), None)
        return self._client.create_run(
            number,
            start_time=_milliseconds(first) if first else None,
            run_name=self._run_dir.name,
            tags={KEY_TAG: position.key},
        )

    def _send(self, metrics: Sequence[Metric]) -> None:
        for first in range(0, len(metrics), MAX_METRICS):
            batch = metrics[first : first + MAX_METRICS]
            self._retry(self._client.log_batch, self._run_id, metrics=batch, synchronous=True)

    def _note(self, row: Mapping[str, Any]) -> None:
        if row["kind"] == "run":
            self._retry(self._client.update_run, self._run_id, status="RUNNING")
            self._tag(row.get("tags", {}))
            self._set_params(row.get("params", {}))
            if row.get("data"):
                self._retry(self._client.log_inputs, self._run_id, datasets=[data_input(row["data"])])
        elif row["kind"] == "tags":
            self._tag(row.get("tags", {}))
        elif row["kind"] == "artifact":
            self._upload(str(row["path"]))
        elif row["kind"] == "checkpoint":
            self._models.note(row, _milliseconds(row))
        elif row["kind"] == "end":
            status = STATUS.get(row["status"], "FAILED")
            self._retry(self._client.set_terminated, self._run_id, status, end_time=_milliseconds(row))

    def _tag(self, tags: Mapping[str, Any]) -> None:
        entries = [RunTag(metric_name(name), str(value)[:MAX_TAG]) for name, value in tags.items()]
        for first in range(0, len(entries), MAX_ENTRIES):
            batch = entries[first : first + MAX_ENTRIES]
            self._retry(self._client.log_batch, self._run_id, tags=batch, synchronous=True)

    def _set_params(self, params: Mapping[str, Any]) -> None:
        standing = self._retry(self._client.get_run, self._run_id).data.params
        entries = [Param(metric_name(name), str(value)[:MAX_PARAM]) for name, value in params.items()]
        # Params cannot be changed: a resume with other values leaves the first ones and tells by the tags.
        entries = [entry for entry in entries if entry.key not in standing]
        for first in range(0, len(entries), MAX_ENTRIES):
            batch = entries[first : first + MAX_ENTRIES]
            self._retry(self._client.log_batch, self._run_id, params=batch, synchronous=True)

    def _upload(self, relative: str) -> None:
        root = self._run_dir.resolve()
        path = (root / relative).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            say(f"artifact {relative}: no such file in {root}, passed over")
            return
        folder = path.relative_to(root).parent.as_posix()
        try:
            self._retry(self._client.log_artifact, self._run_id, str(path), None if folder == "." else folder)
        except NEVER_WORKS as error:
            # An artifact root of another machine; to wait for it would hold back everything behind it.
            say(f"artifact {relative}: {error}, passed over")

    def _tag_events(self) -> None:
        if not self._news:
            return
        self._tag(
            {
                "attempt": self._attempt,
                "events.count": json.dumps(self._counts, sort_keys=True),
                "events.last": "\n".join(reversed(self._last)),
            }
        )
        self._news = False

    def _count(self, row: Mapping[str, Any]) -> None:
        """Take events and attempt from a row."""
        if row.get("attempt", 0) > self._attempt:
            self._attempt, self._news = row["attempt"], True
        if row["kind"] == "event":
            self._news = True
            self._counts[row["code"]] += 1
            self._last.append(_event_line(row))


def _event_line(row: Mapping[str, Any]) -> str:
    details = {name: value for name, value in row.items() if name not in {"kind", "step", "attempt", "time", "code"}}
    return f"step {row['step']} {row['code']} {json.dumps(details, default=str) if details else ''}".strip()[:400]


def _milliseconds(row: Mapping[str, Any]) -> int:
    return round(row["time"] * 1000)
