"""Go on from a checkpoint where things are not as they were: another precision, machine, model, version or place.

Either the run goes on with the same data, each sample once, or it is refused by name before anything is trained.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resume_driver import HERE, ROOT, Driver, Ended, shared_driver
from resume_models import write_text
from resume_runs import BATCH, arguments, checkpoint, codes, consumed, difference

from harness.checkpoint.manifest import MANIFEST, read_manifest
from harness.checkpoint.store import Store
from harness.core.files import dump_json
from harness.tracking.journal import read_rows
from tests.support.matrix import rest_nightly
from tests.support.runs import train

STEPS = 12
RECIPES = ("fp8_hybrid", "fp8_dynamic", "fp16_scaler", "bf16", "fp32")
# From and to, without what is refused: scales by history and scales by tensor have no common state.
MOVES = [
    (a, b)
    for a in RECIPES
    for b in RECIPES
    if a != b and not (a.startswith("fp8") and b.startswith("fp8"))
]
# Each recipe once on either side.
IN_CI = [
    ("bf16", "fp8_hybrid"),
    ("fp16_scaler", "bf16"),
    ("fp8_hybrid", "fp32"),
    ("fp8_dynamic", "fp16_scaler"),
    ("fp32", "fp8_dynamic"),
]


@pytest.fixture(scope="module")
def driver() -> Driver:
    return shared_driver()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "numbered", 100)


@pytest.fixture(scope="module")
def run_of(
    driver: Driver, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A finished run of a recipe, trained when first asked for, with checkpoints of steps 4, 8 and 12."""
    runs: dict[str, Path] = {}

    def run(recipe: str) -> Path:
        if recipe not in runs:
            runs[recipe] = tmp_path_factory.mktemp(recipe) / "runs" / "r"
            ended = driver.train(runs[recipe].parent.parent, *job(text, recipe))
            assert ended.code == 0, ended.output
        return runs[recipe]

    return run


def job(text: Path, recipe: str, *more: str, **model: Any) -> tuple[str, ...]:
    return arguments(
        text, recipe, STEPS, "checkpoint.every=4", "checkpoint.background=false", *more, **model
    )


def rows(run: Path) -> list[dict[str, Any]]:
    """Of the training steps."""
    found = [row for row in read_rows(run / "journal.jsonl") if row["kind"] == "metrics"]
    return [row for row in found if "train/loss" in row["metrics"]]


def figures(run: Path, name: str = "train/loss") -> dict[int, float]:
    """By step; the last, where a step ran twice."""
    return {row["step"]: row["metrics"][name] for row in rows(run) if name in row["metrics"]}


def resolved(run: Path) -> list[str]:
    """What the run resolved to at each of its starts."""
    tags = [row["tags"] for row in read_rows(run / "journal.jsonl") if row["kind"] == "run"]
    return [each["precision.resolved"] for each in tags if "precision.resolved" in each]


def assert_goes_on(run: Path, source: Path, first: int) -> None:
    """From step `first` on, at the losses of the source, every sample once."""
    counts = consumed(run, STEPS)
    assert (counts.sum(), counts.max()) == (STEPS * BATCH, 1)
    assert (counts == consumed(source, STEPS)).all()
    losses, before = figures(run), figures(source)
    assert list(losses) == list(range(first, STEPS + 1))
    worst = max(abs(losses[step] - before[step]) / before[step] for step in losses)
    assert worst < 0.02, f"{worst:.3f}: {losses} against {before}"
    assert "guard.halt" not in codes(run)


@pytest.mark.slow
@pytest.mark.faults(25)
@pytest.mark.parametrize(("before", "after"), rest_nightly(MOVES, *IN_CI))
def test_a_new_run_in_another_precision_starts_from_a_checkpoint(
    driver: Driver,
    text: Path,
    tmp_path: Path,
    run_of: Callable[[str], Path],
    before: str,
    after: str,
) -> None:
    source = run_of(before)
    ended = driver.train(tmp_path, *job(text, after), "--resume", str(checkpoint(source, 8)))
    assert ended.code == 0, ended.output
    run = tmp_path / "runs" / "r"
    assert_goes_on(run, source, 9)
    scales = set(figures(run, "train/loss_scale").values())
    assert (max(scales) > 1) == after.startswith("fp16"), "a loss scale comes and goes with fp16"
    slots = [name for name in rows(run)[-1]["metrics"] if name.startswith("fp8_scale/")]
    assert bool(slots) == after.startswith("fp8")
    if after == "fp8_hybrid":
        assert any(figures(run, slot)[9] == 1.0 for slot in slots), (
            "its scales begin as a new run's"
        )
        assert all(figures(run, slot)[12] != 1.0 for slot in slots)


