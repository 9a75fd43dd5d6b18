"""The description and the data on a run's page in MLflow.

The description links to the experiment's view of charts. It says what ran where and why, and lists the newest events as
they happen. A description that a person wrote or changed is left as it is.
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
    """A run's data in MLflow's form: name, digest, source, and everything else as the profile."""
    source = str(data.get("source", ""))
    name = (Path(source).name or "data")[:500]

    # Without a hash of the data themselves, a hash of what is known of them.
    described = json.dumps(data, sort_keys=True, default=str)
    digest = str(data.get("sha256") or hashlib.sha256(described.encode()).hexdigest())[:36]

    # Long values, such as a list of thousands of files, have no room in a profile.
    short = {key: value for key, value in data.items() if len(str(value)) < 1000}
    short.pop("source", None)
    profile_text = json.dumps(short, default=str)
    source_text = json.dumps({"uri": source})
    dataset = Dataset(name, digest, "local", source_text, profile=profile_text)
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, "training")])


class Description:
    """The run's description, kept up to date with the journal."""

    def __init__(
        self, client: MlflowClient, run_id: str, experiment_id: str, run_dir: Path
    ) -> None:
        self._client = client
        self._run_id = run_id
        self._experiment_id = experiment_id
        self._run_dir = run_dir
        self._about: dict[str, dict[str, Any]] = {"tags": {}, "params": {}, "data": {}, "where": {}}
        self._events: deque[Mapping[str, Any]] = deque(maxlen=_EVENTS)
        self._counts: Counter[str] = Counter()
        self._stale = False

    def take(self, row: Mapping[str, Any]) -> None:
        """Take the next row of the journal."""
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
        """Bring the description up to date, if a row was taken since. Raises what mlflow raises."""
        if not self._stale or not self._about["tags"]:
            return

        # The hash is of the text that we wrote last: another text is a person's, and stays.
        existing = self._client.get_run(self._run_id).data.tags
        there = existing.get(MLFLOW_RUN_NOTE, "")
        if there and _hash(there) != existing.get(_NOTE_HASH):
            self._stale = False
            return

        text = self._text()
        if text != there:
            # In one request: a hash without its text would make the text look like somebody else's.
            tags = [RunTag(_NOTE_HASH, _hash(text)), RunTag(MLFLOW_RUN_NOTE, text)]
            self._client.log_batch(self._run_id, tags=tags, synchronous=True)
        self._stale = False

    def _text(self) -> str:
        """The description in Markdown: a headline, a table of what ran, and the newest events as far as they fit."""
        # What ran, and a link to the charts in our order: MLflow's own page sorts them by name.
        tags = self._about["tags"]
        requested = tags.get("precision.requested", "?")
        resolved, tier = tags.get("precision.resolved", "?"), tags.get("tier", "?")
        experiment = f"#/experiments/{self._experiment_id}"
        view = f"{experiment}/runs?workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey={VIEW}"
        lines = [
            f"**{requested}** on {tier}: ran as **{resolved}**. [Charts in order, as in the report]({view})",
            "",
            "| | |",
            "|---|---|",
        ]
        for label, text in self._rows(tags):
            if text:
                lines.append(f"| {label} | {_cell(text)} |")
        lines += [
            f"| checkpoints | [as models]({experiment}/models) of this experiment: "
            f"`source_run_id = '{self._run_id}'` |",
            "",
            "amax and scale span powers of two: switch their charts to a log axis "
            "(the chart's menu, Configure, Y-axis).",
        ]

        # Newest events first, as many as MLflow takes.
        if self._events:
            lines += ["", "| step | newest events | |", "|---|---|---|"]
        for event in reversed(self._events):
            line = f"| {event['step']} | {event['code']} | {_cell(_details(event))} |"
            if sum(map(len, lines)) + len(lines) + len(line) > MAX_NOTE:
                break
            lines.append(line)
        return "\n".join(lines)[:MAX_NOTE]

    def _rows(self, tags: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(label, text) of the description's table; a row without text is left out."""
        where = dict(self._about["where"])
        for key in ("ranks", "engine", "git.commit"):
            if key in tags:
                where[key] = tags[key]
        counts = [f"{code} x {count}" for code, count in sorted(self._counts.items())]
        return [
            ("why", self._reasons()),
            ("effective precision", tags.get("precision.effective", "recorded at the end")),
            ("data", _listed(self._about["data"])),
            ("where", _listed(where)),
            ("outcome", self._outcome()),
            ("events", ", ".join(counts) or "none"),
        ]

    def _reasons(self) -> str:
        """Why each rung of the recipe's ladder was taken or not; the one that was taken first."""
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
    fields = {name: value for name, value in event.items() if name not in _HEAD}
    return ", ".join(f"{name}: {value}" for name, value in fields.items())


def _listed(facts: Mapping[str, Any]) -> str:
    """`name value, name value`; empty values are left out."""
    listed: list[str] = []
    for name, value in facts.items():
        if value not in (None, "", [], {}):
            listed.append(f"{name} {value}")
    return ", ".join(listed)


def _cell(text: object) -> str:
    """Text for a cell of a Markdown table: on one line, without a bar or a tag, of bounded length."""
    plain = str(text).replace("|", "\\|").replace("<", "&lt;")
    return " ".join(plain.split())[:600]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
