"""Kill a run at any of its steps, or at any moment, and resume: it equals one that was left alone.

Each kill has a run of its own: SIGKILL as soon as step k is in the weights, then the same command again, to the end.
(One run killed at every step would show less: with a save before each kill it is resumed from a step, never replays
any; with fewer saves it never passes the first one.) Between the two, up to six steps run twice.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from resume_driver import HERE, ROOT, Driver, shared_driver
from resume_models import write_text
from resume_runs import BATCH, arguments, codes, consumed, difference

from tests.support.runs import train

STEPS, SAMPLES = 50, 240
EVERY_STEP = ("fp8_hybrid", "fp16_scaler")
DEPTH = os.environ.get("FAULTS_RESUME_STEPS", "")
KILLS = int(os.environ.get("FAULTS_KILLS", "100"))


@dataclass(frozen=True)
class Variant:
    """bad: windows whose loss is NaN. outlier: forwards in which FP8 tensors outgrow their scales.

    arguments: overrides. must: events that have to be in the journal.
    """

    bad: tuple[int, ...] = (11,)
    outlier: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()
    must: tuple[str, ...] = ("nonfinite.skip",)


VARIANTS: Mapping[str, Variant] = {
    # A layer leaves FP8, one step is skipped, and two in a row make the run go back.
    "fp8_hybrid": Variant(
        bad=(11, 36, 37),
        outlier=(40, 48),
        arguments=(
            "guard.max_consecutive_skips=2",
            "checkpoint.healthy_steps=3",
            "guard.snapshot_every=0",
        ),
        must=("nonfinite.skip", "precision.demote", "precision.switched", "guard.rollback"),
    ),
    # Three failures in a row: the whole run leaves fp16.
    "fp16_scaler": Variant(bad=(11, 26, 27, 28), must=("nonfinite.skip", "precision.lowered")),
    **{name: Variant() for name in ("fp16_overflow", "fp16_underflow", "bf16", "fp32", "auto")},
    **{name: Variant() for name in ("fp8_dynamic", "fp8_current", "fp8_block")},
}


@pytest.fixture(scope="module")
def driver() -> Driver:
    return shared_driver()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "numbered", SAMPLES)


def command(name: str, text: Path) -> tuple[str, ...]:
    """The command line of a variant's run."""
    variant = VARIANTS[name]
    more = ("checkpoint.every=7", "train.eval_every=20", *variant.arguments)
    return arguments(text, name, STEPS, *more, bad=variant.bad, outlier=variant.outlier)


def leave_alone(driver: Driver, folder: Path, name: str, text: Path) -> Path:
    """A run of the variant that nothing disturbs, in which all happened that it is meant for."""
    folder.mkdir()
    ended = driver.train(folder, *command(name, text))
    assert ended.code == 0, ended.output
    run = folder / "runs" / "r"
    assert set(VARIANTS[name].must) <= codes(run), f"{VARIANTS[name].must}: {sorted(codes(run))}"
    return run


def kill_and_resume(driver: Driver, folder: Path, name: str, text: Path, step: int) -> Path:
    folder.mkdir()
    killed = driver.train(folder, *command(name, text), kill_at=step)
    assert killed.killed, f"step {step}: {killed.output}"
    run = folder / "runs" / "r"
    assert not (run / "outcome.json").exists()
    resumed = driver.train(folder, *command(name, text))
    assert resumed.code == 0, f"step {step}: {resumed.output}"
    return run


def sweep(
    driver: Driver, tmp_path: Path, name: str, text: Path, steps: list[int]
) -> dict[int, str]:
    """What differs from an undisturbed run, by the step killed at; only where something does."""
    undisturbed = leave_alone(driver, tmp_path / "undisturbed", name, text)
    wrong = {}
    for step in steps:
        run = kill_and_resume(driver, tmp_path / f"{step}", name, text, step)
        if found := difference(run, undisturbed, STEPS):
            wrong[step] = found
        shutil.rmtree(tmp_path / f"{step}")
    return wrong


@pytest.mark.slow
@pytest.mark.faults(1)
def test_a_killed_fp8_run_resumes_to_the_same_bits(
    driver: Driver, tmp_path: Path, text: Path
) -> None:
    # After a skipped step, with layers in BF16, and before a rollback.
    assert sweep(driver, tmp_path, "fp8_hybrid", text, [34]) == {}


