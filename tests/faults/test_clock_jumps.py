"""A wall clock that jumps in mid-run and between two processes: row 26 of the fault matrix."""

from __future__ import annotations

import ast
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tracking_trainer import check_delivered

from harness.core.errors import ExitCode
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL, Journal, read_rows
from tests.support.runs import ANEW, ROOT, metrics, train

pytestmark = pytest.mark.faults(26)

HOUR, YEAR = 3600, 365 * 24 * 3600
# The wall clock of every process that finds this first on its path: off by as many seconds as the file says.
SITE = """
import time
_time, _time_ns = time.time, time.time_ns
def _off():
    try:
        with open({offset!r}) as file:
            return int(file.read() or 0)
    except OSError:
        return 0
time.time = lambda: _time() + _off()
time.time_ns = lambda: _time_ns() + _off() * 10**9
"""
# A user's model that sets the clock while it trains, and writes down what time it then is.
MODEL = """
import os, time, torch
from torch import nn
from harness.models.gpt import build
class Jumping(nn.Module):
    vocab_size = 256
    def __init__(self, jumps):
        super().__init__()
        self.gpt, self.jumps, self.forwards = build(dim=64, layers=1, heads=2, ffn=176, tied=True), jumps, 0
    def forward(self, inputs, targets):
        if torch.is_grad_enabled():
            self.forwards += 1
            if str(self.forwards) in self.jumps:
                with open("offset.new", "w") as file:
                    file.write(str(self.jumps[str(self.forwards)]))
                os.replace("offset.new", "offset")
            with open("clock", "a") as file:
                file.write(f"{time.time()}\\n")
        return self.gpt(inputs, targets)
def jumping(jumps): return Jumping(jumps)
"""


def prepare(folder: Path, jumps: dict[int, int]) -> tuple[tuple[str, ...], str]:
    """Arguments and PYTHONPATH of a run whose clock is set in its n-th forward pass. jumps: forward -> seconds off."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE.format(offset=str(folder / "offset")))
    (folder / "mine.py").write_text(MODEL)
    given = json.dumps({"jumps": {str(forward): seconds for forward, seconds in jumps.items()}})
    return (
        "--name",
        "r",
        "train.micro_batch=4",
        "model.target=mine:jumping",
        f"model.args={given}",
    ), str(folder / "site")


def jumps_of(folder: Path) -> tuple[float, float]:
    """The furthest that the clock went back and forward between two forward passes."""
    times = [float(line) for line in (folder / "clock").read_text().split()]
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return min(steps), max(steps)


def times_of(run_dir: Path) -> list[float]:
    return [row["time"] for row in read_rows(run_dir / JOURNAL)]


@pytest.mark.slow
def test_only_the_rows_clock_reads_the_wall_clock() -> None:
    """And what compares it with times that others wrote by theirs: the store, a build's lock and doctor with those of
    files, the list of runs with their rows, and a delivery with the date until which a server asks it to wait.
    """
    reading = {
        "time": ("time", "time_ns"),
        "datetime": ("now", "today", "utcnow"),
        "date": ("today",),
    }
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "harness").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.attr in reading.get(node.value.id, ())
    ]
    places = {place.partition(":")[0] for place in found}
    compare = {
        "harness/checkpoint/store.py",
        "harness/engines/deepspeed_setup.py",
        "harness/tracking/retry.py",
        "harness/capability/checks.py",
        "harness/report/overview.py",
        # When a drill began, for its page; no run of it depends on that.
        "harness/drill/bench.py",
        "harness/drill/page.py",
        "harness/tools/drill.py",
    }
    assert places == {"harness/tracking/journal.py", *compare}, found


def test_rows_keep_their_order_when_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    shown: list[float] = []

    def set_clock(seconds: int) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)
        shown.append(time.time())

    began = real()
    for resume_step, seconds in ((None, 0), (4, -HOUR), (7, YEAR), (10, -YEAR)):
        set_clock(seconds)
        with Journal(tmp_path / JOURNAL, resume_step=resume_step) as journal:
            for step in range(resume_step or 1, (resume_step or 1) + 3):
                set_clock(seconds + (HOUR if step % 2 else -HOUR))
                journal.metrics(step, {"train/loss": float(step)})
    assert min(shown) < began - YEAR
    rows = list(read_rows(tmp_path / JOURNAL))
    assert [row["step"] for row in rows] == list(range(1, 13))
    times = times_of(tmp_path)
    assert times == sorted(times)
    first, ahead, after = times[0], times[6], times[9]
    assert abs(first - began) < 60
    assert times[5] - first < 60, "behind, rows go on from the last one"
    assert abs(ahead - began - YEAR) < 60, "ahead, a new process takes the clock's word"
    assert after - ahead < 60


@pytest.mark.nightly
def test_a_run_whose_clock_jumps_is_in_order_everywhere(
    tmp_path: Path, figure: Callable[..., None]
) -> None:
    arguments, site = prepare(tmp_path, {5: -HOUR, 9: YEAR})
    arguments += ("tracking.mlflow=true", "tracking.report=true", "train.max_minutes=30")
    run_dir = tmp_path / "runs" / "r"
    done = train(tmp_path, *arguments, "train.steps=14", PYTHONPATH=site, launcher=ANEW)
    assert done.returncode == 0, done.stdout
    back, forward = jumps_of(tmp_path)
    assert back < -HOUR + 60
    assert forward > YEAR
    (tmp_path / "offset").write_text(str(-HOUR))
    done = train(tmp_path, *arguments, "train.steps=20", PYTHONPATH=site, launcher=ANEW)
    assert done.returncode == 0, done.stdout
    assert "resumed at step 14" in done.stdout
    assert jumps_of(tmp_path)[0] < -YEAR, (
        "the clock that the second process found was a year behind the first one's"
    )

    assert [step for step, _ in metrics(run_dir)] == list(range(1, 21))
    times = times_of(run_dir)
    assert times == sorted(times)
    assert times[-1] - times[0] < 600, "as long as it took"
    points = check_delivered(run_dir, tmp_path / "mlflow.db")
    assert points > 20 * 10
    assert list(RunHistory.read(run_dir).series["train/loss"]) == list(range(1, 21))
    rates = [rate for _, rate in metrics(run_dir, "train/tokens_per_second")]
    assert min(rates) > 1.0, "tokens over seconds that really passed"
    assert "at step 20" in (run_dir / "report.html").read_text()
    figure(
        26, "points in order of steps in MLflow, clock set by -1 h, +1 year, -1 year",
        f"{points} of {points}", n=points, target="all",
    )  # fmt: skip


@pytest.mark.slow
def test_the_time_limit_of_a_run_does_not_follow_the_clock(tmp_path: Path) -> None:
    arguments, site = prepare(tmp_path, {3: -HOUR})
    began = time.monotonic()
    done = train(
        tmp_path,
        *arguments,
        "train.steps=100000",
        "train.max_minutes=0.05",
        PYTHONPATH=site,
        launcher=ANEW,
    )
    assert done.returncode == ExitCode.STOPPED, done.stdout
    assert jumps_of(tmp_path)[0] < -HOUR + 60
    assert (
        "train.max_minutes"
        in json.loads((tmp_path / "runs" / "r" / "outcome.json").read_text())["reason"]
    )
    assert time.monotonic() - began < 180
