"""A run whose files were lost, swapped or put back from an older copy: refused by name, never another run in silence.

Row 27 of the fault matrix.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from harness.checkpoint.policy import load_ledger, save_ledger
from harness.core.errors import CheckpointError
from harness.core.state import RunLedger
from tests.support.runs import ROOT, TEXT, metrics, train

pytestmark = pytest.mark.faults(27)

RESUMED = 84


def run(folder: Path, steps: int, *arguments: str) -> tuple[int, str]:
    fixed = (
        "--name", "r", "train.global_batch=2", "train.micro_batch=2", "train.warmup_steps=10", "train.lr=5e-4",
        "train.eval_every=0", "model.target=spiking_models:gradient", "model.args={first: 72, last: 76, times: 100.0}",
        "checkpoint.every=40", "checkpoint.healthy_steps=4", "guard.snapshot_every=10",
        "guard.max_consecutive_skips=3", f"train.steps={steps}", "data.path=text",
    )  # fmt: skip
    done = train(folder, *fixed, *arguments)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 80 steps that passed over the windows 71 to 73 after a rollback."""
    folder = tmp_path_factory.mktemp("rolled_back")
    shutil.copy(ROOT / "tests" / "faults" / "spiking_models.py", folder)
    shutil.copytree(TEXT, folder / "text")
    code, said = run(folder, 80)
    assert code == 0, said
    assert json.loads((folder / "runs" / "r" / "incidents.json").read_text())[
        "skipped_windows"
    ] == [71, 72, 73]
    return folder


def forget(where: Path) -> None:
    (where / "incidents.json").unlink()


def forget_and_the_journal(where: Path) -> None:
    forget(where)
    (where / "journal.jsonl").unlink()


def put_back_an_older_copy(where: Path) -> None:
    save_ledger(where, RunLedger())


def take_one_window_out(where: Path) -> None:
    ledger = json.loads((where / "incidents.json").read_text())
    (where / "incidents.json").write_text(json.dumps({**ledger, "skipped_windows": [71, 72]}))


