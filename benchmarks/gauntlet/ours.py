"""What a run of `harness train` recorded: its end, what it reported, and what `harness replay` says of a bad step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.files import read_json
from harness.run_folder import read_outcome
from harness.tracking.journal import read_rows

RUN = "gauntlet"
SILENT = (
    "run.resumed",
    "precision.switched",
    "precision.promote",
    "run.stopped",
    "scaler.grew",
    "scaler.backed_off",
    "scaler.calibration",
    "loss.unit",
)
"""Events that say what was done, not that something is wrong."""
_TEXTS = ("text", "reason", "name", "samples")


@dataclass(frozen=True)
class Event:
    """One line of the run's account. text: at most 200 characters."""

    step: int
    code: str
    text: str


@dataclass
class Recorded:
    """A run.

    status: as in `runner.Result`.
    computed: steps computed, over all attempts.
    useful: updates in the weights that are left.
    """

    status: str
    why: str
    computed: int = 0
    useful: int = 0
    events: list[Event] = field(default_factory=list[Event])

    def lost(self, steps: int) -> int:
        return max(steps, self.computed) - self.useful


def read(run: Path, code: int) -> Recorded:
    """The run of this folder, whose last process ended with `code`."""
    outcome: dict[str, Any] = {}
    if (run / "outcome.json").exists():
        outcome = dict(read_outcome(run))
    status = str(outcome.get("status", "crashed" if code >= 0 else "hangs"))
    found = Recorded(status, str(outcome.get("reason", "")) if status == "halted" else "")
    if not (run / "journal.jsonl").exists():
        return found
    applied: dict[int, bool] = {}
    newest = 0
    for row in read_rows(run / "journal.jsonl"):
        if row["kind"] == "metrics" and "train/loss" in row["metrics"]:
            found.computed += 1
            newest = row["step"]
            applied[row["step"]] = bool(row["metrics"]["train/step_applied"])
        # The journal has a step once, though a resume computes it again.
        if row["kind"] == "event" and row["code"] == "run.resumed":
            found.computed += max(0, newest - row["step"])
        if row["kind"] == "event" and row["code"] not in SILENT:
            text = "; ".join(str(row[key]) for key in _TEXTS if row.get(key))
            found.events.append(Event(row["step"], row["code"], text[:200]))

    # A run that did not come to its end has the weights of its newest checkpoint.
    last = max(applied, default=0)
    if status != "done":
        saved = _saved(run)
        last = int(saved[-1].name.rpartition("-")[2]) if saved else 0
    found.useful = sum(taken for step, taken in applied.items() if step <= last)
    return found


def weights(run: Path) -> Path:
    """The weights of the newest checkpoint."""
    return _saved(run)[-1] / "model.safetensors"


def _saved(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def bad_step(run: Path) -> int:
    """The first step that has a record for `harness replay`; 0 if there is none."""
    steps = [int(each.name.rpartition("-")[2]) for each in (run / "flight").glob("step-*")]
    return min(steps, default=0)


def cause(run: Path, step: int) -> str:
    """What `harness replay` wrote: the cause, and the module in which a NaN or infinity began; empty if it failed."""
    path = run / "flight" / f"step-{step:08}" / "replay.json"
    if not path.exists():
        return ""
    answer = read_json(path)
    found = answer["finding"] or {}
    module = found.get("module")
    return f"{answer['cause']}, in {module}" if module else str(answer["cause"])
