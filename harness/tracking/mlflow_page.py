"""The description and the data on a run's page in MLflow.

The description links to the experiment's view of charts, says what ran where and why, and lists the newest events as
they happen. A description that somebody else wrote, or changed, is left alone.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_RUN_NOTE

from harness.core.errors import some
from harness.core.files import MAX_LARGE, read_mapping

VIEW = "harness"
"""The experiment's saved view of charts (`mlflow.arrange_charts`), which the description links to."""
_NOTE_HASH = "harness.note"
MAX_NOTE = 7900
_EVENTS = 15
_HEAD = ("kind", "step", "attempt", "time", "code")


def data_input(data: Mapping[str, Any]) -> DatasetInput:
    """What a run trains on, as MLflow knows data: name, digest, source, and everything else as its profile."""
    source = str(data.get("source", ""))
    told = json.dumps(data, sort_keys=True, default=str)
    digest = str(data.get("sha256") or hashlib.sha256(told.encode()).hexdigest())[:36]
    name = (Path(source).name or "data")[:500]
    profile = {
        key: value for key, value in data.items() if key != "source" and len(str(value)) < 1000
    }
    dataset = Dataset(
        name, digest, "local", json.dumps({"uri": source}), profile=json.dumps(profile, default=str)
    )
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, "training")])


class Description:
    """The run's description, kept up to date with the journal."""

    def __init__(
        self, client: MlflowClient, run_id: str, experiment_id: str, run_dir: Path
    ) -> None:
        self._client, self._run_id, self._experiment_id, self._run_dir = (
            client,
            run_id,
            experiment_id,
            run_dir,
        )
        self._about: dict[str, dict[str, Any]] = {"tags": {}, "params": {}, "data": {}, "where": {}}
        self._events: deque[Mapping[str, Any]] = deque(maxlen=_EVENTS)
        self._counts: Counter[str] = Counter()
        self._stale = False

    def take(self, row: Mapping[str, Any]) -> None:
        """One row of the journal, in order."""
        if row["kind"] == "run":
            for part in self._about:
                self._about[part] |= row.get(part) or {}
        elif row["kind"] == "event":
            self._events.append(row)
            self._counts[row["code"]] += 1
        elif row["kind"] != "end":
            return
        self._stale = True

    def write(self) -> None:
        """Bring it up to date, if anything was taken since. Raises what mlflow raises."""
        if not self._stale or not self._about["tags"]:
            return
        standing = self._client.get_run(self._run_id).data.tags
        there, ours = standing.get(MLFLOW_RUN_NOTE, ""), standing.get(_NOTE_HASH)
        if there and _hash(there) != ours:
            self._stale = False
            return
        text = self._text()
        if text != there:
            # In one request: a hash without its text would make the text look like somebody else's.
            tags = [RunTag(_NOTE_HASH, _hash(text)), RunTag(MLFLOW_RUN_NOTE, text)]
            self._client.log_batch(self._run_id, tags=tags, synchronous=True)
        self._stale = False

    def _text(self) -> str:
        tags, where = self._about["tags"], self._about["where"]
        resolved, tier = tags.get("precision.resolved", "?"), tags.get("tier", "?")
        view = f"#/experiments/{self._experiment_id}/runs?workflowType=machine_learning&compareRunsMode=CHART"
        rows = [
            ("why", self._reasons()),
            ("effective precision", tags.get("precision.effective", "told at the end")),
            ("data", _listed(self._about["data"])),
            (
                "where",
                _listed(
                    where
                    | {key: tags[key] for key in ("ranks", "engine", "git.commit") if key in tags}
                ),
            ),
            ("outcome", self._outcome()),
            (
                "events",
                ", ".join(f"{code} x {count}" for code, count in sorted(self._counts.items()))
                or "none",
            ),
        ]
        lines = [
            f"**{tags.get('precision.requested', '?')}** on {tier}: ran as **{resolved}**. "
            f"[Charts in order: train, val, guard, FP8]({view}&viewStateShareKey={VIEW})",
            "",
            "| | |",
            "|---|---|",
            *(f"| {label} | {_cell(text)} |" for label, text in rows if text),
            f"| checkpoints | [as models](#/experiments/{self._experiment_id}/models) of this experiment: "
            f"`source_run_id = '{self._run_id}'` |",
            "",
            "amax and scale span powers of two: switch their charts to a log axis "
            "(the chart's menu, Configure, Y-axis).",
        ]
        if self._events:
            lines += ["", "| step | newest events | |", "|---|---|---|"]
        for event in reversed(self._events):
            line = f"| {event['step']} | {event['code']} | {_cell(_details(event))} |"
            if sum(map(len, lines)) + len(lines) + len(line) > MAX_NOTE:
                break
            lines.append(line)
        return "\n".join(lines)[:MAX_NOTE]

    def _reasons(self) -> str:
        rungs = read_mapping(self._run_dir / "plan.json", MAX_LARGE).get("rungs")
        taken, passed = [], []
        for rung in rungs if isinstance(rungs, list) else ():
            if not isinstance(rung, dict):
                continue
            if rung.get("taken"):
                taken.append(f"{rung.get('rung')} taken: {rung.get('reason')}")
            else:
                passed.append(f"{rung.get('rung')} not taken: {rung.get('reason')}")
        return some(taken + passed, 6)

    def _outcome(self) -> str:
        outcome = read_mapping(self._run_dir / "outcome.json")
        if not outcome.get("status"):
            return "not ended"
        return f"{outcome['status']} at step {outcome.get('step')}: {outcome.get('reason')}"


def _details(event: Mapping[str, Any]) -> str:
    if "text" in event:
        return str(event["text"])
    return ", ".join(f"{name}: {value}" for name, value in event.items() if name not in _HEAD)


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value}" for name, value in facts.items() if value not in (None, "", [], {})
    )


def _cell(text: object) -> str:
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())[:600]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
