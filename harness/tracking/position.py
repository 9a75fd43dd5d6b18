"""How far MLflow has the journal: `shipper.json`, and the questions others ask of it without importing mlflow."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.core.files import read_json, write_json
from harness.tracking.rows import finished_size

JOURNAL = "journal.jsonl"
POSITION = "shipper.json"


@dataclass
class Position:
    """run_id: MLflow's, None until it exists. offset: journal bytes delivered. key: finds a run created just before a
    kill, whose id was never written down."""

    run_id: str | None = None
    offset: int = 0
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def load(cls, run_dir: Path) -> Position:
        """The stored position; the beginning if there is none, it is damaged, or the journal does not reach it."""
        try:
            stored = read_json(run_dir / POSITION)
            position = cls(stored["run_id"], stored["offset"], stored["key"])
        except (OSError, ValueError, KeyError, TypeError):
            return cls()
        texts = isinstance(position.key, str) and isinstance(position.run_id, str | None)
        if not texts or type(position.offset) is not int or position.offset < 0:
            return cls()
        # After a power cut the journal may be shorter than what was delivered of it. To send a row again is harmless.
        if not _ends_a_row(run_dir / JOURNAL, position.offset):
            position.offset = 0
        return position

    def save(self, run_dir: Path) -> None:
        """Write atomically: a reader sees the old position or this one."""
        write_json(run_dir / POSITION, asdict(self))


def delivered(run_dir: Path) -> bool:
    """Whether MLflow has every finished row of this run's journal."""
    journal = run_dir / JOURNAL
    return not journal.exists() or Position.load(run_dir).offset == finished_size(journal)


def tracking_uri(environment: Mapping[str, str] = os.environ, folder: Path | None = None) -> str:
    """MLFLOW_TRACKING_URI where it is set, else an SQLite file in `folder` (default: the working folder)."""
    return environment.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder or Path.cwd()).resolve() / 'mlflow.db'}"


def _ends_a_row(journal: Path, offset: int) -> bool:
    if offset == 0:
        return True
    try:
        with journal.open("rb") as file:
            file.seek(offset - 1)
            return file.read(1) == b"\n"
    except (OSError, ValueError):
        return False
