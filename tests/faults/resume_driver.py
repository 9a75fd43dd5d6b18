"""Run the real `harness train` in forked processes that can be killed, without importing torch for each.

As a program: reads requests from stdin, one JSON object a line, and answers each with one. The server imports what a
run needs and computes nothing, so that a fork of it is as good as a new process (`test_resume_sweep` compares them).
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 120.0
WARM = ("harness.tools.train", "harness.precision.backends.native", "harness.precision.backends.torchao")


@dataclass(frozen=True)
class Ended:
    """How a run ended. code: its exit code, None if a signal ended it. output: what it printed."""

    code: int | None
    killed: bool
    output: str


class Driver:
    """The server's other end."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
        environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._process.communicate, timeout=LIMIT_SECONDS)

    def train(
        self,
        folder: Path,
        *arguments: str,
        kill_at: int = 0,
        kill_after: float = 0.0,
        without: str = "",
        kill_at_end: bool = False,
    ) -> Ended:
        """`harness train --config tiny <arguments>` in `folder`.

        kill_at: SIGKILL itself as soon as the state first counts this many steps: the update is in the weights, not
        judged, not in the journal, not saved. kill_after: be killed after so many seconds, whatever it is doing.
        kill_at_end: SIGKILL itself when all is saved but the outcome. without: a library that this machine lacks.
        """
        fixed = ["--config", "tiny", "tracking.mlflow=false", "tracking.report=false"]
        request = {"folder": str(folder), "arguments": [*fixed, *arguments], "at": kill_at, "after": kill_after}
        request |= {"without": without, "at_end": kill_at_end}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        status = answer["status"]
        assert not answer["hung"], (folder / "output.log").read_text(errors="replace")
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        return Ended(code, killed, (folder / "output.log").read_text(errors="replace"))


@functools.cache
def shared_driver() -> Driver:
    """One server for all tests of this process: it takes seconds of imports to start."""
    return Driver()


def in_child(request: dict[str, Any]) -> None:
    """Become the command. Output goes to output.log of its folder, replaced each time."""
    os.chdir(request["folder"])
    log = os.open("output.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from harness import cli, loop, telemetry
    from harness.capability import probe

    if request["at_end"]:
        telemetry.write_outcome = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    find = probe.find_spec
    probe.find_spec = lambda name: None if name == request["without"] else find(name)
    if request["at"]:
        original = loop.next_step

        def deadly(run: Any) -> Any:
            pending = original(run)
            if run.state.step == request["at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return pending

        loop.next_step = deadly
    sys.argv = ["train.py", *request["arguments"]]
    code = 1
    try:
        cli.train_main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    for module in WARM:
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            in_child(request)
        in_time = wait(child, request["after"] or LIMIT_SECONDS)
        if not in_time:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        print(json.dumps({"status": status, "hung": not in_time and not request["after"]}), flush=True)


def wait(child: int, seconds: float) -> bool:
    """Whether the process ends within `seconds`."""
    descriptor = os.pidfd_open(child)
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return bool(ended.poll(1000 * seconds))
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    serve()