@pytest.mark.slow
@pytest.mark.faults(25)
@pytest.mark.parametrize(
    ("before", "after"), [("fp8_hybrid", "fp8_dynamic"), ("fp8_dynamic", "fp8_hybrid")]
)
def test_fp8_scaled_otherwise_is_refused(
    driver: Driver,
    text: Path,
    tmp_path: Path,
    run_of: Callable[[str], Path],
    before: str,
    after: str,
) -> None:
    refused = driver.train(
        tmp_path, *job(text, after), "--resume", str(checkpoint(run_of(before), 8))
    )
    assert_refused(refused, tmp_path, "fp8 state", "fix: resume with the recipe")


@pytest.mark.slow
@pytest.mark.faults(25)
def test_a_checkpoint_of_other_sizes_is_refused_with_both_shapes(
    driver: Driver, text: Path, tmp_path: Path, run_of: Callable[[str], Path]
) -> None:
    source = checkpoint(run_of("fp32"), 8)
    refused = driver.train(tmp_path, *job(text, "fp32", dim=128), "--resume", str(source))
    told = "gpt.embed.weight is torch.float32 [256, 64] in the checkpoint, torch.float32 [256, 128] in the run"
    assert_refused(refused, tmp_path, told, "gpt.norm.weight is torch.float32 [64]")
    # The name is free for the command that was meant, and no plain resume starts at step 0 instead.
    meant = driver.train(tmp_path, *job(text, "fp32"), "--resume", str(source))
    assert meant.code == 0, meant.output
    assert_goes_on(tmp_path / "runs" / "r", run_of("fp32"), 9)


def assert_refused(ended: Ended, folder: Path, *told: str) -> None:
    """Usage error, no traceback, and nothing trained."""
    assert ended.code == 2, ended.output
    assert "Traceback" not in ended.output
    assert all(words in ended.output for words in told), ended.output
    run = folder / "runs" / "r"
    assert not (run / "journal.jsonl").exists() or not rows(run)


@pytest.mark.faults(25)
@pytest.mark.slow
def test_the_same_command_goes_on_where_another_rung_is_the_best(
    driver: Driver, text: Path, tmp_path: Path, run_of: Callable[[str], Path]
) -> None:
    """A run that moves between rented machines: one has torchao, the next has not, the third has it again."""
    train = job(text, "fp8_dynamic")
    run = tmp_path / "runs" / "r"
    assert driver.train(tmp_path, *train, kill_at=6).killed
    assert driver.train(tmp_path, *train, without="torchao", kill_at=10).killed
    ended = driver.train(tmp_path, *train)
    assert ended.code == 0, ended.output
    assert resolved(run) == ["torchao:fp8", "autocast:bf16", "torchao:fp8"]
    assert "resumed at step 8" in ended.output
    assert_goes_on(run, run_of("fp8_dynamic"), 1)
    assert all(math.isfinite(value) for value in figures(run, "train/grad_norm").values())


@pytest.mark.faults(25)
@pytest.mark.slow
def test_fp8_goes_on_with_its_state_on_a_card_of_another_tier(
    driver: Driver, text: Path, tmp_path: Path, run_of: Callable[[str], Path]
) -> None:
    """From an H100 to a B200 to an L4. On a CPU in their place every bit is that of a run that never moved."""
    train = job(text, "fp8_hybrid")
    run = tmp_path / "runs" / "r"
    assert driver.train(tmp_path, *train, tier="HOPPER", kill_at=6).killed
    assert driver.train(tmp_path, *train, tier="BLACKWELL", kill_at=10).killed
    ended = driver.train(tmp_path, *train, tier="ADA")
    assert ended.code == 0, ended.output
    assert resolved(run) == ["native:fp8"] * 3
    assert "ADA" in ended.output
    assert "resumed at step 8" in ended.output
    assert difference(run, run_of("fp8_hybrid"), STEPS) == ""


def reseal(folder: Path, **changed: Any) -> None:
    """Give the manifest other contents, with their true hash, as another version of the harness would."""
    content = {
        key: value for key, value in read_manifest(folder).items() if key != "sha256"
    } | changed
    digest = hashlib.sha256(dump_json(content)).hexdigest()
    (folder / MANIFEST).write_bytes(dump_json({**content, "sha256": digest}))


