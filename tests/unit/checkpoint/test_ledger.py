"""The ledger comes back as it was, and anything else is refused: forgetting it would train on bad data again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.checkpoint.policy import load_ledger, save_ledger
from harness.core.errors import CheckpointError
from harness.core.state import RunLedger


def test_a_ledger_comes_back(tmp_path: Path) -> None:
    assert load_ledger(tmp_path) == RunLedger()
    ledger = RunLedger(
        attempt=3, skipped_windows=[40, 7], rollbacks=2, skips=9, switches=1, lowered="bf16"
    )
    save_ledger(tmp_path, ledger)
    assert load_ledger(tmp_path) == ledger
    assert [path.name for path in tmp_path.iterdir()] == ["incidents.json"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"attempt": 1}'])
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "incidents.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"incidents\.json"):
        load_ledger(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"skipped_windows": [1.5]}, "whole number"),
        ({"skipped_windows": 3}, "keys"),
        ({"attempt": -1}, "whole number"),
        ({"attempt": True}, "whole number"),
        ({"lowered": "fp64"}, "lowered"),
        ({"lowered": None}, "lowered"),
        ({"more": 1}, "keys"),
    ],
)
def test_one_damaged_value_is_refused(tmp_path: Path, change: dict[str, object], why: str) -> None:
    save_ledger(tmp_path, RunLedger())
    path = tmp_path / "incidents.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=why):
        load_ledger(tmp_path)


def test_a_ledger_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_ledger(tmp_path / "gone", RunLedger())
