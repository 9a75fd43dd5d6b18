"""What is known of a step that is to be run again: its flight record, and what journal and run folder tell of it.

`runs/<run>/flight/step-00000123/` has `record.json` and, under `base/`, hard links to a checkpoint shortly before that
step, so that retention cannot take it. It is kept when the step is judged. Links cost no space, and steps after the
same checkpoint share its bytes. The newest three records are kept; of consecutive bad steps the first and the last.
Journal and folder tell on which branch a step ran, and from which state it can be reached.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, PlainValidator

from harness.checkpoint.policy import load_ledger
from harness.checkpoint.store import Store
from harness.core.config import RunConfig
from harness.core.errors import ConfigError, Problem
from harness.core.facts import Limits, StepFacts, jsonable
from harness.core.files import read_json, step_name, write_json
from harness.core.schema import Strict, validate
from harness.core.state import RunLedger
from harness.tracking.figures import MetricsRow
from harness.tracking.history import RunHistory

FOLDER = "flight"
KEEP = 3
"""Records kept."""

Count = Annotated[int, Field(ge=0)]

_RECORD = "record.json"
_BASE = "base"
_STEP = re.compile(r"step-(\d{8,})")


Figure = float | Literal["nan", "inf", "-inf"]


class BadStep(Strict):
    """What is kept of one bad step. base: step of the checkpoint to start from; 0: the run's initial state, a function
    of its seed.

    window: the step's place in the data order. samples: sample numbers, in reading order. limits: [loss, norm, clip]
    in force, None where there was none. codes: of the verdicts that were not ok. demoted, bad_data: as in StepFacts;
    lowered: its fell_back_to. loss, grad_norm, loss_scale: figures, or "nan", "inf" as text. incidents: the run's
    ledger, then. world_size, engine, threads, torch_version, device: where the step ran.
    """

    step: Count
    base: Count
    window: Count
    samples: tuple[Count, ...]
    incidents: Annotated[RunLedger, PlainValidator(RunLedger.from_json)]
    limits: tuple[float | None, float | None, float | None]
    applied: bool
    loss: Figure
    grad_norm: Figure
    loss_scale: Figure
    bad_data: Count
    codes: tuple[str, ...]
    demoted: tuple[str, ...]
    lowered: str
    recipe: str
    world_size: Annotated[int, Field(ge=1)]
    engine: str
    threads: Annotated[int, Field(ge=1)]
    torch_version: str
    device: str

    @property
    def attempt(self) -> int:
        """Of the run; raised by every rollback."""
        return self.incidents.attempt

    @property
    def limits_then(self) -> Limits:
        """The limits in force in the step."""
        return Limits.from_json(self.limits)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a run computes; part of every record."""

    recipe: str
    world_size: int
    engine: str
    device: str
    torch_version: str = field(default_factory=lambda: str(torch.__version__))
    threads: int = field(default_factory=torch.get_num_threads)


class FlightRecorder:
    """Keeps records for one run folder. For rank 0, under the run's lock."""

    def __init__(self, run_dir: Path, store: Store, surroundings: Surroundings) -> None:
        self.folder = run_dir / FOLDER
        self._store = store
        self.surroundings = surroundings
        self._first = 0
        self._last = (0, 0)

    def keep(
        self, facts: StepFacts, samples: Sequence[int], codes: Sequence[str], ledger: RunLedger
    ) -> bool:
        """Record the step of `facts`; True if it begins a streak of bad steps. Raises OSError.

        What stands from an earlier attempt at the same step is replaced.
        """
        base = nearest(self._store.steps(), facts.step)
        record = {
            "step": facts.step, "base": base, "window": facts.window,
            "samples": [int(sample) for sample in samples], "incidents": asdict(ledger),
            "limits": facts.limits.as_json(), "applied": facts.applied,
            **{name: jsonable(getattr(facts, name)) for name in ("loss", "grad_norm", "loss_scale")},
            "bad_data": facts.bad_data, "codes": codes, "demoted": facts.demoted, "lowered": facts.fell_back_to,
            **asdict(self.surroundings),
        }  # fmt: skip
        final = self.folder / step_name(facts.step)
        temporary = self.folder / f".tmp-{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            if base:
                _link(self._store.path(base), temporary / _BASE / self._store.path(base).name)
            write_json(temporary / _RECORD, record)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self._in_streak(facts.step, ledger.attempt)

    def _in_streak(self, step: int, attempt: int) -> bool:
        """Whether `step` begins a streak; records that are no longer wanted are deleted."""
        begins = self._last != (step - 1, attempt)
        if begins:
            self._first = step
        elif step - 1 != self._first:
            self._remove(step - 1)
        self._last = (step, attempt)
        newest = sorted(
            read_records(self.folder.parent), key=lambda record: (record.attempt, record.step)
        )
        for record in newest[:-KEEP]:
            self._remove(record.step)
        return begins

    def _remove(self, step: int) -> None:
        shutil.rmtree(self.folder / step_name(step), ignore_errors=True)


def nearest(steps: Sequence[int], step: int) -> int:
    """Which checkpoint to start from on the way to `step`, 0 if none lies before it.

    Not the one just before, if there is another: the step before is to be run too, to compare with.
    """
    before = [each for each in steps if each < step]
    return max([each for each in before if each < step - 1] or before, default=0)


def record_folder(run_dir: Path, step: int) -> Path:
    """Where the record of `step` is, or would be."""
    return run_dir / FOLDER / step_name(step)


