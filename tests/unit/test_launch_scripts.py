"""The shell wrappers: true exit codes, signals passed on, and words before things fail."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / "launch/slurm.sbatch", ROOT / ".ci/run"]
LIMIT = 300
"""Seconds: what is waited for comes, however busy the machine is."""
# Ends a run the way a rank does.
RANK = """
import sys
from harness.core.errors import tell_wrapper
tell_wrapper(int(sys.argv[1]), overrule=True)
"""


def supervise(folder: Path, child: str) -> subprocess.Popen[bytes]:
    """`supervise bash -c CHILD` in a shell of its own, in `folder`."""
    script = f'. "{ROOT}/launch/outcome.sh"; supervise bash -c "$CHILD"'
    (folder / "rank.py").write_text(RANK)
    environment = {
        **os.environ,
        "CHILD": child,
        "OUTCOME_WAIT": str(LIMIT),
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=environment, start_new_session=True
    )


def rank(code: int) -> str:
    return f'"{sys.executable}" rank.py {code}'


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    sky = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())
    in_yaml = tmp_path / "skypilot.sh"
    in_yaml.write_text("#!/usr/bin/env bash\n" + sky["run"])
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [shellcheck, "--external-sources", *SCRIPTS, in_yaml],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_outcome_restores_a_code_that_the_launcher_swallowed(tmp_path: Path) -> None:
    assert supervise(tmp_path, f"{rank(75)}; exit 1").wait(LIMIT) == 75
    assert supervise(tmp_path, f"{rank(0)}; exit 143").wait(LIMIT) == 0


def test_without_a_word_from_a_rank_the_launchers_code_stands(tmp_path: Path) -> None:
    assert supervise(tmp_path, "exit 2").wait(LIMIT) == 2
    assert supervise(tmp_path, "exit 0").wait(LIMIT) == 0


def test_a_signal_before_any_rank_trains_is_75_and_says_so(tmp_path: Path) -> None:
    # As torchrun ends when it is asked to before its ranks have begun.
    script = f'. "{ROOT}/launch/outcome.sh"; supervise bash -c "$CHILD"'
    environment = {**os.environ, "CHILD": f": >up; exec sleep {LIMIT}", "OUTCOME_WAIT": "2"}
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(tmp_path / "up")
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=LIMIT)
    assert process.returncode == 75
    assert "stopped before training began" in told


@pytest.mark.parametrize(
    ("ranks", "told", "launcher", "code"),
    [
        (2, 1, 1, 1),
        (2, 1, 247, 247),
        (2, 1, 143, 75),
        (2, 1, 130, 75),
        (4, 3, 1, 1),
        (2, 2, 1, 75),
        (1, 1, 247, 75),
    ],
)
def test_a_rank_that_dies_while_the_others_start_is_no_request(
    tmp_path: Path, ranks: int, told: int, launcher: int, code: int
) -> None:
    """Its launcher ends the others by a signal, which they take for a request; over 128 the launcher itself had one.
    Where every rank had a signal none has died.
    """
    starting = "import os, signal; from harness import stop; stop.end_while_importing(); "
    starting += "os.kill(os.getpid(), signal.SIGTERM); signal.pause()"
    one = f'WORLD_SIZE={ranks} "{sys.executable}" -c "{starting}"; echo $? >>ended; '
    assert supervise(tmp_path, f"{one * told}exit {launcher}").wait(LIMIT) == code
    assert (tmp_path / "ended").read_text() == "75\n" * told, "the ranks' own codes"


def test_what_a_rank_has_said_stands_whatever_signals_the_others_had(tmp_path: Path) -> None:
    starting = "from harness.core.errors import tell_wrapper; tell_wrapper(75, starting=True)"
    later = f'WORLD_SIZE=1 "{sys.executable}" -c "{starting}"'
    assert supervise(tmp_path, f"{rank(2)}; {later}; exit 1").wait(LIMIT) == 2
    assert supervise(tmp_path, f"{later}; {rank(2)}; exit 1").wait(LIMIT) == 2


def test_another_run_that_ends_meanwhile_is_not_taken_for_this_one(tmp_path: Path) -> None:
    other = "mkdir -p runs/other; echo '{\"exit_code\": 75}' >runs/other/outcome.json"
    assert supervise(tmp_path, f"{other}; exit 1").wait(LIMIT) == 1


def test_the_runs_outcome_counts_more_than_what_a_rank_ends_with(tmp_path: Path) -> None:
    first = rank(3)
    later = f'"{sys.executable}" -c "from harness.core.errors import tell_wrapper; tell_wrapper(1)"'
    assert supervise(tmp_path, f"{first}; {later}; exit 1").wait(LIMIT) == 3
    assert supervise(tmp_path, f"{later}; {first}; exit 1").wait(LIMIT) == 3
    assert supervise(tmp_path, f"{later}; exit 7").wait(LIMIT) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_reaches_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    passed_on = "INT" if number == signal.SIGINT else "TERM"
    # Only builtins while it waits: bash forgets a SIGINT that comes as a command of its own ends.
    child = f"trap 'kill $pause; touch got; {rank(75)}; exit 1' {passed_on}; sleep {LIMIT} & pause=$!; : >up; wait"
    process = supervise(tmp_path, child)
    wait_for(tmp_path / "up")
    process.send_signal(number)
    assert process.wait(LIMIT) == 75
    assert (tmp_path / "got").exists()


def test_ranks_that_outlive_their_launcher_are_waited_for(tmp_path: Path) -> None:
    # Like the deepspeed launcher: it ends at once on SIGTERM; its rank saves later and then delivers its metrics.
    late = f"while [ ! -e gone ]; do sleep 0.05; done; sleep 0.5; {rank(75)}; sleep 0.5; touch delivered"
    (tmp_path / "late.sh").write_text(late)
    launcher = "trap 'touch gone; exit 143' TERM; touch up; while :; do sleep 0.05; done"
    child = f"setsid bash late.sh & {launcher}"  # torchrun's ranks have sessions of their own
    process = supervise(tmp_path, child)
    wait_for(tmp_path / "up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 75
    assert (tmp_path / "gone").exists()
    assert (tmp_path / "delivered").exists()


def test_deepspeed_without_compiler_or_ninja_offers_other_commands(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "cat"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    command = [str(tmp_path / "bash"), str(ROOT / "launch/deepspeed.sh"), "--recipe", "bf16"]
    done = subprocess.run(
        command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    for words in ("deepspeed (make setup", "a C++ compiler", "ninja"):
        assert words in done.stderr
    assert (
        "torchrun --standalone --nproc_per_node 1 -- launch/train.py --recipe bf16" in done.stderr
    )
    assert "\n  python launch/train.py --recipe bf16" in done.stderr


def setup(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VENV": str(tmp_path / "venv"), **variables}
    command = ["bash", str(ROOT / "launch/setup.sh"), "run"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_setup_refuses_a_python_it_cannot_use(tmp_path: Path) -> None:
    missing = setup(tmp_path, PYTHON="python3.99")
    assert missing.returncode == 1
    assert "no python3.99 on PATH" in missing.stderr
    wrong = setup(tmp_path, PYTHON="false")
    assert wrong.returncode == 1
    assert "needs Python 3.11, 3.12 or 3.13" in wrong.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_with_a_torch_that_is_not_there(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    done = setup(tmp_path, PYTHON=str(bare), TORCH="system")
    assert done.returncode == 1
    assert "cannot import torch" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("linked", [True, False])
def test_setup_empties_no_folder_that_it_did_not_make(tmp_path: Path, linked: bool) -> None:
    held = tmp_path / "held"
    held.mkdir()
    (held / "work.txt").write_text("a year's work\n")
    venv = tmp_path / "link" if linked else held
    if linked:
        (held / "pyvenv.cfg").write_text("home = /usr/bin\n")  # another project's environment
        venv.symlink_to(held)
    done = setup(tmp_path, VENV=str(venv), PYTHON=sys.executable)
    assert done.returncode == 1
    assert str(venv) in done.stderr
    assert "VENV=" in done.stderr
    assert (held / "work.txt").read_text() == "a year's work\n"


def test_make_alone_lists_the_targets(tmp_path: Path) -> None:
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in (
        "setup",
        "train",
        "test",
        "test-slow",
        "test-gpu",
        "test-faults",
        "lint",
        "clean",
    ):
        assert f"make {target} " in done.stdout


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
