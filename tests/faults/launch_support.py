"""Start the real job under a launcher, find every process of it, signal one of them, and see all of them end."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint.store import Store
from tests.support.runs import BIN, ROOT, command, environment, heard, metrics, train, wait_for_step

STEPS = 120
ARGUMENTS = ("--name", "r", f"train.steps={STEPS}", "checkpoint.every=10", "train.eval_every=25")
START_SECONDS = 300
"""Until a start has done its first steps: imports take long on a machine whose cores are shared."""
_MARK = "FAULT_LAUNCH"
_started: list[Launch] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Import it, and a test that fails leaves no process behind, frozen or not."""
    yield
    while _started:
        _started.pop().kill()


def launcher(kind: str, ranks: int) -> list[str]:
    """What stands before launch/train.py; a port of its own for each call."""
    if kind == "python":
        return [sys.executable]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    if kind == "torchrun":
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={ranks}",
            f"--master-port={port}",
        ]
    return [str(BIN / "deepspeed"), "--num_accelerators", str(ranks), "--master_port", port]


@dataclass
class Launch:
    """A job in `folder` and all of its processes, whatever sessions they are in: they inherit a mark."""

    folder: Path
    process: subprocess.Popen[bytes]
    mark: str

    @classmethod
    def start(cls, folder: Path, line: Sequence[str], variables: Mapping[str, str]) -> Launch:
        """Run `line` in `folder`, in a session of its own."""
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        with (folder / f"{mark}.log").open("wb") as log:
            process = subprocess.Popen(
                line, cwd=folder, env={**variables, _MARK: mark}, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=heard,
            )  # fmt: skip
        _started.append(cls(folder, process, mark))
        return _started[-1]

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "r"

    def processes(self) -> dict[int, dict[str, str]]:
        """Process -> its environment, of all that live (a zombie has no environment)."""
        return {
            pid: variables
            for pid, variables in _environments()
            if variables.get(_MARK) == self.mark
        }

    def rank(self, number: int) -> int:
        """The process of one rank; without a launcher, of the whole run."""
        of_rank = [
            pid
            for pid, variables in self.processes().items()
            if variables.get("RANK") == str(number) and "--name" in _words(pid)
        ]
        if not of_rank and number == 0:
            return self.process.pid
        assert len(of_rank) == 1, of_rank
        return of_rank[0]

    def parent(self, pid: int) -> int:
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0

    def ended(self, seconds: float) -> float:
        """Seconds until no process was left. If some are left at the end they are killed, and it fails with them."""
        began = time.monotonic()
        while left := self.processes():
            if time.monotonic() - began > seconds:
                told = {pid: " ".join(_words(pid)) for pid in left}
                self.kill()
                raise AssertionError(f"left after {seconds} s: {told}\n{self.output()[-3000:]}")
            self.process.poll()
            time.sleep(0.02)
        return time.monotonic() - began

    def kill(self) -> None:
        """End whatever is left."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def output(self) -> str:
        return (self.folder / f"{self.mark}.log").read_text(errors="replace")


def launch(
    folder: Path,
    *arguments: str,
    kind: str = "python",
    ranks: int = 1,
    before: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Launch:
    """Start the job. before: the command line up to the arguments, instead of `kind`'s and launch/train.py."""
    line = command(*arguments, launcher=before or launcher(kind, ranks))
    if before:
        line.remove(str(ROOT / "launch" / "train.py"))
    return Launch.start(folder, line, environment(**(variables or {})))


def script(folder: Path, kind: str, *arguments: str, ranks: int = 2) -> Launch:
    """launch/<kind>.sh with `folder` for the source tree."""
    if not (folder / "launch").exists():
        (folder / "launch").symlink_to(ROOT / "launch")
    line = command(*ARGUMENTS, *arguments, launcher=["bash", f"launch/{kind}.sh"])
    line.remove(str(ROOT / "launch" / "train.py"))
    return Launch.start(folder, line, environment(RANKS=str(ranks)))


def at_step(folder: Path, step: int, *arguments: str, **how: Any) -> Launch:
    """`launch`, and wait until this start of the run, not an earlier one, has done `step`."""
    step = max(step, steps_done(folder / "runs" / "r") + 1)
    started = launch(folder, *(arguments or ARGUMENTS), **how)
    wait_for_step(started.run, step, started.process, START_SECONDS)
    return started


def steps_done(run: Path) -> int:
    return (
        max((step for step, _ in metrics(run)), default=0)
        if (run / "journal.jsonl").exists()
        else 0
    )


def check_stopped(run: Path, reason: str) -> int:
    """The run says that it was stopped for `reason`, after a save that verifies; the step."""
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["status"], outcome["exit_code"], outcome["reason"]) == ("stopped", 75, reason)
    assert Store(run / "checkpoints", readonly=True).verify(outcome["step"]) == []
    assert steps_done(run) == outcome["step"], "the step was finished, and no other begun"
    return outcome["step"]


@functools.cache
def undisturbed(
    kind: str = "python", ranks: int = 1
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Training and validation losses, by step, of a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        done = train(Path(folder), *ARGUMENTS, launcher=launcher(kind, ranks))
        assert done.returncode == 0, done.stdout
        run = Path(folder) / "runs" / "r"
        assert steps_done(run) == STEPS
        return metrics(run), metrics(run, "val/loss")


def finishes(folder: Path, kind: str = "python", ranks: int = 1, resumes: bool = True) -> None:
    """Started again, the run goes on and ends with the losses of an undisturbed one, to the last bit."""
    done = train(folder, *ARGUMENTS, launcher=launcher(kind, ranks))
    assert done.returncode == 0, done.stdout
    assert ("resumed at step" in done.stdout) is resumes
    run = folder / "runs" / "r"
    assert (metrics(run), metrics(run, "val/loss")) == undisturbed(kind, ranks)


def wait_until(holds: Callable[[], Any], what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.01)


def _environments() -> list[tuple[int, dict[str, str]]]:
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # another user's, or gone
            continue
        found.append(
            (int(file.parent.name), dict(each.split("=", 1) for each in variables if "=" in each))
        )
    return found


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
