"""Data sets of the hub by name: against a server that speaks its protocol, and offline from the cache that it made."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from harness.core.config import DataConfig
from harness.core.errors import ConfigError, DataError
from harness.core.schema import validate
from harness.data import hub
from harness.data.tokens import TokenData, prepare
from tests.unit.data.test_what_people_have import EXPECTED, LINES, split
from tests.unit.data.token_files import config

pytestmark = pytest.mark.slow

NAME = "someone/things"
OLD, NEW, TABLES, PICTURES = "a" * 40, "b" * 40, "c" * 40, "d" * 40
CARD = """---
configs:
- config_name: plain
  data_files:
  - {split: train, path: "plain/train-*.jsonl"}
  - {split: validation, path: plain/dev.jsonl}
  - {split: extra, path: plain/extra.jsonl}
  default: true
- config_name: other
  data_files: other/*.jsonl
- config_name: outside
  data_files: OUTSIDE
---
"""
TABLE = """---
configs:
- {config_name: default, data_files: "*.csv", sep: ";"}
---
"""


def rows(word: str, lines: list[str] = LINES) -> bytes:
    return "".join(json.dumps({"text": f"{word}{line.strip()}"}) + "\n" for line in lines).encode()


def repository(word: str) -> dict[str, bytes]:
    return {
        "README.md": CARD.encode(),
        "things.py": b"raise SystemExit('run')",
        "plain/train-0.jsonl": rows(word, LINES[:30]),
        "plain/train-1.jsonl": rows(word, LINES[30:]),
        "plain/dev.jsonl": rows("dev "),
        "plain/extra.jsonl": rows("extra "),
        "other/a.jsonl": rows("other "),
    }


class Hub:
    """What the hub answers, as far as it is asked here. fetched: paths of files, each time one is sent."""

    def __init__(self) -> None:
        table = "text;n\n" + "".join(f"{line.strip()};1\n" for line in LINES)
        self.commits = {
            OLD: repository("old "),
            NEW: repository(""),
            TABLES: {"README.md": TABLE.encode(), "a.csv": table.encode()},
            PICTURES: {"a.png": b"png"},
        }
        self.main = OLD
        self.fetched: list[str] = []
        own = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                own.answer(self)

            def do_HEAD(self) -> None:
                own.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0].strip("/")
        body, headers, status = b"", {}, 404
        for commit, files in self.commits.items():
            for revision in (commit, *(["main"] if commit == self.main else [])):
                if path == f"api/datasets/{NAME}/revision/{revision}":
                    body, status = (
                        json.dumps({"id": NAME, "sha": commit, "siblings": []}).encode(),
                        200,
                    )
                if path == f"api/datasets/{NAME}/tree/{revision}":
                    tree = [
                        {
                            "type": "file",
                            "path": name,
                            "size": len(content),
                            "oid": hashlib.sha1(content).hexdigest(),
                        }
                        for name, content in files.items()
                    ]
                    body, status = json.dumps(tree).encode(), 200
                start = f"datasets/{NAME}/resolve/{revision}/"
                if path.startswith(start) and (name := path.removeprefix(start)) in files:
                    body, status = files[name], 200
                    headers = {
                        "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
                        "X-Repo-Commit": commit,
                    }
                    self.fetched += [name] if request.command == "GET" else []
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        made.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    huggingface_hub.close_session()
    yield made
    made.server.shutdown()
    made.server.server_close()
    huggingface_hub.close_session()


def offline(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.main, server.commits = "", {}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()


def taken(cache: Path, run: Path, **more: Any) -> TokenData:
    return prepare(config(f"hf:{NAME}", cache=str(cache), **more), run)


def lines(data: TokenData, name: str) -> list[str]:
    return sorted(line for line in split(data, name).decode().split("\n") if line)


def test_a_name_gives_its_split_at_a_commit_and_nothing_else_is_fetched(
    tmp_path: Path, server: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    data = taken(tmp_path / "cache", tmp_path / "run")
    assert "Fetching" not in capfd.readouterr().err, "a log is spared the bars"
    assert lines(data, "train") == sorted(f"old {line}" for line in EXPECTED)
    assert lines(data, "val") == sorted(f"dev {line}" for line in EXPECTED)
    assert data.info["source"] == f"hf:{NAME}@{OLD}"
    assert [skip["name"] for skip in data.info["skipped"]] == ["extra"]
    assert sorted(server.fetched) == [
        "README.md",
        "plain/dev.jsonl",
        "plain/train-0.jsonl",
        "plain/train-1.jsonl",
    ]
    server.main = NEW
    again = taken(tmp_path / "cache", tmp_path / "run")
    assert again.sha256 == data.sha256, "a resume goes on with its commit"
    later = taken(tmp_path / "cache", tmp_path / "later")
    assert later.info["source"] == f"hf:{NAME}@{NEW}"
    assert lines(later, "train") == EXPECTED
    pinned = taken(tmp_path / "cache", tmp_path / "pinned", revision=OLD)
    assert pinned.sha256 == data.sha256


def test_a_configuration_and_a_split_are_chosen(tmp_path: Path, server: Hub) -> None:
    data = taken(tmp_path / "cache", tmp_path / "other", configuration="other")
    assert sorted(lines(data, "train") + lines(data, "val")) == sorted(
        f"other {line}" for line in EXPECTED
    )
    data = taken(tmp_path / "cache", tmp_path / "table", revision=TABLES)
    assert sorted(lines(data, "train") + lines(data, "val")) == EXPECTED, (
        "parted by what the card says"
    )
    data = taken(tmp_path / "cache", tmp_path / "extra", split="extra")
    assert lines(data, "train") == sorted(f"extra {line}" for line in EXPECTED)
    assert {"train"} == {skip["name"] for skip in data.info["skipped"]}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"configuration": "another"}, r"another(.|\n)*plain"),
        ({"split": "nope"}, "has no split nope, but train, validation, extra"),
        ({"split": "train[:1%]"}, "has no split train"),
        ({"revision": "nope"}, "cannot be fetched"),
        ({"revision": PICTURES}, "has no rows of text: the library reads it as imagefolder"),
        ({"configuration": "outside"}, "outside of it"),
        ({"format": "Parquet"}, "is JSONL"),
    ],
)
def test_what_there_is_not_is_refused(
    tmp_path: Path, server: Hub, more: dict[str, str], words: str
) -> None:
    private = tmp_path / "private.jsonl"
    private.write_bytes(rows("private "))
    server.commits[OLD]["README.md"] = CARD.replace("OUTSIDE", str(private)).encode()
    with pytest.raises(DataError, match=words) as caught:
        taken(tmp_path / "cache", tmp_path / "run", **more)
    assert f"hf:{NAME}" in str(caught.value)
    assert all(problem.fix for problem in caught.value.problems)


def test_offline_the_cache_is_read_and_one_that_is_not_whole_is_refused(
    tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = taken(tmp_path / "cache", tmp_path / "run")
    offline(server, monkeypatch)
    again = taken(tmp_path / "cache", tmp_path / "offline")
    assert (again.sha256, again.info["source"]) == (data.sha256, f"hf:{NAME}@{OLD}")
    with pytest.raises(
        DataError, match=r"cannot be fetched(.|\n)*hf download someone/things --repo-type dataset"
    ):
        taken(tmp_path / "cache", tmp_path / "other", configuration="other")
    with pytest.raises(DataError, match="cannot be fetched"):
        taken(tmp_path / "nothing", tmp_path / "none")
    (one,) = (tmp_path / "cache").rglob("train-1.jsonl")
    one.unlink()
    with pytest.raises(DataError, match="cannot be fetched"):
        taken(tmp_path / "cache", tmp_path / "cut")


def test_a_cache_that_does_not_say_what_is_missing_is_told(
    tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older version of the hub's library leaves it."""
    offline(server, monkeypatch)
    snapshot = tmp_path / "cache" / "datasets--someone--things" / "snapshots" / OLD
    for name, content in repository("").items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_bytes(content)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(OLD)
    data = taken(tmp_path / "cache", tmp_path / "run")
    assert lines(data, "train") == EXPECTED
    assert "all there is was taken" in str(data.info["skipped"])


def test_what_does_not_fit_is_not_fetched(
    tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DataError, match=r"has no room(.|\n)*data\.cache=FOLDER"):
        taken(tmp_path / "cache", tmp_path / "run")
    assert server.fetched == ["README.md"]
    monkeypatch.undo()


def test_more_than_a_run_takes_is_not_fetched(
    tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.data.tokens.MAX_BYTES", 1000)
    with pytest.raises(DataError, match=rf"harness data prepare hf:{NAME} --out DIR"):
        taken(tmp_path / "cache", tmp_path / "run")
    assert server.fetched == ["README.md"]
    monkeypatch.setattr(
        "harness.data.tokens.MAX_BYTES", 1500
    )  # as much as its files have, unpacked they are more
    packed = gzip.compress(rows("", LINES * 50))
    server.commits = {OLD: {"a.jsonl.gz": packed}}  # without a README
    assert len(packed) < 1500 < 4 * len(packed)
    with pytest.raises(
        DataError, match=rf"harness data prepare hf:{NAME} --revision {OLD} --out DIR"
    ):
        taken(tmp_path / "other", tmp_path / "run")


def test_a_mixture_names_configurations_of_its_own(tmp_path: Path) -> None:
    part = {"path": f"hf:{NAME}", "weight": 1.0, "configuration": "other"}
    made = DataConfig.model_validate({"mixture": [part]})
    assert made.mixture[0].configuration == "other"
    for wrong in ({"path": "rows.jsonl", "split": "train"}, {"split": "train"}):
        with pytest.raises(ConfigError, match=r"data\.split: only a path hf:NAME has one"):
            validate(DataConfig, wrong, "data")
