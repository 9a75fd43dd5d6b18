"""A place where checkpoints will not fit, or cannot be written, met by the real command: row 5 of the fault matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import warm
from tests.support.runs import command, environment, metrics, train

pytestmark = pytest.mark.faults(5)

LIMIT = 5_000_000


def test_a_run_that_could_not_save_is_refused_first_and_can_start_later(tmp_path: Path) -> None:
    arguments = ("--name", "r", "train.steps=2")
    refused = warm.run(command(*arguments)[1:], tmp_path, environment(), file_limit=LIMIT)
    assert refused.returncode == 2, refused.stdout
    assert "files of at most 5 MB" in refused.stdout
    assert "ulimit" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert not (tmp_path / "runs" / "r" / "journal.jsonl").exists()
    done = train(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout
    assert [step for step, _ in metrics(tmp_path / "runs" / "r")] == [1, 2]


@pytest.mark.slow
def test_a_runs_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_bytes(b"")
    done = train(tmp_path, "--name", "r", "train.steps=2")
    assert done.returncode == 2
    assert "runs/r" in done.stdout
    assert "Traceback" not in done.stdout
