"""Requests to stop, in processes of their own: what a signal does before, during and after the loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300
"""Seconds: what is waited for comes, however busy the machine is."""
HEAD = """
import os, signal, sys, time
from harness.stop import StopRequest, StoppedEarly, stop_while_starting
def send(name): os.kill(os.getpid(), getattr(signal, name))
"""


def run(body: str, *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [*before, sys.executable, "-c", HEAD + body]
    environment = {key: value for key, value in os.environ.items() if key != "RANK"} | variables
    return subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_the_first_signal_is_the_reason(name: str) -> None:
    done = run(
        f"s = StopRequest(); s.install(); send('{name}'); send('SIGTERM'); print(s.requested(), s.reason)"
    )
    assert done.stdout == f"True {name}\n"
    assert done.stderr.count("saving after this step") == 1


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    done = run("s = StopRequest(); s.install(); send('SIGHUP'); print(s.requested())", "nohup")
    assert done.stdout == "False\n"


def test_while_it_starts_a_signal_ends_it_even_if_something_swallows_that() -> None:
    early = run(
        "stop_while_starting()\ntry: send('SIGTERM')\nexcept StoppedEarly as s: print(s, isinstance(s, Exception))"
    )
    assert early.stdout == "SIGTERM False\n"
    swallowed = run(
        "stop_while_starting()\ntry: send('SIGUSR1')\nexcept BaseException: pass\n"
        "s = StopRequest(); s.install(); print(s.requested(), s.reason)"
    )
    assert swallowed.stdout == "True SIGUSR1\n"


@pytest.mark.parametrize("variables", [{}, {"RANK": "1"}], ids=["alone", "rank"])
def test_a_second_signal_while_it_ends_changes_nothing(variables: dict[str, str]) -> None:
    body = """
import atexit
from harness import cli
def action():
    stop_while_starting()
    atexit.register(send, "SIGTERM")
    send("SIGINT")
try: cli._guarded(action)
except cli.typer.Exit as end: sys.exit(end.exit_code)
"""
    done = run(body, **variables)
    assert done.returncode == 75, done.stderr
    assert done.stderr.splitlines() == [
        "SIGINT: stopped before training began; the same command starts it again"
    ]


@pytest.mark.faults(20)
@pytest.mark.parametrize(
    "error", ["LostRankError(Problem('lost rank 0', 'here'))", "OSError('lost')"]
)
def test_a_signal_while_it_says_why_it_ends_does_not_silence_it(error: str) -> None:
    """As from a launcher that has noticed the same lost rank: this one's message names it."""
    body = f"""
from harness import cli
from harness.core.errors import LostRankError, Problem
StopRequest().install()
class Slow:
    def write(self, text): send("SIGTERM"); return sys.__stderr__.write(text)
    def flush(self): sys.__stderr__.flush()
sys.stderr = Slow()
def action(): raise {error}
cli._guarded(action)
"""
    done = run(body, RANK="1")
    assert done.returncode == 1
    assert done.stderr.count("lost") == 1, done.stderr
    assert "saving" not in done.stderr


def test_after_the_end_signals_mean_what_they_meant_or_keep_its_code() -> None:
    start = "stop_while_starting(); s = StopRequest(); s.install(); "
    assert run(start + "s.uninstall(); send('SIGTERM')").returncode == -signal.SIGTERM
    ended = run(start + f"print('said'); s.uninstall(75); send('SIGTERM'); time.sleep({LIMIT})")
    assert (ended.returncode, ended.stdout) == (75, "said\n")


@pytest.mark.faults(6)
@pytest.mark.parametrize("launcher", ["sh", "deepspeed"])
def test_a_launcher_that_dies_while_its_rank_starts_is_missed(
    tmp_path: Path, launcher: str
) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(
        HEAD + "open('up', 'w').close()\nwhile not os.path.exists('gone'): time.sleep(0.01)\n"
        "s = StopRequest(launched=True)\n"
        "with open('writing', 'w') as file: file.write(f'{s.requested()} {s.reason}')\n"
        "os.rename('writing', 'told')"
    )
    start = f"'{sys.executable}' rank.py; :"
    # The deepspeed command is the grandparent of its ranks, and what is between them outlives it.
    line = start if launcher == "sh" else f'sh -c "{start}"; :'
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(["sh", "-c", line, launcher], cwd=tmp_path, env=environment)
    wait_for(tmp_path / "up")
    process.kill()
    process.wait()
    (tmp_path / "gone").touch()
    wait_for(tmp_path / "told")
    assert (tmp_path / "told").read_text() == "True the launcher is gone"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)