def take_another_runs(where: Path) -> None:
    save_ledger(where, RunLedger(attempt=2, skipped_windows=[5], returned_to=[60], rollbacks=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (forget, "the journal has steps of attempt 2; incidents.json knows of 1"),
        (forget_and_the_journal, "windows to skip"),
        (put_back_an_older_copy, "the journal has steps of attempt 2; incidents.json knows of 1"),
        (take_one_window_out, "its contents do not match their hash"),
        (take_another_runs, "windows to skip"),
    ],
)
def test_a_ledger_that_is_not_the_runs_own_is_refused(
    rolled_back: Path, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    folder = tmp_path / "work"
    shutil.copytree(rolled_back, folder)
    change(folder / "runs" / "r")
    outcome = (folder / "runs" / "r" / "outcome.json").read_bytes()
    code, told = run(folder, RESUMED)
    assert code == CheckpointError.exit_code, told
    assert said in told
    assert "incidents.json" in told
    assert (folder / "runs" / "r" / "outcome.json").read_bytes() == outcome, (
        "how the run ended is as true as before"
    )
    assert not [step for step, _ in metrics(folder / "runs" / "r", attempt=2) if step > 80], (
        "it must not train"
    )


@pytest.mark.slow
def test_another_runs_ledger_is_refused_before_the_first_rollback_too(
    rolled_back: Path, tmp_path: Path
) -> None:
    shutil.copy(rolled_back / "spiking_models.py", tmp_path)
    shutil.copytree(rolled_back / "text", tmp_path / "text")
    code, told = run(tmp_path, 4, "train.seed=1")
    assert code == 0, told
    ledger = tmp_path / "runs" / "r" / "incidents.json"
    assert not ledger.exists(), "no rollback yet"
    journal = (tmp_path / "runs" / "r" / "journal.jsonl").read_bytes()
    shutil.copy(rolled_back / "runs" / "r" / "incidents.json", ledger)
    code, told = run(tmp_path, 6, "train.seed=1")
    assert code == CheckpointError.exit_code, told
    assert "windows to skip" in told
    assert "incidents.json" in told
    assert not [step for step, _ in metrics(tmp_path / "runs" / "r", attempt=2)], "must not train"
    assert (tmp_path / "runs" / "r" / "journal.jsonl").read_bytes().startswith(journal)
    ledger.unlink()
    code, told = run(tmp_path, 6, "train.seed=1")
    assert code == 0, told
    assert "resumed at step 4" in told


def other_text(where: Path) -> None:
    """The source changed, and what the run kept of the old one is gone."""
    (where / "data" / "corpus.json").unlink()
    for path in (where.parent.parent / "text").rglob("*"):
        if path.is_file():
            path.write_bytes(
                path.read_bytes()[::-1] if path.read_bytes().isascii() else path.read_bytes()
            )


def another_rate(where: Path) -> None:
    """config.yaml is changed to fit a command that means another learning rate."""
    config = yaml.safe_load((where / "config.yaml").read_text())
    config["train"]["lr"] = 1e-3
    (where / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (other_text, (), "the data differ"),
        (another_rate, ("train.lr=1e-3",), "changed from 0.0005 to 0.001"),
    ],
)
def test_what_a_checkpoint_was_trained_with_is_held_to(
    rolled_back: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    folder = tmp_path / "work"
    shutil.copytree(rolled_back, folder)
    change(folder / "runs" / "r")
    code, told = run(folder, RESUMED, *arguments)
    assert code == CheckpointError.exit_code, told
    assert said in told
    assert not [step for step, _ in metrics(folder / "runs" / "r", attempt=2) if step > 80]


@pytest.mark.slow
def test_what_is_refused_leaves_damaged_checkpoints_where_they_are(
    rolled_back: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    shutil.copytree(rolled_back, folder)
    another_rate(folder / "runs" / "r")
    checkpoints = folder / "runs" / "r" / "checkpoints"
    (checkpoints / "step-00000080" / "state.json").write_text("{}")
    (checkpoints / "good.json").write_text('{"good": [40, 80]}')
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    code, told = run(folder, RESUMED, "train.lr=1e-3")
    assert code == CheckpointError.exit_code, told
    assert "changed from 0.0005 to 0.001" in told
    assert {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["outcome.json", "plan.json", "config.yaml", "journal.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_named(
    rolled_back: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "work"
    shutil.copytree(rolled_back, folder)
    place = folder / "runs" / "r" / name
    place.unlink()
    place.mkdir()
    replaced = [
        place.with_name(each)
        for each in ("config.yaml", "plan.json", "outcome.json")
        if each != name
    ]
    others = [each for each in replaced if each.exists()]
    before = [each.read_bytes() for each in others]
    code, told = run(folder, RESUMED)
    assert code == CheckpointError.exit_code, told
    assert f"runs/r/{name}" in told
    assert "Traceback" not in told
    assert [each.read_bytes() for each in others] == before, "a refusal changes nothing"
    place.rmdir()
    shutil.copy(rolled_back / "runs" / "r" / name, place)
    assert run(folder, RESUMED)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 8])
def test_a_config_that_was_cut_short_is_named(
    rolled_back: Path, tmp_path: Path, lines: int
) -> None:
    folder = tmp_path / "work"
    shutil.copytree(rolled_back, folder)
    config = folder / "runs" / "r" / "config.yaml"
    config.write_text("".join(config.read_text().splitlines(keepends=True)[:lines]))
    code, told = run(folder, RESUMED)
    assert code == CheckpointError.exit_code, told
    assert "config.yaml does not have it: the file was cut short" in told


@pytest.mark.slow
def test_an_untouched_run_goes_on(rolled_back: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.copytree(rolled_back, folder)
    code, told = run(folder, RESUMED)
    assert code == 0, told
    assert max(step for step, _ in metrics(folder / "runs" / "r", attempt=2)) == RESUMED
    assert load_ledger(folder / "runs" / "r").skipped_windows == [71, 72, 73]


def test_a_rollback_after_the_first_checkpoints_follows_them() -> None:
    ledger = RunLedger()
    ledger.begin("own")
    before = ledger.newest_hash
    ledger.go_back(20, [21])
    assert ledger.follows(before)
    again = RunLedger.from_json(json.loads(json.dumps(vars(ledger))))
    assert again == ledger
    again.begin("other")
    assert again == ledger, "a run begins once"


def test_runs_of_equal_rollbacks_have_ledgers_of_their_own() -> None:
    own, other = RunLedger(), RunLedger()
    own.begin("own")
    other.begin("other")
    for ledger in (own, other):
        ledger.go_back(20, [21])
    assert not other.follows(own.newest_hash)
    changed = json.loads(json.dumps(vars(other))) | {"hashes": ["run:own", *other.hashes[1:]]}
    with pytest.raises(ValueError, match="do not match their hash"):
        RunLedger.from_json(changed)


def test_a_later_rollback_still_follows_an_earlier_checkpoint() -> None:
    ledger = RunLedger()
    ledger.go_back(20, [21])
    before = ledger.newest_hash
    ledger.go_back(30, [33, 31])
    assert ledger.follows(before)
    assert RunLedger.from_json(json.loads(json.dumps(vars(ledger)))) == ledger
    assert not RunLedger(attempt=2, skipped_windows=[21]).follows(ledger.newest_hash)
