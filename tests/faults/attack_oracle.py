"""What tells a run that was attacked from one that nothing happened to, and a traceback of ours from a launcher's."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resume_runs import OF_THE_PROCESS, checkpoint

from harness.checkpoint.store import Store
from harness.tracking.journal import read_rows
from tests.support.runs import ROOT

TRACEBACK = "Traceback (most recent call last)"
Row = tuple[int, int, str, str]
_OF_PROCESSES = ("run.", "checkpoint.", "flight.", "report.", "journal.")
# Events about damaged files, not about a step: no undisturbed run has them. `_Sequence` checks which fault caused them.
CAUSED = ("data.source", "fp8.no_table", "fp8.dropped", "resume.mismatch")
# Counts every skip of the run; one that a rollback to an older checkpoint repeats is counted again.
_IN_ALL = ("guard/skipped",)
_OF_ATTEMPTS = (*_IN_ALL, "guard/rollbacks", "guard/attempt")

_NOT_WRITTEN = re.compile(r"outcome\.json could not be written.*?; the run ends with (\d+): (.*)")
_AT = re.compile(r"^outcome +(\w+)(?: at step (\d+))?", re.MULTILINE)


def outcome_of(run: Path, told: str) -> dict[str, Any]:
    """outcome.json, or what the screen has in its place where a disk did not take it."""
    found, at = _NOT_WRITTEN.search(told), _AT.search(told)
    if not found or not at:
        return read(run / "outcome.json")
    return {
        "exit_code": int(found[1]),
        "reason": found[2],
        "status": at[1],
        "step": int(at[2] or 0),
    }


def refusal(told: str) -> str:
    """What a start that refuses says, without what it said before that."""
    return told[told.index("error:") :] if "error:" in told else ""


def traceback(told: str, kind: str) -> str:
    """What the first traceback of the harness says; launchers have their own, for a rank that did not end with 0."""
    for block in told.split(TRACEBACK)[1:]:
        if (
            kind in ("torchrun", "deepspeed")
            and f"{ROOT}/harness" not in block.partition("Error")[0]
        ):
            continue
        lines = block.splitlines()
        return next(
            (line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception|Interrupt)\b", line)),
            lines[-1],
        )[:300]
    return ""


@dataclass
class Rows:
    """What the attacker did to rows of a journal: how many more of each there are, or fewer. lossy: a disk took none
    for a while, so that nobody can tell which are gone.
    """

    altered: Counter[Row] = field(default_factory=Counter)
    lossy: bool = False

    def change(self, before: Iterable[Row], after: Iterable[Row]) -> None:
        """By what was done just now."""
        self.altered.update(after)
        self.altered.subtract(before)

    @property
    def touched(self) -> bool:
        return self.lossy or any(self.altered.values())


def compare(run: Path, undisturbed: Path, last: int, rows: Rows | None = None) -> str:
    """What tells a run that is through from one that was left alone; empty if nothing. Bytes first, then history."""
    ours, theirs = checkpoint(run, last), checkpoint(undisturbed, last)
    if not ours.is_dir():
        return f"bytes: exit code 0, and there is no checkpoint of step {last}"
    if problems := Store(run / "checkpoints", readonly=True).verify(last):
        return f"bytes: the last checkpoint does not verify: {problems[0]}"
    names = sorted(
        {path.name for folder in (ours, theirs) for path in folder.glob("*.safetensors")}
    )
    wrong = [name for name in names if _bytes(ours / name) != _bytes(theirs / name)]
    elsewhere = _rollbacks(run) != _rollbacks(undisturbed) or bool(_before_its_target(run))
    if _state(ours, elsewhere) != _state(theirs, elsewhere):
        wrong.append("state.json")
    if wrong:
        return f"bytes: the last checkpoint has others than an undisturbed run: {', '.join(wrong)}"
    return compare_history(run, undisturbed, last, rows or Rows())


def compare_history(run: Path, undisturbed: Path, last: int, altered: Rows) -> str:
    """Every row of every step, once, in order, to the last bit; the guard's events with them; and the outcome's counts.

    Where the attacker altered rows, nothing else may differ than what was altered: rows that were lost may have come
    back.
    """
    if not (run / "journal.jsonl").exists():
        return "history: there is no journal"
    outcome, expected = read(run / "outcome.json"), read(undisturbed / "outcome.json")
    if wrong := [
        key
        for key in ("status", "step", "applied", "skipped", "val_loss")
        if outcome.get(key) != expected[key]
    ]:
        return f"outcome: {', '.join(f'{key} is {outcome.get(key)}' for key in wrong)}"
    ours, theirs = _without_repeats(run), figures(undisturbed)
    missing = sorted({*range(1, last + 1)} - {step for step, *_ in ours})
    if _rollbacks(run) != _rollbacks(undisturbed):
        # To an older checkpoint, since the one after it was not saved: more steps are done again, to the same end.
        targets = [to for each in (run, undisturbed) for _, to in _rollbacks(each)]
        ours, theirs = (
            [row for row in rows if not min(targets) < row[0] <= max(targets)]
            for rows in (_without_repeats(run, _IN_ALL), figures(undisturbed, _IN_ALL))
        )
    # A row that became unreadable after the last save is done again, and written behind those that were not.
    again = altered.touched and Counter(ours) == Counter(theirs)
    if (ours == theirs or again) and not missing:
        return ""
    if altered.touched:
        return _not_altered(Counter(ours), Counter(theirs), altered)
    if missing:
        return (
            f"history: {len(missing)} steps have no row: {missing[:20]}; told: {_told_of_rows(run)}"
        )
    twice = sorted(
        {row[0] for row, count in Counter(ours).items() if count > 1 and row[2] == "metrics"}
    )
    if twice:
        return f"history: rows stand twice: {twice[:10]}"
    first = next(
        (f"{a} against {b}" for a, b in zip(ours, theirs, strict=False) if a != b),
        f"{len(ours)} rows, not {len(theirs)}",
    )
    return f"history: {first[:500]}"


def _not_altered(ours: Counter[Row], theirs: Counter[Row], altered: Rows) -> str:
    """The first difference that the attacker did not make."""
    for row in sorted({*ours, *theirs}):
        more, made = ours[row] - theirs[row], altered.altered[row]
        if more > max(made, 0):
            return f"history: nobody altered it, and it is there {ours[row]} times, not {theirs[row]}: {row}"[
                :500
            ]
        if more < min(made, 0) and not altered.lossy:
            return f"history: nobody altered it, and it is gone: {row}"[:500]
    return ""


def figures(run: Path, without: Sequence[str] = ()) -> list[Row]:
    """The rows of figures in order, then the events: a switch may be logged before the step before it is
    judged, or after it where the run stops there. without: figures that are left out.
    """
    metrics_rows: list[Row] = []
    events: list[Row] = []
    left_out = {*OF_THE_PROCESS, *without}
    if not (run / "journal.jsonl").is_file():
        return []
    for row in read_rows(run / "journal.jsonl"):
        if row["kind"] == "metrics":
            metrics = {
                name: value for name, value in row["metrics"].items() if name not in left_out
            }
            metrics_rows.append(
                (row["step"], row["attempt"], "metrics", repr(sorted(metrics.items())))
            )
        elif row["kind"] == "event" and not row["code"].startswith((*_OF_PROCESSES, *CAUSED)):
            events.append((row["step"], row["attempt"], row["code"], ""))
    return metrics_rows + sorted(events, key=lambda event: event[:2])


def events_of_rows(run: Path, names: tuple[str, ...] = ("journal.",)) -> list[dict[str, Any]]:
    """What the journal says of itself, or of what begins with one of `names`."""
    path = run / "journal.jsonl"
    events = (row for row in (read_rows(path) if path.is_file() else ()) if row["kind"] == "event")
    return [row for row in events if row["code"].startswith(names)]


def _told_of_rows(run: Path) -> list[str]:
    return [f"{row['code']} at step {row['step']}" for row in events_of_rows(run)]


def _rollbacks(run: Path) -> list[tuple[int, int]]:
    """From where to where."""
    path = run / "journal.jsonl"
    rows = read_rows(path, metrics=False) if path.is_file() else ()
    return [
        (row["step"], row["to_step"])
        for row in rows
        if row["kind"] == "event" and row["code"] == "guard.rollback"
    ]


def _before_its_target(run: Path) -> set[tuple[int, int]]:
    """(attempt, step) of what an attempt did again before the step that the rollback had gone back to: the checkpoint
    of that step was lost since."""
    rolled = _rollbacks(run)
    resumed = [(row["attempt"], row["step"]) for row in events_of_rows(run, ("run.resumed",))]
    return {
        (attempt, step)
        for attempt, begin in resumed
        for _, target in (rolled[attempt - 2 : attempt - 1] if attempt > 1 else ())
        for step in range(begin + 1, target + 1)
    }


def _without_repeats(run: Path, without: Sequence[str] = ()) -> list[Row]:
    """`figures` without those that are `_before_its_target`, as far as they are what they were the first time."""
    again, plain = _before_its_target(run), figures(run, _OF_ATTEMPTS)
    first = {(step, *rest) for step, attempt, *rest in plain if (attempt, step) not in again}
    return [
        row
        for row, (step, attempt, *rest) in zip(figures(run, without), plain, strict=True)
        if (attempt, step) not in again or (step, *rest) not in first
    ]


def _state(folder: Path, elsewhere: bool) -> dict[str, Any]:
    """state.json without how long older checkpoints have waited, and the keys of the config that may change; nor, where
    a rollback went elsewhere, the hash of where, and how many skips there were in all: some of them a second time."""
    content = read(folder / "state.json")
    content.pop("waiting", None)
    if elsewhere:
        content.pop("ledger", None)
        for key in ("skips", "recent_skips"):
            (content.get("budgets") or {}).pop(key, None)
    bound = content.get("bound") or {}
    config = bound.get("config") or {}
    for key in ("checkpoint", "tracking"):
        config.pop(key, None)
    return content


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
