"""What the journal and the run folder tell of a step: on which branch it ran, from which state it can be reached."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.policy import load_incidents
from harness.checkpoint.store import Store
from harness.core.config import RunConfig
from harness.core.errors import ConfigError, Problem
from harness.core.facts import StepFacts
from harness.core.state import Incidents
from harness.replay.flight import FOLDER, base_store, nearest, read_records
from harness.tracking.history import RunHistory

_COMPARED = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/loss_scale": "loss_scale"}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first figure of a re-run that is not, bit for bit, the journal's."""

    step: int
    metric: str
    journal: float
    here: float


class Branches:
    """The attempts of a run, and what each had in common with the others."""

    def __init__(self, folder: Path) -> None:
        """Of the run in `folder`. Raises ConfigError if it is none, CheckpointError if its incidents cannot be read."""
        history = RunHistory.read(folder)
        self.folder = history.run_dir
        self.records = {record.step: record for record in read_records(folder)}
        self.incidents = load_incidents(folder)
        self.rollbacks = history.rollbacks
        self.rows = {(row.step, row.attempt): row for row in history.rows if "train/loss" in row.values}
        started = [event["step"] for event in history.events if event["code"] == "run.started_from"]
        self.started_from: int | None = started[-1] if started else None

    def attempt_of(self, step: int) -> int:
        """The attempt in which `step` went bad, else the last one that ran it. Raises ConfigError if none did."""
        if step in self.records:
            return self.records[step].attempt
        attempts = [attempt for each, attempt in self.rows if each == step]
        if not attempts:
            last = max((each for each, _ in self.rows), default=0)
            what = f"step {step} has no record, and the journal does not have it: its steps are 1 to {last}"
            recorded = ", ".join(map(str, sorted(self.records))) or "none"
            fix = f"give --step one of the steps with a record ({recorded}), or another that the run has done"
            raise ConfigError(Problem(what, str(self.folder / FOLDER), fix=fix))
        return max(attempts)

    def incidents_of(self, step: int) -> Incidents:
        """What earlier rollbacks meant for the attempt in which `step` is replayed."""
        if step in self.records:
            return copy.deepcopy(self.records[step].incidents)
        attempt, now = self.attempt_of(step), self.incidents
        later = {window for each in self.rollbacks if each.attempt >= attempt for window in each.passed_over}
        back: list[int] = []
        for each in self.rollbacks:
            if each.attempt < attempt:
                back = [*(min(earlier, each.to_step) for earlier in back), each.to_step]
        skipped = [window for window in now.skipped_windows if window not in later]
        return Incidents(attempt=attempt, skipped_windows=skipped, returned_to=back)

    def config_of(self, step: int, config: RunConfig) -> RunConfig:
        """The config under which `step` ran: the learning rate's schedule depends on train.steps."""
        row = self.rows.get((step, self.attempt_of(step)))
        steps = row.total if row and row.total is not None else config.train.steps
        return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})

    def row(self, step: int, attempt: int) -> Mapping[str, float] | None:
        """The journal's figures of `step` on the branch of `attempt`."""
        attempts = [each for number, each in self.rows if number == step and each <= attempt]
        return self.rows[step, max(attempts)].values if attempts else None

    def difference(self, facts: StepFacts, attempt: int) -> Difference | None:
        """Where the journal has other figures; None if every bit agrees, or it has no row."""
        row = self.row(facts.step, attempt)
        for metric, name in _COMPARED.items():
            here: float = getattr(facts, name)
            if row is not None and metric in row and not same(row[metric], here):
                return Difference(facts.step, metric, row[metric], here)
        return None

    def bases(self, step: int) -> Iterator[tuple[int, Store]]:
        """Checkpoints on the branch of `step` that lie before it, the best to start from first; not verified."""
        attempt = self.attempt_of(step)
        current = Store(self.folder / "checkpoints", readonly=True)
        found = [(each, self.incidents.attempt, current) for each in current.steps()]
        for record in self.records.values():
            store = base_store(self.folder, record.step)
            found += [(each, record.attempt, store) for each in store.steps()]
        usable = [(base, store) for base, of, store in found if base < step and self._shared(base, of, attempt)]
        while usable:
            best = nearest([base for base, _ in usable], step)
            yield from (each for each in usable if each[0] == best)
            usable = [each for each in usable if each[0] != best]

    def _shared(self, step: int, one: int, other: int) -> bool:
        """Whether attempts `one` and `other` have the state after `step` in common."""
        between = range(min(one, other), max(one, other))
        return all(step <= rollback.to_step for rollback in self.rollbacks if rollback.attempt in between)


def same(a: float, b: float) -> bool:
    """Bit for bit, but for which NaN."""
    return a == b or (math.isnan(a) and math.isnan(b))
