"""A drill's runs write nowhere but in its folder, whatever the config and the environment name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.core.config import RunConfig, load_config
from harness.core.errors import ConfigError
from harness.core.files import with_this_package
from harness.drill.bench import Bench, short_config, users_config
from harness.drill.child import Missed
from harness.drill.exercises import closed_port, lacks_ranks, sigterm, soak
from harness.drill.judge import Account, Check, Verdict
from harness.drill.page import Drill, Result, write


def config(**sections: object) -> RunConfig:
    return RunConfig.model_validate(sections, strict=False)


def test_paths_mean_the_same_from_the_drills_folder(tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    given = config(
        data={"mixture": [{"path": "texts", "weight": 1.0}, {"path": "hf:a/b", "weight": 1.0}]},
        model={
            "target": "hf:models/mine",
            "args": {"config": "models/mine", "kind": "a/b", "depth": 2},
        },
        checkpoint={"emergency_path": "/mnt/other"},
    )
    ours = users_config(given, tmp_path)
    assert [each.path for each in ours.data.mixture] == [str(tmp_path / "texts"), "hf:a/b"]
    assert ours.model.target == f"hf:{tmp_path / 'models' / 'mine'}"
    assert ours.model.args["config"] == str(tmp_path / "models" / "mine")
    assert ours.model.args["kind"] == "a/b", "no file of that name"
    assert ours.checkpoint.emergency_path is None, "it saves nowhere else"


def test_the_short_config_changes_length_saves_and_tracking_alone() -> None:
    users = load_config("tiny")
    short = short_config(users, 12)
    assert (short.train.steps, short.checkpoint.every) == (12, 3)
    assert (short.tracking.mlflow, short.tracking.report) == (False, False)
    train = {"steps", "eval_every", "max_minutes"}
    assert short.train.model_dump(exclude=train) == users.train.model_dump(exclude=train)
    for section in ("data", "model", "engine", "guard"):
        assert getattr(short, section) == getattr(users, section)


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        Bench.open(tmp_path, load_config("tiny"), 12, 60)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_children_know_no_tracker_and_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:secret@example.com")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "https://example.com")
    monkeypatch.setenv("HARNESS_EXIT_CODE_FILE", str(tmp_path / "code"))
    monkeypatch.setenv("MASTER_PORT", "1")
    bench = Bench.open(tmp_path / "drill", load_config("tiny"), 12, 60)
    child = bench.start(
        "env", "-c", "import os; print('\\n'.join(f'{k}={v}' for k, v in os.environ.items()))"
    )
    assert child.finish(60) == 0
    seen = dict(line.split("=", 1) for line in child.screen.splitlines() if "=" in line)
    named = {name: value for name, value in seen.items() if name.startswith("MLFLOW_")}
    assert named == {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
    assert not {"HARNESS_EXIT_CODE_FILE", "MASTER_PORT"} & seen.keys()
    assert seen["PYTHONPATH"].split(os.pathsep)[-1] == os.getcwd(), "a user's own model is found"


@pytest.mark.slow
def test_whatever_a_run_leaves_behind_is_ended(tmp_path: Path) -> None:
    bench = Bench.open(tmp_path / "drill", load_config("tiny"), 12, 60)
    # A process in a session of its own, as the shipper is.
    script = (
        "import subprocess, sys; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True, "
        "stdout=subprocess.DEVNULL); print(p.pid)"
    )
    child = bench.start("leaves", "-c", script)
    assert child.finish(60) == 0
    left = int(child.screen)
    os.kill(left, 0)
    bench.sweep()
    deadline = time.monotonic() + 300
    while _lives(left):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# A run, and a rank of it in a session of its own. Both would go on for an hour.
RUN = """
import os, subprocess, sys, time
sleep = "import time; print('up', flush=True); time.sleep(3600)"
pipe = subprocess.PIPE
rank = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True, stdout=pipe)
rank.stdout.read(2)
print(os.getpid(), rank.pid, "both", flush=True)
time.sleep(3600)
"""
DRILL = """
import sys
from pathlib import Path
from harness.core.config import load_config
from harness.drill.bench import Bench
bench = Bench.open(Path("drill"), load_config("tiny"), 12, 60)
with bench.kept():
    child = bench.start("run", "-c", sys.argv[1])
    child.until(lambda: "both" in child.screen, "its pids", 300)
    print(child.screen, flush=True)
    child.finish(3600)
"""


def test_a_drill_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    line = [sys.executable, "-c", DRILL, RUN]
    variables = with_this_package()
    with subprocess.Popen(line, cwd=tmp_path, env=variables, stdout=subprocess.PIPE) as drill:
        assert drill.stdout is not None
        run, rank, _ = drill.stdout.readline().split()
        pids = [int(run), int(rank)]
        assert all(map(_lives, pids))
        drill.kill()
    try:
        deadline = time.monotonic() + 300
        while any(map(_lives, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for pid in filter(_lives, pids):
            os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_a_run_that_fails_undisturbed_fails_soak_and_is_tried_once(tmp_path: Path) -> None:
    bench = Bench.open(tmp_path / "drill", load_config("tiny", ["data.path=/no/such"]), 12, 300)
    account = soak(bench)
    assert account.verdict is Verdict.FAILED
    assert "ended with 2" in account.checks[0].seen
    with pytest.raises(Missed, match="the undisturbed run failed"):
        sigterm(bench)
    logs = [path.name for path in (bench.folder / "logs").iterdir()]
    assert logs == ["soak-1.log"]


def test_nobody_listens_on_the_dead_trackers_port() -> None:
    with closed_port() as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"engine": {"name": "single"}}, "engine.name=single"),
        ({"train": {"global_batch": 6, "micro_batch": 2}}, "train.global_batch"),
    ],
)
def test_why_two_ranks_do_not_apply(
    tmp_path: Path, changed: dict[str, object], reason: str
) -> None:
    bench = Bench.open(tmp_path / "drill", config(**changed), 12, 60)
    assert reason in lacks_ranks(bench)


def test_the_page_obeys_nothing_that_a_run_prints(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\x1b[2J"
    account = Account(evil, evil, [Check(evil, evil, False)], notes=[evil])
    drill = Drill(evil, [Result("soak", "twice", account, 1.0)], {evil: evil})
    write(tmp_path, drill)
    page = (tmp_path / "drill.html").read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    assert "http" not in page, "self-contained"
    assert int(drill.exit_code) == 1
