"""Atomic files: the old content or the new one, never a part, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.core.files import atomic_file, dump_json, write_json


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def interrupted() -> None:
        with atomic_file(path) as stream:
            stream.write(b"half of the new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert json.loads(path.read_bytes()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_dead_writers_leftover_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".a.json.tmp").write_bytes(b"left by a killed process, longer than what comes now")
    write_json(tmp_path / "a.json", [1])
    assert json.loads((tmp_path / "a.json").read_bytes()) == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}])
def test_json_has_no_nan(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", value)
    assert list(tmp_path.iterdir()) == []


def test_json_keeps_floats_and_the_order_of_keys() -> None:
    value = {"z": 0.1 + 0.2, "a": 1e-310, "m": "é"}
    assert list(json.loads(dump_json(value)).items()) == list(value.items())
