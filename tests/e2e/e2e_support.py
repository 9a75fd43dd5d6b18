"""Run the real command line in a folder of its own and read what it left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.tracking.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "launch" / "train.py"
TEXT = ROOT / "tests" / "golden" / "text"
BIN = Path(sys.executable).parent


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, one thread per rank (bit-exactness needs a fixed number), tools on PATH."""
    clean = {
        k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MLFLOW_TRACKING_URI"}
    }
    path = f"{BIN}{os.pathsep}{clean.get('PATH', '')}"
    return clean | {"OMP_NUM_THREADS": "1", "PATH": path, "DS_ACCELERATOR": "cpu"} | extra


def command(*arguments: str, launcher: Sequence[str] = (sys.executable,)) -> list[str]:
    """`<launcher> launch/train.py --config tiny` on the small text; MLflow and the report only if an argument asks."""
    fixed = ["--config", "tiny", f"data.path={TEXT}", "tracking.mlflow=false", "tracking.report=false"]
    return [*map(str, launcher), str(TRAIN), *fixed, *arguments]


def train(
    folder: Path, *arguments: str, launcher: Sequence[str] = (sys.executable,), timeout: float = 240, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end; stdout and stderr together."""
    return subprocess.run(
        command(*arguments, launcher=launcher),
        cwd=folder,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def heard() -> None:
    """In a child before it begins: SIGINT and SIGHUP count, although these tests may run under nohup or with &."""
    for each in (signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


def start(folder: Path, *arguments: str, launcher: Sequence[str] = (sys.executable,)) -> subprocess.Popen[bytes]:
    """Start and return at once, in a session of its own so that all of it can be signalled."""
    with (folder / "output.log").open("ab") as log:
        return subprocess.Popen(
            command(*arguments, launcher=launcher),
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=heard,
        )


def metrics(run: Path, name: str = "train/loss", attempt: int | None = None) -> list[tuple[int, float]]:
    """(step, value) of every journal row that has the metric, in file order."""
    return [
        (row["step"], row["metrics"][name])
        for row in read_rows(run / "journal.jsonl")
        if row["kind"] == "metrics" and name in row["metrics"] and attempt in (None, row["attempt"])
    ]


def events(run: Path, code: str) -> list[Mapping[str, Any]]:
    """Journal events of one code."""
    return [row for row in read_rows(run / "journal.jsonl") if row["kind"] == "event" and row["code"] == code]


def wait_for_checkpoint(run: Path, step: int, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Until the checkpoint of `step` or a later one is committed; fails if the process ends before that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(int(folder.name[-8:]) >= step for folder in (run / "checkpoints").glob("step-*")):
            return
        assert process.poll() is None, f"ended with {process.returncode} before the checkpoint of step {step}"
        time.sleep(0.002)
    raise AssertionError(f"no checkpoint of step {step} in {seconds} s")


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Until the journal has a loss of `step` or later; fails if the process ends before that."""
    deadline = time.monotonic() + seconds
    journal = run / "journal.jsonl"
    while time.monotonic() < deadline:
        if journal.exists() and any(row_step >= step for row_step, _ in metrics(run)[-3:]):
            return
        assert process.poll() is None, f"ended with {process.returncode} before step {step}"
        time.sleep(0.002)
    raise AssertionError(f"step {step} not reached in {seconds} s")
