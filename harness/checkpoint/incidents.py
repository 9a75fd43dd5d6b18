"""`incidents.json`: what a rollback must not undo, so it lives beside the checkpoints and not in them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from harness.checkpoint.failures import failed
from harness.core.atomic import write_json
from harness.core.errors import CheckpointError, Problem
from harness.core.state import Incidents

_FILE = "incidents.json"
_LISTS = ("skipped_windows", "returned_to")
_PRECISIONS = ("", "bf16", "fp32")


def save_incidents(run_dir: Path, incidents: Incidents) -> None:
    """Replace the run's incidents. Raises CheckpointError if they cannot be written."""
    try:
        write_json(run_dir / _FILE, asdict(incidents))
    except OSError as error:
        raise failed("cannot be written", run_dir / _FILE, error) from error


def load_incidents(run_dir: Path) -> Incidents:
    """The run's incidents; new ones if it has none. Raises CheckpointError if they cannot be read as such."""
    path = run_dir / _FILE
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Incidents()
    except (OSError, ValueError) as error:
        raise CheckpointError(_damaged(path, str(error))) from error
    lists = [raw.get(key) for key in _LISTS] if isinstance(raw, dict) else [None]
    if not all(isinstance(each, list) for each in lists) or set(raw) != {field.name for field in fields(Incidents)}:
        raise CheckpointError(_damaged(path, "its keys are not those of this version"))
    if raw["lowered"] not in _PRECISIONS:
        raise CheckpointError(_damaged(path, f"lowered is none of {', '.join(map(repr, _PRECISIONS))}"))
    counts = [value for key, value in raw.items() if key not in (*_LISTS, "lowered")]
    if not all(_is_count(value) for value in [*raw["skipped_windows"], *raw["returned_to"], *counts]):
        raise CheckpointError(_damaged(path, "a value is not a whole number of at least 0"))
    return Incidents(**raw)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _damaged(path: Path, why: str) -> Problem:
    fix = "restore it from another copy of the run; without it, skipped data would be trained on and budgets forgotten"
    return Problem("cannot be read", str(path), why=why, fix=fix)
