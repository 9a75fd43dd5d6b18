"""Damage to real checkpoints of an FP8 run: every bit counts, and a resume goes back to the newest that is whole."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from resume_driver import Driver, Ended, shared_driver
from resume_models import write_text
from resume_runs import arguments, checkpoint, codes, difference
from typer.testing import CliRunner

from harness.checkpoint.store import Store
from harness.cli import app
from harness.core.errors import CheckpointError

FLIPS = int(os.environ.get("FAULTS_FLIPS", "10000"))
SAVED, STEPS = (5, 10, 15), 18
FILES = (
    "manifest.json",
    "state.json",
    "model.safetensors",
    "optimizer.safetensors",
    "fp8.safetensors",
    "rng.safetensors",
)


@pytest.fixture(scope="module")
def driver() -> Driver:
    return shared_driver()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    text = write_text(tmp_path_factory.mktemp("text") / "numbered", 100)
    return arguments(
        text, "fp8_hybrid", STEPS, "checkpoint.every=5", "checkpoint.background=false", bad=(6,)
    )


@pytest.fixture(scope="module")
def undisturbed(
    driver: Driver, job: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of 18 steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = driver.train(folder, *job)
    assert ended.code == 0, ended.output
    return folder / "runs" / "r"


@pytest.fixture(scope="module")
def killed(driver: Driver, job: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, killed after step 17; checkpoints of steps 5, 10 and 15."""
    folder = tmp_path_factory.mktemp("killed")
    ended = driver.train(folder, *job, kill_at=17)
    assert ended.killed, ended.output
    run = folder / "runs" / "r"
    assert Store(run / "checkpoints", readonly=True).steps() == list(SAVED)
    assert {path.name for path in checkpoint(run, 15).iterdir()} == set(FILES)
    return run


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    """A copy of the killed run's folder."""
    return shutil.copytree(killed, tmp_path / "runs" / "r")


def flip(path: Path, bit: int) -> None:
    """Bit 0 is the lowest of the first byte. Done twice, the file is as it was."""
    with path.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def found(store: Store, step: int, path: Path, bit: int) -> bool:
    """Whether `verify` names the file, and only it, while one bit of it is flipped."""
    flip(path, bit)
    try:
        return [problem.where for problem in store.verify(step)] == [str(path)]
    finally:
        flip(path, bit)


@pytest.mark.timeout(3600)
@pytest.mark.faults(4)
@pytest.mark.parametrize(
    "flips", [100, pytest.param(FLIPS, marks=(pytest.mark.slow, pytest.mark.attack))]
)
def test_every_flipped_bit_is_found_and_its_file_named(
    run: Path, figure: Callable[..., None], flips: int
) -> None:
    store, generator = Store(run / "checkpoints", readonly=True), random.Random(flips)
    missed = []
    for number in range(flips):
        step, name = (
            generator.choice(SAVED),
            FILES[number % len(FILES)],
        )  # large files must not take all
        path = checkpoint(run, step) / name
        bit = generator.randrange(8 * path.stat().st_size)
        if not found(store, step, path, bit):
            missed.append((step, name, bit))
    if flips == FLIPS:
        figure(
            4,
            "single-bit flips found, with the file named",
            (flips - len(missed), flips),
            target="all",
        )
    assert missed == []
    assert all(store.verify(step) == [] for step in SAVED)


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.timeout(3600)
@pytest.mark.faults(4)
def test_every_bit_of_a_manifest_counts(run: Path, figure: Callable[..., None]) -> None:
    store, path = Store(run / "checkpoints", readonly=True), checkpoint(run, 15) / "manifest.json"
    bits = 8 * path.stat().st_size
    missed = [bit for bit in range(bits) if not found(store, 15, path, bit)]
    figure(4, "bits of a manifest whose flip is found", (bits - len(missed), bits), target="all")
    assert missed == []


@pytest.mark.faults(4)
def test_the_command_names_the_file_and_a_load_refuses_it(run: Path) -> None:
    path = checkpoint(run, 10) / "fp8.safetensors"
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
    flip(path, 8 * (path.stat().st_size - 3))
    told = CliRunner().invoke(app, ["verify", str(run)])
    assert told.exit_code == 1
    assert f"{path}: differs from its SHA-256" in told.output
    assert "2 of 3 checkpoints verify" in told.output
    with pytest.raises(CheckpointError, match=r"fp8\.safetensors: differs from its SHA-256"):
        Store(run / "checkpoints", readonly=True).load(10)


def cut_short(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path, _: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path, _: Path) -> None:
    flip(path, 4 * path.stat().st_size)


def deleted(path: Path, _: Path) -> None:
    path.unlink()


def of_another_step(path: Path, other: Path) -> None:
    shutil.copy(other / path.name, path)


def a_link(path: Path, other: Path) -> None:
    path.rename(other.parent / f"elsewhere-{path.name}")
    path.symlink_to(other.parent / f"elsewhere-{path.name}")


KINDS = (cut_short, emptied, flipped, deleted, of_another_step, a_link)
QUICK = {
    ("cut_short", FILES[2]),
    ("flipped", FILES[4]),
    ("of_another_step", FILES[3]),
    ("a_link", FILES[1]),
}
SWEEP = (pytest.mark.slow, pytest.mark.attack)
Damage = Callable[[Path, Path], None]


def resume(driver: Driver, run: Path, job: tuple[str, ...]) -> Ended:
    return driver.train(run.parent.parent, *job)


def assert_resumed_at(step: int, ended: Ended, run: Path, undisturbed: Path) -> None:
    assert ended.code == 0, ended.output
    assert f"resumed at step {step}" in ended.output
    assert "set aside" in ended.output
    assert "checkpoint.quarantined" in codes(run)
    assert difference(run, undisturbed, STEPS) == ""


@pytest.mark.slow
@pytest.mark.faults(4)
@pytest.mark.parametrize(
    ("damage", "name"),
    [
        pytest.param(kind, name, marks=() if (kind.__name__, name) in QUICK else SWEEP)
        for kind in KINDS
        for name in FILES
    ],
)
def test_a_damaged_newest_checkpoint_is_set_aside_for_the_one_before(
    driver: Driver, job: tuple[str, ...], run: Path, undisturbed: Path, damage: Damage, name: str
) -> None:
    damage(checkpoint(run, 15) / name, checkpoint(run, 10))
    assert Store(run / "checkpoints", readonly=True).verify(15)
    assert_resumed_at(10, resume(driver, run, job), run, undisturbed)
    assert (run / "checkpoints" / "quarantine-step-00000015-1").is_dir()


@pytest.mark.slow
@pytest.mark.faults(4)
def test_two_damaged_checkpoints_lead_to_the_third(
    driver: Driver, job: tuple[str, ...], run: Path, undisturbed: Path
) -> None:
    cut_short(checkpoint(run, 15) / "model.safetensors", run)
    shutil.rmtree(checkpoint(run, 10))
    shutil.copytree(checkpoint(run, 5), checkpoint(run, 10))  # whole, but of another step
    assert_resumed_at(5, resume(driver, run, job), run, undisturbed)


@pytest.mark.faults(4)
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(
    driver: Driver, job: tuple[str, ...], run: Path
) -> None:
    for step in SAVED:
        flipped(checkpoint(run, step) / "model.safetensors", run)
    before = (run / "journal.jsonl").read_bytes()
    ended = resume(driver, run, job)
    assert ended.code == 2, ended.output
    for step in SAVED:
        assert f"step-{step:08d}" in ended.output
    assert (run / "journal.jsonl").read_bytes().startswith(before)
    assert not (run / "outcome.json").exists()
