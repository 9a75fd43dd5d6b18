"""Repro bundles of bad steps, and the way back to any step through the journal and the run folder.

A repro bundle, `runs/<run>/flight/step-00000123/`, is kept when a bad step is judged. It has `record.json` (`BadStep`)
and, under `base/`, hard links to a checkpoint shortly before that step, so that retention cannot delete its bytes.
Links cost no space, and steps after the same checkpoint share them. The newest three bundles are kept. Of consecutive
bad steps only the first and the last are.

A rollback makes a run repeat steps: each repetition is another *attempt*, a branch of the run's history. `Branches`
finds on which branch a step ran, and the checkpoints of that branch to start from.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

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
"""Bundles kept."""

Count = Annotated[int, Field(ge=0)]

_RECORD = "record.json"
_BASE = "base"
_STEP = re.compile(r"step-(\d{8,})")

Figure = float | Literal["nan", "inf", "-inf"]
"""A figure as JSON has it: text for what strict JSON has no number for."""


class BadStep(Strict):
    """The record of one bad step.

    base: the step of the checkpoint to start from; 0: the run's initial state, a function of its seed.
    window: the step's place in the data order.
    samples: sample numbers, in reading order.
    ledger: the run's ledger at that time; "incidents" in the file.
    limits: [loss, norm, clip] in force; None where there was none.
    codes: of the verdicts that were not ok.
    applied, bad_data, demoted: as in StepFacts.
    fell_back_to: as in StepFacts; "lowered" in the file.
    loss, grad_norm, loss_scale: of the step.
    recipe, world_size, engine, threads, torch_version, device: where the step ran.
    """

    step: Count
    base: Count
    window: Count
    samples: tuple[Count, ...]
    ledger: Annotated[RunLedger, PlainValidator(RunLedger.from_json), Field(alias="incidents")]
    limits: tuple[float | None, float | None, float | None]
    applied: bool
    loss: Figure
    grad_norm: Figure
    loss_scale: Figure
    bad_data: Count
    codes: tuple[str, ...]
    demoted: tuple[str, ...]
    fell_back_to: Annotated[str, Field(alias="lowered")]
    recipe: str
    world_size: Annotated[int, Field(ge=1)]
    engine: str
    threads: Annotated[int, Field(ge=1)]
    torch_version: str
    device: str

    @property
    def attempt(self) -> int:
        """The run's attempt; every rollback begins another."""
        return self.ledger.attempt

    @property
    def limits_then(self) -> Limits:
        """The limits in force in the step."""
        return Limits.from_json(self.limits)


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of a run; part of every record."""

    recipe: str
    world_size: int
    engine: str
    device: str
    torch_version: str = field(default_factory=lambda: str(torch.__version__))
    threads: int = field(default_factory=torch.get_num_threads)


class FlightRecorder:
    """Keeps the repro bundles of one run folder. For rank 0, under the run's lock."""

    def __init__(self, run_dir: Path, store: Store, environment: Environment) -> None:
        self.folder = run_dir / FOLDER
        self._store = store
        self.environment = environment
        # The first step of the present streak of bad steps, and the newest one with its attempt.
        self._first = 0
        self._last = (0, 0)

    def keep(
        self, facts: StepFacts, samples: Sequence[int], codes: Sequence[str], ledger: RunLedger
    ) -> bool:
        """Record the step of `facts`; True if it begins a streak of bad steps. Raises OSError.

        A bundle of the same step from an earlier attempt is replaced.
        """
        # What a replay needs to run the step again: where to start from, on which samples, under which limits.
        base = nearest(self._store.steps(), facts.step)
        record = {
            "step": facts.step,
            "base": base,
            "window": facts.window,
            "samples": [int(sample) for sample in samples],
            "incidents": asdict(ledger),
            "limits": facts.limits.as_json(),
            "applied": facts.applied,
            "loss": jsonable(facts.loss),
            "grad_norm": jsonable(facts.grad_norm),
            "loss_scale": jsonable(facts.loss_scale),
            "bad_data": facts.bad_data,
            "codes": codes,
            "demoted": facts.demoted,
            "lowered": facts.fell_back_to,
            **asdict(self.environment),
        }

        # Complete under a temporary name first: a process that is killed leaves no half bundle.
        final = self.folder / step_name(facts.step)
        temporary = self.folder / f".tmp-{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            if base:
                checkpoint = self._store.path(base)
                _link(checkpoint, temporary / _BASE / checkpoint.name)
            write_json(temporary / _RECORD, record)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self._in_streak(facts.step, ledger.attempt)

    def _in_streak(self, step: int, attempt: int) -> bool:
        """Whether `step` begins a streak of bad steps. Deletes the bundles that are no longer needed."""
        # Of a streak the first and the last are kept.
        begins = self._last != (step - 1, attempt)
        if begins:
            self._first = step
        elif step - 1 != self._first:  # neither the first of its streak nor, now, the last
            self._remove(step - 1)
        self._last = (step, attempt)

        # Of all, the newest: an attempt begins at an earlier step, and is later.
        records = read_records(self.folder.parent)
        records.sort(key=lambda record: (record.attempt, record.step))
        for record in records[:-KEEP]:
            self._remove(record.step)
        return begins

    def _remove(self, step: int) -> None:
        shutil.rmtree(self.folder / step_name(step), ignore_errors=True)


