"""Tracking servers that refuse, fail, hang, lose answers, cannot be found or are locked: row 18 of the fault matrix.

The real journal, the real shipper, a real MLflow store; what the server does is up to the proxy before it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from launch_support import START_SECONDS, launch, nothing_left  # noqa: F401
from tracking_server import FAULTS, Proxy, held, real_server, wait_for
from tracking_trainer import Timings, Trainer, alive, check_delivered, query

from harness.tracking.journal import JOURNAL, delivered, read_rows
from tests.support.runs import ROOT, environment, metrics, train

pytestmark = pytest.mark.faults(18)

STEPS = int(os.environ.get("FAULTS_TRACKING_STEPS", "2000"))
LIMIT = 1e-3
Tell = Callable[..., None]


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def said(run_dir: Path, what: str) -> int:
    """How many of the shipper's attempts failed with these words."""
    log = run_dir / "shipper.log"
    return (
        len(re.findall(rf"^\d{{4}}-\d\d-\d\d .*{what}", log.read_text(), re.MULTILINE))
        if log.exists()
        else 0
    )


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    """Before nothing: between outages it hangs up."""
    proxy = Proxy(tmp_path)
    yield proxy
    proxy.close()


def check_unhurried(times: list[Timings], tell: Tell, what: str) -> None:
    """No step waited: its calls took at most LIMIT more in an outage than those of a journal that nobody follows."""

    def all_of(name: str) -> list[float]:
        return [seconds for part in times for seconds in part[name]]

    watched, alone = p99(all_of("watched")), p99(all_of("alone"))
    tell(
        18, f"p99 of the time that an outage adds to a step: {what}",
        f"{(watched - alone) * 1e6:+.0f} us",
        n=len(all_of("watched")), target="below 1 ms",
    )  # fmt: skip
    assert watched - alone < LIMIT


