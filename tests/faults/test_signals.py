"""Row 6: whatever asks a real run to stop, the step is finished and saved, and a resume goes on to the last bit."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_support import (
    ARGUMENTS,
    START_SECONDS,
    Launch,
    at_step,
    check_stopped,
    finishes,
    launch,
    launcher,
    nothing_left,  # noqa: F401
    script,
    steps_done,
    wait_until,
)

from tests.support.matrix import rest_nightly
from tests.support.runs import ROOT, metrics, wait_for_step

pytestmark = pytest.mark.faults(6)

SIGNALS = int(os.environ.get("FAULTS_SIGNALS", "5"))
PER_RUN = 5
ASKED = (
    ("SIGTERM",),
    ("SIGINT",),
    ("SIGUSR1",),
    ("SIGHUP",),
    ("SIGINT", "SIGTERM"),
    ("SIGTERM", "SIGTERM"),
)
# launch/train.py that sends itself SIGTERM when it begins to import torch, or first calls STAGE of the job.
STARTING = """
import os, signal, sys
sys.path.insert(0, {root!r})
stage = os.environ["STAGE"]
def fire():
    open("fired", "a").write(stage + " ")
    os.kill(os.getpid(), signal.SIGTERM)
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            fire()
if stage == "import":
    sys.meta_path.insert(0, Finder)
else:
    from harness.tools import train as job
    real = getattr(job, stage)
    setattr(job, stage, lambda *given: (fire(), real(*given))[1])
from harness.cli import train_main
train_main()
"""
# A model that takes longer for its eighth step than torchrun, left to itself, waits for a rank that it asked to stop.
SLEEPY = """
import time
from harness.models.gpt import build
def sleepy():
    model, forwards = build(dim=64, layers=1, heads=2, ffn=176, tied=True), []
    def sleep(*given):
        forwards.append(1)
        if model.training and len(forwards) == 15:  # two to a step
            open("asleep", "w").close()
            time.sleep(33)
    model.register_forward_pre_hook(sleep)
    return model
"""
# launch/train.py that sends itself a signal when it begins to import the first thing that takes its time.
AT_IMPORT = """
import os, runpy, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "typer":
            open("fired", "w").close()
            os.kill(os.getpid(), signal.{name})
sys.meta_path.insert(0, Finder)
runpy.run_path({program!r}, run_name="__main__")
"""
# The same, whose rank 0 comes late to the rendezvous, so that the other waits there.
LATE = """
import os, sys, time
sys.path.insert(0, {root!r})
from harness import build
real = build.join
def join(launch, *given):
    open(str(launch.rank), "w").close()
    if launch.rank == 0:
        time.sleep(600)
    return real(launch, *given)
build.join = join
from harness.cli import train_main
train_main()
"""
# The same, which is sent a signal by what is left when the interpreter is taken down.
LAST = """
import os, signal, sys
sys.path.insert(0, {root!r})
class Remains:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGTERM):
        kill(process, number)
sys.remains = Remains()
from harness.cli import train_main
train_main()
"""
# Whom a test of a launcher signals, and with what.
LAUNCHERS = (("launcher", "SIGTERM"), ("launcher", "SIGKILL"))
RANKS_ALONE = (("1", "SIGUSR1"),)
ALL = (*LAUNCHERS, ("launcher", "SIGINT"), ("0", "SIGTERM"), *RANKS_ALONE)
STAGES = (
    "join_worker",
    "build_plan",
    "build_data",
    "write_plan",
    "open_store",
    "open_telemetry",
    "build_run",
)
# The same, with signals from within: WHERE is what is going on when they come, "<signal> <how often>".
WITHIN = """
import os, signal, sys
sys.path.insert(0, {root!r})
where, name, times = os.environ["WHERE"].split()
def fire(real):
    def fired(*given, **named):
        open("fired", "a").write(where + " ")
        for _ in range(int(times)):
            os.kill(os.getpid(), getattr(signal, name))
        return real(*given, **named)
    return fired