@pytest.mark.slow
@pytest.mark.faults(1)
def test_a_run_killed_when_only_its_outcome_is_missing_says_nothing_twice(
    driver: Driver, tmp_path: Path
) -> None:
    text = write_text(tmp_path / "numbered", 40)
    job = arguments(text, "bf16", 4)
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        ended = driver.train(tmp_path / name, *job, kill_at_end=name == "killed")
        assert ended.killed == (name == "killed"), ended.output
    run = tmp_path / "killed" / "runs" / "r"
    assert not (run / "outcome.json").exists()
    ended = driver.train(tmp_path / "killed", *job)
    assert ended.code == 0, ended.output
    assert "resumed at step 4" in ended.output
    assert (run / "outcome.json").exists()
    assert difference(run, tmp_path / "undisturbed" / "runs" / "r", 4) == ""


@pytest.mark.nightly
@pytest.mark.faults(1)
def test_a_fork_of_the_driver_is_as_good_as_a_new_process(
    driver: Driver, tmp_path: Path, text: Path
) -> None:
    forked = leave_alone(driver, tmp_path / "forked", "fp8_hybrid", text)
    path = f"{ROOT}{os.pathsep}{HERE}"
    done = train(tmp_path, *command("fp8_hybrid", text), launcher=["python"], PYTHONPATH=path)
    assert done.returncode == 0, done.stdout
    assert difference(tmp_path / "runs" / "r", forked, STEPS) == ""


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.timeout(3600)
@pytest.mark.faults(1)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_step_is_as_good_as_any_to_be_killed_at(
    driver: Driver, tmp_path: Path, text: Path, figure: Callable[..., None], name: str
) -> None:
    every = int(DEPTH or (1 if name in EVERY_STEP else 10))
    steps = list(range(every, STEPS + 1, every))
    wrong = sweep(driver, tmp_path, name, text, steps)
    what = f"{name}: runs of {STEPS} steps killed after step k and resumed that end bit-identical"
    figure(1, what, (len(steps) - len(wrong), len(steps)), target="all")
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.faults(1)
@pytest.mark.parametrize(
    "kills", [2, pytest.param(KILLS, marks=(pytest.mark.slow, pytest.mark.attack))]
)
def test_every_sample_counts_once_whatever_the_run_was_killed_in(
    driver: Driver, tmp_path: Path, figure: Callable[..., None], kills: int
) -> None:
    """SIGKILL at random moments, in a save, a rollback or the journal too, again and again until the run is through."""
    steps, bad = (30, (9, 20, 21)) if kills < KILLS else (200, (9, 75, 76, 140))
    text = write_text(tmp_path / "numbered", steps * BATCH + 40)
    options = (
        "guard.max_consecutive_skips=2",
        "checkpoint.healthy_steps=3",
        "guard.snapshot_every=0",
    )
    job = arguments(text, "fp8_hybrid", steps, "checkpoint.every=4", *options, bad=bad)
    (tmp_path / "undisturbed").mkdir()
    began = time.monotonic()
    alone = driver.train(tmp_path / "undisturbed", *job)
    whole = time.monotonic() - began
    assert alone.code == 0, alone.output
    reach = (
        0.6 * whole * min(1.0, 80 / steps)
    )  # long enough to begin and to save, short enough for several kills a run
    undisturbed = tmp_path / "undisturbed" / "runs" / "r"
    assert "guard.rollback" in codes(undisturbed)
    chance, fired, lost, doubled, runs = random.Random(kills), 0, 0, 0, 0
    while fired < kills:
        runs += 1
        folder = tmp_path / f"{runs}"
        folder.mkdir()
        while (ended := driver.train(folder, *job, kill_after=chance.uniform(0.1, reach))).killed:
            fired += 1
        assert ended.code == 0, ended.output
        counts, expected = consumed(folder / "runs" / "r", steps), consumed(undisturbed, steps)
        # A skipped step leaves no trace in the model; the two in a row are passed over, and others take their place.
        assert expected.sum() == (steps - len(bad) + 2) * BATCH
        assert expected.max() == 1
        lost, doubled = (
            lost + int((counts < expected).sum()),
            doubled + int((counts > expected).sum()),
        )
        assert difference(folder / "runs" / "r", undisturbed, steps) == ""
    if kills == KILLS:
        figure(
            1,
            "samples lost or doubled by random kills",
            f"{lost} lost, {doubled} doubled",
            n=fired,
            target="0",
        )
    assert (lost, doubled) == (0, 0)
