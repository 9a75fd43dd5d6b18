"""Recorded FP8 statistics of real runs, and longer runs made from them by block bootstrap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.core.errors import ConfigError, DataError, Problem
from harness.core.facts import SlotStats, StepFacts
from harness.tracking.journal import read_rows
from harness.tracking.slot_file import FIGURES, SlotSteps

FIELDS = ("amax", "scale", "saturation", "clipped", "underflow", "sqnr_db", "even_db")
"""The statistics of a slot, in the order of SlotStats."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Every slot's statistics at every step of one run.

    slots: `<layer>.<role>`. values: float32 [FIELDS, steps, slots], NaN where not sampled. switches: how many the run
    made.
    """

    slots: tuple[str, ...]
    values: npt.NDArray[np.float32]
    switches: int = 0

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return self.values.shape[1]

    @property
    def layers(self) -> tuple[str, ...]:
        """In the order of the slots."""
        return tuple(dict.fromkeys(slot.rpartition(".")[0] for slot in self.slots))

    def field(self, name: str, role: str) -> npt.NDArray[np.float32]:
        """One statistic of one role's slots, float32 [steps, slots of the role]."""
        return self.values[FIELDS.index(name)][:, self.of_role(role)]

    def of_role(self, role: str) -> list[int]:
        """Places of one role's slots."""
        return [place for place, slot in enumerate(self.slots) if slot.rpartition(".")[2] == role]

    def facts(self, order: Sequence[int] | None = None) -> Iterator[StepFacts]:
        """The steps in recorded order, or those of `order` (from 0), as the fallback controller sees a clean run."""
        for step, place in enumerate(range(self.steps) if order is None else order, start=1):
            slots = SlotStats(self.slots, *self.values[:, place])
            yield StepFacts(
                step=step,
                window=step - 1,
                loss=1.0,
                grad_norm=1.0,
                lr=1e-3,
                loss_scale=1.0,
                applied=True,
                applied_steps=step,
                tokens=1,
                seconds=1.0,
                slots=slots,
            )

    def with_storm(self, slot: str, steps: Sequence[int], saturation: float) -> Trace:
        """A copy in which `slot` has this saturation ratio at `steps` (from 0)."""
        values = self.values.copy()
        values[FIELDS.index("saturation"), list(steps), self.slots.index(slot)] = saturation
        return replace(self, values=values)


def read_trace(journal: Path) -> Trace:
    """The trace of a run, of the slot file beside its journal, or of the journal alone, as runs of before had it.

    Raises DataError unless it holds each of its steps once, with the same slots.
    """
    stored = SlotSteps.of(journal.parent)
    if stored is not None:
        return _stored(journal, stored)
    steps: list[int] = []
    metrics: list[dict[str, float]] = []
    slots: tuple[str, ...] = ()
    switches = 0
    for row in read_rows(journal):
        switches += row.get("code") == "precision.switched"
        named = _slots_in(row["metrics"]) if row["kind"] == "metrics" else ()
        if named:
            steps.append(row["step"])
            metrics.append(row["metrics"])
            slots = slots or named
            if named != slots:
                break
    else:
        if steps and steps == list(range(1, len(steps) + 1)):
            values = [
                [[at_step.get(f"fp8_{field}/{slot}", np.nan) for slot in slots] for at_step in metrics]
                for field in FIELDS
            ]
            return Trace(slots, np.array(values, dtype=np.float32), switches)
    raise _incomplete(journal, steps)


def _stored(journal: Path, stored: SlotSteps) -> Trace:
    rows = list(stored.read())
    steps = [step for step, _, _ in rows]
    slots = stored.names
    if steps != list(range(1, len(steps) + 1)) or any(names != slots for _, names, _ in rows):
        raise _incomplete(journal, steps)
    switches = sum(row.get("code") == "precision.switched" for row in read_rows(journal))
    fields = [FIGURES.index(field) for field in FIELDS]
    return Trace(slots, np.stack([values[fields] for _, _, values in rows], axis=1), switches)


def _incomplete(journal: Path, steps: Sequence[int]) -> DataError:
    why = f"{len(steps)} steps with FP8 statistics, up to step {max(steps, default=0)}"
    fix = "train it in one piece with tracking.fp8_every=1"
    return DataError(Problem("does not hold the statistics of every step once", str(journal), why, fix))


def _slots_in(metrics: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(name.removeprefix("fp8_amax/") for name in metrics if name.startswith("fp8_amax/"))


def resample(
    recorded: int, steps: int, start: int, block: int, cadence: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Which recorded steps (from 0) make up a synthetic run: int64 [steps].

    The first `start` steps, in which scales and learning rate settle, stay what they are. After them follow blocks of
    `block` successive recorded steps, each from a random place among the rest, which counts as a circle, so that every
    step is equally likely (circular block bootstrap, Politis and Romano, 1992). Blocks begin and end on multiples of
    `cadence`, so that what is sampled every `cadence` steps stays so. Raises ConfigError for numbers that do not fit.
    """
    rest = recorded - start
    if any(number % cadence for number in (recorded, start, block)) or not 0 < block <= rest:
        why = f"recorded {recorded} steps, start {start}, block {block}, cadence {cadence}"
        fix = f"give multiples of {cadence}, and a block no longer than what follows the start"
        raise ConfigError(Problem("blocks that do not fit", "block bootstrap", why, fix))
    count = max(0, -(-(steps - start) // block))
    places = rng.integers(0, rest // cadence, count) * cadence
    blocks = (places[:, None] + np.arange(block)) % rest + start
    return np.concatenate([np.arange(min(start, steps)), blocks.reshape(-1)])[:steps]