from harness import run as loop
from harness.checkpoint.store import Store
from harness.report import inspect as summary
from harness.report import page as report
owner, member = dict(save=(Store, "save"), evaluate=(loop, "evaluate"), write=(report, "write"),
                     summary=(summary, "summary"), train_step=(loop, "train_step"))[where]
setattr(owner, member, fire(getattr(owner, member)))
from harness.cli import train_main
train_main()
"""


def scripted(folder: Path, script: str, *more: str, **variables: str) -> Launch:
    (folder / "start.py").write_text(script.format(root=str(ROOT)))
    return launch(
        folder,
        *ARGUMENTS,
        *more,
        before=[sys.executable, str(folder / "start.py")],
        variables=variables,
    )


def stopped_while_starting(folder: Path, stage: str) -> None:
    job = scripted(folder, STARTING, STAGE=stage)
    assert job.process.wait(timeout=120) == 75, job.output()
    assert (folder / "fired").read_text().split()[-1] == stage
    assert "SIGTERM: stopped before training began" in job.output()
    assert steps_done(job.run) == 0
    job.ended(5)


def test_a_signal_during_the_imports_is_a_clear_end(tmp_path: Path) -> None:
    stopped_while_starting(tmp_path, "import")
    assert not (tmp_path / "runs").exists()


@pytest.mark.nightly
def test_a_signal_at_any_stage_of_the_start_leaves_a_run_that_starts(tmp_path: Path) -> None:
    for stage in STAGES:
        stopped_while_starting(tmp_path, stage)
    finishes(tmp_path, resumes=False)


@pytest.mark.slow
@pytest.mark.attack
def test_any_signal_at_any_step_is_one_request(tmp_path: Path, figure: Callable[..., None]) -> None:
    generator = random.Random(os.environ.get("HARNESS_TEST_SEED", "7"))
    for begun in range(0, SIGNALS, PER_RUN):
        folder = tmp_path / str(begun)
        folder.mkdir()
        for step in sorted(generator.sample(range(2, 80), min(PER_RUN, SIGNALS - begun))):
            names = generator.choice(ASKED)
            job = at_step(folder, step)
            for name in names:
                job.process.send_signal(signal.Signals[name])
            assert job.process.wait(timeout=60) == 75, job.output()
            assert check_stopped(job.run, names[0]) >= step
            job.ended(5)
        finishes(folder)
    figure(
        6,
        "signals to a run at random steps: step finished, saved, resumed bit for bit",
        (SIGNALS, SIGNALS),
    )


@pytest.mark.nightly
def test_signals_during_saves_and_validation_change_nothing(tmp_path: Path) -> None:
    for where in ("save", "evaluate"):
        job = scripted(tmp_path, WITHIN, WHERE=f"{where} SIGTERM 1")
        assert job.process.wait(timeout=120) == 75, job.output()
        step = check_stopped(job.run, "SIGTERM")
        # The request came during the first save or validation of this start; the save after it had another signal.
        assert (tmp_path / "fired").read_text().split().count(where) == (
            2 if where == "save" else 1
        )
        assert step < 30
        assert not list((job.run / "checkpoints").glob(".tmp-*"))
    assert metrics(job.run, "val/loss"), "the validation was finished"
    finishes(tmp_path)


@pytest.mark.nightly
def test_a_signal_during_the_farewell_leaves_the_exit_code(tmp_path: Path) -> None:
    job = scripted(tmp_path, WITHIN, "train.max_minutes=0.01", WHERE="summary SIGTERM 1")
    assert job.process.wait(timeout=120) == 75, job.output()
    assert (tmp_path / "fired").exists()
    finishes(tmp_path)


@pytest.mark.nightly
def test_the_third_ctrl_c_ends_at_once_and_the_run_resumes(tmp_path: Path) -> None:
    first = at_step(tmp_path, 12)
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(timeout=60) == 75
    done = check_stopped(first.run, "SIGINT")
    job = scripted(tmp_path, WITHIN, WHERE="train_step SIGINT 3")
    assert job.process.wait(timeout=120) not in (0, 75), job.output()
    assert (tmp_path / "fired").read_text() == "train_step "
    outcome = json.loads((job.run / "outcome.json").read_text())
    assert (outcome["status"], outcome["step"]) == ("failed", done)
    assert "KeyboardInterrupt" in outcome["reason"]
    assert steps_done(job.run) == done, "the step was not finished"
    job.ended(5)
    finishes(tmp_path)


@pytest.mark.nightly
def test_a_signal_during_the_report_changes_nothing(tmp_path: Path) -> None:
    job = scripted(
        tmp_path, WITHIN, "train.steps=12", "tracking.report=true", WHERE="write SIGTERM 2"
    )
    assert job.process.wait(timeout=120) == 0, job.output()
    assert (tmp_path / "fired").exists()
    assert json.loads((job.run / "outcome.json").read_text())["status"] == "done"
    assert (job.run / "report.html").stat().st_size > 1000


def signalled(folder: Path, kind: str, ranks: int, target: str, name: str, step: int) -> float:
    """One start of the run in `folder`, stopped by signal `name` to `target`; seconds until all of it had ended."""
    job = at_step(folder, step, kind=kind, ranks=ranks)
    os.kill(
        job.process.pid if target == "launcher" else job.rank(int(target)), signal.Signals[name]
    )
    seconds = job.ended(60)
    job.process.wait()
    if target == "launcher":
        # torchrun passes SIGINT on; the ranks of a killed launcher notice by themselves.
        passed_on = {"torchrun": {"SIGTERM": "SIGTERM", "SIGINT": "SIGINT"}, "deepspeed": {}}[kind]
        check_stopped(job.run, passed_on.get(name, "the launcher is gone"))
    else:
        check_stopped(job.run, name if target == "0" else f"rank {target}: {name}")
    return seconds


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "ranks", "sent"),
    [
        pytest.param(
            "torchrun", 2, RANKS_ALONE, marks=pytest.mark.nightly, id="a rank of torchrun"
        ),
        pytest.param("torchrun", 2, ALL, marks=pytest.mark.nightly, id="torchrun-2"),
        pytest.param("torchrun", 1, LAUNCHERS, marks=pytest.mark.nightly, id="torchrun-1"),
        pytest.param("deepspeed", 1, LAUNCHERS, marks=pytest.mark.nightly, id="deepspeed-1"),
        pytest.param("deepspeed", 2, ALL, marks=pytest.mark.nightly, id="deepspeed-2"),
    ],
)
def test_signals_to_the_launcher_or_one_rank_stop_all(
    tmp_path: Path,
    kind: str,
    ranks: int,
    sent: tuple[tuple[str, str], ...],
    figure: Callable[..., None],
) -> None:
    seconds = [
        signalled(tmp_path, kind, ranks, *each, step=5 + 15 * number)
        for number, each in enumerate(sent)
    ]
    finishes(tmp_path, kind, ranks)
    if sent == RANKS_ALONE:  # the page has the figures of all of them
        return
    what = (
        f"signals to launcher or rank, saved, ended, resumed bit for bit: {kind}, {ranks} rank(s)"
    )
    figure(6, what, (len(sent), len(sent)))
    figure(
        6,
        f"longest from signal to the end of every process: {kind}, {ranks} rank(s)",
        f"{max(seconds):.1f} s",
    )


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "fault"),
    rest_nightly(
        [
            *(
                ("torchrun", fault)
                for fault in (
                    "SIGTERM",
                    "SIGINT",
                    "SIGUSR1",
                    "SIGHUP",
                    "starting",
                    "launcher killed",
                )
            ),
            *(
                ("deepspeed", fault)
                for fault in ("SIGTERM", "SIGINT", "starting", "launcher killed")
            ),
        ],
        ("torchrun", "SIGTERM"),
        ("torchrun", "launcher killed"),
    ),
)
def test_the_launch_scripts_end_with_75(tmp_path: Path, kind: str, fault: str) -> None:
    job = script(tmp_path, kind, "train.steps=1000000")
    if fault == "starting":
        lock = job.run / "lock"
        wait_until(
            lambda: lock.exists() or job.process.poll() is not None,
            "rank 0 has the lock",
            START_SECONDS,
        )
    else:
        wait_for_step(job.run, 5, job.process, START_SECONDS)
    if fault == "launcher killed":
        (launcher,) = (pid for pid in job.processes() if job.parent(pid) == job.process.pid)
        os.kill(launcher, signal.SIGKILL)
    else:
        job.process.send_signal(signal.Signals[fault if fault != "starting" else "SIGTERM"])
    assert job.process.wait(timeout=90) == 75, job.output()
    job.ended(5)
    if fault != "starting":
        assert json.loads((job.run / "outcome.json").read_text())["status"] == "stopped"


@pytest.mark.nightly
@pytest.mark.dist
def test_a_step_or_save_longer_than_torchruns_patience_is_finished(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLEEPY)
    job = script(tmp_path, "torchrun", "model.target=mine:sleepy", "model.args={}", ranks=1)
    wait_until((tmp_path / "asleep").exists, "the long step", START_SECONDS)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=90) == 75, job.output()
    assert check_stopped(job.run, "SIGTERM") in (8, 9), "a step is judged during the next"
    job.ended(5)


@pytest.mark.nightly
@pytest.mark.dist
def test_max_minutes_stops_two_ranks_at_one_step(tmp_path: Path) -> None:
    job = launch(
        tmp_path,
        *ARGUMENTS,
        "train.steps=100000",
        "train.max_minutes=0.05",
        kind="torchrun",
        ranks=2,
    )
    job.ended(START_SECONDS)
    assert job.process.wait() == 1, "torchrun's word for any failure"
    outcome = json.loads((job.run / "outcome.json").read_text())
    assert outcome["reason"].endswith("train.max_minutes is over")
    check_stopped(job.run, outcome["reason"])


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_nightly(["SIGTERM", "SIGINT"], "SIGINT"))
def test_more_signals_until_the_process_is_gone_leave_75(tmp_path: Path, name: str) -> None:
    """The last moments of a process are the interpreter's, where its own handlers are gone."""
    job = at_step(tmp_path, 5)
    job.process.send_signal(signal.Signals[name])
    # Of two signals on their way at once a busy machine may hand over the second one first.
    wait_until(lambda: f"{name}: saving" in job.output(), "the first one is heard", START_SECONDS)
    sent = 0
    while job.process.poll() is None:
        job.process.send_signal(signal.SIGTERM)
        sent += 1
        time.sleep(0.001)
    assert job.process.returncode == 75, job.output()
    assert sent > 1
    check_stopped(job.run, name)


