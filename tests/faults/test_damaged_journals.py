"""Journals that somebody cut off, deleted, replaced, changed or doubled: missed and told.

Row 27 of the fault matrix.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from harness.tracking.journal import JOURNAL, Journal, read_rows
from harness.tracking.standing import Seal, read_seal, seal_file
from tests.support.runs import events, harness, train

pytestmark = pytest.mark.faults(27)

RUN = ("--name", "r", "checkpoint.every=5")


def written(folder: Path, steps: int = 9) -> Path:
    """A journal of `steps` steps, sealed at its end."""
    path = folder / JOURNAL
    (folder / "config.yaml").touch()
    with Journal(path) as journal:
        for step in range(1, steps + 1):
            journal.metrics(step, {"train/loss": 1.0 / step})
    return path


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def cut(path: Path) -> None:
    path.write_bytes(b"".join(lines(path)[:-3]))


def doubled(path: Path) -> None:
    path.write_bytes(b"".join([*lines(path)[:5], lines(path)[4], *lines(path)[5:]]))


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"train/loss": 0.5', b'"train/loss": 0.6'))


def taken_out(path: Path) -> None:
    path.write_bytes(b"".join([*lines(path)[:2], *lines(path)[4:]]))


def deleted(path: Path) -> None:
    path.unlink()


def an_older_copy(path: Path) -> None:
    cut(path)
    seal_file(path).unlink()


DAMAGE: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "no figures of 3 steps: 7-9"),
    "doubled": (doubled, "figures of 1 steps stand twice: 5"),
    "changed": (changed, "every step has its figures"),
    "taken out": (taken_out, "no figures of 2 steps: 3-4"),
    "deleted": (deleted, "no figures of 9 steps: 1-9"),
    "an older copy": (
        an_older_copy,
        "its last row is of step 6, and the run goes on from step 9; no figures of 3 steps",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_wrong_with_a_journal_is_known_when_it_is_opened(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path)
    damage, told = DAMAGE[kind]
    damage(path)
    with Journal(path, resume_step=10) as journal:
        assert told in journal.damage
        journal.metrics(10, {"train/loss": 0.1})
    with Journal(path, resume_step=11) as journal:
        assert journal.damage == "", "told once: what stands now is sealed"


def test_a_journal_that_is_whole_is_in_order(tmp_path: Path) -> None:
    path = written(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"kind": "event", "ste')
    for first in (10, 8, 1):
        with Journal(path, resume_step=first) as journal:
            assert journal.damage == ""
            journal.event(first, "guard.test")


def test_a_damaged_seal_raises_no_false_alarm(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = seal_file(path).read_bytes()
    for place in range(len(whole)):
        seal_file(path).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert Seal.of(path)[1] == "", place
    assert set(read_seal(path)) <= {"step", "bytes", "sha256", "self"}


def test_rows_after_the_last_save_that_stand_twice_are_told(tmp_path: Path) -> None:
    path = written(tmp_path, 5)
    with Journal(path) as journal:
        for step in (6, 7, 8):
            journal.metrics(step, {"train/loss": 1.0})
        seal_file(path).rename(tmp_path / "kept")
        shutil.copy(tmp_path / "kept", seal_file(path))
        journal.mute()
    with path.open("ab") as file:
        file.write(lines(path)[-1])
    with Journal(path, resume_step=6) as journal:
        assert "rows of steps that are done again stand twice: 8" in journal.damage


def renamed(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy(path, other)
    cut(other)
    other.replace(path)


@pytest.mark.parametrize("kind", [deleted, renamed, replaced])
def test_a_journal_taken_away_in_mid_run_is_put_back(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        for step in range(1, 10):
            journal.metrics(step, {"train/loss": 1.0})
            if step == 5:
                kind(journal.path)
        journal.flush()
        assert "while the run went on, and was put back as it had been" in journal.damage
        journal.metrics(10, {"train/loss": 1.0})
    assert [row["step"] for row in read_rows(tmp_path / JOURNAL)] == list(range(1, 11))


def test_a_journal_changed_in_mid_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with Journal(tmp_path / JOURNAL) as journal:
        for step in range(1, 10):
            journal.metrics(step, {"train/loss": 1.0})
            if step == 5:
                with journal.path.open("r+b") as file:
                    file.truncate(0)
        journal.flush()
        assert "somebody else changed it" in journal.damage
        assert "no figures of 5 steps: 1-5" in journal.damage
        journal.damage = ""
        journal.metrics(10, {"train/loss": 1.0})
        journal.flush()
        assert journal.damage == "", "told once"


@pytest.mark.slow
def test_lost_steps_are_told_by_run_summary_and_and_verify(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    mlflow = ("tracking.mlflow=true", "tracking.drain_seconds=120")
    done = train(tmp_path, *RUN, *mlflow, "train.steps=12")
    assert done.returncode == 0, done.stdout
    assert "delivered" in done.stdout
    assert harness(tmp_path, "verify", str(run)).returncode == 0
    kept = [
        line
        for line in lines(run / JOURNAL)
        if not any(b'"metrics", "step": %d,' % step in line for step in range(4, 10))
    ]
    (run / JOURNAL).write_bytes(b"".join(kept))
    verified = harness(tmp_path, "verify", str(run))
    assert verified.returncode == 1
    assert "is not as the run left it" in verified.stdout
    assert "no figures of 6 steps: 4-9" in harness(tmp_path, "inspect", str(run)).stdout

    done = train(tmp_path, *RUN, *mlflow, "train.steps=14")
    assert done.returncode == 0, done.stdout
    assert "journal.changed: journal.jsonl is not as this run left it" in done.stdout
    (event,) = events(run, "journal.changed")
    assert "no figures of 6 steps: 4-9" in event["text"]