@pytest.mark.slow
@pytest.mark.faults(25)
def test_a_checkpoint_of_another_torch_resumes(
    driver: Driver, text: Path, tmp_path: Path, run_of: Callable[[str], Path]
) -> None:
    """Tensors and JSON do not depend on it; where another torch computes other bits, the journal says so (row 1)."""
    run = tmp_path / "runs" / "r"
    assert driver.train(tmp_path, *job(text, "fp8_hybrid"), kill_at=10).killed
    reseal(checkpoint(run, 8), versions={"torch": "1.13.0", "hopper-harness": "0.0.1"})
    assert Store(run / "checkpoints", readonly=True).verify(8) == []
    ended = driver.train(tmp_path, *job(text, "fp8_hybrid"))
    assert ended.code == 0, ended.output
    assert "resumed at step 8" in ended.output
    assert difference(run, run_of("fp8_hybrid"), STEPS) == ""


@pytest.mark.faults(4, 25)
def test_another_format_number_is_named(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(run_of("fp8_hybrid"), tmp_path / "r"))
    reseal(checkpoint(run, 12), format=2)
    problems = Store(run / "checkpoints", readonly=True).verify(12)
    assert [problem.what for problem in problems] == ["has format 2, this version reads 1"]
    assert problems[0].where == str(checkpoint(run, 12) / MANIFEST)


@pytest.mark.slow
@pytest.mark.faults(25)
def test_a_run_copied_to_another_place_resumes_there_without_its_text(
    driver: Driver, text: Path, tmp_path: Path, run_of: Callable[[str], Path]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    own = Path(shutil.copytree(text, here / "text"))
    assert driver.train(here, *job(own, "fp8_hybrid"), kill_at=10).killed
    command = job(own, "fp8_hybrid")
    shutil.copytree(here / "runs", there / "runs")
    shutil.rmtree(here)
    ended = driver.train(there, *command)
    assert ended.code == 0, ended.output
    assert "resumed at step 8" in ended.output
    run = there / "runs" / "r"
    assert (consumed(run, STEPS) == consumed(run_of("fp8_hybrid"), STEPS)).all()
    assert figures(run) == figures(run_of("fp8_hybrid"))
    told = [row for row in read_rows(run / "journal.jsonl") if str(here) in str(row)]
    assert {row["kind"] for row in told} <= {"run", "checkpoint"}, (
        "paths are recorded, never followed"
    )


def windows(lines: list[str], ranks: int) -> list[list[int]]:
    """The samples of each step, sorted, from what every rank's forward passes saw (two micro-batches a step)."""
    forwards = [[int(number) for number in line.split()] for line in lines]
    if ranks > 1:
        forwards.sort()  # by the rank's own count of its forward passes: one a step
    return [sorted(a[1:] + b[1:]) for a, b in zip(forwards[::2], forwards[1::2], strict=True)]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.faults(25)
@pytest.mark.parametrize("recipe", rest_nightly(["fp32", "fp8_hybrid"], "fp8_hybrid"))
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((2, 1), id="2-to-1", marks=pytest.mark.nightly),
        pytest.param((1, 2), id="1-to-2"),
    ],
)
def test_another_number_of_ranks_keeps_the_data_order(
    driver: Driver,
    text: Path,
    tmp_path: Path,
    figure: Callable[..., None],
    ranks: tuple[int, int],
    recipe: str,
) -> None:
    seen, losses = [], []
    for name, numbers in (("one", (1, 1)), ("other", ranks)):
        (folder := tmp_path / name).mkdir()
        log = folder / "samples.txt"
        order: list[list[int]] = []
        for steps, number in zip((STEPS // 2, STEPS), numbers, strict=True):
            before = len(log.read_text().splitlines()) if log.exists() else 0
            train_on(
                driver,
                folder,
                number,
                *job(text, recipe, f"train.steps={steps}", log=str(log), noise=0.0),
            )
            order += windows(log.read_text().splitlines()[before:], number)
        seen.append(order)
        losses.append(figures(folder / "runs" / "r"))
    assert seen[0] == seen[1]
    assert len({number for window in seen[1] for number in window}) == STEPS * BATCH
    assert losses[0].keys() == losses[1].keys() == set(range(1, STEPS + 1))
    worst = max(abs(losses[1][step] - loss) / loss for step, loss in losses[0].items())
    figure(
        25,
        f"{recipe}, {ranks[0]} to {ranks[1]} ranks: largest relative difference of a loss",
        f"{worst:.1e}",
        n=STEPS,
    )
    # Under FP8 a rank's weight gradient is rounded to bf16 before the ranks sum theirs.
    assert worst < (1e-4 if recipe == "fp32" else 2e-2)


def train_on(driver: Driver, folder: Path, ranks: int, *arguments: str) -> None:
    if ranks == 1:
        ended = driver.train(folder, *arguments)
        assert ended.code == 0, ended.output
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = f"--master-port={probe.getsockname()[1]}"
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", port]
    done = train(folder, *arguments, launcher=launcher, PYTHONPATH=f"{ROOT}{os.pathsep}{HERE}")
    assert done.returncode == 0, done.stdout