@pytest.mark.slow
def test_a_signal_in_the_interpreters_last_moments_changes_no_code(tmp_path: Path) -> None:
    job = scripted(tmp_path, LAST, "train.steps=3")
    assert job.process.wait(timeout=120) == 0, job.output()


@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM", "SIGINT"])
def test_a_signal_before_anything_is_imported_is_a_clear_end(tmp_path: Path, name: str) -> None:
    (tmp_path / "start.py").write_text(
        AT_IMPORT.format(program=str(ROOT / "launch" / "train.py"), name=name)
    )
    job = launch(tmp_path, *ARGUMENTS, before=[sys.executable, str(tmp_path / "start.py")])
    assert job.process.wait(timeout=120) == 75, job.output()
    assert (tmp_path / "fired").exists()
    assert (
        job.output() == f"{name}: stopped before training began; the same command starts it again\n"
    )


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kind", rest_nightly(["torchrun", "deepspeed"], "torchrun"))
def test_ranks_that_start_miss_their_launcher(tmp_path: Path, kind: str) -> None:
    """Out of reach of signals: one waits for the other in the rendezvous, whose host is gone."""
    (tmp_path / "start.py").write_text(LATE.format(root=str(ROOT)))
    job = launch(tmp_path, *ARGUMENTS, before=[*launcher(kind, 2), str(tmp_path / "start.py")])
    wait_until(
        lambda: (tmp_path / "1").exists() and (tmp_path / "0").exists(),
        "both ranks start",
        START_SECONDS,
    )
    for pid, variables in job.processes().items():  # the deepspeed launcher is two processes
        if "RANK" not in variables:
            os.kill(pid, signal.SIGKILL)
    job.ended(15)
    assert "the launcher is gone: stopped before training began" in job.output()