@pytest.mark.slow
def test_no_step_waits_whatever_the_server_does(tmp_path: Path, proxy: Proxy, figure: Tell) -> None:
    run_dir = tmp_path / "runs" / "r"
    run_dir.mkdir(parents=True)
    given = {"MLFLOW_TRACKING_URI": proxy.uri, "PYTHONPATH": str(proxy.python_path)}
    given["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "2"
    times: list[Timings] = []
    faults = [fault for fault in FAULTS if fault != "swallow"]
    trainer = Trainer(run_dir, 1, given)
    for fault in faults:
        with proxy.outage(fault):
            before = proxy.fired(fault, said(run_dir, "Connection refused"))
            times.append(trainer.steps(1300))
            wait_for(lambda: proxy.fired(fault, said(run_dir, "Connection refused")) > before)  # noqa: B023
    trainer.kill()
    os.kill(trainer.shipper, signal.SIGKILL)
    check_unhurried(times, figure, "four kinds, one after the other")
    rows = [row["step"] for row in read_rows(run_dir / JOURNAL) if row["kind"] == "metrics"]
    assert rows == list(range(1, 1300 * len(faults) + 1))
    assert not delivered(run_dir)


def through_outages(
    run_dir: Path,
    database: Path,
    given: dict[str, str],
    outage: Callable[[], AbstractContextManager[None]],
    fired: Callable[[], int],
    often: int = 2,
) -> list[Timings]:
    """A run with an outage at its start, in mid-run, and when it resumes after a kill; what the journal's calls took.

    fired: how often the fault was met so far. Each outage lasts until it was met `often` times more.
    """
    run_dir.mkdir(parents=True)
    times: list[Timings] = []

    def in_outage(trainer: Trainer, before: int) -> None:
        times.append(trainer.steps(STEPS))
        wait_for(lambda: fired() >= before + often)
        assert not delivered(run_dir)

    with outage():
        in_outage(trainer := Trainer(run_dir, 1, given), fired())
    wait_for(lambda: delivered(run_dir))
    with outage():
        in_outage(trainer, fired())
    wait_for(lambda: delivered(run_dir))
    with outage():
        before, shipper = fired(), trainer.shipper
        trainer.kill()
        in_outage(trainer := Trainer(run_dir, 2 * STEPS - 99, given), before)
    wait_for(lambda: delivered(run_dir))
    wait_for(lambda: not alive(shipper))
    # The shipper of the trainer that was killed may have had the last word, and that was KILLED.
    status = "select status from runs where name = ?"
    wait_for(lambda: query(database, status, run_dir.name) == [("RUNNING",)])
    assert trainer.end()
    return times


def check_whole(run_dir: Path, database: Path) -> None:
    """Delivered, and the steps that the resume did again stand once."""
    points = check_delivered(run_dir, database)
    done = [row["step"] for row in read_rows(run_dir / JOURNAL) if row["kind"] == "metrics"]
    assert done == list(range(1, 3 * STEPS - 99))
    assert points > 4 * len(done)


@pytest.mark.nightly
def test_a_database_that_is_locked_delays_delivery_and_nothing_else(
    tmp_path: Path, figure: Tell
) -> None:
    run_dir, database = tmp_path / "runs" / "locked", tmp_path / "mlflow.db"
    given = {"MLFLOW_TRACKING_URI": f"sqlite:///{database}"}
    times = through_outages(
        run_dir,
        database,
        given,
        lambda: held(database),
        lambda: said(run_dir, "database is locked"),
    )
    check_whole(run_dir, database)
    check_unhurried(times, figure, "database locked")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Proxy]]:
    """The folder of a real `mlflow server`, and the proxy before it."""
    folder = tmp_path_factory.mktemp("server")
    with real_server(folder) as port:
        proxy = Proxy(folder, port)
        yield folder, proxy
        proxy.close()


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_delays_delivery_and_nothing_else(
    tmp_path: Path, server: tuple[Path, Proxy], fault: str, figure: Tell
) -> None:
    folder, proxy = server
    run_dir = tmp_path / "runs" / fault
    given = {"MLFLOW_TRACKING_URI": proxy.uri, "PYTHONPATH": str(proxy.python_path)}
    if fault == "hang":
        given["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "4"
    # Answers that are lost one after the other: to the creation of experiment and run, then to the first rows.
    often = 4 if fault == "swallow" else 2
    times = through_outages(
        run_dir,
        folder / "mlflow.db",
        given,
        lambda: proxy.outage(fault),
        lambda: proxy.fired(fault, said(run_dir, "Connection refused")),
        often,
    )
    check_whole(run_dir, folder / "mlflow.db")
    check_unhurried(times, figure, FAULTS[fault])


def sync(folder: Path, run: str, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """`harness sync` in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", "sync", run, *words],
        cwd=folder, env=environment(PYTHONPATH=str(ROOT), **extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, timeout=180,
    )  # fmt: skip


SHORT = ("--name", "r", "train.steps=8", "tracking.mlflow=true", "tracking.drain_seconds=1")


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["hang", "error", "no name"])
def test_a_run_that_ends_in_an_outage_can_be_delivered_from_elsewhere(
    tmp_path: Path, proxy: Proxy, fault: str
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    run_dir = here / "runs" / "r"
    with proxy.outage(fault if fault in FAULTS else ""):
        uri = proxy.uri if fault in FAULTS else "http://no-such-host.invalid"
        job = launch(here, *SHORT, "train.steps=1000000", variables={"MLFLOW_TRACKING_URI": uri})
        wait_for(
            lambda: proxy.hits[fault] + said(run_dir, "no-such-host.invalid") > 0, START_SECONDS
        )
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(timeout=START_SECONDS) == 75, job.output()
        assert "harness sync runs/r" in job.output()
        assert not delivered(run_dir)
        shutil.copytree(run_dir, elsewhere / "r")
        later = sync(
            elsewhere, "r", "--elsewhere", MLFLOW_TRACKING_URI=f"sqlite:///{elsewhere / 'other.db'}"
        )
    assert later.returncode == 0, later.stdout
    steps = [step for step, _ in metrics(elsewhere / "r")]
    assert steps == list(range(1, len(steps) + 1))
    assert check_delivered(elsewhere / "r", elsewhere / "other.db", "KILLED") > len(steps) * 8
    ((began, ended),) = query(elsewhere / "other.db", "select start_time, end_time from runs")
    rows = list(read_rows(elsewhere / "r" / JOURNAL))
    assert (began, ended) == (round(rows[0]["time"] * 1000), round(rows[-1]["time"] * 1000)), (
        "the run's times, not ours"
    )


@pytest.mark.nightly
def test_a_run_whose_database_is_locked_to_its_end_is_synced_in_its_place(tmp_path: Path) -> None:
    with held(tmp_path / "mlflow.db"):
        done = train(tmp_path, *SHORT)
        assert done.returncode == 0, done.stdout
        told = re.findall(r"harness sync (\S+)", done.stdout)
        wait_for(lambda: said(tmp_path / "runs" / "r", "database is locked") > 0)
    assert told
    later = sync(tmp_path, told[-1])
    assert later.returncode == 0, later.stdout
    assert check_delivered(tmp_path / "runs" / "r", tmp_path / "mlflow.db") > 8 * 10
