"""The flight recorder: what a later re-run of a bad step needs, kept when the step is judged.

`runs/<run>/flight/step-00000123/` has `record.json` and, under `base/`, hard links to a checkpoint shortly before that
step, so that retention cannot take it. Links cost no space, and steps after the same checkpoint share its bytes. The
newest three records are kept; of consecutive bad steps the first and the last.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint.incidents import incidents_from
from harness.checkpoint.store import Store
from harness.core.atomic import write_json
from harness.core.facts import Limits, StepFacts, jsonable
from harness.core.naming import step_name
from harness.core.state import Incidents
from harness.core.untrusted import read_json

FOLDER = "flight"
KEEP = 3
"""Records kept."""

_RECORD = "record.json"
_BASE = "base"
_COUNTS = ("step", "base", "window", "bad_data", "world_size", "threads")
_WORDS = ("lowered", "recipe", "engine", "torch_version", "device")
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class BadStep:
    """One bad step. base: step of the checkpoint to start from; 0: the run's initial state, a function of its seed.

    window: the step's place in the data order. samples: sample numbers, in reading order. limits: [loss, norm, clip]
    in force, None where there was none. codes: of the verdicts that were not ok. lowered, demoted: as in StepFacts.
    loss, grad_norm, loss_scale: figures, or "nan", "inf" as text. bad_data: bits, as in StepFacts. incidents: the
    run's, then. world_size, engine, threads, torch_version, device: where the step ran.
    """

    step: int
    base: int
    window: int
    samples: tuple[int, ...]
    incidents: Incidents
    limits: tuple[float | None, ...]
    applied: bool
    loss: float | str
    grad_norm: float | str
    loss_scale: float | str
    bad_data: int
    codes: tuple[str, ...]
    demoted: tuple[str, ...]
    lowered: str
    recipe: str
    world_size: int
    engine: str
    threads: int
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

    def keep(self, facts: StepFacts, samples: Sequence[int], codes: Sequence[str], incidents: Incidents) -> bool:
        """BadStep the step of `facts`; True if it begins a streak of bad steps. Raises OSError.

        What stands from an earlier attempt at the same step is replaced.
        """
        base = nearest(self._store.steps(), facts.step)
        record = BadStep(
            step=facts.step, base=base, window=facts.window, samples=tuple(int(sample) for sample in samples),
            incidents=incidents,
            limits=tuple(facts.limits.as_json()), applied=facts.applied,
            loss=jsonable(facts.loss), grad_norm=jsonable(facts.grad_norm), loss_scale=jsonable(facts.loss_scale),
            bad_data=facts.bad_data, codes=tuple(codes), demoted=facts.demoted, lowered=facts.lowered,
            **asdict(self.surroundings),
        )  # fmt: skip
        final = self.folder / step_name(facts.step)
        temporary = self.folder / f".tmp-{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            if base:
                _link(self._store.path(base), temporary / _BASE / self._store.path(base).name)
            write_json(temporary / _RECORD, asdict(record))
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self._in_streak(facts.step, incidents.attempt)

    def _in_streak(self, step: int, attempt: int) -> bool:
        """Whether `step` begins a streak; records that are no longer wanted are deleted."""
        begins = self._last != (step - 1, attempt)
        if begins:
            self._first = step
        elif step - 1 != self._first:
            self._remove(step - 1)
        self._last = (step, attempt)
        newest = sorted(read_records(self.folder.parent), key=lambda record: (record.attempt, record.step))
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
    return sorted((record for record in found if record is not None), key=lambda record: record.step)


def _read(path: Path) -> BadStep | None:
    names = {each.name for each in fields(BadStep)}
    try:
        raw: dict[str, Any] = read_json(path)
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
        if values.keys() != names or not _sound(values) or path.parent.name != step_name(values["step"]):
            return None
        return BadStep(**{**values, "incidents": incidents_from(raw["incidents"])})
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _sound(values: Mapping[str, Any]) -> bool:
    """Whether figures are figures: steps name folders, which are deleted when they are old."""
    counts = [values[name] for name in _COUNTS] + list(values["samples"])
    figures = [limit for limit in values["limits"] if limit is not None]
    words = [values[name] for name in _WORDS] + list(values["codes"]) + list(values["demoted"])
    return (
        all(type(count) is int and count >= 0 for count in counts)
        and all(type(figure) in (int, float) for figure in figures)
        and len(values["limits"]) == len(fields(Limits))
        and all(isinstance(word, str) for word in words)
        and min(values["world_size"], values["threads"]) > 0
    )


def _link(source: Path, target: Path) -> None:
    """Every file of a checkpoint under a second name; copied where the file system has no hard links."""
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy2(path, target / path.name)