def nearest(steps: Sequence[int], step: int) -> int:
    """The checkpoint to start from on the way to `step`; 0 if none lies before it.

    Rather not the one of `step` - 1: the step before `step` is re-run too, for comparison.
    """
    before = [each for each in steps if each < step]
    earlier = [each for each in before if each < step - 1]
    candidates = earlier or before
    return max(candidates, default=0)


def record_folder(run_dir: Path, step: int) -> Path:
    """Where the repro bundle of `step` is, or would be."""
    return run_dir / FOLDER / step_name(step)


def base_store(run_dir: Path, step: int) -> Store:
    """The checkpoint in the repro bundle of `step`, as a store to read."""
    return Store(record_folder(run_dir, step) / _BASE, readonly=True)


def read_records(run_dir: Path) -> list[BadStep]:
    """Every record of a run that can be read, by step."""
    try:
        names = sorted(os.listdir(run_dir / FOLDER))
    except OSError:
        return []
    records: list[BadStep] = []
    for name in names:
        if not _STEP.fullmatch(name):
            continue
        record = _read(run_dir / FOLDER / name / _RECORD)
        if record is not None:
            records.append(record)
    return sorted(records, key=lambda record: record.step)


def _read(path: Path) -> BadStep | None:
    """The record at `path`; None if no recorder wrote it."""
    try:
        found = BadStep.model_validate_json(json.dumps(read_json(path)))
    except (OSError, ValueError):
        return None
    # Old records are deleted by their step, so a record must be in the folder of that step.
    return found if path.parent.name == step_name(found.step) else None


def _link(source: Path, target: Path) -> None:
    """Give every file of a checkpoint a second name. Where the file system has no hard links, copy it."""
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy2(path, target / path.name)


_COMPARED = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/loss_scale": "loss_scale"}
"""Metrics that must agree bit for bit, and their fields in StepFacts."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first figure of a re-run that is not, bit for bit, the journal's."""

    step: int
    metric: str
    journal: float
    here: float


class Setting(NamedTuple):
    """How a run did a step. ranks: they decide the order of sums, and whose random numbers count."""

    config: RunConfig
    ranks: int


