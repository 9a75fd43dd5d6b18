"""`harness drill` on real runs: all verdicts on the tiny config, a broken model, nothing of the user's touched."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.matrix import rest_slow
from tests.support.runs import ROOT, TEXT, environment, harness

TINY = ("drill", "--config", "tiny", f"data.path={TEXT}")
# A user's model whose loss is another one each time: no two runs of it agree.
NOISY = """
import random
import torch
from harness.models.gpt import build
class Noisy(torch.nn.Module):
    vocab_size = 256
    def __init__(self):
        super().__init__()
        self.gpt, self.noise = build(dim=32, layers=1, heads=2, ffn=64), random.SystemRandom()
    def forward(self, inputs, targets):
        return self.gpt(inputs, targets) * (1 + 1e-3 * self.noise.random())
"""


REFUSED = [
    (("--only", "sigtem"), "did you mean"),
    (("--steps", "3"), "at least 8"),
    (("--patience", "0"), "--patience"),
    (("engine.name=deepspeed",), "deepspeed cannot be drilled"),
    (("train.lrr=1",), "unknown key"),
    (("--folder", "mine"), "is not empty"),
]


@pytest.mark.parametrize(("words", "text"), rest_slow(REFUSED, REFUSED[-1]))
def test_what_cannot_be_drilled_is_refused_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], text: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    done = harness(tmp_path, *TINY, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stderr
    assert "fix: " in done.stderr or "known: " in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "notes.txt"]


def test_a_rank_of_a_launcher_is_no_drill(tmp_path: Path) -> None:
    done = harness(tmp_path, *TINY, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "started as a rank" in done.stderr


@pytest.mark.nightly
@pytest.mark.faults(1)
def test_a_model_that_is_never_the_same_fails_soak_and_meets_no_tracker(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NOISY)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = harness(
            tmp_path, *TINY, "model.target=mine:Noisy", "--only", "soak", "--steps", "8", "--json",
            # Waited for, so that whatever would be called has been called.
            "tracking.drain_seconds=600", MLFLOW_TRACKING_URI=address,
        )  # fmt: skip
        assert not select.select([listener], [], [], 0)[0], "the configured tracker was called"
    assert done.returncode == 1, done.stdout + done.stderr
    content = json.loads(done.stdout)
    (soak,) = content["exercises"]
    assert (soak["name"], soak["verdict"]) == ("soak", "failed")
    broken = [check for check in soak["checks"] if not check["holds"]]
    assert len(broken) == 1, "both runs came to their end"
    assert "step 1 differs first" in broken[0]["seen"]
    folder = tmp_path / "drills" / "tiny-fp8_hybrid"
    assert json.loads((folder / "drill.json").read_text()) == content
    assert "soak: failed" in (folder / "drill.html").read_text()
    assert (folder / "mlflow.db").is_file(), "delivered to a file of its own"
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"mine.py", "drills"}


@pytest.mark.slow
@pytest.mark.faults(1)
def test_a_drill_that_is_stopped_ends_its_runs_and_files_the_page(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "harness.cli", *TINY, "--only", "sigterm,bit", "--folder", "d"]
    variables = environment(PYTHONPATH=str(ROOT))
    drill = subprocess.Popen(line, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)
    journal = tmp_path / "d" / "runs" / "soak-1" / "journal.jsonl"
    deadline = time.monotonic() + warm.PATIENCE
    while not journal.exists():
        assert drill.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    drill.send_signal(signal.SIGINT)
    output, _ = drill.communicate(timeout=warm.PATIENCE)
    assert drill.returncode == 75, output
    content = json.loads((tmp_path / "d" / "drill.json").read_text())
    reasons = {each["name"]: each["reason"] for each in content["exercises"]}
    assert reasons == dict.fromkeys(("sigterm", "bit"), "the drill was stopped by SIGINT")
    assert {each["verdict"] for each in content["exercises"]} == {"not shown"}
    assert not living(tmp_path / "d"), "runs that go on"


@pytest.mark.slow
@pytest.mark.faults(1)
def test_a_drill_that_is_killed_ends_its_runs(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    words = ("--only", "soak", "--folder", "d", "--steps", "1000000")
    line = [sys.executable, "-m", "harness.cli", *TINY, *words]
    variables = environment(PYTHONPATH=str(ROOT))
    with subprocess.Popen(line, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL) as drill:
        journal = folder / "runs" / "soak-1" / "journal.jsonl"
        deadline = time.monotonic() + warm.PATIENCE
        while not journal.exists():
            assert drill.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert living(folder), "the run trains"
        drill.kill()
    try:
        deadline = time.monotonic() + warm.PATIENCE
        while left := living(folder):
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
    finally:
        for pid in living(folder):
            os.kill(pid, signal.SIGKILL)


def living(folder: Path) -> dict[int, str]:
    """Processes that work in `folder`: pid -> command."""
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdecimal() and Path(f"/proc/{entry}/cwd").readlink() == folder:
                command = Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ")
                if command:
                    found[int(entry)] = command
        except OSError:
            continue
    return found


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.faults(1, 3, 4)
@pytest.mark.timeout(3600)
def test_the_whole_drill_of_the_tiny_config_passes(tmp_path: Path) -> None:
    # Some twenty starts of a run: on a busy machine more than one command is waited for elsewhere.
    words = ["-m", "harness.cli", *TINY, "--folder", "d", "--json"]
    variables = environment(PYTHONPATH=str(ROOT))
    done = warm.run(words, tmp_path, variables, timeout=3500, apart=True)
    assert done.returncode == 0, done.stdout + done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    verdicts = {each["name"]: each["verdict"] for each in content["exercises"]}
    names = (
        "preflight",
        "soak",
        "sigterm",
        "sigkill",
        "bit",
        "disk",
        "tracker",
        "ranks",
        "rollback",
    )
    assert verdicts == dict.fromkeys(names, "passed")
    faults = {each["name"]: each["fault"] for each in content["exercises"]}
    assert "exit code 75" in faults["sigterm"]
    assert faults["sigkill"].count("ended by SIGKILL") == 2
    assert ".tmp-step-" in faults["sigkill"]
    assert "byte" in faults["bit"]
    assert "File too large" in faults["disk"]
    assert "refused" in faults["tracker"]
    assert "NaN" in faults["rollback"]
    assert not living(tmp_path / "d")
