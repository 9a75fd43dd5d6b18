"""From the journal to an MLflow run: metrics, tags, params and artifacts, and the view of charts that shows them.

A metric keeps its name (as far as MLflow's rules allow), its step and the journal's own timestamp. By these MLflow's
SQL store recognises a row that is sent again, and drops it: delivery is at least once, the result exactly once.

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

from harness.core.facts import ROLES, SLOT_ROWS
from harness.core.screen import say
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
KEY_TAG = "harness.key"
STATUS = {"done": "FINISHED", "stopped": "KILLED"}
NEVER_WORKS = (FileNotFoundError, PermissionError, NotADirectoryError)

KIND, TRAINING = "mlflow.experimentKind", "custom_model_development"
_VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
# Sections of charts in order, each with its figures.
_SECTIONS: Mapping[str, Sequence[str]] = {
    "train": ("loss", "grad_norm", "lr", "tokens_per_second"),
    "val": ("loss",),
    "guard": ("demoted_layers", "skipped", "rollbacks"),
    **{f"fp8/{role}": ("saturation_max", "amax_max", "sqnr_db_min") for role in ROLES},
}
# Sections that are closed at first: the series of single slots, `fp8_amax/<slot>` and so on.
_FOLDED = tuple(metric.key for metric in SLOT_ROWS.values())


def arrange_charts(client: MlflowClient, experiment_id: str) -> None:
    """Make the experiment one of training, unless somebody chose a kind, with a saved view that has loss first.

    MLflow's own pages sort sections by name, which puts FP8 before loss.
    """
    tags = client.get_experiment(experiment_id).tags
    if not tags.get(KIND):
        client.set_experiment_tag(experiment_id, KIND, TRAINING)
    view = json.dumps(_view(), separators=(",", ":"))
    if tags.get(_VIEW_TAG) != view:
        client.set_experiment_tag(experiment_id, _VIEW_TAG, view)


def _view() -> dict[str, Any]:
    """The view as MLflow's page keeps it. An amax spans powers of two: its chart has a log axis."""
    sections = [_section(name, display=True) for name in _SECTIONS]
    sections += [_section(name, display=False) for name in _FOLDED]
    charts: list[dict[str, Any]] = []
    for name, figures in _SECTIONS.items():
        for figure in figures:
            chart = {
                "type": "LINE",
                "uuid": f"{VIEW}-{name}/{figure}",
                "metricKey": f"{name}/{figure}",
                "metricSectionId": f"{VIEW}-{name}",
                "deleted": False,
                "isGenerated": True,
            }
            if figure == "amax_max":
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
    return "/".join("_" if part in {"", ".", ".."} else part for part in plain.split("/"))


