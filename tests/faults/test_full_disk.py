"""A disk that fills up under a real run, and may have room again: row 3 of the fault matrix, from the user's side."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launch_support import (
    ARGUMENTS,
    START_SECONDS,
    STEPS,
    Launch,
    finishes,
    launch,
    nothing_left,  # noqa: F401
    undisturbed,
    wait_until,
)

from harness.checkpoint.store import Store
from tests.support.runs import metrics, train, wait_for_checkpoint

pytestmark = [pytest.mark.faults(3), pytest.mark.slow]

HERE = Path(__file__).parent
HOLDING = ("checkpoint.max_failures=2", "checkpoint.retry_seconds=0.5")


@dataclass(frozen=True)
class Disk:
    """A disk around the run folder, of a size that can be chosen while the run goes on."""

    folder: Path
    injector: Path

    @property
    def size(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.size"

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "r"

    def variables(self) -> dict[str, str]:
        return {
            "DISK": str(self.folder / "runs"),
            "DISK_SIZE": str(self.size),
            "LD_PRELOAD": str(self.injector),
        }

    def fill(self, left: int = 100) -> None:
        """Leave so many bytes of it free."""
        used = sum(
            path.stat().st_size for path in (self.folder / "runs").rglob("*") if path.is_file()
        )
        temporary = self.size.with_suffix(".new")
        temporary.write_text(str(used + left))
        temporary.rename(self.size)

    def make_room(self) -> None:
        self.size.unlink()

    def refused(self) -> int:
        """How often it had no room: the fault fired."""
        counter = Path(f"{self.size}.refused")
        return counter.stat().st_size if counter.exists() else 0

    def start(self, *more: str, kind: str = "python", ranks: int = 1) -> Launch:
        """A run whose disk is full from its second checkpoint on."""
        job = launch(
            self.folder, *ARGUMENTS, *more, kind=kind, ranks=ranks, variables=self.variables()
        )
        wait_for_checkpoint(self.run, 20, job.process, START_SECONDS)
        self.fill()
        return job


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, (
        "no cc, gcc or clang to build the fault injector with: install one (apt-get install gcc)"
    )
    library = tmp_path_factory.mktemp("injector") / "small_disk.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "small_disk.c", "-ldl"],
        check=True,
    )
    return library


@pytest.fixture
def disk(tmp_path: Path, injector: Path) -> Disk:
    (tmp_path / "disk").mkdir()
    return Disk(tmp_path / "disk", injector)


def told(job: Launch, words: str) -> Callable[[], bool]:
    return lambda: words in job.output() or job.process.poll() is not None


def holds(job: Launch) -> None:
    wait_until(told(job, "checkpoint.paused"), "the run holds", START_SECONDS)
    assert job.process.poll() is None, job.output()


def outcome(run: Path) -> dict[str, Any]:
    return json.loads((run / "outcome.json").read_text())


def newest(folder: Path) -> int:
    """Step of the newest checkpoint that verifies."""
    store = Store(folder, readonly=True)
    return max(step for step in store.steps() if not store.verify(step))


def assert_lost(run: Path) -> None:
    """The outcome names the steps that no checkpoint has."""
    ended = outcome(run)
    assert f"steps {newest(run / 'checkpoints') + 1} to {ended['step']} are lost" in ended["reason"]


def holds_and_goes_on(disk: Disk, kind: str, ranks: int, seconds: float) -> str:
    """The run reports the full disk, waits `seconds` for room, goes on by itself and ends as an undisturbed one.

    Returns its output.
    """
    job = disk.start(*HOLDING, "engine.timeout_seconds=10", kind=kind, ranks=ranks)
    holds(job)
    assert disk.refused()
    stopped = max(step for step, _ in metrics(disk.run))
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(seconds)
    disk.make_room()
    assert job.process.wait(timeout=START_SECONDS) == 0, job.output()
    job.ended(10)
    assert stopped < STEPS
    assert (metrics(disk.run), metrics(disk.run, "val/loss")) == undisturbed(kind, ranks), (
        "nothing is missing"
    )
    assert newest(disk.run / "checkpoints") == STEPS
    return job.output()


def test_a_full_disk_is_told_waited_for_and_forgotten(disk: Disk) -> None:
    said = holds_and_goes_on(disk, "python", 1, 3)
    first = re.search(r"step \d+: checkpoint\.failed: .*", said)
    assert first, said
    assert "No space left on device" in said
    assert re.search(r"1 save in a row failed; the newest checkpoint is of step \d+", said), said
    assert re.search(r"2 saves in a row failed, for 0:\d\d", said), said
    assert said.count(": checkpoint.paused: ") == 1
    assert "checkpoint.saved_again" in said
    assert f"{STEPS}: {STEPS} applied, 0 skipped" in said, (
        "counted by the state, not by what the journal still has"
    )
    assert "Traceback" not in said
    ended = outcome(disk.run)
    assert (ended["status"], ended["exit_code"], ended["step"], ended["applied"]) == (
        "done",
        0,
        STEPS,
        STEPS,
    )


@pytest.mark.slow
@pytest.mark.attack  # minutes each
@pytest.mark.dist
@pytest.mark.parametrize("kind", ["torchrun", "deepspeed"])
def test_ranks_hold_together_for_longer_than_their_timeout(disk: Disk, kind: str) -> None:
    holds_and_goes_on(disk, kind, 2, 15)


def stopped_while_it_holds(disk: Disk, *more: str, name: str = "SIGTERM") -> tuple[Launch, int]:
    job = disk.start(*HOLDING, *more)
    holds(job)
    job.process.send_signal(signal.Signals[name])
    code = job.process.wait(timeout=60)
    job.ended(10)
    assert "Traceback" not in job.output(), job.output()
    assert disk.refused()
    return job, code


@pytest.mark.nightly
def test_stopped_while_it_holds_it_names_the_steps_that_are_lost(disk: Disk) -> None:
    job, code = stopped_while_it_holds(disk)
    assert code == 1, job.output()
    ended = outcome(disk.run)
    assert (ended["status"], ended["exit_code"]) == ("failed", 1)
    assert_lost(disk.run)
    assert "SIGTERM" in ended["reason"]
    assert ended["reason"] in " ".join(job.output().split())
    disk.make_room()
    finishes(disk.folder)


@pytest.mark.nightly
def test_stopped_while_it_holds_it_saves_if_there_is_room_by_then(disk: Disk) -> None:
    job = disk.start("checkpoint.max_failures=1", "checkpoint.retry_seconds=100")
    holds(job)
    disk.make_room()
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=60) == 75, job.output()
    assert outcome(disk.run)["step"] == newest(disk.run / "checkpoints") >= 30
    finishes(disk.folder)


@pytest.mark.nightly
def test_stopped_while_it_holds_it_saves_elsewhere_and_comes_back(
    disk: Disk, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    job, code = stopped_while_it_holds(disk, f"checkpoint.emergency_path={elsewhere}")
    assert code == 75, job.output()
    ended = outcome(disk.run)
    (folder,) = elsewhere.iterdir()
    assert newest(folder) == ended["step"] > 20
    assert str(folder) in ended["reason"]
    assert str(folder) in job.output()
    disk.make_room()
    done = train(disk.folder, *ARGUMENTS)  # although that command does not name the place
    assert done.returncode == 0, done.stdout
    assert f"step {ended['step']}: checkpoint.taken_back" in done.stdout
    assert f"resumed at step {ended['step']}" in done.stdout
    assert not list(elsewhere.iterdir()), "taken back"
    assert dict(metrics(disk.run)).items() <= dict(undisturbed()[0]).items(), "bit for bit"
    assert metrics(disk.run)[-1] == undisturbed()[0][-1]


@pytest.mark.nightly
def test_it_halts_where_that_is_wanted(disk: Disk) -> None:
    job = disk.start("checkpoint.max_failures=1", "checkpoint.on_failure=halt")
    assert job.process.wait(timeout=60) == 3, job.output()
    ended = outcome(disk.run)
    assert ended["status"] == "halted"
    assert_lost(disk.run)
    disk.make_room()
    finishes(disk.folder)


@pytest.mark.nightly
def test_a_run_whose_end_is_not_saved_is_not_done(disk: Disk) -> None:
    job = disk.start("checkpoint.on_failure=continue")
    assert job.process.wait(timeout=120) == 1, job.output()
    assert "Traceback" not in job.output()
    assert "checkpoint.paused" not in job.output()
    ended = outcome(disk.run)
    assert (ended["status"], ended["step"], ended["applied"]) == ("failed", STEPS, STEPS)
    assert len(metrics(disk.run)) < STEPS, "the journal does not know"
    assert f"{STEPS}: {STEPS} applied, 0 skipped" in job.output()
    assert_lost(disk.run)
    disk.make_room()
    finishes(disk.folder)


@pytest.mark.nightly
def test_the_last_words_are_written_without_a_byte_free(disk: Disk) -> None:
    """Nor a name: the file that is kept in reserve becomes outcome.json."""
    job = disk.start(*HOLDING)
    holds(job)
    disk.size.write_text("0")
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.process.wait(timeout=60) == 1, job.output()
    assert_lost(disk.run)
    assert "Traceback" not in job.output()
    disk.make_room()
    finishes(disk.folder)