def base_store(run_dir: Path, step: int) -> Store:
    """The checkpoint that the record of `step` holds, as a store to read."""
    return Store(record_folder(run_dir, step) / _BASE, readonly=True)


def read_records(run_dir: Path) -> list[BadStep]:
    """Every record of a run that can be read, by step."""
    try:
        names = sorted(os.listdir(run_dir / FOLDER))
    except OSError:
        return []
    found = (_read(run_dir / FOLDER / name / _RECORD) for name in names if _STEP.fullmatch(name))
    return sorted(
        (record for record in found if record is not None), key=lambda record: record.step
    )


def _read(path: Path) -> BadStep | None:
    """None for what no recorder wrote. Steps name folders, which are deleted when they are old."""
    try:
        found = BadStep.model_validate_json(json.dumps(read_json(path)))
    except (OSError, ValueError):
        return None
    return found if path.parent.name == step_name(found.step) else None


def _link(source: Path, target: Path) -> None:
    """Every file of a checkpoint under a second name; copied where the file system has no hard links."""
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy2(path, target / path.name)


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
        """Of the run in `folder`. Raises ConfigError if it is none, CheckpointError if its ledger cannot be read."""
        history = RunHistory.read(folder)
        self.folder = history.run_dir
        self.records = {record.step: record for record in read_records(folder)}
        self.ledger = load_ledger(folder)
        self.rollbacks = history.rollbacks
        self._figures = history.rows
        done = [
            points
            for each in (history.series, history.abandoned)
            if (points := each.get("train/loss"))
        ]
        self._last = max((int(points.steps[-1]) for points in done), default=0)
        self.changed = [event for event in history.events if event["code"] == "run.changed"]
        started = [event["step"] for event in history.events if event["code"] == "run.started_from"]
        self.started_from: int | None = started[-1] if started else None

    def _rows(self, step: int) -> dict[int, MetricsRow]:
        """The figures of `step`, by attempt."""
        return {
            row.attempt: row for row in self._figures.of_step(step) if "train/loss" in row.values
        }

    def attempt_of(self, step: int) -> int:
        """The attempt in which `step` went bad, else the last one that ran it. Raises ConfigError if none did."""
        if step in self.records:
            return self.records[step].attempt
        attempts = [*self._rows(step)]
        if not attempts:
            what = f"step {step} has no record, and the journal does not have it: its steps are 1 to {self._last}"
            recorded = ", ".join(map(str, sorted(self.records))) or "none"
            fix = f"give --step one of the steps with a record ({recorded}), or another that the run has done"
            raise ConfigError(Problem(what, str(self.folder / FOLDER), fix=fix))
        return max(attempts)

    def ledger_of(self, step: int) -> RunLedger:
        """What earlier rollbacks meant for the attempt in which `step` is replayed."""
        if step in self.records:
            return copy.deepcopy(self.records[step].incidents)
        attempt, now = self.attempt_of(step), self.ledger
        later = {
            window
            for each in self.rollbacks
            if each.attempt >= attempt
            for window in each.passed_over
        }
        back: list[int] = []
        for each in self.rollbacks:
            if each.attempt < attempt:
                back = [*(min(earlier, each.to_step) for earlier in back), each.to_step]
        skipped = [window for window in now.skipped_windows if window not in later]
        return RunLedger(
            attempt=attempt, skipped_windows=skipped, returned_to=back, hashes=list(now.hashes)
        )

    def config_of(self, step: int, config: RunConfig) -> RunConfig:
        """The config under which `step` ran: a resume may have changed it since."""
        later = [event for event in self.changed if event["step"] >= step]
        if later:  # the earliest of them has the config of before
            config = validate(RunConfig, later[0]["config"], f"{self.folder}: run.changed")
        row = self._rows(step).get(self.attempt_of(step))
        steps = row.total if row and row.total is not None else config.train.steps
        return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})

    def ranks_of(self, step: int) -> tuple[int, str]:
        """How many ranks `step` ran on, and their engine: by its record, else by the journal; (1, "") if untold."""
        if step in self.records:
            return self.records[step].world_size, self.records[step].engine
        row = self._rows(step).get(self.attempt_of(step))
        return (1, "") if row is None else (row.ranks or 1, row.engine)

    def row(self, step: int, attempt: int) -> Mapping[str, float] | None:
        """The journal's figures of `step` on the branch of `attempt`."""
        rows = self._rows(step)
        attempts = [each for each in rows if each <= attempt]
        return rows[max(attempts)].values if attempts else None

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
        found = [(each, self.ledger.attempt, current) for each in current.steps()]
        for record in self.records.values():
            store = base_store(self.folder, record.step)
            found += [(each, record.attempt, store) for each in store.steps()]
        usable = [
            (base, store)
            for base, of, store in found
            if base < step and self._shared(base, of, attempt)
        ]
        while usable:
            best = nearest([base for base, _ in usable], step)
            yield from (each for each in usable if each[0] == best)
            usable = [each for each in usable if each[0] != best]

    def _shared(self, step: int, one: int, other: int) -> bool:
        """Whether attempts `one` and `other` have the state after `step` in common."""
        between = range(min(one, other), max(one, other))
        return all(
            step <= rollback.to_step for rollback in self.rollbacks if rollback.attempt in between
        )


def same(a: float, b: float) -> bool:
    """Bit for bit, but for which NaN."""
    return a == b or (math.isnan(a) and math.isnan(b))
