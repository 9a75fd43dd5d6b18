"""Carry a run's journal into an MLflow run: metrics, tags, params and artifacts, and a view of charts that shows them.

Delivery must survive kills and outages without losing a row or showing one twice. It takes three steps:

1. Read the next rows behind `Position.offset`.
2. Send them. A metric keeps its name (as far as MLflow's rules allow), its step, and the journal's own timestamp.
3. Move the offset behind them, on disk.

A kill between 2 and 3 sends rows again. MLflow's SQL stores recognise a metric by name, step, time and value, and drop
the second. So delivery is at least once, and the result in an SQL store is exactly once. MLflow's old store of plain
files (`./mlruns`), which it refuses by default, would keep both.

Only the shipper's process imports this module, and with it mlflow.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from harness.core.facts import SLOT_ROWS
from harness.core.screen import say
from harness.tracking.charts import LOG_AXIS, SECTIONS
from harness.tracking.journal import JOURNAL, SET_ASIDE, Position, read_rows, rows_after, set_aside
from harness.tracking.mlflow_machine import MachineWatch
from harness.tracking.mlflow_models import CheckpointModels
from harness.tracking.mlflow_page import VIEW, Description, data_input
from harness.tracking.retry import Retry

MAX_METRICS = 1000
MAX_ENTRIES = 100
MAX_NAME = 250
MAX_TAG = 8000
MAX_PARAM = 6000
LAST_EVENTS = 20
MAX_EVENT = 400
KEY_TAG = "harness.key"
# MLflow's status for the journal's; any other is FAILED.
STATUS = {"done": "FINISHED", "stopped": "KILLED"}
# Errors of an upload that another try would not cure.
NEVER_WORKS = (FileNotFoundError, PermissionError, NotADirectoryError)

KIND, TRAINING = "mlflow.experimentKind", "custom_model_development"
_VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
# Sections that are closed at first: series of single slots, such as `fp8_amax/<slot>`.
_FOLDED = tuple(metric.key for metric in SLOT_ROWS.values())


def arrange_charts(client: MlflowClient, experiment_id: str) -> None:
    """Give the experiment the kind "training", unless it has a kind, and a saved view that has loss first.

    MLflow's own pages sort sections by name, which puts FP8 before loss.
    """
    tags = client.get_experiment(experiment_id).tags
    if not tags.get(KIND):
        client.set_experiment_tag(experiment_id, KIND, TRAINING)
    view = json.dumps(_view(), separators=(",", ":"))
    if tags.get(_VIEW_TAG) != view:
        client.set_experiment_tag(experiment_id, _VIEW_TAG, view)


def _view() -> dict[str, Any]:
    """The view as MLflow's page saves it. An amax spans powers of two, so its charts have a log axis."""
    sections = [_section(each.name, display=True) for each in SECTIONS]
    sections += [_section(name, display=False) for name in _FOLDED]
    charts: list[dict[str, Any]] = []
    for section in SECTIONS:
        for key in section.figures:
            chart = {
                "type": "LINE",
                "uuid": f"{VIEW}-{key}",
                "metricKey": key,
                "metricSectionId": f"{VIEW}-{section.name}",
                "deleted": False,
                "isGenerated": True,
            }
            if key in LOG_AXIS:
                chart["scaleType"] = "log"
            charts.append(chart)
    return {
        "compareRunSections": sections,
        "compareRunCharts": charts,
        "isAccordionReordered": True,
    }


def _section(name: str, display: bool) -> dict[str, Any]:
    return {
        "uuid": f"{VIEW}-{name}",
        "name": name,
        "display": display,
        "isReordered": True,
        "isGenerated": True,
        "deleted": False,
    }


def metric_name(name: str) -> str:
    """`name` under MLflow's rules: ASCII letters, digits, `_ - . : /` and space, no empty or dotted path parts."""
    plain = re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name)[:MAX_NAME]
    parts = plain.split("/")
    for place, part in enumerate(parts):
        if part in {"", ".", ".."}:
            parts[place] = "_"
    return "/".join(parts)


