"""Links, pipes and names that somebody left where the harness writes, deletes or imports. Row 24."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hostile import make_run

from harness.checkpoint.store import Store
from harness.core.config import ModelConfig
from harness.core.errors import CheckpointError, ConfigError
from harness.core.facts import StepFacts
from harness.core.files import step_name, write_json
from harness.core.state import RunLedger
from harness.models import build_model
from harness.replay.flight import FlightRecorder, Surroundings, read_records
from harness.report import page as report
from harness.run_folder import RunLock, read_outcome
from harness.tracking.journal import Journal

pytestmark = pytest.mark.faults(24)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_writing_does_not_go_through_what_was_planted(run_dir: Path, kind: str) -> None:
    victim, planted = run_dir.parent / "victim", run_dir / ".outcome.json.tmp"
    victim.write_text("mine")
    planted.symlink_to(victim) if kind == "link" else os.mkfifo(planted)
    write_json(run_dir / "outcome.json", {"status": "done"})
    assert victim.read_text() == "mine"
    assert read_outcome(run_dir) == {"status": "done"}


@pytest.mark.parametrize("name", ["lock", "journal.jsonl", "report.html", "plots/loss.png"])
def test_no_file_is_changed_through_a_planted_link(run_dir: Path, name: str) -> None:
    victim = run_dir.parent / "victim"
    victim.write_text("mine\n")
    journal = (run_dir / "journal.jsonl").read_bytes()
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / name).symlink_to(victim)
    if name == "lock":
        with pytest.raises(CheckpointError, match="cannot be locked"):
            RunLock(run_dir).acquire()
    elif name == "journal.jsonl":
        with pytest.raises(ConfigError, match="cannot be opened"):
            Journal(run_dir / name)
    else:
        assert (run_dir / "journal.jsonl").read_bytes() == journal
        report.write(run_dir)
        assert not (run_dir / name).is_symlink(), "written in its own place"
    assert victim.read_text() == "mine\n"


def test_a_lock_with_a_hostile_owner_is_still_a_lock(run_dir: Path) -> None:
    with RunLock(run_dir):
        (run_dir / "lock").write_bytes(b"[" * 4096)
        with pytest.raises(CheckpointError, match="owner not known"):
            RunLock(run_dir).acquire()


@pytest.mark.parametrize(
    "target", ["os:system", "subprocess:call", "builtins:exec", "importlib.util:find_spec"]
)
def test_a_model_is_never_one_of_pythons_own_functions(run_dir: Path, target: str) -> None:
    canary = run_dir / "canary"
    with pytest.raises(ConfigError, match="Python's own library"):
        build_model(ModelConfig(target=target, args={"command": f"touch {canary}"}))
    assert not canary.exists()


def test_records_of_bad_steps_cannot_have_other_folders_deleted(run_dir: Path) -> None:
    """The recorder deletes its oldest records, by their steps."""
    victim = run_dir.parent / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    facts = StepFacts(step=900, window=900, loss=1.0, grad_norm=1.0, lr=1e-3, loss_scale=1.0, applied=False,
                      applied_steps=1, tokens=4, seconds=0.1)  # fmt: skip
    recorder = FlightRecorder(
        run_dir, Store(run_dir / "checkpoints"), Surroundings("fp32", 1, "single", "cpu")
    )
    recorder.keep(facts, [1], ["loss.skip"], RunLedger())
    kept = json.loads((run_dir / "flight" / "step-00000900" / "record.json").read_bytes())
    (run_dir / "flight" / "step-..").mkdir()
    for step in range(1, 6):
        write_json(record_of(run_dir, step), kept | {"step": f"../../../{victim.name}"})
    write_json(record_of(run_dir, 6), kept)
    assert [found.step for found in read_records(run_dir)] == [900]
    recorder.keep(replace(facts, step=950), [1], ["loss.skip"], RunLedger())
    assert (victim / "file").read_text() == "mine"
    write_json(record_of(run_dir, 5), kept | {"step": 5})
    assert [found.step for found in read_records(run_dir)] == [5, 900, 950], (
        "with its own step it is a record"
    )


def record_of(run_dir: Path, step: int) -> Path:
    folder = run_dir / "flight" / step_name(step)
    folder.mkdir(exist_ok=True)
    return folder / "record.json"
