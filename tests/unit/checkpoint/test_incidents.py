"""Incidents come back as they were, and anything else is refused: forgetting them would train on bad data again."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.checkpoint.incidents import load_incidents, save_incidents
from harness.core.errors import CheckpointError
from harness.core.state import Incidents


def test_incidents_come_back(tmp_path: Path) -> None:
    assert load_incidents(tmp_path) == Incidents()
    incidents = Incidents(attempt=3, skipped_windows=[40, 7], rollbacks=2, skips=9, switches=1)
    save_incidents(tmp_path, incidents)
    assert load_incidents(tmp_path) == incidents
    assert [path.name for path in tmp_path.iterdir()] == ["incidents.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"attempt": 1}',
        b'{"attempt": 1, "skipped_windows": [1.5], "rollbacks": 0, "skips": 0, "switches": 0}',
        b'{"attempt": -1, "skipped_windows": [], "rollbacks": 0, "skips": 0, "switches": 0}',
        b'{"attempt": true, "skipped_windows": [], "rollbacks": 0, "skips": 0, "switches": 0}',
        b'{"attempt": 1, "skipped_windows": [], "rollbacks": 0, "skips": 0, "switches": 0, "more": 1}',
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "incidents.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"incidents\.json"):
        load_incidents(tmp_path)


def test_incidents_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_incidents(tmp_path / "gone", Incidents())
