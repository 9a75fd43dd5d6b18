"""`incidents.json`: what a rollback must not undo, so it lives beside the checkpoints and not in them."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from harness.checkpoint.failures import failed
from harness.core.errors import CheckpointError, Problem
from harness.core.files import read_json, write_json
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
        return incidents_from(read_json(path))
    except FileNotFoundError:
        return Incidents()
    except (OSError, ValueError) as error:
        raise CheckpointError(_damaged(path, str(error))) from error


def incidents_from(raw: Any) -> Incidents:
    """Incidents from what JSON says of them. Raises ValueError saying why they cannot be."""
    lists = [raw.get(key) for key in _LISTS] if isinstance(raw, dict) else [None]
    if not all(isinstance(each, list) for each in lists) or set(raw) != {field.name for field in fields(Incidents)}:
        raise ValueError("its keys are not those of this version")
    if raw["lowered"] not in _PRECISIONS:
        raise ValueError(f"lowered is none of {', '.join(map(repr, _PRECISIONS))}")
    counts = [value for key, value in raw.items() if key not in (*_LISTS, "lowered")]
    if not all(_is_count(value) for value in [*raw["skipped_windows"], *raw["returned_to"], *counts]):
        raise ValueError("a value is not a whole number from 0 to 2^63")
    return Incidents(**raw)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _damaged(path: Path, why: str) -> Problem:
    fix = "restore it from another copy of the run; without it, skipped data would be trained on and budgets forgotten"
    return Problem("cannot be read", str(path), why=why, fix=fix)