class Branches:
    """The attempts of a run: which of them ran a step, and which checkpoints they share."""

    def __init__(self, folder: Path) -> None:
        """Read the run in `folder`. Raises ConfigError if it is none, CheckpointError for an unreadable ledger."""
        history = RunHistory.read(folder)
        self.folder = history.run_dir
        self.records = {record.step: record for record in read_records(folder)}
        self.ledger = load_ledger(folder)
        self.rollbacks = history.rollbacks
        self._figures = history.rows

        # The last step that any attempt did, for an error.
        self._last = 0
        for series in (history.series, history.abandoned):
            points = series.get("train/loss")
            if points:
                self._last = max(self._last, int(points.steps[-1]))

        events = history.events
        self.changed = [event for event in events if event["code"] == "run.changed"]
        self.started_from: int | None = None
        for event in history.events:
            if event["code"] == "run.started_from":
                self.started_from = event["step"]

    def _rows(self, step: int) -> dict[int, MetricsRow]:
        """The figures of `step`, by attempt."""
        rows: dict[int, MetricsRow] = {}
        for row in self._figures.of_step(step):
            if "train/loss" in row.values:
                rows[row.attempt] = row
        return rows

    def attempt_of(self, step: int) -> int:
        """The attempt in which `step` went bad; else the last one that ran it. Raises ConfigError if none did."""
        if step in self.records:
            return self.records[step].attempt
        attempts = [*self._rows(step)]
        if not attempts:
            there = f"its steps are 1 to {self._last}" if self._last else "it has no step"
            what = f"step {step} has no record, and the journal does not have it: {there}"
            recorded = ", ".join(map(str, sorted(self.records))) or "none"
            fix = f"give --step one of the steps with a record ({recorded}), or another that the run has done"
            raise ConfigError(Problem(what, str(self.folder / FOLDER), fix=fix))
        return max(attempts)

    def is_first_or_last(self, step: int) -> tuple[bool, bool]:
        """Whether `attempt_of` gives the attempt that ran `step` first, and whether it gives the run's last attempt."""
        attempt = self.attempt_of(step)
        return attempt == min(self._rows(step), default=attempt), attempt == self.ledger.attempt

    def ledger_of(self, step: int) -> RunLedger:
        """The run's ledger as it was when `step` ran: without the rollbacks that came later."""
        if step in self.records:
            return copy.deepcopy(self.records[step].ledger)

        # No record: take back what later rollbacks did to the present ledger.
        attempt = self.attempt_of(step)
        later: set[int] = set()
        returned_to: list[int] = []
        for rollback in self.rollbacks:
            to_step = rollback.to_step
            if rollback.attempt >= attempt:
                # A rollback of this attempt or a later one: the windows that it skips were not skipped yet.
                later.update(rollback.passed_over)
            else:
                # An earlier rollback. A return to an earlier step also undoes the returns to later ones.
                returned_to = [min(earlier, to_step) for earlier in returned_to]
                returned_to.append(to_step)

        now = self.ledger
        skipped = [window for window in now.skipped_windows if window not in later]
        return RunLedger(
            attempt=attempt,
            skipped_windows=skipped,
            returned_to=returned_to,
            hashes=list(now.hashes),
        )

    def last_attempt_of(self, step: int) -> int | None:
        """The last attempt that ran `step`, also if it went bad in an earlier one; None if none did."""
        return max(self._rows(step), default=None)

    def config_of(self, step: int, config: RunConfig, attempt: int | None = None) -> RunConfig:
        """The config under which `step` ran. Its engine is that of `config`: it is run again here.

        config: the run's present one; a resume may have changed it since.
        attempt: the one that ran the step; None: `attempt_of`.
        """
        engine = config.engine.name
        if attempt is None:
            attempt = self.attempt_of(step)
        # A run.changed event holds the config before the change. The first one after this step has this step's. A
        # change in an earlier attempt came before it, even if that attempt had got further.
        place = attempt, step
        later = [each for each in self.changed if (each["attempt"], each["step"]) >= place]
        if later:
            config = validate(RunConfig, later[0]["config"], f"{self.folder}: run.changed")

        # A run may also have been extended, which changes its schedule.
        row = self._rows(step).get(attempt)
        steps = config.train.steps
        if row is not None and row.total is not None:
            steps = row.total
        train = config.train.model_copy(update={"steps": steps})
        own_engine = config.engine.model_copy(update={"name": engine})
        return config.model_copy(update={"train": train, "engine": own_engine})

    def setting_of(self, step: int, config: RunConfig, attempt: int | None = None) -> Setting:
        """How `step` ran. Arguments as of `config_of`."""
        ranks, _ = self.ranks_of(step, attempt)
        return Setting(self.config_of(step, config, attempt), ranks)

    def ranks_of(self, step: int, attempt: int | None = None) -> tuple[int, str]:
        """How many ranks `step` ran on, and their engine; (1, "") if neither record nor journal says.

        attempt: the one that ran the step; None: `attempt_of`.
        """
        if attempt is None:
            attempt = self.attempt_of(step)
        record = self.records.get(step)
        if record is not None and record.attempt == attempt:
            return record.world_size, record.engine
        row = self._rows(step).get(attempt)
        if row is None:
            return 1, ""
        return row.ranks or 1, row.engine

    def row(self, step: int, attempt: int) -> Mapping[str, float] | None:
        """The journal's figures of `step` on the branch of `attempt`."""
        rows = self._rows(step)
        # Steps before a rollback were not done again: they are rows of an earlier attempt.
        attempts = [each for each in rows if each <= attempt]
        return rows[max(attempts)].values if attempts else None

    def difference(self, facts: StepFacts, attempt: int) -> Difference | None:
        """The first figure that differs from the journal's; None if every bit agrees, or the journal has no row."""
        row = self.row(facts.step, attempt)
        if row is None:
            return None
        for metric, name in _COMPARED.items():
            here: float = getattr(facts, name)
            if metric in row and not same(row[metric], here):
                return Difference(facts.step, metric, row[metric], here)
        return None

    def checkpoints(self, step: int) -> list[tuple[int, Store]]:
        """All checkpoints on the branch of `step`, the same one perhaps in several stores. They are not verified."""
        # All there are, with the attempt that wrote them: the run's own, and those in repro bundles.
        attempt = self.attempt_of(step)
        current = Store(self.folder / "checkpoints", readonly=True)
        found = [(each, self.ledger.attempt, current) for each in current.steps()]
        for record in self.records.values():
            store = base_store(self.folder, record.step)
            found += [(each, record.attempt, store) for each in store.steps()]

        usable: list[tuple[int, Store]] = []
        for base, written_in, store in found:
            if self._shared(base, written_in, attempt):
                usable.append((base, store))
        return usable

    def bases(self, step: int) -> Iterator[tuple[int, Store]]:
        """Checkpoints before `step` on its branch, the best to start from first. They are not verified."""
        usable = [each for each in self.checkpoints(step) if each[0] < step]

        # The same checkpoint may be in several stores: all copies of the best one, then those of the next.
        while usable:
            best = nearest([base for base, _ in usable], step)
            others: list[tuple[int, Store]] = []
            for each in usable:
                if each[0] == best:
                    yield each
                else:
                    others.append(each)
            usable = others

    def _shared(self, step: int, one: int, other: int) -> bool:
        """Whether attempts `one` and `other` share the state after `step`: no rollback between them went behind it."""
        between = range(min(one, other), max(one, other))
        rollbacks = [each for each in self.rollbacks if each.attempt in between]
        return all(step <= rollback.to_step for rollback in rollbacks)


def same(a: float, b: float) -> bool:
    """Whether two figures are equal bit for bit; all NaNs count as one."""
    if math.isnan(a) and math.isnan(b):
        return True
    return struct.pack("d", a) == struct.pack("d", b)  # unlike ==, tells 0.0 from -0.0
