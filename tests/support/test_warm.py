"""A program in a warm process sees what it would see in a new interpreter, and ends as it would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.matrix import rest_nightly
from tests.support.runs import LOADED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TELL = """
import json, os, random, signal, sys, threading
import torch
json.dump({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"), "folder": os.getcwd(),
    "environment": {k: v for k, v in os.environ.items() if k not in ("PWD", "OLDPWD", "_", "LC_CTYPE", "SHLVL")},
    "threads": [each.name for each in threading.enumerate()], "torch_threads": torch.get_num_threads(),
    "signals": {each.name: str(signal.getsignal(each)) for each in signal.valid_signals() if hasattr(each, "name")},
    "harness": [name for name in sys.modules if name.partition(".")[0] == "harness"],
    "own": [name for name in vars(sys.modules["__main__"]) if not name.startswith("__")],
    "session": os.getsid(0) == os.getpid(), "random": torch.rand(3).tolist(), "grad": torch.is_grad_enabled(),
    "stdin": sys.stdin.read(), "descriptors": len(os.listdir("/proc/self/fd")),
}, sys.stdout)
"""


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": warm.THREADS, "PYTHONPATH": str(ROOT), **extra}


def new(program: list[str], folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program], cwd=folder, env=environment(**extra), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, start_new_session=True, preexec_fn=warm.ignore_nothing,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", rest_nightly(["script", "module", "code"], "module"))
def test_a_program_sees_what_a_new_interpreter_shows_it(tmp_path: Path, how: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "tell.py").write_text(f"import torch; torch.manual_seed(1)\n{TELL}")
    begin = {
        "script": [str(tmp_path / "sub" / "tell.py")],
        "module": ["-m", "sub.tell"],
        "code": ["-c", TELL],
    }[how]
    begin += ["--first", "second third"]
    if how == "code":
        begin[1] = (tmp_path / "sub" / "tell.py").read_text()
    ours, theirs = (
        warm.run(begin, tmp_path, environment(OWN="1"), apart=True),
        new(begin, tmp_path, OWN="1"),
    )
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    seen, expected = json.loads(ours.stdout), json.loads(theirs.stdout)
    assert seen == expected
    assert seen["environment"]["OWN"] == "1"
    assert seen["harness"] == []


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(75)", "raise SystemExit", "import sys; sys.exit('said')", "1 / 0",
        "import os; os.kill(os.getpid(), 9)", "import signal, os; os.kill(os.getpid(), signal.SIGINT)",
        "import atexit; atexit.register(print, 'at its end'); print('before')",
        "import threading; threading.Timer(0.1, print, ['of a thread']).start()",
        "import subprocess; print(subprocess.run(['false']).returncode)",
    ],
)  # fmt: skip
def test_it_ends_with_the_same_code_and_words(tmp_path: Path, code: str) -> None:
    ours, theirs = (
        warm.run(["-c", code], tmp_path, environment(), apart=True),
        new(["-c", code], tmp_path),
    )
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    last = [(done.stderr.splitlines() or [""])[-1] for done in (ours, theirs)]
    assert last[0] == last[1]


def test_it_can_be_waited_for_and_killed(tmp_path: Path) -> None:
    code = "import sys, time; print('up', flush=True); time.sleep(3600)"
    with (tmp_path / "log").open("wb") as log:
        process = warm.start(["-c", code], tmp_path, environment(), log.fileno(), log.fileno())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    deadline = time.monotonic() + warm.PATIENCE
    while "up" not in (tmp_path / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(warm.PATIENCE) == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)  # to nobody


def test_files_have_the_limit_and_threads_cannot_be_chosen(tmp_path: Path) -> None:
    code = "with open('large', 'wb') as file: file.write(bytes(2000))"
    assert (
        "File too large" in warm.run(["-c", code], tmp_path, environment(), file_limit=1000).stdout
    )
    assert warm.run(["-c", code], tmp_path, environment()).returncode == 0
    with pytest.raises(ValueError, match="OMP_NUM_THREADS=2"):
        warm.run(["-c", code], tmp_path, environment(OMP_NUM_THREADS="2"))


def test_modules_can_be_there_already(tmp_path: Path) -> None:
    code = "import sys; print('harness.cli' in sys.modules, 'harness.tools.train' in sys.modules)"
    with (tmp_path / "log").open("wb") as log:
        told = log.fileno()
        assert (
            warm.start(["-c", code], tmp_path, environment(), told, told, modules=LOADED).wait(300)
            == 0
        )
    assert (tmp_path / "log").read_text() == "False True\n"
    assert warm.run(["-c", code], tmp_path, environment()).stdout == "False False\n", (
        "no other process has them"
    )