class Sink:
    """One run's journal, carried to its run in an MLflow store, which is found by id, else by key, else created.

    position: how far the store has the journal; kept up to date, in memory and on disk.
    retry: repeats single requests that fail for the moment. Where that does not help, what mlflow raises is raised: the
    caller goes on with a new Sink.
    store: the address of the store without secrets. What another store has of the journal is sent again.
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
        self._attempt = 0
        self._counts: Counter[str] = Counter()
        self._last: deque[str] = deque(maxlen=LAST_EVENTS)
        self._description = Description(self._client, self._run_id, run.info.experiment_id, run_dir)
        self._news = False
        if position.offset:
            for row in read_rows(run_dir / JOURNAL, position.offset, metrics=False):
                self._count(row)
                self._description.take(row)
            # The process that sent these events may have ended before it sent the tags.
            self._news = True

    def carry(self) -> str | None:
        """Send the next rows of the journal, about `journal.CHUNK` bytes, and move the position behind them.

        Returns the kind of the last row, empty if none of the lines was a row; None if there is nothing new.
        """
        rows, offset, strange = rows_after(self._run_dir / JOURNAL, self._position.offset)
        if offset == self._position.offset:
            return None
        for sent in self.deliver([row for row, _ in rows]):
            # Lines that are no rows are set aside first: whoever goes on behind them never sees them.
            if sent < len(rows) and not strange:
                self._move_to(rows[sent - 1][1])
        if strange:
            count = set_aside(self._run_dir, strange)
            path = self._run_dir / SET_ASIDE
            say(
                f"{len(strange)} lines of the journal are no rows of a run and are set aside in {path}"
            )
            self._tag({"rows.set_aside": count})
        self._move_to(offset)
        return rows[-1][0]["kind"] if rows else ""

    def _move_to(self, offset: int) -> None:
        self._position.offset = offset
        self._position.save(self._run_dir)

    def deliver(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[int]:
        """Send `rows` in order, and yield after each batch how many of them the store has.

        A metrics row becomes one Metric for each of its figures; rows of other kinds go by `_note`, events by tags. If
        this raises, make a new Sink and send the rest.
        """
        metrics: list[Metric] = []
        for number, row in enumerate(rows):
            self._description.take(row)
            self._count(row)
            if row["kind"] == "event":
                continue
            if row["kind"] == "metrics":
                stamp = _milliseconds(row)
                added = [
                    Metric(metric_name(name), value, stamp, row["step"])
                    for name, value in row["metrics"].items()
                ]
                if metrics and len(metrics) + len(added) > MAX_METRICS:
                    self._send(metrics)
                    metrics = []
                    yield number
                metrics += added
                continue
            self._send(metrics)
            metrics = []
            self._note(row)
            # The last row counts as sent once the tags about it are.
            if number + 1 < len(rows):
                yield number + 1
        self._send(metrics)
        self._tag_events()
        if any(row["kind"] == "end" for row in rows):
            self.rest()
        yield len(rows)

    def rest(self) -> None:
        """Nothing waits to be sent: bring the description up to date."""
        self._retry(self._description.write)

    def resumed(self) -> None:
        """A trainer runs, whatever status an earlier shipper set last."""
        if self._status != "RUNNING":
            self._retry(self._client.update_run, self._run_id, status="RUNNING")

    def watch_machine(self, seconds: float) -> MachineWatch:
        """Begin to send how busy this machine is."""
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
        created = self._client.search_runs(
            [number], f"tags.`{KEY_TAG}` = '{position.key}'", max_results=1
        )
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
        if row["kind"] == "run":
            self._retry(self._client.update_run, self._run_id, status="RUNNING")
            self._tag(row.get("tags", {}))
            self._set_params(row.get("params", {}))
            if row.get("data"):
                self._retry(
                    self._client.log_inputs, self._run_id, datasets=[data_input(row["data"])]
                )
        elif row["kind"] == "tags":
            self._tag(row.get("tags", {}))
        elif row["kind"] == "artifact":
            self._upload(str(row["path"]))
        elif row["kind"] == "checkpoint":
            self._models.note(row, _milliseconds(row))
        elif row["kind"] == "end":
            status = STATUS.get(row["status"], "FAILED")
            self._retry(
                self._client.set_terminated, self._run_id, status, end_time=_milliseconds(row)
            )

    def _tag(self, tags: Mapping[str, Any]) -> None:
        entries = [RunTag(metric_name(name), str(value)[:MAX_TAG]) for name, value in tags.items()]
        for first in range(0, len(entries), MAX_ENTRIES):
            batch = entries[first : first + MAX_ENTRIES]
            self._retry(self._client.log_batch, self._run_id, tags=batch, synchronous=True)

    def _set_params(self, params: Mapping[str, Any]) -> None:
        earlier = self._retry(self._client.get_run, self._run_id).data.params
        entries = [
            Param(metric_name(name), str(value)[:MAX_PARAM]) for name, value in params.items()
        ]
        # Params cannot be changed: a resume with other values leaves the first ones; the tags have the new ones.
        entries = [entry for entry in entries if entry.key not in earlier]
        for first in range(0, len(entries), MAX_ENTRIES):
            batch = entries[first : first + MAX_ENTRIES]
            self._retry(self._client.log_batch, self._run_id, params=batch, synchronous=True)

    def _upload(self, relative: str) -> None:
        root = self._run_dir.resolve()
        path = (root / relative).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            say(f"artifact {relative}: no such file in {root}, skipped")
            return
        folder = path.relative_to(root).parent.as_posix()
        try:
            self._retry(
                self._client.log_artifact,
                self._run_id,
                str(path),
                None if folder == "." else folder,
            )
        except NEVER_WORKS as error:
            # An artifact root of another machine; to wait for it would hold back everything behind it.
            say(f"artifact {relative}: {error}, skipped")

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
        """Take a row's event and attempt into the tags."""
        if row.get("attempt", 0) > self._attempt:
            self._attempt, self._news = row["attempt"], True
        if row["kind"] == "event":
            self._news = True
            self._counts[row["code"]] += 1
            self._last.append(_event_line(row))


def _event_line(row: Mapping[str, Any]) -> str:
    details = {
        name: value
        for name, value in row.items()
        if name not in {"kind", "step", "attempt", "time", "code"}
    }
    return f"step {row['step']} {row['code']} {json.dumps(details, default=str) if details else ''}".strip()[
        :400
    ]


def _milliseconds(row: Mapping[str, Any]) -> int:
    return round(row["time"] * 1000)
