"""Where a run's figures go: to the store that it remembers, through servers that refuse a share of requests, and never
with a secret in what is written down."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tracking_server import SHARE, Proxy, real_server
from tracking_trainer import check_delivered, query
from typer.testing import CliRunner

from harness.cli import app
from harness.core.errors import ConfigError
from harness.tracking import shipper
from harness.tracking.journal import JOURNAL, Journal, Position, delivered
from tests.support.matrix import rest_nightly
from tests.support.runs import environment, harness, train

pytestmark = pytest.mark.faults(18)


def small_run(run_dir: Path, steps: int = 4) -> None:
    """A journal of a run that has ended."""
    run_dir.mkdir(parents=True)
    with Journal(run_dir / JOURNAL) as journal:
        journal.note("run", tags={"experiment": "e"}, params={"seed": 1})
        for step in range(1, steps + 1):
            journal.metrics(step, {"train/loss": 1 / step})
        journal.note("end", status="done")


def ship(run_dir: Path) -> None:
    """To where a start or a resume would deliver."""
    assert shipper.sync(run_dir, "e"), (run_dir / "shipper.log").read_text()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The working folder, with a run in it, and another folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    small_run(here / "runs" / "r")
    return here, there


def more(run_dir: Path) -> None:
    """Rows that are not delivered yet."""
    with Journal(run_dir / JOURNAL, resume_step=5) as journal:
        journal.metrics(5, {"train/loss": 0.1})
        journal.note("end", status="done")


STORES = ("sqlite:///stores.db", "sqlite:///deep/er/stores.db", "sqlite:///./stores.db?timeout=20")


@pytest.mark.parametrize("uri", rest_nightly(STORES, STORES[-1]))
@pytest.mark.slow
def test_sync_delivers_to_the_store_of_the_run_from_wherever_it_is_called(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    here, there = places
    database = here / uri.removeprefix("sqlite:///").partition("?")[0]
    database.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run = here / "runs" / "r"
    ship(run)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    more(run)
    done = harness(there, "sync", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(database.resolve()) in done.stdout, "it says where"
    assert list(there.iterdir()) == []
    assert check_delivered(run, database) == 5


@pytest.mark.nightly
def test_another_store_takes_a_flag(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = places
    run = here / "runs" / "r"
    ship(run)
    more(run)
    other = there / "other.db"
    refused = harness(there, "sync", str(run), MLFLOW_TRACKING_URI=f"sqlite:///{other}")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert all(
        each in refused.stderr for each in (str(other), str(here / "mlflow.db"), "--elsewhere")
    )
    assert not other.exists()
    moved = harness(
        there, "sync", str(run), "--elsewhere", MLFLOW_TRACKING_URI=f"sqlite:///{other}"
    )
    assert moved.returncode == 0, moved.stdout + moved.stderr
    assert str(other) in moved.stdout
    assert check_delivered(run, other) == 5
    with Journal(run / JOURNAL, resume_step=6) as journal:
        journal.metrics(6, {"train/loss": 0.05})
        journal.note("end", status="done")
    assert harness(here, "sync", str(run)).returncode == 0
    assert check_delivered(run, other) == 6, "the run belongs there from then on"
    assert query(here / "mlflow.db", "select count(*) from metrics") == [(4,)]


@pytest.mark.nightly
def test_a_copy_of_the_store_gets_what_it_lacks(places: tuple[Path, Path]) -> None:
    """A backup from before the newest rows, under another address: what the first has counts for nothing there."""
    here, there = places
    run = here / "runs" / "r"
    ship(run)
    shutil.copy(here / "mlflow.db", there / "copy.db")
    more(run)
    assert harness(here, "sync", str(run)).returncode == 0
    done = harness(
        there, "sync", str(run), "--elsewhere", MLFLOW_TRACKING_URI=f"sqlite:///{there / 'copy.db'}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert check_delivered(run, there / "copy.db") == 5


@pytest.mark.nightly
def test_a_resume_goes_on_where_the_run_was_unless_the_variable_says_otherwise(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.tracking.store import choose

    here, there = places
    run = here / "runs" / "r"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///first.db")
    ship(run)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(there)
    more(run)
    ship(run)
    assert check_delivered(run, here / "first.db") == 5
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///second.db")
    announcement = choose(run).announcement
    assert str(here / "first.db") in announcement
    assert str(there / "second.db") in announcement
    ship(run)
    assert check_delivered(run, there / "second.db") == 5, "all of it, not only what is new"


@pytest.mark.nightly
def test_a_run_whose_store_is_forgotten_is_not_delivered_at_a_guess(
    places: tuple[Path, Path],
) -> None:
    here, there = places
    run = here / "runs" / "r"
    ship(run)
    more(run)
    (run / "store.json").unlink()
    refused = harness(there, "sync", str(run))
    assert refused.returncode == 2
    assert "--elsewhere" in refused.stderr
    assert list(there.iterdir()) == []


SECRET = "s3cr3t-Pa55"
NEEDS = {
    f"http://me:{SECRET}@tracking:5000": ["MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"],
    f"https://{SECRET}@tracking/": ["MLFLOW_TRACKING_URI"],
    f"https://tracking/mlflow?token={SECRET}": ["MLFLOW_TRACKING_URI"],
    f"postgresql://me:{SECRET}@db:5432/mlflow?sslmode=require": ["MLFLOW_TRACKING_URI"],
    f"mysql+pymysql://me:{SECRET}@db/mlflow": ["MLFLOW_TRACKING_URI"],
    "http://tracking:5000": [],
}


@pytest.mark.parametrize("uri", NEEDS)
def test_a_run_remembers_no_credentials_and_says_which_variables_had_them(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    from harness.tracking.store import choose, choose_for_sync

    run = places[0] / "runs" / "r"
    choose(run, {"MLFLOW_TRACKING_URI": uri}).destination.save(run)
    assert SECRET not in (run / "store.json").read_text()
    needs = NEEDS[uri]
    if needs:
        with pytest.raises(ConfigError) as refused:
            choose_for_sync(run, False, {})
        assert all(name in str(refused.value) for name in needs)
        assert SECRET not in str(refused.value)
    if "?token" in uri:
        with pytest.raises(ConfigError, match="MLFLOW_TRACKING_TOKEN"):
            choose_for_sync(run, False, {"MLFLOW_TRACKING_URI": uri})
        return
    again = choose_for_sync(run, False, {"MLFLOW_TRACKING_URI": uri})
    assert again.uri == uri, "MLflow itself gets them"
    if needs == ["MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"]:
        given = dict.fromkeys(needs, "x")
        assert choose_for_sync(run, False, given).uri == "http://tracking:5000"
        assert (
            choose_for_sync(run, False, {"MLFLOW_TRACKING_TOKEN": "x"}).uri
            == "http://tracking:5000"
        )


def test_variables_with_credentials_are_asked_for_again(places: tuple[Path, Path]) -> None:
    from harness.tracking.store import choose, choose_for_sync

    run = places[0] / "runs" / "r"
    choose(
        run, {"MLFLOW_TRACKING_URI": "https://t", "MLFLOW_TRACKING_TOKEN": SECRET}
    ).destination.save(run)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_TOKEN"):
        choose_for_sync(run, False, {})
    assert SECRET not in (run / "store.json").read_text()


@pytest.mark.parametrize("kind", ["sqlite:///", "sqlite+pysqlite:///", "file://"])
def test_a_run_whose_project_was_moved_leaves_no_figures_at_the_old_place(
    places: tuple[Path, Path], kind: str
) -> None:
    """MLflow would make the old folder again, and nobody looks there."""
    from harness.tracking.store import choose, choose_for_sync

    here, there = places
    run, old = there / "runs" / "r", here / "project"
    old.mkdir()
    run.mkdir(parents=True)
    uri = f"{kind}{old / 'mlflow.db'}"
    choose(run, {"MLFLOW_TRACKING_URI": uri}).destination.save(run)
    assert choose(run, {}).uri == choose_for_sync(run, False, {}).uri == uri

    old.rename(there / "elsewhere")
    choice = choose(run, {})
    assert choice.uri == f"sqlite:///{here / 'mlflow.db'}", "in the working folder, as of a new run"
    assert uri in choice.announcement
    with pytest.raises(ConfigError, match=f"{old}.*is not there") as refused:
        choose_for_sync(run, False, {})
    assert "--elsewhere" in str(refused.value)
    assert choose_for_sync(run, True, {}).uri == choice.uri
    assert not old.exists()


NOW = datetime(2026, 1, 1, tzinfo=UTC)
HEADERS = {
    "0": 0.0,
    "7": 7.0,
    " 7 ": 7.0,
    "99999999999999999999": 60.0,
    format_datetime(NOW + timedelta(seconds=5), usegmt=True): 5.0,
    format_datetime(NOW - timedelta(days=1), usegmt=True): 0.0,
    format_datetime(NOW + timedelta(days=400), usegmt=True): 60.0,
    "-5": None,
    "nan": None,
    "1e9": None,
    "٣": None,
    "soon": None,
    "": None,
}


@pytest.mark.parametrize("header", HEADERS)
def test_retry_after_is_honoured_within_bounds(header: str) -> None:
    from harness.tracking.retry import asked_pause, pause

    asked = asked_pause(header, NOW)
    assert asked == HEADERS[header]
    for share in (0.0, 0.5, 1.0):
        usual = pause(1, None, share)
        assert 0 < usual <= 0.2
        waits = usual if asked is None else asked
        assert waits <= pause(1, asked, share) <= waits + 0.2
    assert pause(50, None, 1.0) <= 10.0
    assert len({pause(9, None, share) for share in (0.0, 0.3, 0.9)}) == 3, (
        "runs do not come back all at once"
    )


class Scripted(BaseHTTPRequestHandler):
    """Answers one request after the other as `answers` says; the last answer stays."""

    answers: ClassVar[list[str]] = []
    asked: ClassVar[list[float]] = []

    def do_GET(self) -> None:
        """One answer of the script."""
        kind = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.asked.append(time.monotonic())
        body = b'{"experiment": {"experiment_id": "7", "name": "e"}}'
        self.send_response(503 if kind == "503" else 200)
        if kind == "503":
            self.send_header(
                "Retry-After",
                format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True),
            )
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:9] if kind == "cut" else body)
        self.close_connection = True

    def log_message(self, format: str, *_: object) -> None:
        """Nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "tries", "least"),
    [(["503", "200"], 2, 1.9), (["cut", "cut", "200"], 3, 0.0), (["503", "cut", "200"], 3, 1.9)],
)
def test_one_request_is_repeated_until_it_is_answered_whole(
    monkeypatch: pytest.MonkeyPatch, answers: list[str], tries: int, least: float
) -> None:
    """503 with an HTTP date of whole seconds, and a connection that breaks in the middle of an answer."""
    from mlflow import MlflowClient

    from harness.tracking.retry import Retry, listen_to_answers

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    Scripted.answers, Scripted.asked = list(answers), []
    web = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    said: list[int] = []
    listen_to_answers()
    try:
        client = MlflowClient(tracking_uri=f"http://127.0.0.1:{web.server_port}")
        found = Retry(60.0, lambda _, times: said.append(times))(client.get_experiment_by_name, "e")
    finally:
        web.shutdown()
        web.server_close()
    assert found is not None
    assert found.experiment_id == "7"
    assert said == list(range(1, tries))
    assert len(Scripted.asked) == tries
    assert Scripted.asked[1] - Scripted.asked[0] >= least


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Proxy]]:
    """The folder of a real `mlflow server`, and the proxy before it."""
    folder = tmp_path_factory.mktemp("server")
    with real_server(folder) as port:
        proxy = Proxy(folder, port)
        yield folder, proxy
        proxy.close()