class Sink:
    """Carries one run's journal to its run in an MLflow store.

    The MLflow run is found by its id, else by its key; else it is created.

    position: how far the store has the journal; kept up to date, in memory and on disk.
    retry: repeats single requests that fail for the moment. If that does not help, mlflow's error is raised, and the
        caller goes on with a new Sink.
    store: address of the store without secrets. If another store has the journal so far, all of it is sent again.
    """

    def __init__(
        self,
        uri: str,
        run_dir: Path,
        experiment: str,
        position: Position,
        retry: Retry,
        store: str | None = None,
    ) -> None:
        self._uri = uri
        self._client = MlflowClient(tracking_uri=uri)
        self._retry = retry
        self._run_dir = run_dir
        self._position = position

        # Another store, or a run that is new there, has nothing of the journal yet. Each part of the position is saved
        # before the next request: a kill then finds the run again, and sends no row to the wrong one.
        if position.store != store:
            position.store, position.offset = store, 0
        position.save(run_dir)
        run = self._retry(self._find, experiment)
        if position.run_id != run.info.run_id:
            position.run_id, position.offset = run.info.run_id, 0
            position.save(run_dir)
        self._run_id: str = run.info.run_id
        self._status: str = run.info.status
        self._retry(arrange_charts, self._client, run.info.experiment_id)
        if position.experiment_id != run.info.experiment_id:
            position.experiment_id = run.info.experiment_id
            position.save(run_dir)
        self._models = CheckpointModels(self._client, run, retry)

        # Tags about attempts and events are made of all rows, so count those that an earlier process sent.
        self._attempt = 0
        self._counts: Counter[str] = Counter()
        self._last: deque[str] = deque(maxlen=LAST_EVENTS)
        self._description = Description(self._client, self._run_id, run.info.experiment_id, run_dir)
        self._tags_are_due = False
        if position.offset:
            for row in read_rows(run_dir / JOURNAL, position.offset, metrics=False):
                self._count(row)
                self._description.take(row)
            # That process may have ended before it sent the tags.
            self._tags_are_due = True

    def carry(self) -> str | None:
        """Send the next rows of the journal, about `journal.CHUNK` bytes, and move the position behind them.

        Returns the kind of the last row; empty if no line was a row; None if there is nothing new.
        """
        rows, offset, strange = rows_after(self._run_dir / JOURNAL, self._position.offset)
        if offset == self._position.offset:
            return None
        for sent in self.deliver([row for row, _ in rows]):
            # The position must not pass a line that is no row before that line is set aside.
            if sent < len(rows) and not strange:
                self._move_to(rows[sent - 1][1])
        if strange:
            count = set_aside(self._run_dir, strange)
            path = self._run_dir / SET_ASIDE
            what = f"{len(strange)} lines of the journal are no rows of a run"
            say(f"{what} and are set aside in {path}")
            self._tag({"rows.set_aside": count})
        self._move_to(offset)
        return rows[-1][0]["kind"] if rows else ""

    def _move_to(self, offset: int) -> None:
        self._position.offset = offset
        self._position.save(self._run_dir)

    def deliver(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[int]:
        """Send `rows` in order, and yield after each batch how many of them the store has.

        A metrics row becomes one Metric for each of its figures. Events go into tags, rows of other kinds through
        `_note`. If this raises, make a new Sink and send the rest.
        """
        metrics: list[Metric] = []
        for number, row in enumerate(rows):
            # Tags and description are made of all rows, whatever else becomes of them.
            self._description.take(row)
            self._count(row)
            if row["kind"] == "event":
                continue  # the tags at the end of this batch have it

            # Metrics of several rows share a request, as many as fit.
            if row["kind"] == "metrics":
                stamp = _milliseconds(row)
                added: list[Metric] = []
                for name, value in row["metrics"].items():
                    plain = metric_name(name)
                    added.append(Metric(plain, value, stamp, row["step"]))
                if metrics and len(metrics) + len(added) > MAX_METRICS:
                    self._send(metrics)
                    metrics = []
                    yield number
                metrics += added
                continue

            # Rows of other kinds keep their place among the metrics.
            self._send(metrics)
            metrics = []
            self._note(row)
            # The last row counts as sent once the tags about it are.
            if number + 1 < len(rows):
                yield number + 1
        self._send(metrics)
        self._tag_events()
        if any(row["kind"] == "end" for row in rows):
            self.caught_up()
        yield len(rows)

    def caught_up(self) -> None:
        """Nothing waits to be sent: write the run's description."""
        self._retry(self._description.write)

    def resumed(self) -> None:
        """A trainer runs: set the status RUNNING, whatever an earlier shipper set."""
        if self._status != "RUNNING":
            self._retry(self._client.update_run, self._run_id, status="RUNNING")

    def watch_machine(self, seconds: float) -> MachineWatch:
        """Begin to send load and memory of this machine."""
        return MachineWatch(self._uri, self._run_id, seconds)

    def lost(self) -> None:
        """The trainer ended without an "end" row: it was killed. A resume sets the run RUNNING again."""
        self._retry(self._client.set_terminated, self._run_id, "KILLED")

    def _find(self, experiment: str) -> Run:
        """The run in the store; created if it is not there. May be repeated: it looks before it creates."""
        # By the id of an earlier delivery.
        position = self._position
        if position.run_id:
            try:
                run = self._client.get_run(position.run_id)
                if run.info.lifecycle_stage == "active":
                    return run
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise

        # By its key, in the experiment: a kill may have come between the creation and the note of the id.
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            number = self._client.create_experiment(experiment)
        else:
            number = found.experiment_id
            if found.lifecycle_stage != "active":
                self._client.restore_experiment(number)
        mine = f"tags.`{KEY_TAG}` = '{position.key}'"
        created = self._client.search_runs([number], mine, max_results=1)
        if created:
            return created[0]

        # The journal's time here too: else a run that is delivered late would start after its end.
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
        """Send a row that is neither metrics nor an event."""
        if row["kind"] == "run":
            # A resume writes one too: MLflow then shows the run as running again.
            self._retry(self._client.update_run, self._run_id, status="RUNNING")
            self._tag(row.get("tags", {}))
            self._set_params(row.get("params", {}))
            if row.get("data"):
                datasets = [data_input(row["data"])]
                self._retry(self._client.log_inputs, self._run_id, datasets=datasets)
        elif row["kind"] == "tags":
            self._tag(row.get("tags", {}))
        elif row["kind"] == "artifact":
            self._upload(str(row["path"]))
        elif row["kind"] == "checkpoint":
            self._models.note(row, _milliseconds(row))
        elif row["kind"] == "end":
            status = STATUS.get(row["status"], "FAILED")
            ended = _milliseconds(row)
            self._retry(self._client.set_terminated, self._run_id, status, end_time=ended)

    def _tag(self, tags: Mapping[str, Any]) -> None:
        entries: list[RunTag] = []
        for name, value in tags.items():
            text = str(value)[:MAX_TAG]
            entries.append(RunTag(metric_name(name), text))
        for first in range(0, len(entries), MAX_ENTRIES):
            batch = entries[first : first + MAX_ENTRIES]
            self._retry(self._client.log_batch, self._run_id, tags=batch, synchronous=True)

    def _set_params(self, params: Mapping[str, Any]) -> None:
        earlier = self._retry(self._client.get_run, self._run_id).data.params
        entries: list[Param] = []
        for name, value in params.items():
            entry = Param(metric_name(name), str(value)[:MAX_PARAM])
            # MLflow's params cannot be changed: a resume with other values keeps the first ones.
            if entry.key not in earlier:
                entries.append(entry)
        for first in range(0, len(entries), MAX_ENTRIES):
            batch = entries[first : first + MAX_ENTRIES]
            self._retry(self._client.log_batch, self._run_id, params=batch, synchronous=True)

    def _upload(self, relative: str) -> None:
        """Send a file of the run folder as an artifact; one that cannot be sent is logged and skipped."""
        # Another program may have written the row: nothing outside of the run's folder is sent.
        root = self._run_dir.resolve()
        path = (root / relative).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            say(f"artifact {relative}: no such file in {root}, skipped")
            return
        inside = path.relative_to(root).parent.as_posix()
        folder = None if inside == "." else inside
        try:
            self._retry(self._client.log_artifact, self._run_id, str(path), folder)
        except NEVER_WORKS as error:
            # The store's artifact folder is on another machine. Waiting for it would hold back everything behind it.
            say(f"artifact {relative}: {error}, skipped")

    def _tag_events(self) -> None:
        """Send the tags that are made of events, if they changed."""
        if not self._tags_are_due:
            return
        self._tag(
            {
                "attempt": self._attempt,
                "events.count": json.dumps(self._counts, sort_keys=True),
                "events.last": "\n".join(reversed(self._last)),
            }
        )
        self._tags_are_due = False

    def _count(self, row: Mapping[str, Any]) -> None:
        """Take a row's event and attempt into the tags."""
        if row.get("attempt", 0) > self._attempt:
            self._attempt = row["attempt"]
            self._tags_are_due = True
        if row["kind"] == "event":
            self._tags_are_due = True
            self._counts[row["code"]] += 1
            self._last.append(_event_line(row))


def _event_line(row: Mapping[str, Any]) -> str:
    head = {"kind", "step", "attempt", "time", "code"}
    fields = {name: value for name, value in row.items() if name not in head}
    details = json.dumps(fields, default=str) if fields else ""
    return f"step {row['step']} {row['code']} {details}".strip()[:MAX_EVENT]


def _milliseconds(row: Mapping[str, Any]) -> int:
    return round(row["time"] * 1000)
