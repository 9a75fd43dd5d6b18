"""Runs the real command line in a folder of its own, and reads the files of the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from harness.tracking.journal import read_rows
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "launch" / "train.py"
TEXT = ROOT / "tests" / "golden" / "text"
BIN = Path(sys.executable).parent
PYTHON = (sys.executable,)
ANEW = (sys.executable, "-u")
"""Starts a new interpreter. For tests of an interpreter's own start, such as of sitecustomize."""
LOADED = (
    "harness.tools.train",
    "harness.models.gpt",
    "harness.precision.backends.native",
    "harness.report.explain",
)
"""What most runs import, with what those import: half a second of each start. Warm runs have it already."""


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, with the tools on PATH and one thread for each rank.

    Bit-exact results need a fixed number of threads.
    """
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MLFLOW_TRACKING_URI"}
    }
    path = f"{BIN}{os.pathsep}{clean.get('PATH', '')}"
    return clean | {"OMP_NUM_THREADS": "1", "PATH": path, "DS_ACCELERATOR": "cpu"} | extra


def command(*arguments: str, launcher: Sequence[str] = PYTHON) -> list[str]:
    """`<launcher> launch/train.py --config tiny` on the small text. MLflow and the report are off by default."""
    fixed = [
        "--config",
        "tiny",
        f"data.path={TEXT}",
        "tracking.mlflow=false",
        "tracking.report=false",
    ]
    return [*map(str, launcher), str(TRAIN), *fixed, *arguments]


def train(
    folder: Path,
    *arguments: str,
    launcher: Sequence[str] = PYTHON,
    timeout: float = warm.PATIENCE,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Train to the end; stdout and stderr together. Without a launcher it runs in a warm process."""
    if tuple(launcher) == PYTHON:
        return warm.run(
            command(*arguments)[1:], folder, environment(**extra), timeout, modules=LOADED
        )
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


def program(
    script: Path,
    folder: Path,
    *words: str,
    options: Sequence[str] = ("-W", "error"),
    timeout: float = 500,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run `python *options script *words` in `folder`, without a GPU, to its end; it must succeed."""
    done = subprocess.run(
        [sys.executable, *options, str(script), *words],
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", **extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def train_ranks(
    folder: Path,
    ranks: int,
    *arguments: str,
    kind: str = "torchrun",
    program: Path | None = None,
    anew: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`train` as several ranks in warm processes, with a launcher's environment but without the launcher.

    kind: torchrun or deepspeed. program: a script of the tests instead of launch/train.py; it may import the tests.
    anew: as for `start_ranks`.
    Waits for all ranks. The result has their output, one rank after the other, and the first exit code that is not 0.
    """
    line = [str(program or TRAIN), *command(*arguments)[2:]]
    paths = str(ROOT) if program else os.environ.get("PYTHONPATH", "")
    modules = () if program else LOADED
    processes = start_ranks(folder, ranks, line, kind, modules, anew, PYTHONPATH=paths)
    try:
        codes = [each.wait(warm.PATIENCE) for each in processes]
    finally:
        for each in processes:
            each.kill()
    output = "".join(log.read_text(errors="replace") for log in rank_logs(folder, ranks))
    first_failure = next((code for code in codes if code), 0)
    return subprocess.CompletedProcess(line, first_failure, output)


def start_ranks(
    folder: Path,
    ranks: int,
    line: Sequence[str],
    kind: str = "torchrun",
    modules: tuple[str, ...] = (),
    anew: bool = False,
    **extra: str,
) -> list[warm.Process | subprocess.Popen[bytes]]:
    """Start `python *line` as `ranks` ranks, without a launcher, and return at once. `rank_logs` has their output.

    modules: as for `warm.start`.
    anew: in new interpreters. CUDA may not be used in a forked process.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), **extra}
    job |= {"torchrun": {"TORCHELASTIC_RUN_ID": "none"}, "deepspeed": {"CROSS_RANK": "0"}}[kind]
    processes: list[warm.Process | subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(rank_logs(folder, ranks)):
            with log.open("wb") as file:
                variables = environment(**job, RANK=str(rank), LOCAL_RANK=str(rank))
                output = file.fileno()
                process: warm.Process | subprocess.Popen[bytes]
                if anew:
                    whole = [sys.executable, *line]
                    process = subprocess.Popen(
                        whole, cwd=folder, env=variables, stdout=output, stderr=output
                    )
                else:
                    process = warm.start(line, folder, variables, output, output, modules=modules)
                processes.append(process)
    except BaseException:
        for each in processes:
            each.kill()
        raise
    return processes


def rank_logs(folder: Path, ranks: int) -> list[Path]:
    """The files with the output of each rank."""
    return [folder / f"rank-{rank}.log" for rank in range(ranks)]


def harness(folder: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """`harness <words>` in `folder`, in a warm process; stdout and stderr apart."""
    variables = environment(PYTHONPATH=str(ROOT), **extra)
    line = ["-m", "harness.cli", *words]
    return warm.run(line, folder, variables, apart=True, modules=LOADED)


def heard() -> None:
    """Restore SIGINT and SIGHUP in a child before it starts: under nohup or with & the tests ignore them."""
    for each in (signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


def start(
    folder: Path, *arguments: str, launcher: Sequence[str] = PYTHON
) -> subprocess.Popen[bytes] | warm.Process:
    """As `train`, but return at once. The process has a session of its own, so that all of it can be signalled."""
    with (folder / "output.log").open("ab") as log:
        if tuple(launcher) == PYTHON:
            line, output = command(*arguments)[1:], log.fileno()
            return warm.start(line, folder, environment(), output, output, modules=LOADED)
        return subprocess.Popen(
            command(*arguments, launcher=launcher),
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=heard,
        )


def metrics(
    run: Path, name: str = "train/loss", attempt: int | None = None
) -> list[tuple[int, float]]:
    """(step, value) of every journal row that has the metric, in file order."""
    return [
        (row["step"], row["metrics"][name])
        for row in read_rows(run / "journal.jsonl")
        if row["kind"] == "metrics" and name in row["metrics"] and attempt in (None, row["attempt"])
    ]


def events(run: Path, code: str) -> list[Mapping[str, Any]]:
    """Journal events of one code."""
    return [
        row
        for row in read_rows(run / "journal.jsonl")
        if row["kind"] == "event" and row["code"] == code
    ]


class Ending(Protocol):
    """A process that may have ended."""

    def poll(self) -> int | None: ...


def wait_for_checkpoint(
    run: Path, step: int, process: Ending, seconds: float = warm.PATIENCE
) -> None:
    """Wait until the checkpoint of `step` or a later one is committed. Fails if the process ends before that."""

    def there() -> bool:
        return any(int(folder.name[-8:]) >= step for folder in (run / "checkpoints").glob("step-*"))

    _wait(there, f"the checkpoint of step {step}", process, seconds)


def wait_for_step(run: Path, step: int, process: Ending, seconds: float = warm.PATIENCE) -> None:
    """Wait until the journal has a loss of `step` or later. Fails if the process ends before that."""
    journal = run / "journal.jsonl"

    def there() -> bool:
        return journal.exists() and any(row_step >= step for row_step, _ in metrics(run)[-3:])

    _wait(there, f"step {step}", process, seconds)


def _wait(there: Callable[[], bool], what: str, process: Ending, seconds: float) -> None:
    """Wait until `there` is true. Fails if the process ends first, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        # Polled before the check, so that what the process did last still counts.
        code = process.poll()
        if there():
            return
        assert code is None, f"ended with {code} before {what}"
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        time.sleep(0.005)