@pytest.mark.nightly
def test_a_server_that_fails_three_in_ten_requests_gets_the_run_once_and_in_order(
    tmp_path: Path, server: tuple[Path, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, proxy = server
    run_dir = tmp_path / "runs" / "share"
    run_dir.mkdir(parents=True)
    with Journal(run_dir / JOURNAL) as journal:
        journal.note(
            "run",
            tags={f"tag{number}": "x" for number in range(250)},
            params={"seed": 1},
            data={"source": "t"},
        )
        (run_dir / "plan.json").write_text("{}")
        for step in range(1, 61):
            journal.metrics(
                step,
                {
                    f"fp8_amax/blocks.{number:03d}.up.input": step + number / 3
                    for number in range(100)
                },
            )
            if step % 10 == 0:
                journal.event(step, "nonfinite.skip", window=step)
            if step % 20 == 0:
                journal.note(
                    "checkpoint",
                    step=step,
                    state="saved",
                    path=f"step-{step}",
                    metrics={"train_loss": 1 / step},
                )
                journal.note("checkpoint", step=step, state="good")
        journal.note("artifact", path="plan.json")
        journal.note("end", status="done")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    with proxy.outage(SHARE):
        assert shipper.sync(run_dir, "e"), (run_dir / "shipper.log").read_text()[-3000:]
    assert min(proxy.hits[kind] for kind in ("429", "500", "lost", "passed")) > 0, proxy.hits
    assert check_delivered(run_dir, folder / "mlflow.db") == 60 * 100 + 3
    assert query(folder / "mlflow.db", "select count(*) from runs") == [(1,)]


REFUSALS = {
    "refuse": "Connection refused",
    "no_name": "Name or service not known",
    "denied": "failed with error code 401",
}


@pytest.mark.parametrize("fault", REFUSALS)
@pytest.mark.slow
def test_sync_says_the_first_refusal_at_once_and_that_it_tries_again(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Not only how it ended, a minute later."""
    here, _ = places
    proxy = Proxy(here / "proxy")
    for name, value in (("MLFLOW_TRACKING_URI", proxy.uri), ("PYTHONPATH", str(proxy.python_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("harness.tools.sync.PATIENCE", 2.0)
    with proxy.outage(fault):
        told = CliRunner().invoke(app, ["sync", str(here / "runs" / "r")])
        assert told.exit_code == 1
    first, last = " ".join(told.output.split()).split("not delivered to ")
    # On a busy machine the line of progress, due every 10 s, may come before the refusal.
    first = re.sub(r"^([\d.]+% of the journal delivered \([^)]*\) )+", "", first)
    assert first.startswith(f"! {proxy.uri}: ")
    assert REFUSALS[fault] in first
    assert "trying again, until 2 s have passed without success" in first
    assert "shipper.log" in last


@pytest.mark.nightly
def test_what_a_store_has_taken_is_not_sent_again_when_the_next_batch_fails(
    places: tuple[Path, Path],
) -> None:
    """A chunk of the journal is several requests; a store that refuses the last for good still gets the first once."""
    run_dir, database = places[0] / "runs" / "r", places[0] / "mlflow.db"
    ship(run_dir)
    with Journal(run_dir / JOURNAL, resume_step=5) as journal:
        for step in range(5, 35):
            journal.metrics(
                step, {f"fp8_amax/{number:03d}.input": float(step) for number in range(100)}
            )
        journal.note("end", status="done")
    begun = Position.load(run_dir).offset
    refusing = "create trigger t before insert on metrics when new.step >= 30 begin select raise(abort, 'no'); end"
    with closing(sqlite3.connect(database)) as store:
        store.execute(refusing)
        store.commit()
    assert not shipper.sync(run_dir, "e", patience=1.0)
    reached = Position.load(run_dir).offset
    assert begun < reached < (run_dir / JOURNAL).stat().st_size
    rows = (run_dir / JOURNAL).read_bytes()[:reached].count(b"fp8_amax/000.input")
    assert 10 <= rows < 30
    with closing(sqlite3.connect(database)) as store:
        store.execute("drop trigger t")
        store.commit()
    ship(run_dir)
    assert query(database, "select count(*) from metrics where key = 'fp8_amax/000.input'") == [
        (30,)
    ]


FORMS = {
    "password": "http://me:{secret}@{host}",
    "encoded": "http://me:{encoded}@{host}",
    "token before the host": "http://{secret}@{host}",
    "token in a setting": "http://{host}?api_token={secret}",
    "short": "http://me:pw@{host}",
}


def files_with(folder: Path, *words: str) -> list[str]:
    """Without server.log: the tracking server keeps there what it was asked for, as every web server may."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "server.log":
            content = path.read_bytes()
            found += [
                f"{path.relative_to(folder)}: {word}" for word in words if word.encode() in content
            ]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_no_secret_of_the_address_is_written_down(
    tmp_path: Path, server: tuple[Path, Proxy], form: str
) -> None:
    """Neither in an outage, whose exceptions are logged, nor after delivery.

    Read are the run folder, both streams, MLflow's store and its files.
    """
    folder, proxy = server
    secret = "sEcr3t/Wörd" if form == "encoded" else SECRET
    encoded = "sEcr3t%2FW%C3%B6rd"
    uri = FORMS[form].format(secret=secret, encoded=encoded, host=f"127.0.0.1:{proxy.port}")
    words = ("me:pw@", "pw@") if form == "short" else (secret, encoded, SECRET)
    variables: dict[str, Any] = {"MLFLOW_TRACKING_URI": uri, "HTTP_PROXY": f"http://out:{SECRET}@127.0.0.1:9",
                 "HF_TOKEN": f"hf_{SECRET}", "NO_PROXY": "127.0.0.1"}  # fmt: skip
    with proxy.outage("error"):
        done = train(tmp_path, "--name", form.replace(" ", "-"), "train.steps=4", "tracking.mlflow=true",
                     "tracking.report=true", "tracking.drain_seconds=6", **variables)  # fmt: skip
        assert done.returncode == 0, done.stdout
    run = tmp_path / "runs" / form.replace(" ", "-")
    assert "Exception" in (run / "shipper.log").read_text(), "there was something to tell"
    told = [done.stdout]
    for words_of in (
        ["sync", str(run)],
        ["inspect", str(run)],
        ["doctor"],
        ["report", str(run)],
        ["explain", str(run)],
    ):
        said = harness(tmp_path, *words_of, **variables)
        told += [said.stdout, said.stderr]
    for text in told:
        assert not [word for word in words if word in text], text
    assert files_with(tmp_path, *words) == []
    assert files_with(folder, *words) == []
    assert stat.S_IMODE(os.stat(run / "shipper.log").st_mode) == 0o600
    # MLflow's client cannot deliver with a setting in the address; run and sync say so, and what to set instead.
    cannot = form == "token in a setting"
    assert delivered(run) != cannot, (run / "shipper.log").read_text()
    unsent = form.startswith("token")
    assert ("MLFLOW_TRACKING_TOKEN" in done.stdout) == unsent, done.stdout
    assert ("MLFLOW_TRACKING_TOKEN" in told[2]) == cannot, "sync refuses it at once"
    if cannot:
        plain = f"http://127.0.0.1:{proxy.port}"
        mended = harness(
            tmp_path, "sync", str(run), MLFLOW_TRACKING_URI=plain, MLFLOW_TRACKING_TOKEN=secret
        )
        assert mended.returncode == 0, mended.stdout + mended.stderr
        assert delivered(run)


ODD = (
    "nosuch://me:{}@host/db",  # MLflow's exception quotes all of it
    "http://me:{}@127.0.0.1:99999",
    "http://me:{}@127.0.0.1:9x",
    "postgresql://me:{}@host:x/db",
    "http://127.0.0.1:9?token={}",
)


@pytest.mark.parametrize("uri", ODD)
@pytest.mark.slow
def test_an_address_that_cannot_be_used_leaves_no_secret_in_the_log(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    from harness.tracking.store import choose_for_sync

    run = places[0] / "runs" / "r"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(SECRET))
    assert not shipper.sync(run, "e", patience=0.5, choice=choose_for_sync(run, elsewhere=True))
    assert (run / "shipper.log").read_text(), "there was something to tell"
    assert files_with(places[0], SECRET) == []


@pytest.mark.slow
def test_a_traceback_on_the_screen_has_no_secret(places: tuple[Path, Path]) -> None:
    """Of whatever a library raises where nobody expected it."""
    here = places[0]
    program = "from harness import cli; import mlflow, os; cli._guarded(lambda: mlflow.MlflowClient(" \
              "os.environ['MLFLOW_TRACKING_URI']).get_run('x'))"  # fmt: skip
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=here, capture_output=True, text=True, check=False, timeout=300,
        env=environment(MLFLOW_TRACKING_URI=f"nosuch://me:{SECRET}@host/db"),
    )  # fmt: skip
    assert told.returncode == 1
    assert "nosuch://***@host/db" in told.stderr
    assert SECRET not in told.stderr


PIECES = (
    "http://me:{s}@host:5000/api/2.0",
    "Max retries exceeded with url: /api/2.0?token={s} (Caused by x)",
    "Invalid port: '{s}@host'",
    "password authentication failed: 'me:{s}'",
    "('postgresql://me:{s}@db/x', 'no such host')",
    "https://{s}@other.host/x",
    "proxy http://corp:{s}@proxy:3128 refused",
    "Authorization: Basic {b}",
)


@pytest.mark.parametrize("secret", [SECRET, "p@ss:word", "slash/and?mark", "ünï-côdé", "a%2Fb%40c"])
def test_a_secret_is_taken_out_of_whatever_a_library_says(secret: str) -> None:
    import base64
    from urllib.parse import quote, unquote

    from harness.core.secrets import Address, scrubbed

    given = {"MLFLOW_TRACKING_URI": f"http://me:{secret}@tracking:5000/"}
    plain = unquote(secret)
    for shape in (secret, plain, quote(plain, safe="")):
        for piece in PIECES:
            coded = base64.b64encode(f"me:{plain}".encode()).decode()
            text = scrubbed(piece.format(s=shape, b=coded), given)
            assert not [
                each for each in (secret, plain, quote(plain, safe=""), coded) if each in text
            ], text
    assert Address.of(given["MLFLOW_TRACKING_URI"]).bare == "http://tracking:5000"


def test_what_is_no_secret_stays() -> None:
    from harness.core.secrets import scrubbed

    given = {
        "MLFLOW_TRACKING_URI": "http://tracking:5000",
        "PATH": "/usr/bin",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for text in (
        "http://tracking:5000/#/experiments/1/runs/2?workflowType=machine_learning",
        "/usr/bin",
        "false",
        "a@b",
    ):
        assert scrubbed(text, given) == text


@pytest.mark.slow
def test_the_start_says_where_figures_go(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    short = ("--name", "r", "train.steps=2", "tracking.drain_seconds=0.1")
    done = train(
        tmp_path,
        *short,
        "tracking.mlflow=true",
        MLFLOW_TRACKING_URI=f"http://me:{SECRET}@{address}",
    )
    assert f"figures go to MLflow at http://{address}" in done.stdout, done.stdout
    assert SECRET not in done.stdout
    alone = train(tmp_path, "--name", "q", "train.steps=2")
    assert "figures go only to runs/q/journal.jsonl" in alone.stdout, alone.stdout
