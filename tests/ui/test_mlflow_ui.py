"""MLflow's real pages of a large run in a real browser: what they open on, and how soon. Run by `make test-ui`.

The run is the one that `python -m benchmarks.telemetry` makes: 10,000 steps of 32 layers. UI_STORE: a folder where it
was made before. UI_SECONDS: how soon a page must be usable (5). UI_IMAGES: a folder for what the pages looked like.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness.tracking.journal import Position, run_page
from tests.support.runs import ROOT, environment

pytest.importorskip("aiohttp", reason="the browser is driven by aiohttp")
from tests.ui import browser

psutil = pytest.importorskip("psutil")

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("UI"), reason="run by make test-ui: it needs a browser and minutes"
    ),
    pytest.mark.skipif(
        browser.binary() is None,
        reason=f"no browser: none of {', '.join(browser.NAMES)} is installed",
    ),
]
SECONDS = float(os.environ.get("UI_SECONDS", "5"))
FIRST_CHART = "document.querySelector('.js-plotly-plot .scatterlayer .trace path.js-line')"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mlflow.db and runs/large."""
    if given := os.environ.get("UI_STORE"):
        return Path(given)
    made = tmp_path_factory.mktemp("ui")
    command = [sys.executable, "-m", "benchmarks.telemetry", "--work", str(made)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
    return made


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[str]:
    """Address of a real `mlflow server` on the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).parent / "mlflow")
    uri = f"sqlite:///{store / 'mlflow.db'}"
    command = [
        program,
        "server",
        "--backend-store-uri",
        uri,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        command,
        cwd=store,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            _wait_until_healthy(f"{address}/health", process)
            yield address
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def _wait_until_healthy(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        with suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError("the server did not come up")


@pytest.fixture(scope="module")
def page(server: str) -> Iterator[browser.Browser]:
    """A browser that has loaded MLflow once, and knows nothing else of it."""
    with browser.browser() as opened:
        opened.open(f"{server}/#/")
        opened.wait("document.body && document.body.innerText.includes('Experiments')", 300)
        _wait_until_quiet()
        # MLflow opens a panel of its own beside the first page, and keeps in mind that it was closed.
        opened.ask("""document.querySelector('[aria-label="Close"]')?.click()""")
        yield opened


def _wait_until_quiet(seconds: float = 120.0) -> None:
    """Let the server's helpers come up, or a page's charts, until nothing computes any more."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        before = _processor_seconds()
        time.sleep(2.0)
        if _processor_seconds() - before < 0.2:
            return


def show(page: browser.Browser, address: str, ready: str, name: str) -> float:
    """Seconds from the click until `ready`; the page as it looks then is kept."""
    page.open("about:blank")
    page.wait("location.href === 'about:blank'")
    before = _processor_seconds()
    page.open(address)
    seconds = page.wait(ready)
    print(
        f"\n{name}: usable after {seconds:.2f} s, {_processor_seconds() - before:.2f} s of processor time"
    )
    if folder := os.environ.get("UI_IMAGES"):
        _wait_until_quiet()
        page.photograph(Path(folder) / f"mlflow_{name}.png")
    assert seconds < SECONDS, f"{name}: {seconds:.1f} s"
    return seconds


def _processor_seconds() -> float:
    """Of the browser, the server and this process, which tells a slow page from a busy machine."""
    family = psutil.Process().children(recursive=True)
    spent = 0.0
    for process in family:
        with suppress(psutil.Error):
            spent += sum(process.cpu_times()[:2])
    return spent


def says(*texts: str) -> str:
    return " && ".join(
        ["document.body", *(f"document.body.innerText.includes({text!r})" for text in texts)]
    )


def test_the_experiment_shows_training_runs(
    page: browser.Browser, server: str, store: Path
) -> None:
    experiment = Position.load(store / "runs" / "large").experiment_id
    address = f"{server}/#/experiments/{experiment}?workflowType=machine_learning"
    show(page, address, says("Run Name", "large"), "runs")
    assert "Evaluation runs" not in page.text()


def test_the_run_page_opens_on_what_ran(page: browser.Browser, server: str, store: Path) -> None:
    show(
        page,
        server + run_page(store / "runs" / "large"),
        says("Charts in order", "train/loss"),
        "run",
    )
    text = page.text()
    for part in ("native:fp8", "effective precision", "fp8.picked", "Datasets", "made up"):
        assert part in text, text


def test_the_first_charts_are_of_the_loss(page: browser.Browser, server: str, store: Path) -> None:
    run, query = run_page(store / "runs" / "large").split("?")
    show(page, f"{server}{run}/model-metrics?{query}", FIRST_CHART, "charts")
    text = page.text()
    places = [text.index(section) for section in ("Loss", "fp8/grad_output", "fp8/input")]
    assert places == sorted(places)


def test_the_view_has_the_order_of_the_report(
    page: browser.Browser, server: str, store: Path
) -> None:
    address = run_page(store / "runs" / "large")
    page.open(server + address)
    page.wait(says("Charts in order"))
    link = page.ask(
        "Array.from(document.querySelectorAll('a')).find(a => a.innerText.startsWith('Charts in order')).href"
    )
    show(page, link, FIRST_CHART, "view")
    text = page.text()
    sections = (
        "\nloss\n",
        "\ntrain\n",
        "\nloss scale\n",
        "\nfp8/input\n",
        "\nfp8/weight\n",
        "\nfp8/grad_output\n",
        "\nguard\n",
        "\nspeed\n",
        "\nfp8_amax\n",
    )
    places = [text.find(section) for section in sections]
    assert -1 not in places, text
    assert places == sorted(places)


def test_the_machine_has_charts(page: browser.Browser, server: str, store: Path) -> None:
    run, query = run_page(store / "runs" / "large").split("?")
    show(
        page, f"{server}{run}/system-metrics?{query}", says("cpu_utilization_percentage"), "system"
    )
