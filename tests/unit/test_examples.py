"""The examples run as they are, on this machine, and learn."""

from __future__ import annotations

import ast
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.matrix import rest_nightly
from tests.support.pages import content_of
from tests.support.runs import ROOT, program

PLAIN_LOOP = ROOT / "examples" / "plain_loop.py"
GUARDED_LOOP = ROOT / "examples" / "guarded_loop.py"
DDP_LOOP = ROOT / "examples" / "ddp_loop.py"
CONVNET_DIGITS = ROOT / "examples" / "convnet_digits.py"
UNSAFE_LOSS = ROOT / "examples" / "unsafe_loss.py"
STANDARD_LOOP = ROOT / "examples" / "standard_loop.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "resolved", "slots"),
    [
        ("fp8_hybrid", "native:fp8", 6),
        pytest.param("bf16", "autocast:bf16", 0, marks=pytest.mark.nightly),
    ],
)
def test_plain_loop(recipe: str, resolved: str, slots: int, tmp_path: Path) -> None:
    done = program(PLAIN_LOOP, tmp_path, recipe)
    assert f"{recipe} runs as {resolved}" in done.stdout
    losses = [float(found) for found in re.findall(r"loss (\S+)", done.stdout)]
    assert losses[-1] < 0.1 * losses[0]
    assert done.stdout.count("applied True") == len(losses)
    assert len(re.findall(r"amax +\S+ +scale", done.stdout)) == slots
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_guarded_loop(tmp_path: Path) -> None:
    """Five bad batches, a rollback, and a run folder that can be read."""
    done = program(GUARDED_LOOP, tmp_path)
    assert "back at step 60, next comes window 60" in done.stdout
    assert "guard.rollback x 1, nonfinite.skip x 5" in done.stdout
    assert "6 of 6 FP8 slots saw a nonzero amax" in done.stdout
    losses = [float(found) for found in re.findall(r"loss (\d\S+)", done.stdout)]
    assert losses[-1] < 0.1 * losses[0]
    assert (tmp_path / "runs" / "guarded" / "report.html").exists()


@pytest.mark.dist
@pytest.mark.slow
def test_ddp_loop(tmp_path: Path) -> None:
    """One rank has bad batches; both skip them and roll back to the same step."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = program(DDP_LOOP, tmp_path, options=launcher)
    for rank in (0, 1):
        assert f"rank {rank}: back at step 60, next is window 60" in done.stdout
    assert done.stdout.count("events     guard.rollback x 1, nonfinite.skip x 5") == 1
    content = content_of(tmp_path / "runs" / "ddp" / "report.html")
    assert "2 ranks on CPU" in dict(content["runs"][0]["cost"])["rank hours"]
    assert "6 of 6 FP8 slots saw a nonzero amax" in done.stdout
    losses = [float(found) for found in re.findall(r"loss (\d\S+)", done.stdout)]
    assert losses[-1] < 0.1 * losses[0]


def run_example(example: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = program(example, folder, *words)
    assert re.search(r"peak memory \d+\.\d\d GiB", done.stdout)
    return done


@pytest.mark.nightly  # fp16 on a CPU
def test_convnet_digits(tmp_path: Path) -> None:
    done = run_example(CONVNET_DIGITS, tmp_path)
    assert "fp16_scaler runs as autocast:fp16" in done.stdout
    (accuracy,) = re.findall(r"accuracy (\S+)% of 297", done.stdout)
    assert float(accuracy) > 85


@pytest.mark.nightly
def test_convnet_digits_under_an_fp8_recipe_says_why_not(tmp_path: Path) -> None:
    done = run_example(CONVNET_DIGITS, tmp_path, "fp8_hybrid")
    assert "fp8_hybrid runs as autocast:bf16" in done.stdout
    assert (
        "native:fp8 is not taken: no layer of this model can run in FP8 (8: sizes 10x256"
        in done.stderr
    )


@pytest.mark.nightly
def test_unsafe_loss(tmp_path: Path) -> None:
    """The overflow is skipped and reported, and training goes on; the same penalty in float32 never overflows."""
    done = run_example(UNSAFE_LOSS, tmp_path)
    unsafe, safe = done.stdout.split("\nunsafe: ")
    assert "loss inf" in unsafe
    assert "the run goes on in bf16, for good" in unsafe
    told, _, safe = safe.partition("\n")
    assert "weights finite: True" in told
    assert 3 < int(told.split()[0]) < 10
    assert "safe: 0 updates skipped" in safe
    losses = [float(found) for found in re.findall(r"skipped, loss (\S+),", done.stdout)]
    assert all(loss < 0.1 for loss in losses), "both go on to learn"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", rest_nightly(["fp8_hybrid", "fp16_scaler"], "fp8_hybrid"))
def test_standard_loop(recipe: str, tmp_path: Path) -> None:
    """Everything happens to it, and it learns; what it saw of the amaxes arrives in MLflow."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-W", "error", str(STANDARD_LOOP), recipe]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "guard.rollback x 1, nonfinite.skip x 6" in done.stdout
    assert ("precision.demote x 1" in done.stdout) == (recipe == "fp8_hybrid")
    assert float(re.findall(r"last loss (\S+),", done.stdout)[0]) < 0.1
    assert re.search(r"peak memory \d\.\d\d GiB", done.stdout)
    series = amaxes(tmp_path / "mlflow.db")
    assert (len(series) > 3) == (recipe == "fp8_hybrid")


def amaxes(store: Path) -> list[float]:
    """The history of one slot's amax in an MLflow store that holds one run."""
    with closing(sqlite3.connect(store)) as database:
        found = database.execute(
            "SELECT key, value FROM metrics WHERE key LIKE 'fp8_amax/%' ORDER BY step"
        ).fetchall()
    first = min((key for key, _ in found), default="")
    return [value for key, value in found if key == first]


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.py")), ids=lambda each: each.stem
)
def test_an_example_is_short(example: Path) -> None:
    # Statements, as the formatter decides how many lines they take.
    tree = ast.parse(example.read_text(encoding="utf-8"))
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) <= 55
